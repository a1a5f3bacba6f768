"""Clients in virtual time: they submit in any order, resend, leave gaps, cancel, resume, attach from elsewhere, die.

A client follows the rules that the protos tell it, and knows what any client could know; what must be true of the
answers is `truth`'s business.
"""

import asyncio
import random
from collections.abc import Awaitable, Sequence
from typing import Any, NoReturn

from google.protobuf import duration_pb2

from plexrl.v1 import call_pb2, job_pb2, model_pb2, session_pb2
from plexrl_controller.domain.errors import ControllerError, NotFound, Unavailable
from plexrl_controller.domain.ids import Tenant
from tests.simulation.faults.client_stream import ClientStream
from tests.simulation.faults.draws import draw_functions, draw_spec, saved_checkpoints
from tests.simulation.faults.rollouts import Rollouts
from tests.simulation.faults.service import JobOver, Service
from tests.simulation.faults.truth import JobTruth, ModelTruth, Request

PATIENCE_S = 6.0
"""A client that waits this long for a call looks whether its sequence has a gap."""
LEASE_S = 20.0
PROBES = 4
_ENDED = ("JOB_NOT_ACTIVE", "MODEL_NOT_ACTIVE")


class Client:
    """One client process after another of one job."""

    def __init__(self, world: Service, name: str, tenant: Tenant, rng: random.Random, rounds: int) -> None:
        self.world, self.name, self.tenant, self.rng, self.rounds = world, name, tenant, rng, rounds
        self.job: JobTruth | None = None
        self.next: dict[str, int] = {}
        self.broken: set[str] = set()
        """Models whose sequence must be resumed before it goes on."""
        self.made_version: dict[str, int] = {}
        self.sessions: dict[str, str] = {}
        """Open sessions by model, as far as this client knows."""
        self.last_renewal_s = 0.0
        self._seed = rng.getrandbits(16)
        # Draws of its own, so that what else a client does is as it was before there were sessions.
        self._session_rng = random.Random(self._seed)
        self.lease_s = LEASE_S
        self.rollouts = Rollouts(self, self._seed)
        self._finishing = False
        self._numbers = 0
        self._round = 0
        self.helpers: list[asyncio.Task[Any]] = []
        self._stream: ClientStream | None = None

    async def run(self) -> None:
        """A client process, from attaching (or creating) to the last result."""
        try:
            await self._begin()
            while self._round < self.rounds:
                self._round += 1
                await self._play()
                await asyncio.sleep(self.rng.expovariate(1 / 1.5))
            await self._finish()
        except JobOver:
            await self._job_over()
        finally:
            for helper in self.helpers:
                helper.cancel()
            self.helpers.clear()
            self._stream = None

    # The job.

    async def _begin(self) -> None:
        if self.job is None:
            await self._create()
        else:
            await self._attach(self.job)
        self.helpers.append(asyncio.ensure_future(self._heartbeat()))

    async def _create(self) -> None:
        lease = duration_pb2.Duration(seconds=int(LEASE_S))
        # The same key from whichever process: what an earlier one made is found, not made again.
        request = job_pb2.CreateJobRequest(request_id=f"{self.name}-create", name=self.name, lease=lease)
        made = await self._ask("JobService", "CreateJob", request)
        self.job = JobTruth(made.job_id, self.name, self.tenant)
        self.world.truth.jobs.append(self.job)
        await self._create_model(self.job)

    async def _create_model(self, job: JobTruth) -> None:
        init = model_pb2.InitBase(config_json='{"architectures": ["Qwen3ForCausalLM"]}', seed=self._seed)
        base = model_pb2.ModelBase(init=init)
        request = model_pb2.CreateModelRequest(
            request_id=f"{self.name}-model", job_id=job.job_id, name="policy", base=base
        )
        model = await self._ask("ModelService", "CreateModel", request)
        job.models.setdefault(model.model_id, ModelTruth(model.model_id, self._seed))
        self.next[model.model_id] = 1
        await self.rollouts.create(base, model.model_id)

    async def _attach(self, job: JobTruth) -> None:
        """Another process, perhaps elsewhere: goes on from what the service says."""
        self.world.note(self.name, "attaches")
        try:
            answer = await self._ask("JobService", "AttachJob", job_pb2.AttachJobRequest(name=self.name))
        except NotFound:
            raise JobOver from None
        sampled = [cursor for cursor in answer.models if cursor.model.role == model_pb2.MODEL_ROLE_ROLLOUT]
        trained = [cursor for cursor in answer.models if cursor not in sampled]
        self.next = {cursor.model.model_id: cursor.next_sequence for cursor in trained}
        for cursor in sampled:
            self.rollouts.adopt(next(iter(self.next)), cursor.model.model_id, cursor.next_sequence, self._seed)
        if not self.next or not sampled:
            # What an earlier process made is found, not made again.
            known = dict(self.next)
            await self._create_model(job)
            self.next |= known
        for model_id in self.next:
            job.models.setdefault(model_id, ModelTruth(model_id, self._seed))
        self.broken = {*self.next, *self.rollouts.next}
        listed = {call.call_id for call in answer.calls}
        for call in answer.calls:
            self.world.truth.hear(job, call, whole=False)
        for request in job.requests.values():
            if request.call_id and not request.acknowledged and request.call_id not in listed:
                self.world.blame(f"AttachJob does not list {request.name}, {request.call_id}")

    async def _heartbeat(self) -> None:
        assert self.job is not None
        while True:
            sent_s = asyncio.get_running_loop().time()
            try:
                await self._once(
                    "JobService", "HeartbeatJob", job_pb2.HeartbeatJobRequest(job_id=self.job.job_id), limit_s=5.0
                )
                self.last_renewal_s = sent_s
            except Unavailable:
                await asyncio.sleep(0.5)
                continue
            except ControllerError:
                return
            await asyncio.sleep(LEASE_S / 5)

    async def _job_over(self) -> None:
        """It expired: every call has ended then, and says so."""
        assert self.job is not None
        self.job.over = True
        self.world.note(self.name, "finds its job over")
        job = await self._ask("JobService", "GetJob", job_pb2.GetJobRequest(job_id=self.job.job_id))
        lived_s = job.end_time.ToNanoseconds() / 1e9 - self.last_renewal_s
        if job.state == job_pb2.JOB_STATE_EXPIRED and lived_s < LEASE_S - 1e-3:
            self.world.blame(f"the lease of {self.name} ended {lived_s:.1f} s after its renewal")
        if job.state != job_pb2.JOB_STATE_EXPIRED and not self._finishing:
            self.world.blame(f"job {self.name} is over as {job.state}")
        await self._outcomes([r for r in self.job.requests.values() if r.call_id], "poll")

    async def _finish(self) -> None:
        assert self.job is not None
        await self._outcomes(list(self.job.requests.values()), self._way())
        await self._verify(self.job)
        if self.rng.random() < 0.5:
            self._finishing = True
            await self._ask(
                "JobService", "FinishJob", job_pb2.FinishJobRequest(request_id=self._id(), job_id=self.job.job_id)
            )
            self.job.over = True

    async def _verify(self, job: JobTruth) -> None:
        """Everything that was promised of past calls, asked for again."""
        for request in [r for r in job.requests.values() if r.call_id]:
            await self._poll(job, request)
            if self.rng.random() < 0.3:
                await self._submit(request, again=True)
        for model_id in self.next:
            await self._probe(model_id)
        await self.rollouts.probe()

    async def _probe(self, model_id: str) -> None:
        """The model works, whatever happened. What struck before the calm may still show once or twice."""
        probes = []
        for _ in range(PROBES):
            await self._mend(model_id)
            probes.append(self._request(model_id, "score"))
            await self._submit(probes[-1])
            await self._outcomes(probes, "poll")
            if probes[-1].outcome is not None and probes[-1].outcome.succeeded:
                return
            await asyncio.sleep(LEASE_S)
        ends = [(probe.name, probe.outcome, probe.rejected) for probe in probes]
        self.world.blame(f"nothing fails any more, and calls end so: {ends}")

    # Calls.

    async def _play(self) -> None:
        """A round: some calls, sent in some order, awaited or not."""
        model_id = self.rng.choice(sorted(self.next))
        if model_id in self.broken:
            await self._mend(model_id)
        if self._session_rng.random() < 0.3:
            await self._change_session(model_id)
        functions = draw_functions(self.rng)
        requests = []
        for function in functions:
            if self.rng.random() < 0.03:
                self.next[model_id] += 1
                self.broken.add(model_id)
            requests.append(self._request(model_id, function))
        way = self._way()
        if way == "stream" and self._stream is None:
            self._stream = ClientStream(self)
        await self._send_all(requests, way)
        cancelled = [r for r in requests if r.call_id and self.rng.random() < 0.08]
        for request in cancelled:
            await asyncio.sleep(self.rng.expovariate(1 / 0.05))
            message = await self._ask(
                "CallService", "CancelCall", call_pb2.CancelCallRequest(request_id=self._id(), call_id=request.call_id)
            )
            self.world.note(self.name, "cancels", request.name)
            assert self.job is not None
            self.world.truth.hear(self.job, message, whole=False)
        if self.rng.random() < 0.75:
            await self._outcomes(requests, way)
            await self._acknowledge([r for r in requests if r.outcome is not None and self.rng.random() < 0.5])
        await self.rollouts.play()

    async def _change_session(self, model_id: str) -> None:
        """Opens a session of the model, or ends the one that it has."""
        if (session_id := self.sessions.pop(model_id, None)) is not None:
            close = session_pb2.CloseSessionRequest(request_id=self._id(), session_id=session_id)
            await self._ask("SessionService", "CloseSession", close)
            return
        opening = session_pb2.OpenSessionRequest(
            request_id=self._id(), model_id=model_id, max_concurrent=self._session_rng.randint(1, 4)
        )
        opening.grace.FromMilliseconds(self._session_rng.choice([0, 50, 2000]))
        opening.idle_limit.seconds = self._session_rng.choice([10, 3600])
        try:
            session = await self._ask("SessionService", "OpenSession", opening)
        except ControllerError as error:
            # Those of its earlier processes may all be open.
            if error.reason != "TOO_MANY_SESSIONS":
                raise
        else:
            self.sessions[model_id] = session.session_id

    async def _send_all(self, requests: list[Request], way: str) -> None:
        order = list(requests)
        if self.rng.random() < 0.3:
            self.rng.shuffle(order)
        if self.rng.random() < 0.4:
            for request in order:
                await self._submit(request, way)
            return
        sends = [self._submit(r, way, self.rng.expovariate(1 / 0.01)) for r in order]
        # Sometimes the same request from two places at once.
        sends += [self._submit(r, way, self.rng.expovariate(1 / 0.01)) for r in order if self.rng.random() < 0.1]
        await _all(sends)

    def _request(self, model_id: str, function: str) -> Request:
        assert self.job is not None
        sequence, numbers = 0, self._numbers_of(model_id)
        if function != "generate":
            sequence, numbers[model_id] = numbers[model_id], numbers[model_id] + 1
        timeout = duration_pb2.Duration(seconds=self.rng.randint(1, 8)) if self.rng.random() < 0.05 else None
        message = call_pb2.SubmitCallRequest(
            request_id=self._id(),
            job_id=self.job.job_id,
            model_id=model_id,
            sequence=sequence,
            spec=draw_spec(
                self.rng,
                function,
                version=self.made_version.get(model_id, 0),
                saved=saved_checkpoints(self.job.models[model_id]),
                policy_id=self.rollouts.policy_of.get(model_id, ""),
                new_label=self._id,
            ),
            timeout=timeout,
        )
        if function == "generate" and self._session_rng.random() < 0.7:
            message.session_id = self.sessions.get(model_id, "")
        request = Request(message, self.made_version.get(model_id, 0))
        self.job.requests[message.request_id] = request
        self.job.models[model_id].requests.append(request)
        return request

    def _numbers_of(self, model_id: str) -> dict[str, int]:
        return self.rollouts.next if model_id in self.rollouts.next else self.next

    async def _submit(self, request: Request, way: str = "unary", delay_s: float = 0.0, *, again: bool = False) -> None:
        """Sends until the answer is known."""
        assert self.job is not None
        await asyncio.sleep(delay_s)
        while True:
            try:
                if way == "stream" and self._stream is not None:
                    call = await self._stream.submit(request)
                else:
                    call = await self._once("CallService", "SubmitCall", request.message, self.rng.expovariate(1 / 2.0))
            except Unavailable:
                await asyncio.sleep(self.rng.expovariate(1 / 0.3))
            except ControllerError as error:
                self._rejected(request, error)
                return
            else:
                # Two copies of one request may meet a model before and after another request of theirs mends it.
                if request.rejected not in ("", "STATE_LOST", "VERSION_GONE"):
                    self.world.blame(f"{request.name} was refused with {request.rejected}, then accepted")
                self.world.truth.hear(self.job, call, fresh=again, whole=way != "stream")
                return

    def _rejected(self, request: Request, error: ControllerError) -> None:
        self.world.note(self.name, "is refused", request.name, error.reason)
        if request.call_id:
            self.world.blame(f"{request.name} was accepted as {request.call_id}, then refused: {error.message}")
        request.rejected = error.reason
        model_id = request.message.model_id
        match error.reason:
            case "PREDECESSOR_FAILED" | "STATE_LOST":
                self.broken.add(model_id)
            case "VERSION_GONE" | "INVALID_ARGUMENT" if request.message.spec.generate.version.WhichOneof("selector"):
                pass
            case "NOT_FOUND" | "JOB_NOT_ACTIVE" | "MODEL_NOT_ACTIVE":
                raise JobOver
            case "SESSION_NOT_OPEN" if request.message.session_id:
                self.sessions.pop(model_id, None)
            case "SEQUENCE_TAKEN" if self._overtaken(request):
                pass
            case _:
                self.world.blame(f"{request.name} was refused: {error.reason}: {error.message}")
        if request.message.sequence:
            self.broken.add(model_id)

    def _overtaken(self, request: Request) -> bool:
        """A load_checkpoint of a later number was accepted for a lost state: earlier numbers are over."""
        assert self.job is not None
        others = self.job.models[request.message.model_id].requests
        return any(o.function == "load_checkpoint" and o.message.sequence > request.message.sequence for o in others)

    async def _outcomes(self, requests: list[Request], way: str) -> None:
        """Waits until every accepted one of these has ended."""
        assert self.job is not None
        waiting = [r for r in requests if r.call_id and r.outcome is None]
        loop = asyncio.get_running_loop()
        look_s = loop.time() + PATIENCE_S
        while waiting := [r for r in waiting if r.outcome is None]:
            if way == "stream" and self._stream is not None:
                await self._stream.heard(look_s - loop.time())
            elif way == "watch":
                await self._watch(waiting[0], look_s - loop.time())
            else:
                await self._poll(self.job, waiting[0])
                await asyncio.sleep(self.rng.expovariate(1 / 0.3))
            if loop.time() >= look_s:
                look_s = loop.time() + PATIENCE_S
                concerned = {r.message.model_id for r in waiting}
                # A pull waits behind a gap of its policy's too.
                concerned |= {self.rollouts.policy_of[m] for m in concerned if m in self.rollouts.policy_of}
                for model_id in sorted(self.broken & concerned):
                    await self._resume(model_id)
        for request in requests:
            if request.outcome is None:
                continue
            if request.message.sequence and not request.outcome.succeeded:
                self.broken.add(request.message.model_id)
            if request.function in ("sync_weights", "load_checkpoint") and request.outcome.succeeded:
                before = self.made_version.get(request.message.model_id, 0)
                self.made_version[request.message.model_id] = max(before, request.message.sequence)

    async def _poll(self, job: JobTruth, request: Request) -> None:
        known = request.outcome is not None
        try:
            call = await self._ask("CallService", "GetCall", call_pb2.GetCallRequest(call_id=request.call_id))
        except NotFound:
            self._forgotten(request)
        self.world.truth.hear(job, call, fresh=known)

    def _forgotten(self, request: Request) -> NoReturn:
        self.world.blame(f"{request.name} was accepted as {request.call_id}, and nobody knows it any more")
        raise JobOver

    async def _watch(self, request: Request, limit_s: float) -> None:
        """WatchCall until the call has ended, the stream breaks, or the time is over."""
        assert self.job is not None
        frames: asyncio.Queue[Any] = asyncio.Queue()
        task = self.world.watch(self.name, self.tenant, request.call_id, frames)
        try:
            async with asyncio.timeout(max(limit_s, 0.0)):
                while isinstance(call := await frames.get(), call_pb2.Call):
                    self.world.truth.hear(self.job, call)
                if isinstance(call, NotFound):
                    self._forgotten(request)
                await asyncio.sleep(self.rng.expovariate(1 / 0.3))
        except TimeoutError:
            pass
        finally:
            task.cancel()

    async def _acknowledge(self, requests: list[Request]) -> None:
        assert self.job is not None
        if not requests:
            return
        for request in requests:
            request.acknowledged = True
        ids = [request.call_id for request in requests]
        await self._ask("CallService", "AckCalls", call_pb2.AckCallsRequest(job_id=self.job.job_id, call_ids=ids))

    # Mending a sequence.

    async def _mend(self, model_id: str) -> None:
        """Makes the model take sequenced calls again, whatever happened to it."""
        assert self.job is not None
        while model_id in self.broken:
            model = await self._ask("ModelService", "GetModel", model_pb2.GetModelRequest(model_id=model_id))
            if model.state == model_pb2.MODEL_STATE_STATE_LOST:
                self.next[model_id] = model.next_sequence
                load = self._request(model_id, "load_checkpoint")
                await self._submit(load)
                await self._outcomes([load], "poll")
                if load.outcome is not None and load.outcome.succeeded:
                    self.broken.discard(model_id)
            else:
                await self._resume(model_id)

    async def _resume(self, model_id: str) -> None:
        request = model_pb2.ResumeSequenceRequest(request_id=self._id(), model_id=model_id)
        try:
            answer = await self._ask("ModelService", "ResumeSequence", request)
        except ControllerError as error:
            if error.code != "FAILED_PRECONDITION":
                raise
            self.world.note(self.name, "cannot resume", error.message)
            await asyncio.sleep(self.rng.expovariate(1 / 0.5))
            return
        self._numbers_of(model_id)[model_id] = answer.next_sequence
        self.broken.discard(model_id)

    # Asking.

    def _way(self) -> str:
        return self.rng.choice(["stream", "stream", "watch", "poll"])

    def _id(self) -> str:
        self._numbers += 1
        return f"{self.name}-{self._numbers}"

    async def _once(self, service: str, method: str, request: Any, limit_s: float = 10.0) -> Any:
        return await self.world.ask(self.name, self.tenant, service, method, request, limit_s)

    async def _ask(self, service: str, method: str, request: Any) -> Any:
        """Until there is an answer. Raises JobOver where the answer says so."""
        while True:
            try:
                return await self._once(service, method, request)
            except Unavailable as error:
                await asyncio.sleep(self.rng.expovariate(1 / 0.3) + (error.retry_after_s or 0.0))
            except ControllerError as error:
                ended = error.reason in _ENDED or (error.code == "NOT_FOUND" and method not in ("AttachJob", "GetCall"))
                if ended and method != "GetJob":
                    raise JobOver from error
                raise


async def _all(work: Sequence[Awaitable[None]]) -> None:
    """All of it; the first failure ends the rest."""
    tasks = [asyncio.ensure_future(piece) for piece in work]
    try:
        for task in tasks:
            await task
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
