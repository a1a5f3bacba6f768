"""A job: its lease, its models, and the stream that carries its calls.

Knows how a job begins, goes on elsewhere and ends; knows nothing of what its calls compute.
"""

import logging
import uuid
from collections.abc import Sequence
from types import MappingProxyType, TracebackType
from typing import Literal

from plexrl import bases, errors
from plexrl.call_stream import CallStream
from plexrl.connection import Connection
from plexrl.futures import CallFuture
from plexrl.lease import Lease
from plexrl.model import Affinity, Lora, Model
from plexrl.results import Result
from plexrl.v1 import call_pb2 as c
from plexrl.v1 import job_pb2 as j
from plexrl.v1 import model_pb2 as m

log = logging.getLogger("plexrl")

HEARTBEATS_PER_LEASE = 3.0
# An exit by error or Ctrl-C must not wait long for a controller that is away: the lease ends the job anyway.
HURRIED_FINISH_S = 5.0

Precision = Literal["float32", "bfloat16"]
Role = Literal["policy", "reference", "rollout"]
_PRECISIONS = {"float32": m.PRECISION_FLOAT32, "bfloat16": m.PRECISION_BFLOAT16}
_ROLES = {
    "policy": m.MODEL_ROLE_POLICY,
    "reference": m.MODEL_ROLE_REFERENCE,
    "rollout": m.MODEL_ROLE_ROLLOUT,
}


class Job:
    """An RLVR run. Its lease is renewed in the background; as a context manager it is finished on exit, also by an
    error. Made by `cluster.job(...)` or `cluster.attach(...)`."""

    def __init__(
        self,
        connection: Connection,
        job: j.Job,
        max_message_bytes: int,
        *,
        models: Sequence[m.Model] = (),
        calls: Sequence[c.Call] = (),
        client_state: bytes = b"",
    ) -> None:
        self._connection = connection
        self._client_state = client_state
        self._over = False
        self.job_id = job.job_id
        self.name = job.name
        self._stream = CallStream(connection, job.job_id, max_message_bytes)
        self._models = {message.name: Model(connection, self._stream, message) for message in models}
        self.unacknowledged: tuple[CallFuture[Result], ...] = tuple(self._stream.adopt(call) for call in calls)
        """Calls that an earlier client submitted and whose results it did not take, oldest first."""
        self._stream.start()
        interval_s = job.lease.ToNanoseconds() / 1e9 / HEARTBEATS_PER_LEASE
        self._lease = Lease(connection.another(), job.job_id, interval_s, self._stream.end)
        self._lease.start()

    def __repr__(self) -> str:
        return f"<Job {self.name} {self.job_id}>"

    @property
    def models(self) -> MappingProxyType[str, Model]:
        """The job's models by name."""
        return MappingProxyType(self._models)

    def model(
        self,
        name: str,
        *,
        base: bases.Base,
        precision: Precision = "float32",
        role: Role = "policy",
        affinity: Affinity | None = None,
        max_sequence_tokens: int = 0,
        micro_batch_tokens: int = 0,
        activation_checkpointing: bool = False,
        lora: Lora | None = None,
    ) -> Model:
        """Creates a model and returns at once: its worker builds it meanwhile, and calls queue.

        precision: of the rollout weights and the trainer's compute; master weights are float32. role "reference" is
        frozen (generate and score only); "rollout" samples on another worker than the policy's: it has rollout weights
        alone, its base's until `pull_weights`. max_sequence_tokens: prompt and completion together, 0 means the
        configuration's. micro_batch_tokens: most tokens in one forward pass of the trainer, 0 means the worker's
        default. lora: adapters over a frozen base are trained instead of all parameters.
        """
        for field, value, known in (("precision", precision, _PRECISIONS), ("role", role, _ROLES)):
            if value not in known:
                raise errors.InvalidArgument(f"{field}: {value!r} is unknown, want one of {', '.join(known)}")
        settings = m.ModelSettings(
            precision=_PRECISIONS[precision],
            max_sequence_tokens=max_sequence_tokens,
            micro_batch_tokens=micro_batch_tokens,
            activation_checkpointing=activation_checkpointing,
            lora=None if lora is None else m.LoraSettings(rank=lora.rank, alpha=lora.alpha or 0.0, seed=lora.seed),
        )
        request = m.CreateModelRequest(
            request_id=uuid.uuid4().hex,
            job_id=self.job_id,
            name=name,
            base=bases.to_wire(base, self._connection),
            role=_ROLES[role],
            settings=settings,
            affinity=affinity.to_wire() if affinity else None,
        )
        message = self._connection.unary(self._connection.models.CreateModel, request)
        model = self._models[name] = Model(self._connection, self._stream, message)
        return model

    def idle(self, seconds: float) -> None:
        """Hints that nothing will be asked of the cluster for this long, e.g. during a tool call. Returns at once."""
        self._lease.idle(seconds)

    @property
    def client_state(self) -> bytes:
        """What `save_client_state` last stored, by this or an earlier client; b"" if nothing."""
        return self._client_state

    def save_client_state(self, state: bytes) -> None:
        """Stores at most 64 KiB with the job, e.g. step and random state, for whoever attaches later."""
        request = j.PutClientStateRequest(request_id=uuid.uuid4().hex, job_id=self.job_id, client_state=state)
        self._connection.unary(self._connection.jobs.PutClientState, request)
        self._client_state = state

    def account(self) -> j.JobAccount:
        """Device seconds charged so far: busy_s, swap_s, hold_s, wait_s; and swaps and calls counted."""
        return self._connection.unary(self._connection.jobs.GetJob, j.GetJobRequest(job_id=self.job_id)).account

    def finish(self, *, retry_for_s: float | None = None) -> None:
        """Ends the job: pending calls are cancelled, its models leave their workers, checkpoints stay."""
        if self._over:
            return
        try:
            request = j.FinishJobRequest(request_id=uuid.uuid4().hex, job_id=self.job_id)
            self._connection.unary(self._connection.jobs.FinishJob, request, retry_for_s=retry_for_s)
        finally:
            self._let_go()

    def detach(self) -> None:
        """Lets go without ending the job: `cluster.attach` takes it up elsewhere, before its lease runs out."""
        try:
            self._stream.send_acks()
        finally:
            self._let_go()

    def _let_go(self) -> None:
        self._over = True
        self._lease.stop()
        self._stream.end(errors.JobEnded(f"this client let go of job {self.name}"))

    def __enter__(self) -> "Job":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.finish()
            return
        try:
            self.finish(retry_for_s=HURRIED_FINISH_S)
        except errors.PlexRLError as unfinished:
            log.warning("job %s was not finished, its lease will end it: %s", self.name, unfinished)
