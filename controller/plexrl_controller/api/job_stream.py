"""One client's stream: requests in, answers and updates out, several to a frame.

What a frame submits is accepted in one batch and so in one commit. Only what must write or look something up first
takes a task of its own; calls of one model keep their order all the same.
"""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import suppress
from typing import Any, Protocol

from plexrl.v1 import call_pb2, session_pb2
from plexrl_controller.api import messages
from plexrl_controller.api.status import normalize, status_of
from plexrl_controller.dispatch import limits, sessions, submit
from plexrl_controller.dispatch.core import Core
from plexrl_controller.dispatch.hub import Subscription
from plexrl_controller.domain.errors import ControllerError, DataLoss, InvalidArgument, NotFound
from plexrl_controller.domain.ids import CallId, ModelId, SessionId
from plexrl_controller.domain.records import Call, Job
from plexrl_controller.domain.states import CallKind
from plexrl_controller.lifecycle import calls as call_lifecycle

MAX_PENDING_SUBMITS = 1024
MAX_PENDING_BYTES = 128 * 1024 * 1024
"""Submits of one stream that wait for durability at a time; more wait in the stream (back-pressure)."""
LARGE_BYTES = 256 * 1024
"""A submit of this size is checked and hashed beside the loop, so that nobody's small calls wait for it."""
TOLD_AFTER_S = 0.05
"""A call of which nothing else was told for so long is told as accepted; the end of a shorter one says so as well."""
_MESSAGE_BYTES = 8 * 1024
"""More than a message takes beside its result, whose error may be long."""


class SubmitChecks(Protocol):
    """What the stream asks of its service: the same checks as for the unary rpc."""

    def submission(self, request: call_pb2.SubmitCallRequest) -> submit.Submission:
        """Checks a submit as far as memory tells."""
        ...

    async def prepared(self, request: call_pb2.SubmitCallRequest, size_bytes: int) -> submit.Submission:
        """Checks a submit that is large or needs the store."""
        ...


class JobStream:
    """The calls of one job on one stream."""

    def __init__(self, core: Core, job: Job, checks: SubmitChecks) -> None:
        self._core = core
        self._job = job
        self._checks = checks
        self._answers: list[Call | call_pb2.SubmitRejected] = []
        self._untold: dict[CallId, Call] = {}
        """Accepted, durable, and nothing of it told yet."""
        self._subscription = core.hub.watch_job(job.job_id)
        self._pending = 0
        self._pending_bytes = 0
        self._room = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._ended = False
        self._told: dict[CallId, tuple[int, int]] = {}

    async def run(
        self, first: Sequence[call_pb2.ClientMessage], frames: AsyncIterator[call_pb2.ConnectRequest]
    ) -> AsyncIterator[call_pb2.ConnectResponse]:
        """Yields frames until the client closes its side or the rpc ends. The first message is its hello."""
        core, job_id = self._core, self._job.job_id
        for call_id in core.ledger.calls_of_job.get(job_id, ()):
            self._subscription.note(call_id)
        for session in core.ledger.open_sessions(*core.ledger.models_of_job.get(job_id, ())):
            self._subscription.note_session(session)
        reader = asyncio.create_task(self._read(first, frames))
        try:
            while True:
                changed = [] if self._ended and not self._pending else await self._subscription.take()
                if self._ended:
                    self._tell_accepted(list(self._untold))
                answers, self._answers = self._answers, []
                frames_out = _Frames()
                for answer in answers:
                    if isinstance(answer, Call):
                        messages.fill_call(frames_out.add().accepted, core, self._newest(answer))
                    else:
                        frames_out.add().rejected.CopyFrom(answer)
                for call_id in changed:
                    if (call := self._news(call_id)) is not None:
                        result_bytes = call.result.size_bytes if call.result is not None else 0
                        message = frames_out.add(result_bytes).updated
                        if not messages.fill_small_call(message, core, call):
                            message.CopyFrom(await self._with_result(call))
                for news in session_news(core, self._subscription):
                    frames_out.add().session.CopyFrom(news)
                for frame in frames_out.frames:
                    yield frame
                if reader.done():
                    reader.result()
                    if not self._pending and not self._answers:
                        return
        finally:
            reader.cancel()
            for task in self._tasks:
                task.cancel()
            core.hub.leave_job(job_id, self._subscription)
            with suppress(asyncio.CancelledError):
                await asyncio.gather(reader, *self._tasks, return_exceptions=True)

    async def _with_result(self, call: Call) -> call_pb2.Call:
        """One that is damaged or gone is told in its place, as the error: it must not end the stream of the others."""
        try:
            return await messages.full_call_message(self._core, call)
        except (DataLoss, NotFound) as error:
            message = messages.call_message(self._core, call)
            lost = DataLoss(f"the call succeeded, and its result is lost: {error.message}", reason="RESULT_LOST")
            message.error.CopyFrom(status_of(lost))
            return message

    def _news(self, call_id: CallId) -> Call | None:
        """The call, if there is something new to tell of it."""
        call = self._core.ledger.calls.get(call_id)
        if call is None or call_id in self._core.undurable:
            # What is on its way to the store is published once it is there.
            return None
        self._untold.pop(call_id, None)
        progress = self._core.ledger.progress.get(call_id, (0, 0))[0]
        if self._told.get(call_id) == (call.revision, progress):
            return None
        if call.state in call_lifecycle.TERMINAL:
            self._told.pop(call_id, None)
        else:
            self._told[call_id] = (call.revision, progress)
        return call

    async def _read(
        self, first: Sequence[call_pb2.ClientMessage], frames: AsyncIterator[call_pb2.ConnectRequest]
    ) -> None:
        try:
            await self._note_ended(first[0].hello.session_ids)
            await self._take(first[1:])
            async for frame in frames:
                if len(frame.messages) > limits.MAX_FRAME_MESSAGES:
                    raise InvalidArgument(
                        f"a frame has {len(frame.messages)} messages; the limit is {limits.MAX_FRAME_MESSAGES}"
                    )
                await self._take(frame.messages)
        finally:
            self._ended = True
            self._notice()

    async def _note_ended(self, session_ids: Sequence[str]) -> None:
        """Those of the sessions that have ended are told of: their end may have come while there was no stream."""
        if len(session_ids) > limits.MAX_HELLO_SESSIONS:
            raise InvalidArgument(f"session_ids: {len(session_ids)}, the limit is {limits.MAX_HELLO_SESSIONS}")
        for session_id in session_ids:
            if session_id not in self._core.ledger.sessions:
                with suppress(NotFound):
                    session = await sessions.find(self._core, SessionId(session_id))
                    if session.job_id == self._job.job_id:
                        self._subscription.note_session(session)

    async def _take(self, frame: Sequence[call_pb2.ClientMessage]) -> None:
        await self._core.writer.has_room()
        while self._pending >= MAX_PENDING_SUBMITS or self._pending_bytes >= MAX_PENDING_BYTES:
            self._room.clear()
            await self._room.wait()
        acknowledged: list[str] = []
        submits: list[call_pb2.SubmitCallRequest] = []
        for message in frame:
            match message.WhichOneof("message"):
                case "submit":
                    submits.append(message.submit)
                case "ack":
                    acknowledged.extend(checked_ids(message.ack))
                case _:
                    raise InvalidArgument("a message on this stream is submit or ack; hello comes once, first")
        if acknowledged:
            freed = submit.acknowledge(self._core, self._job, acknowledged)
            if freed:
                self._spawn(submit.acknowledged(self._core, self._job, freed))
        # Measuring a message costs as much as writing it, and a large one comes alone.
        size_bytes = submits[0].ByteSize() if len(submits) == 1 else 0
        if size_bytes > LARGE_BYTES:
            self._accept_behind(submits[0], size_bytes)
        elif submits:
            self._accept(submits)

    def _accept(self, submits: Sequence[call_pb2.SubmitCallRequest]) -> None:
        """Accepts, without a pause, what can be accepted at once."""
        batch = self._core.batch()
        accepted: list[Call] = []
        for request in submits:
            try:
                self._check_job(request)
                submission = self._checks.submission(request)
                looked_up = submission.kind is CallKind.LOAD_CHECKPOINT and request.spec.load_checkpoint.checkpoint_id
                if looked_up or not submit.may_accept_now(self._core, submission):
                    self._accept_behind(request, len(submission.spec_bytes))
                else:
                    accepted.append(submit.accept_now(self._core, batch, submission))
            except Exception as error:  # noqa: BLE001 - one bad submit must not end the stream; it is answered with its status
                self._refuse(request.request_id, error)
        if accepted:
            self._pending += len(accepted)
            self._core.queue(batch, lambda error: self._accepted(accepted, error))
        else:
            self._notice()

    def _accepted(self, accepted: Sequence[Call], error: ControllerError | None) -> None:
        if error is None:
            self._untold.update((call.call_id, call) for call in accepted)
            asyncio.get_running_loop().call_later(
                TOLD_AFTER_S, self._tell_accepted, [call.call_id for call in accepted]
            )
        else:
            for call in accepted:
                self._answer(call.request_id, error)
        self._settled(len(accepted))

    def _tell_accepted(self, call_ids: Sequence[CallId]) -> None:
        """Answers the submits of calls of which nothing has been told."""
        answers = [self._untold.pop(call_id) for call_id in call_ids if call_id in self._untold]
        if answers:
            self._answers += answers
            self._notice()

    def _refuse(self, request_id: str, error: Exception) -> None:
        """Says no, once it is certain that this controller still leads: see `submit.submit`."""
        self._pending += 1

        def tell(lost: ControllerError | None) -> None:
            self._answer(request_id, error if lost is None else lost)
            self._settled(1)

        try:
            self._core.writer.confirm(tell)
        except ControllerError as lost:
            tell(lost)

    def _check_job(self, request: call_pb2.SubmitCallRequest) -> None:
        if request.job_id != self._job.job_id:
            raise InvalidArgument("job_id: another job than the stream's")

    def _accept_behind(self, request: call_pb2.SubmitCallRequest, size_bytes: int = 0) -> None:
        """Takes the call's place in the order of arrival, and accepts it in a task."""
        arrival = submit.Arrival(self._core, ModelId(request.model_id))
        self._pending += 1
        self._pending_bytes += size_bytes
        task = self._spawn(self._accept_alone(request, arrival, size_bytes))
        task.add_done_callback(lambda _: self._settled(1, size_bytes))
        task.add_done_callback(lambda _: arrival.leave())

    async def _accept_alone(
        self, request: call_pb2.SubmitCallRequest, arrival: submit.Arrival, size_bytes: int
    ) -> None:
        try:
            self._check_job(request)
            call = await submit.submit(self._core, arrival, lambda: self._checks.prepared(request, size_bytes))
            self._answer(request.request_id, call)
        except Exception as error:  # noqa: BLE001 - as in `_accept`
            self._answer(request.request_id, error)

    def _answer(self, request_id: str, outcome: Call | Exception) -> None:
        if isinstance(outcome, Call):
            self._answers.append(outcome)
        else:
            status = status_of(normalize(outcome))
            self._answers.append(call_pb2.SubmitRejected(request_id=request_id, error=status))

    def _newest(self, accepted: Call) -> Call:
        """A call as it was accepted, or as it is now where that is durable too."""
        known = self._core.ledger.calls.get(accepted.call_id)
        return accepted if known is None or accepted.call_id in self._core.undurable else known

    def _settled(self, count: int, size_bytes: int = 0) -> None:
        self._pending -= count
        self._pending_bytes -= size_bytes
        self._room.set()
        self._notice()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _notice(self) -> None:
        self._subscription.wake()


def checked_ids(request: call_pb2.AckCallsRequest) -> Sequence[str]:
    """The calls to acknowledge. Raises InvalidArgument."""
    if len(request.call_ids) > limits.MAX_ACK_CALLS:
        raise InvalidArgument(f"call_ids: {len(request.call_ids)}, the limit is {limits.MAX_ACK_CALLS}")
    return request.call_ids


def session_news(core: Core, subscription: Subscription) -> list[session_pb2.Session]:
    """The sessions that changed, as they stand now; an end that is on its way to the store is published later."""
    changed = [session for session in subscription.take_sessions() if session.session_id not in core.ending]
    return [messages.session_message(core, core.ledger.sessions.get(each.session_id, each)) for each in changed]


class _Frames:
    """Messages in frames, each within the bounds of a frame. They are filled in place, which saves a copy."""

    def __init__(self) -> None:
        self.frames: list[call_pb2.ConnectResponse] = []
        self._size_bytes = 0

    def add(self, result_bytes: int = 0) -> call_pb2.ServerMessage:
        """Room for a message with a result of so many bytes."""
        size_bytes = _MESSAGE_BYTES + result_bytes
        full = not self.frames or len(self.frames[-1].messages) >= limits.MAX_FRAME_MESSAGES
        if full or self._size_bytes + size_bytes > limits.MAX_FRAME_BYTES:
            self.frames.append(call_pb2.ConnectResponse())
            self._size_bytes = 0
        self._size_bytes += size_bytes
        return self.frames[-1].messages.add()
