"""CallService: submit, watch, cancel, acknowledge, list, explain."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from typing import Any

from plexrl.v1 import call_pb2, call_pb2_grpc
from plexrl_controller.api import messages
from plexrl_controller.api.auth import identity, require_visible
from plexrl_controller.api.explain import explain
from plexrl_controller.api.job_stream import LARGE_BYTES, JobStream, checked_ids
from plexrl_controller.api.validation import check_spec
from plexrl_controller.dispatch import limits, submit
from plexrl_controller.dispatch.core import Core
from plexrl_controller.domain.errors import FailedPrecondition, InvalidArgument, NotFound
from plexrl_controller.domain.ids import CallId, CheckpointId, JobId, ModelId, SessionId
from plexrl_controller.domain.records import Call, Job
from plexrl_controller.domain.states import CallKind
from plexrl_controller.lifecycle import calls as call_lifecycle
from plexrl_controller.lifecycle import jobs as job_lifecycle
from plexrl_controller.store.paging import newest_first
from plexrl_controller.store.port import Listing, Page


class CallService(call_pb2_grpc.CallServiceServicer):
    """The wire's CallService over the dispatcher's core."""

    def __init__(self, core: Core) -> None:
        self._core = core

    async def SubmitCall(self, request: call_pb2.SubmitCallRequest, context: Any) -> call_pb2.Call:
        """Accepts a call."""
        arrival = submit.Arrival(self._core, ModelId(request.model_id))
        call = await submit.submit(self._core, arrival, lambda: self.prepared(request, request.ByteSize()))
        return await messages.full_call_message(self._core, call)

    async def Connect(
        self, request_iterator: AsyncIterator[call_pb2.ConnectRequest], context: Any
    ) -> AsyncIterator[call_pb2.ConnectResponse]:
        """Serves a job's long-lived stream."""
        first = await anext(aiter(request_iterator), None)
        if first is None or not first.messages or first.messages[0].WhichOneof("message") != "hello":
            raise InvalidArgument("the first message of the stream must be hello, with the job's id")
        job = self._job(first.messages[0].hello.job_id)
        if job.state in job_lifecycle.TERMINAL:
            raise FailedPrecondition(
                f"job {job.name} is {job.state.name}. {job.message}".strip(), reason="JOB_NOT_ACTIVE"
            )
        stream = JobStream(self._core, job, self)
        async for response in stream.run(list(first.messages), request_iterator):
            yield response

    async def GetCall(self, request: call_pb2.GetCallRequest, context: Any) -> call_pb2.Call:
        """Reads one call."""
        return await messages.full_call_message(self._core, await self._durable_call(request.call_id))

    async def WatchCall(self, request: call_pb2.WatchCallRequest, context: Any) -> AsyncIterator[call_pb2.Call]:
        """Streams a call's changes until it is terminal."""
        call = await self._call(request.call_id)
        subscription = self._core.hub.watch_call(call.call_id)
        try:
            while True:
                if call.call_id in self._core.undurable:
                    await subscription.take()
                    continue
                call = self._core.ledger.calls.get(call.call_id) or await self._call(request.call_id)
                message = await messages.full_call_message(self._core, call)
                terminal = call.state in call_lifecycle.TERMINAL
                old = message.attempt == request.attempt and 0 < message.progress_done <= request.offset
                if terminal or (message.attempt >= request.attempt and not old):
                    yield message
                if terminal:
                    return
                await subscription.take()
        finally:
            self._core.hub.leave_call(call.call_id, subscription)

    async def CancelCall(self, request: call_pb2.CancelCallRequest, context: Any) -> call_pb2.Call:
        """Asks for a call to be ended."""
        messages.request_id_of(request.request_id)
        call = await self._call(request.call_id)
        if call.state not in call_lifecycle.TERMINAL:
            call = await submit.cancel(self._core, call)
        return messages.call_message(self._core, call)

    async def AckCalls(self, request: call_pb2.AckCallsRequest, context: Any) -> call_pb2.AckCallsResponse:
        """Drops results that have been taken."""
        job = self._job(request.job_id)
        await submit.acknowledged(self._core, job, submit.acknowledge(self._core, job, checked_ids(request)))
        return call_pb2.AckCallsResponse()

    async def ListCalls(self, request: call_pb2.ListCallsRequest, context: Any) -> call_pb2.ListCallsResponse:
        """Lists calls, newest first."""
        page = Page(size=page_size(request.page_size), after=request.page_token or None)
        job_id = JobId(request.job_id) if request.job_id else None
        listing = await self._listing(job_id, request.live_only, page)
        newest = [self._core.ledger.calls.get(call.call_id, call) for call in listing.items]
        # What memory showed must be durable before it is told.
        await self._core.commit(self._core.batch())
        return call_pb2.ListCallsResponse(
            calls=[messages.call_message(self._core, call) for call in newest], next_page_token=listing.next or ""
        )

    async def _listing(self, job_id: JobId | None, live_only: bool, page: Page) -> Listing[Call]:
        tenant = identity().scope
        if not live_only:
            return await self._core.store.list_calls(tenant, job_id, page)
        return newest_first(
            self._core.ledger.calls.values(),
            page,
            lambda call: (
                call.state not in call_lifecycle.TERMINAL
                and tenant in (None, call.tenant)
                and job_id in (None, call.job_id)
            ),
        )

    async def ExplainCall(self, request: call_pb2.ExplainCallRequest, context: Any) -> call_pb2.ExplainCallResponse:
        """Says what a call waits for or how it ended."""
        call = await self._durable_call(request.call_id)
        sentence, blocking = explain(self._core, call, self._core.clock.now())
        return call_pb2.ExplainCallResponse(
            call=messages.call_message(self._core, call), explanation=sentence, blocking_call_ids=blocking
        )

    def submission(self, request: call_pb2.SubmitCallRequest) -> submit.Submission:
        """Checks a submit as far as it can be checked without order and without a look at the store."""
        request_id = messages.request_id_of(request.request_id)
        job = self._job(request.job_id)
        model = self._core.ledger.models.get(ModelId(request.model_id))
        if model is None or model.job_id != job.job_id:
            raise NotFound(f"job {job.name} has no live model {request.model_id!r}")
        kind = check_spec(request.spec)
        if kind.sequenced != bool(request.sequence):
            want = "a sequence number from 1" if kind.sequenced else "sequence 0: it is not sequenced"
            raise InvalidArgument(f"sequence: {request.sequence}; {kind.name.lower()} takes {want}")
        if request.session_id and kind is not CallKind.GENERATE:
            raise InvalidArgument(f"session_id: only generate runs in a session, {kind.name.lower()} does not")
        spec_bytes = request.spec.SerializeToString(deterministic=True)
        spec_sha256 = hashlib.sha256(spec_bytes).hexdigest()
        tags = messages.labels_of(request.tags, "tags")
        in_session = (request.session_id,) if request.session_id else ()
        identity_of_content = repr((model.model_id, request.sequence, spec_sha256, sorted(tags.items()), *in_session))
        return submit.Submission(
            request_id=request_id,
            request_hash=hashlib.sha256(identity_of_content.encode()).hexdigest(),
            model=model,
            kind=kind,
            sequence=request.sequence,
            spec=request.spec,
            spec_bytes=spec_bytes,
            spec_sha256=spec_sha256,
            tags=tags,
            session_id=SessionId(request.session_id) if request.session_id else None,
            timeout_s=messages.seconds(request, "timeout", limits.DEFAULT_CALL_TIMEOUT_S, limits.CALL_TIMEOUT_RANGE_S),
        )

    async def prepared(self, request: call_pb2.SubmitCallRequest, size_bytes: int) -> submit.Submission:
        """Checks a submit, a large one beside the loop, and that a checkpoint to be loaded is there."""
        large = size_bytes > LARGE_BYTES
        submission = await asyncio.to_thread(self.submission, request) if large else self.submission(request)
        await self._check_checkpoint(submission)
        return submission

    async def _check_checkpoint(self, submission: submit.Submission) -> None:
        """Checks that the checkpoint to be loaded is there. Raises NotFound."""
        checkpoint_id = CheckpointId(submission.spec.load_checkpoint.checkpoint_id)
        if submission.kind is not CallKind.LOAD_CHECKPOINT or not checkpoint_id:
            return
        known = self._core.ledger.checkpoints.get(checkpoint_id)
        checkpoint = known or await self._core.store.get_checkpoint(checkpoint_id)
        if checkpoint is None or not identity().may_see(checkpoint.tenant):
            raise NotFound(f"no checkpoint {checkpoint_id!r}")

    def _job(self, job_id: str) -> Job:
        job = self._core.ledger.job(JobId(job_id))
        require_visible(job.tenant, "job", job_id)
        return job

    async def _durable_call(self, call_id: str) -> Call:
        """A call as it stands now, once that is durable: what memory shows must not be told before."""
        call = await self._call(call_id)
        await self._core.commit(self._core.batch())
        return call

    async def _call(self, call_id: str) -> Call:
        call = self._core.ledger.calls.get(CallId(call_id)) or await self._core.store.get_call(CallId(call_id))
        if call is None:
            raise NotFound(f"no call {call_id!r}")
        require_visible(call.tenant, "call", call_id)
        return call


def page_size(requested: int) -> int:
    """The size of a page. Raises InvalidArgument."""
    if not 0 <= requested <= 1000:
        raise InvalidArgument(f"page_size: {requested}, want 1 to 1000, or 0 for 100")
    return requested or 100
