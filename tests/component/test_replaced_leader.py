"""G20: a controller that was replaced, and has not noticed yet, tells nobody what may be wrong by now."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from google.rpc import code_pb2

from plexrl import wire
from plexrl.v1 import call_pb2, job_pb2
from plexrl_controller.api.jobs import JobService
from plexrl_controller.domain.errors import ControllerError, LeadershipLost
from plexrl_controller.domain.records import Model
from plexrl_controller.store.memory import MemoryStore
from tests.support import specs
from tests.support.leader import Leader, running_leader


def submit_request(model: Model) -> call_pb2.SubmitCallRequest:
    """A call that a controller refuses in whose memory the sequence is broken."""
    return call_pb2.SubmitCallRequest(
        request_id="later", job_id=model.job_id, model_id=model.model_id, sequence=2, spec=specs.optim_step()
    )


async def with_broken_sequence(leader: Leader) -> Model:
    await leader.join()
    model = await leader.model(await leader.job())
    leader.worker.fail_next["forward_backward"] = (code_pb2.INVALID_ARGUMENT, "NON_FINITE")
    await leader.submit(model, specs.forward_backward(), 1)
    await leader.work()
    return model


async def streamed(leader: Leader, request: call_pb2.SubmitCallRequest) -> wire.ErrorInfo:
    """What Connect answers a submit that it refuses."""

    async def frames() -> AsyncIterator[call_pb2.ConnectRequest]:
        hello = call_pb2.ClientMessage(hello=call_pb2.ConnectHello(job_id=request.job_id))
        yield call_pb2.ConnectRequest(messages=[hello])
        yield call_pb2.ConnectRequest(messages=[call_pb2.ClientMessage(submit=request)])
        await asyncio.Event().wait()

    async for frame in leader.calls.Connect(frames(), None):
        for message in frame.messages:
            if message.HasField("rejected"):
                info = wire.error_info(message.rejected.error)
                assert info is not None
                return info
    raise AssertionError("no answer")


async def test_a_submit_is_refused_by_a_controller_that_leads() -> None:
    async with running_leader() as leader:
        model = await with_broken_sequence(leader)
        assert (await streamed(leader, submit_request(model))).reason == "PREDECESSOR_FAILED"
        with pytest.raises(ControllerError, match="ResumeSequence"):
            await leader.calls.SubmitCall(submit_request(model), None)


async def test_a_submit_is_not_refused_by_a_controller_that_was_replaced() -> None:
    """The next one may have resumed the sequence: the client is told to ask there."""
    store = MemoryStore()
    async with running_leader(store) as leader:
        model = await with_broken_sequence(leader)
        await store.acquire_term("the next")
        assert (await streamed(leader, submit_request(model))).code == code_pb2.UNAVAILABLE
        with pytest.raises(LeadershipLost):
            await leader.calls.SubmitCall(submit_request(model), None)


async def test_a_job_is_not_handed_over_by_a_controller_that_was_replaced() -> None:
    store = MemoryStore()
    async with running_leader(store) as leader:
        model = await with_broken_sequence(leader)
        await store.acquire_term("the next")
        with pytest.raises(LeadershipLost):
            await JobService(leader.core).AttachJob(job_pb2.AttachJobRequest(job_id=model.job_id), None)
