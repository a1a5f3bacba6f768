"""What is told, to whom and when: nothing before it is durable, and nothing by half."""

import asyncio
from collections.abc import AsyncIterator

from plexrl.v1 import call_pb2, types_pb2
from plexrl_controller.dispatch import submit
from tests.support import specs
from tests.support.gated_store import GatedStore
from tests.support.leader import running_leader


async def test_nothing_is_told_before_it_is_durable() -> None:
    """Durable before acknowledged, also for whoever hears of an earlier change while a later one is being written."""
    store = GatedStore()
    async with running_leader(store) as leader:
        await leader.join()
        model = await leader.model(await leader.job())
        accepted = await leader.submit(model, specs.generate())
        watch = leader.calls.WatchCall(call_pb2.WatchCallRequest(call_id=accepted.call_id), None)
        assert (await anext(watch)).state != types_pb2.CALL_STATE_SUCCEEDED
        await leader.settle()
        store.gate.clear()
        reports = leader.worker.run()
        assert leader.worker_id is not None
        recording = asyncio.create_task(leader.dispatcher.reports_came(leader.worker_id, 1, reports))
        hearing = asyncio.ensure_future(anext(watch))
        await leader.settle()
        leader.core.hub.publish(leader.call(accepted.call_id))
        await leader.settle()
        assert not hearing.done()
        store.gate.set()
        await recording
        assert (await hearing).state == types_pb2.CALL_STATE_SUCCEEDED
        await watch.aclose()  # type: ignore[attr-defined]


async def test_a_client_that_goes_away_in_mid_request_leaves_no_change_half_made() -> None:
    """G03: an rpc whose caller is gone is cancelled; its batch takes effect all the same, and whoever watches hears."""
    store = GatedStore()
    async with running_leader(store) as leader:
        await leader.join()
        model = await leader.model(await leader.job())
        running = await leader.submit(model, specs.generate())
        await leader.settle()
        store.gate.clear()
        cancelling = asyncio.create_task(submit.cancel(leader.core, leader.call(running.call_id)))
        await leader.settle()
        cancelling.cancel()
        await leader.settle()
        store.gate.set()
        await leader.settle()
        assert leader.transport.sent[-1].WhichOneof("action") == "abort"
        assert running.call_id not in leader.core.undurable


async def test_a_stream_that_opens_early_hears_nothing_of_a_call_that_is_not_durable_yet() -> None:
    """G14: accepted is what is durable; before that a call may still be lost with its controller."""
    store = GatedStore()
    async with running_leader(store) as leader:
        await leader.join()
        model = await leader.model(await leader.job())
        store.gate.clear()
        submitting = asyncio.create_task(leader.submit(model, specs.generate()))
        await leader.settle()
        requests: asyncio.Queue[call_pb2.ConnectRequest] = asyncio.Queue()
        hello = call_pb2.ClientMessage(hello=call_pb2.ConnectHello(job_id=model.job_id))
        requests.put_nowait(call_pb2.ConnectRequest(messages=[hello]))
        stream = leader.calls.Connect(queued(requests), None)
        hearing = asyncio.ensure_future(anext(aiter(stream)))
        await leader.settle()
        assert not hearing.done()
        store.gate.set()
        await submitting
        await leader.work()
        assert (await hearing).messages[0].updated.call_id == (await submitting).call_id
        await stream.aclose()  # type: ignore[attr-defined]


async def queued(requests: "asyncio.Queue[call_pb2.ConnectRequest]") -> AsyncIterator[call_pb2.ConnectRequest]:
    while True:
        yield await requests.get()
