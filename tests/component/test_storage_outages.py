"""A payload store that is away, full or damaged costs the calls that need it, and nobody else."""

import asyncio
import os
from collections.abc import AsyncIterator

import obstore
import pytest
from obstore.store import MemoryStore as MemoryObjects

from plexrl import wire
from plexrl.v1 import call_pb2, types_pb2
from plexrl_controller.dispatch import reaper
from plexrl_controller.dispatch.core import _ByteCache
from plexrl_controller.dispatch.uploads import UPLOAD_HOLD_S
from plexrl_controller.domain.errors import Unavailable
from plexrl_controller.domain.ids import Tenant, WorkerId
from plexrl_controller.domain.records import Payload
from plexrl_controller.payloads.memory import MemoryPayloadStore
from plexrl_controller.payloads.objects import ObjectPayloadStore
from plexrl_controller.store.memory import MemoryStore
from tests.support import specs
from tests.support.leader import TENANT, Leader, running_leader
from tests.support.worker_double import WorkerDouble


async def test_a_payload_store_that_is_away_does_not_stop_the_reaper() -> None:
    async def away(_: object) -> None:
        raise Unavailable("the object store does not answer")

    async with running_leader() as leader:
        await leader.join()
        for content in (b"a" * 70_000, b"b" * 70_000):
            payload = await leader.core.payloads.put(TENANT, content)
            await leader.core.uploads.uploaded(TENANT, payload, leader.clock.now())
        leader.core.payloads._delete = away  # type: ignore[attr-defined]
        leader.clock.time += UPLOAD_HOLD_S + 1
        for group in leader.core.ledger.groups.values():
            group.last_sync = leader.clock.time
        await reaper.reap(leader.core)
        await reaper.reap(leader.core)
        assert leader.core.payloads.stored_bytes(TENANT) == 0


async def test_an_upload_that_is_cancelled_at_its_end_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(3):
            yield os.urandom(1 << 20)

    acme, reached, delete = Tenant("acme"), asyncio.Event(), obstore.delete_async

    async def slow_once(*arguments: object) -> None:
        if not reached.is_set():
            reached.set()
            await asyncio.sleep(60)
        await delete(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(obstore, "delete_async", slow_once)
    store = await ObjectPayloadStore.open(MemoryObjects(), part_bytes=1 << 18)
    kept = await store.put(acme, b"kept")
    task = asyncio.create_task(store.put(acme, pieces()))
    await reached.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert store.stored_bytes(acme) == kept.size_bytes
    assert len(store._ledger._sizes) == 1


async def with_large_result(leader: Leader, worker: WorkerDouble, worker_id: WorkerId, tokens: int = 40_000) -> None:
    await leader.settle()
    while reports := worker.run(1):
        for report in reports:
            if report.HasField("call") and report.HasField("finished"):
                completions = wire.token_batch([[7] * tokens])
                report.finished.result.generate.CopyFrom(types_pb2.GenerateResult(completions=completions))
        await leader.dispatcher.reports_came(worker_id, 1, reports)
        await leader.settle()


async def test_reading_arguments_while_the_payload_store_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_leader() as leader:
        await leader.join()
        model = await leader.model(await leader.job())
        leader.core._bytes = _ByteCache(0)
        real, away = leader.core.payloads.chunks, [True]

        async def chunks(tenant: Tenant | None, payload: Payload) -> AsyncIterator[bytes]:
            if away[0]:
                raise Unavailable("the object store does not answer", retry_after_s=1.0)
            async for c in real(tenant, payload):
                yield c

        monkeypatch.setattr(leader.core.payloads, "chunks", chunks)
        await leader.submit(model, specs.forward_backward(tokens=40_000), 1)
        for _ in range(5):
            await leader.settle()
            await asyncio.sleep(0.01)
        assert not leader.dispatcher.failed.done(), leader.dispatcher.failed.result()
        away[0] = False
        await asyncio.sleep(2.2)
        await leader.work()
        assert [c.state.name for c in leader.core.ledger.calls.values()] == ["SUCCEEDED"]


async def test_a_result_beyond_the_tenants_quota_is_kept() -> None:
    worker = WorkerDouble()
    async with running_leader(worker=worker, payloads=MemoryPayloadStore(quota_bytes=200_000)) as leader:
        worker_id = await leader.join()
        await leader.core.payloads.put(TENANT, b"x" * 150_000)
        model = await leader.model(await leader.job())
        call = await leader.submit(model, specs.generate())
        await with_large_result(leader, worker, worker_id)
        found = await leader.calls.GetCall(call_pb2.GetCallRequest(call_id=call.call_id), None)
        assert found.state == types_pb2.CALL_STATE_SUCCEEDED


async def test_one_damaged_result_does_not_end_the_stream() -> None:
    store, worker, payloads = MemoryStore(), WorkerDouble(), MemoryPayloadStore()
    async with running_leader(store, worker, payloads=payloads) as leader:
        worker_id = await leader.join()
        model = await leader.model(await leader.job(lease_s=3600.0))
        await leader.submit(model, specs.generate())
        await with_large_result(leader, worker, worker_id)
        small = await leader.submit(model, specs.generate())
        await leader.work()
        for _, digest in list(payloads._content):
            payloads.damage(TENANT, digest)
        leader.core._bytes._entries.clear()  # as after a restart
        heard: list[call_pb2.Call] = []

        async def frames() -> AsyncIterator[call_pb2.ConnectRequest]:
            yield call_pb2.ConnectRequest(
                messages=[call_pb2.ClientMessage(hello=call_pb2.ConnectHello(job_id=model.job_id))]
            )
            await asyncio.sleep(1)

        async for frame in leader.calls.Connect(frames(), None):
            heard += [m.updated for m in frame.messages if m.HasField("updated")]
        by_id = {c.call_id: c for c in heard}
        assert by_id[small.call_id].HasField("result")
        assert len(by_id) == 2
        assert [c.error.code for c in heard] == [15, 0] or [c.error.code for c in heard] == [0, 15]
