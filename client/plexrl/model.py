"""A job's model: its functions, its tokenizer, its checkpoints.

Each function has two forms: `model.generate(...)` waits for the result, `model.generate.submit(...)` returns a future.
Knows what functions take and return; how calls travel is the call stream's business.
"""

import secrets
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Final, Literal, cast

from plexrl import durations, errors, results
from plexrl.batch import Tokens, TrainingBatch
from plexrl.call_stream import CallStream
from plexrl.connection import Connection
from plexrl.export import write_export
from plexrl.functions import CallFunction
from plexrl.futures import CallFuture
from plexrl.session import Session
from plexrl.v1 import call_pb2 as c
from plexrl.v1 import model_pb2 as m
from plexrl.v1 import session_pb2 as s
from plexrl.v1 import types_pb2 as t
from plexrl.wire import Int32Array, batch_arrays, put_token_batch, split, tensor, token_batch

Loss = Literal["cross_entropy", "importance_sampling", "ppo", "grpo", "cispo", "linear"]
InFlight = Literal["drain", "abort"]

_LOSSES: Mapping[str, "t.Loss.ValueType"] = {
    "cross_entropy": t.LOSS_CROSS_ENTROPY,
    "importance_sampling": t.LOSS_IMPORTANCE_SAMPLING,
    "ppo": t.LOSS_PPO,
    "grpo": t.LOSS_GRPO,
    "cispo": t.LOSS_CISPO,
    "linear": t.LOSS_LINEAR,
}
_IN_FLIGHT: Mapping[str, "t.InFlight.ValueType"] = {"drain": t.IN_FLIGHT_DRAIN, "abort": t.IN_FLIGHT_ABORT}


class _BaseMarker:
    def __repr__(self) -> str:
        return "plexrl.BASE"


BASE: Final = _BaseMarker()
"""For `load_checkpoint`: the model's base, as it was created."""


@dataclass(frozen=True)
class AtLeast:
    """For `generate`: any version of the weights from this one on."""

    version: int


@dataclass(frozen=True)
class Affinity:
    """Where a model may run: labels its worker must carry, models that must or must not share the worker."""

    require: Mapping[str, str] | None = None
    colocate: Sequence["Model"] = ()
    avoid: Sequence["Model"] = ()

    def to_wire(self) -> t.Affinity:
        """Writes it for the wire."""
        return t.Affinity(
            require=self.require or {},
            colocate_model_ids=[model.model_id for model in self.colocate],
            avoid_model_ids=[model.model_id for model in self.avoid],
        )


@dataclass(frozen=True)
class Lora:
    """Low-rank adapters (Hu et al. 2021) beside every linear layer of the body; the base under them stays as it is.

    rank: at least 1. alpha: an adapter's output is scaled by alpha / rank; None means alpha = rank. seed: of the first
    adapter, which changes nothing until it is trained. Checkpoints of such a model are PEFT adapters.
    """

    rank: int
    alpha: float | None = None
    seed: int = 0


class Model:
    """An LLM of a job. As a context manager it is deleted on exit; otherwise it lives as long as its job.

    Every function takes `tags` (labels the worker must carry) and `timeout_s` (time until the call expires, 1 s to
    24 h, default 1 h). All but `generate` form one sequence, executed once each in the order submitted.
    """

    def __init__(self, connection: Connection, stream: CallStream, message: m.Model) -> None:
        self._connection = connection
        self._stream = stream
        self._counter = stream.counter(message.model_id, message.next_sequence or 1)
        self.model_id = message.model_id
        self.job_id = message.job_id
        self.name = message.name

    def __repr__(self) -> str:
        return f"<Model {self.name} {self.model_id}>"

    # --- functions ---------------------------------------------------------------------------------------------------

    @CallFunction
    def generate(
        self,
        prompts: Sequence[Tokens],
        *,
        max_tokens: int,
        n: int = 1,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        stop: Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
        seed: int | None = None,
        logprobs: bool = True,
        leave: int = 0,
        version: int | AtLeast | None = None,
        session: "Session | None" = None,
        tags: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> CallFuture[results.Completions]:
        """Samples n completions for each prompt (token ids) from the rollout weights.

        temperature 0 is greedy; top_k 0 keeps all tokens; seed None draws one. version: a number for exactly that
        version, AtLeast(number), or None for the newest that was synced before this call. Log-probabilities are the
        raw model's, before temperature. Not sequenced. leave: the call ends as soon as no more than so many of all its
        completions are unfinished; they come as far as they are, with finish reason "unfinished". session: an open
        one, with whose other calls it runs together; `session.generate` says the same.
        """
        if any(isinstance(prompt, str) for prompt in prompts):
            raise errors.InvalidArgument("prompts: want token ids, not text: model.tokenize(texts) makes them")
        if isinstance(stop, str):
            raise errors.InvalidArgument("stop: want a list of strings, not one string")
        if leave and not 0 <= leave < len(prompts) * n:
            raise errors.InvalidArgument(f"leave: {leave} of {len(prompts) * n} completions, want fewer than there are")
        # In place: a message that is built apart is copied into the one that it is part of.
        request = self._request(tags, timeout_s)
        if session is not None:
            request.session_id = session.session_id
        spec = request.spec.generate
        put_token_batch(spec.prompts, prompts)
        sampling = spec.sampling
        sampling.n, sampling.max_tokens, sampling.temperature = n, max_tokens, temperature
        sampling.top_p, sampling.top_k, sampling.logprobs = top_p, top_k, logprobs
        sampling.leave = leave
        sampling.seed = secrets.randbits(63) if seed is None else seed
        sampling.stop.extend(stop)
        sampling.stop_token_ids.extend(stop_token_ids)
        match version:
            case None:
                spec.version.latest = True
            case AtLeast(number):
                spec.version.at_least = number
            case _:
                spec.version.exact = version
        future = self._stream.submit(request, sequenced=False)
        return cast("CallFuture[results.Completions]", future)

    @CallFunction
    def score(
        self,
        sequences: Sequence[Tokens],
        *,
        tags: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> CallFuture[results.Scores]:
        """Per-token log-probabilities of sequences (token ids) under the training state."""
        spec = t.CallSpec(score=t.ScoreSpec(batch=token_batch(sequences)))
        return cast("CallFuture[results.Scores]", self._submit(spec, tags, timeout_s))

    @CallFunction
    def forward_backward(
        self,
        batch: TrainingBatch,
        *,
        loss: Loss,
        clip_low: float | None = None,
        clip_high: float | None = None,
        kl_coef: float | None = None,
        tags: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> CallFuture[results.ForwardBackward]:
        """Adds the gradient of a loss to the accumulated gradients, all of it or none.

        Every loss is a sum over tokens of weight times term, so normalisation lies in the batch's weights and several
        calls add up. Terms, with log-probability l, ratio r = exp(l - old) and advantage A: cross_entropy -l;
        importance_sampling -r A; ppo -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A); grpo the ppo term plus
        kl_coef (exp(ref - l) - (ref - l) - 1); cispo -sg(clip(r, 1 - clip_low, 1 + clip_high)) A l, with sg() constant
        under differentiation; linear g l with the caller's gradient g. Clips default to 0.2.
        """
        if loss not in _LOSSES:
            raise errors.InvalidArgument(f"loss: {loss!r} is unknown, want one of {', '.join(_LOSSES)}")
        spec = t.ForwardBackwardSpec(
            batch=t.TokenBatch(token_ids=tensor(batch.token_ids, "int32"), lengths=tensor(batch.lengths, "int32")),
            loss=_LOSSES[loss],
            params=t.LossParams(clip_low=clip_low, clip_high=clip_high, kl_coef=kl_coef),
            weights=tensor(batch.weights, "float32"),
            advantages=_optional(batch.advantages),
            old_logprobs=_optional(batch.old_logprobs),
            ref_logprobs=_optional(batch.ref_logprobs),
            logprob_grads=_optional(batch.logprob_grads),
        )
        future = self._submit(t.CallSpec(forward_backward=spec), tags, timeout_s)
        return cast("CallFuture[results.ForwardBackward]", future)

    @CallFunction
    def optim_step(
        self,
        *,
        lr: float,
        beta1: float | None = None,
        beta2: float | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        max_grad_norm: float | None = None,
        tags: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> CallFuture[results.OptimStep]:
        """Applies the accumulated gradients with AdamW and clears them.

        Unset: betas 0.9 and 0.95, eps 1e-8, no weight decay, no clipping of the global gradient norm.
        """
        adamw = t.AdamWParams(
            lr=lr, beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay, max_grad_norm=max_grad_norm
        )
        spec = t.CallSpec(optim_step=t.OptimStepSpec(adamw=adamw))
        return cast("CallFuture[results.OptimStep]", self._submit(spec, tags, timeout_s))

    @CallFunction
    def sync_weights(
        self,
        *,
        in_flight: InFlight = "drain",
        tags: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> CallFuture[results.SyncWeights]:
        """Publishes the training weights to `generate` as a new version.

        Generates submitted earlier finish at the old version first ("drain"), or end with VersionGone ("abort").
        """
        if in_flight not in _IN_FLIGHT:
            raise errors.InvalidArgument(f"in_flight: {in_flight!r} is unknown, want one of {', '.join(_IN_FLIGHT)}")
        spec = t.CallSpec(sync_weights=t.SyncWeightsSpec(in_flight=_IN_FLIGHT[in_flight]))
        return cast("CallFuture[results.SyncWeights]", self._submit(spec, tags, timeout_s))

    @CallFunction
    def save_checkpoint(
        self,
        label: str,
        *,
        tags: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> CallFuture[results.Checkpoint]:
        """Writes the full training state; it counts once its hashed manifest is committed. Labels are unique."""
        spec = t.CallSpec(save_checkpoint=t.SaveCheckpointSpec(label=label))
        return cast("CallFuture[results.Checkpoint]", self._submit(spec, tags, timeout_s))

    @CallFunction
    def load_checkpoint(
        self,
        checkpoint: "results.Checkpoint | str | _BaseMarker",
        *,
        tags: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> CallFuture[results.LoadCheckpoint]:
        """Replaces the training state by a checkpoint (or its id) or by plexrl.BASE; also after StateLost.

        The rollout weights become the checkpoint's, under a new version.
        """
        match checkpoint:
            case results.Checkpoint():
                spec = t.LoadCheckpointSpec(checkpoint_id=checkpoint.checkpoint_id)
            case str():
                spec = t.LoadCheckpointSpec(checkpoint_id=checkpoint)
            case _BaseMarker():
                spec = t.LoadCheckpointSpec(base=True)
            case _:
                raise errors.InvalidArgument(
                    f"checkpoint: {checkpoint!r}, want a Checkpoint (of a future: its result()), an id, or plexrl.BASE"
                )
        return self._load(spec, tags, timeout_s)

    @CallFunction
    def pull_weights(
        self,
        policy: "Model",
        *,
        tags: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> CallFuture[results.LoadCheckpoint]:
        """Takes the rollout weights of a policy of the job, from its worker to this model's, of role "rollout".

        They are those of the newest `sync_weights` of the policy that was submitted before this, and become a version
        of this model; the result names both. A later `sync_weights` of the policy waits until they are here
        (in_flight="drain") or has this end with VersionGone. After StateLost, pull again; after a pull that ended
        otherwise than well, `resume()` first.
        """
        source = t.RolloutSource(model_id=policy.model_id)
        return self._load(t.LoadCheckpointSpec(rollout=source), tags, timeout_s)

    def _load(
        self, spec: t.LoadCheckpointSpec, tags: Mapping[str, str] | None, timeout_s: float | None
    ) -> CallFuture[results.LoadCheckpoint]:
        # A load replaces whatever is there: it needs none of the calls before it.
        if self._counter.hole is not None:
            self._counter.reset(self._describe().next_sequence)
        future = self._submit(t.CallSpec(load_checkpoint=spec), tags, timeout_s)
        return cast("CallFuture[results.LoadCheckpoint]", future)

    def _submit(
        self, spec: t.CallSpec, tags: Mapping[str, str] | None, timeout_s: float | None
    ) -> CallFuture[results.Result]:
        request = self._request(tags, timeout_s)
        request.spec.CopyFrom(spec)
        return self._stream.submit(request, sequenced=True)

    def _request(self, tags: Mapping[str, str] | None, timeout_s: float | None) -> c.SubmitCallRequest:
        request = c.SubmitCallRequest(job_id=self.job_id, model_id=self.model_id)
        if tags:
            request.tags.update(tags)
        if timeout_s is not None:
            durations.put(request.timeout, timeout_s, "timeout_s")
        return request

    def session(
        self,
        *,
        max_concurrent: int = 16,
        grace_s: float | None = None,
        idle_limit_s: float | None = None,
        on_revoked: Callable[[], None] | None = None,
    ) -> "Session":
        """Opens a session: generates that run together, for rollouts whose turns come at their own times.

        max_concurrent: most that are with the engine at a time, 1 to 64. grace_s: how long those that run have to end
        when another job is to have the device, default 5; then they are parked, and go on later. idle_limit_s: the
        session expires when nothing is asked of it for so long, default an hour; where the model has 8 already, opening
        one ends the one that was unused longest. on_revoked: called when what runs is to make way for another job, in
        the thread that brings results: it must not wait for any.
        """
        request = s.OpenSessionRequest(
            request_id=uuid.uuid4().hex, model_id=self.model_id, max_concurrent=max_concurrent
        )
        if grace_s is not None:
            durations.put(request.grace, grace_s, "grace_s")
        if idle_limit_s is not None:
            durations.put(request.idle_limit, idle_limit_s, "idle_limit_s")
        if max_concurrent < 1:
            raise errors.InvalidArgument(f"max_concurrent: {max_concurrent}, want at least 1")
        message = self._connection.unary(self._connection.sessions.OpenSession, request)
        return Session(self._connection, self._stream, self, message, on_revoked)

    def resume(self) -> int:
        """Lets the sequence go on after a call of it did not succeed. Returns the next sequence number."""
        request = m.ResumeSequenceRequest(request_id=uuid.uuid4().hex, model_id=self.model_id)
        number = self._connection.unary(self._connection.models.ResumeSequence, request).next_sequence
        self._counter.reset(number)
        return number

    # --- text --------------------------------------------------------------------------------------------------------

    def tokenize(self, texts: Sequence[str], *, add_special_tokens: bool = False) -> list[Int32Array]:
        """Token ids of each text, int32. Raises FailedPrecondition if the base has no tokenizer."""
        if isinstance(texts, str):
            raise errors.InvalidArgument("texts: want a list of strings, not one string")
        request = m.TokenizeRequest(model_id=self.model_id, texts=texts, add_special_tokens=add_special_tokens)
        batch = self._connection.unary(self._connection.models.Tokenize, request).batch
        token_ids, lengths = batch_arrays(batch, name="tokenize.batch", min_length=0)
        return [view.astype(token_ids.dtype, copy=False) for view in split(token_ids, lengths)]

    def detokenize(self, sequences: Sequence[Tokens], *, skip_special_tokens: bool = True) -> list[str]:
        """The text of each token sequence."""
        request = m.DetokenizeRequest(
            model_id=self.model_id, batch=token_batch(sequences), skip_special_tokens=skip_special_tokens
        )
        return list(self._connection.unary(self._connection.models.Detokenize, request).texts)

    # --- life and checkpoints ----------------------------------------------------------------------------------------

    def wait_until_placed(self, timeout_s: float = 300.0) -> None:
        """Waits until a worker has built the model. Calls need not wait for it: they queue.

        Raises ModelEnded with the worker's message if it cannot be built, TimeoutError.
        """
        give_up = time.monotonic() + timeout_s
        while True:
            message = self._describe()
            if message.state == m.MODEL_STATE_PLACED:
                return
            state = m.ModelState.Name(message.state).removeprefix("MODEL_STATE_")
            if message.state in (m.MODEL_STATE_FAILED, m.MODEL_STATE_DELETING, m.MODEL_STATE_DELETED):
                raise errors.ModelEnded(f"model {self.name} is {state}: {message.message or 'no reason was given'}")
            if time.monotonic() > give_up:
                raise TimeoutError(f"model {self.name} is {state} after {timeout_s} s: see `plexrl workers`")
            time.sleep(0.1)

    def checkpoints(self) -> list[results.Checkpoint]:
        """The model's committed checkpoints, newest first."""
        request = m.ListCheckpointsRequest(model_id=self.model_id)
        listed = self._connection.unary(self._connection.models.ListCheckpoints, request)
        return [results.checkpoint(message) for message in listed.checkpoints]

    def export(
        self,
        checkpoint: "results.Checkpoint | str",
        directory: str | PathLike[str],
        *,
        training_state: bool = False,
    ) -> Path:
        """Writes a checkpoint as a Hugging Face directory, which must not exist yet or be empty.

        Every file is checked against its SHA-256; all of them are written or none (DataLoss). training_state adds the
        optimizer's and gradients' files.
        """
        checkpoint_id = checkpoint if isinstance(checkpoint, str) else checkpoint.checkpoint_id
        request = m.ExportCheckpointRequest(checkpoint_id=checkpoint_id, training_state=training_state)
        models = self._connection.models
        return self._connection.again(
            lambda: write_export(models.ExportCheckpoint(request, metadata=self._connection.metadata), Path(directory))
        )

    def delete(self) -> None:
        """Takes the model off its worker; its checkpoints stay. Deleting twice is fine."""
        request = m.DeleteModelRequest(request_id=uuid.uuid4().hex, model_id=self.model_id)
        self._connection.unary(self._connection.models.DeleteModel, request)

    @property
    def state_bytes(self) -> int:
        """Bytes of the full state on the device; 0 until the model is built."""
        return self._describe().state_bytes

    def _describe(self) -> m.Model:
        return self._connection.unary(self._connection.models.GetModel, m.GetModelRequest(model_id=self.model_id))

    def __enter__(self) -> "Model":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.delete()
        # Otherwise the job's end takes the model away, and the error stays the one that the caller sees.


def _optional(values: object) -> t.Tensor | None:
    return None if values is None else tensor(cast("list[float]", values), "float32")
