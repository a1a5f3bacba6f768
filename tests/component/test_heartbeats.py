"""G05: heartbeats have a path of their own, and the database never carries bulk. G14: durable before dispatched."""

import asyncio

import pytest

from plexrl import wire
from plexrl.v1 import call_pb2, job_pb2, registry_pb2, types_pb2
from plexrl_controller.api.admin import RegistryService
from plexrl_controller.api.jobs import JobService
from plexrl_controller.domain.ids import CallId
from plexrl_controller.domain.records import Call
from plexrl_controller.domain.states import CallState
from plexrl_controller.store.memory import MemoryStore
from plexrl_controller.store.port import Changes
from tests.support import specs
from tests.support.gated_store import GatedStore
from tests.support.leader import Leader, running_leader

INLINE_BYTES = 64 * 1024


async def test_leases_are_renewed_while_the_store_does_not_answer() -> None:
    """G05: behind a crowd of calls that wait for their commit, client and worker renew their leases at once."""
    store = GatedStore()
    async with running_leader(store) as leader:
        worker_id = await leader.join()
        job = await leader.job(lease_s=10.0)
        model = await leader.model(job)
        with store.closed():
            crowd = [asyncio.create_task(leader.submit(model, specs.generate())) for _ in range(50)]
            await leader.settle()
            leader.clock.time += 9.0
            beat = JobService(leader.core).HeartbeatJob(job_pb2.HeartbeatJobRequest(job_id=job.job_id), None)
            incarnation = leader.core.ledger.workers[worker_id].incarnation
            renewal = registry_pb2.SynchronizeRequest(worker_id=worker_id, worker_incarnation=incarnation)
            synchronizing = RegistryService(leader.core).Synchronize(renewal, None)
            renewed = [asyncio.create_task(rpc) for rpc in (beat, synchronizing)]
            await leader.settle()
            assert [task.done() for task in renewed] == [True, True]
            assert leader.core.ledger.facts[job.job_id].lease_end == leader.clock.time + 10.0
            assert leader.core.ledger.groups[worker_id].last_sync == leader.clock.time
            assert not any(task.done() for task in crowd)
        await asyncio.gather(*crowd)
        await leader.work()


@pytest.mark.parametrize("tokens", [1000, 40_000], ids=["small", "large"])
async def test_rows_carry_small_arguments_and_results_only(tokens: int) -> None:
    """G05: above 64 KiB neither arguments nor result are in the call's row."""
    async with running_leader() as leader:
        worker_id = await leader.join()
        model = await leader.model(await leader.job())
        trained = await leader.submit(model, specs.forward_backward(tokens), 1)
        sampled = await leader.submit(model, specs.generate())
        await leader.settle()
        while reports := leader.worker.run(1):
            for report in reports:
                if report.call.call_id == sampled.call_id and report.HasField("finished"):
                    completions = wire.token_batch([[7] * tokens])
                    report.finished.result.generate.CopyFrom(types_pb2.GenerateResult(completions=completions))
            await leader.dispatcher.reports_came(worker_id, 1, reports)
            await leader.settle()
        rows = [await leader.core.store.get_call(CallId(c.call_id)) for c in (trained, sampled)]
        kept = [rows[0].spec if rows[0] else None, rows[1].result if rows[1] else None]
        for payload in kept:
            assert payload is not None
            assert payload.size_bytes > 4 * tokens
            assert (payload.inline is None) == (payload.size_bytes > INLINE_BYTES)
            assert len(payload.inline or b"") <= INLINE_BYTES


async def test_no_order_leaves_before_its_attempt_is_durable() -> None:
    """G14: a leader that dies now has given no worker anything that changes a state and that the next one does not know
    of.
    """
    store = GatedStore()
    async with running_leader(store) as leader:
        await leader.join()
        model = await leader.model(await leader.job())
        await leader.submit(model, specs.generate())
        await leader.work()
        with store.closed():
            leader.transport.sent.clear()
            submitting = asyncio.create_task(leader.submit(model, specs.forward_backward(), 1))
            await leader.settle()
            assert not submitting.done()
            assert leader.transport.sent == []
        await submitting
        await leader.settle()
        assert [order.WhichOneof("action") for order in leader.transport.sent] == ["run_call"]


async def test_a_generate_may_run_before_it_is_durable_and_nobody_hears_of_it() -> None:
    """G14: it changes nothing. Should its leader die now, its client has heard nothing and asks again."""
    store = GatedStore()
    async with running_leader(store) as leader:
        await leader.join()
        model = await leader.model(await leader.job())
        await leader.submit(model, specs.generate())
        await leader.work()
        with store.closed():
            submitting = asyncio.create_task(leader.submit(model, specs.generate(), request_id="early"))
            await leader.work()
            (call,) = [c for c in leader.core.ledger.calls.values() if c.request_id == "early"]
            assert call.state is CallState.SUCCEEDED
            assert await store.get_call(call.call_id) is None
            assert not submitting.done()
            watching = asyncio.create_task(leader.calls.GetCall(call_pb2.GetCallRequest(call_id=call.call_id), None))
            await leader.settle()
            assert not watching.done()
        assert (await submitting).call_id == call.call_id
        assert (await watching).state == types_pb2.CALL_STATE_SUCCEEDED
        stored = await store.get_call(call.call_id)
        assert stored is not None
        assert stored.state is CallState.SUCCEEDED


@pytest.mark.parametrize("rpc", ["GetCall", "ExplainCall", "ListCalls"])
async def test_no_rpc_tells_of_an_end_that_is_not_durable(rpc: str) -> None:
    """G14: what one has heard must not be otherwise after the controller's death."""
    store = GatedStore()
    async with running_leader(store) as leader:
        await leader.join()
        model = await leader.model(await leader.job())
        call = await leader.submit(model, specs.generate())
        await leader.settle()
        with store.closed():
            await leader.work()
            assert leader.call(call.call_id).state is CallState.SUCCEEDED
            request = {
                "GetCall": call_pb2.GetCallRequest(call_id=call.call_id),
                "ExplainCall": call_pb2.ExplainCallRequest(call_id=call.call_id),
                "ListCalls": call_pb2.ListCallsRequest(job_id=model.job_id),
            }[rpc]
            asking = asyncio.create_task(getattr(leader.calls, rpc)(request, None))
            await leader.settle()
            assert not asking.done()
        told = await asking
        match told:
            case call_pb2.ExplainCallResponse():
                state = told.call.state
            case call_pb2.ListCallsResponse():
                (state,) = [each.state for each in told.calls]
            case _:
                state = told.state
        assert state == types_pb2.CALL_STATE_SUCCEEDED


async def test_no_order_passes_one_that_waits_for_the_store() -> None:
    """Orders run in the order in which they were decided."""
    store = GatedStore()
    async with running_leader(store) as leader:
        await leader.join()
        model = await leader.model(await leader.job())
        await leader.submit(model, specs.generate())
        await leader.work()
        leader.transport.sent.clear()
        with store.closed():
            training = asyncio.create_task(leader.submit(model, specs.forward_backward(), 1))
            await leader.settle()
            generating = asyncio.create_task(leader.submit(model, specs.generate()))
            await leader.settle()
            assert leader.transport.sent == []
        await asyncio.gather(training, generating)
        await leader.settle()
        ran = [order.run_call.spec.WhichOneof("function") for order in leader.transport.sent]
        assert ran == ["forward_backward", "generate"]


async def test_a_leader_stops_what_its_worker_runs_and_nobody_wants() -> None:
    """What an earlier leader ordered and took with it would hold the device to its end, for nobody."""
    async with running_leader() as leader:
        worker_id = await leader.join()
        model = await leader.model(await leader.job())
        trained = await leader.submit(model, specs.forward_backward(), 1)
        await leader.work()
        await leader.calls.AckCalls(call_pb2.AckCallsRequest(job_id=model.job_id, call_ids=[trained.call_id]), None)
        wanted = await leader.submit(model, specs.generate())
        await leader.settle()
        cancelled = await leader.submit(model, specs.generate())
        await leader.calls.CancelCall(call_pb2.CancelCallRequest(request_id="c", call_id=cancelled.call_id), None)
        await leader.settle()
        leader.transport.sent.clear()
        status = leader.worker.status()
        for call_id in (wanted.call_id, trained.call_id, "e" * 32):
            status.attempts.add(call_id=call_id, attempt=1)
        # Of a later attempt than the one that is known: its dispatch was not durable.
        status.attempts.add(call_id=wanted.call_id, attempt=2)
        await leader.dispatcher.stream_opened(worker_id, 1, status)
        await leader.settle()
        stopped = [order.abort.call for order in leader.transport.sent if order.HasField("abort")]
        assert registry_pb2.CallAttempt(call_id="e" * 32, attempt=1) in stopped
        assert registry_pb2.CallAttempt(call_id=wanted.call_id, attempt=2) in stopped
        assert registry_pb2.CallAttempt(call_id=wanted.call_id, attempt=1) not in stopped
        assert trained.call_id not in [call.call_id for call in stopped]
        await leader.work()
        assert leader.call(wanted.call_id).state is CallState.SUCCEEDED


async def test_nothing_is_dispatched_while_a_stream_is_being_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """G14: what a turn dispatched meanwhile would be among what is sent again, and in no store yet."""
    store, may_commit = MemoryStore(), asyncio.Semaphore(0)
    commit = store.commit

    async def commit_one(term: int, changes: Changes) -> None:
        await may_commit.acquire()
        await commit(term, changes)

    async with running_leader(store) as leader:
        worker_id = await leader.join()
        model = await leader.model(await leader.job())
        other = await leader.job("other")
        leader.dispatcher.stream_closed(worker_id, 1)
        leader.transport.sent.clear()

        async def others_write() -> None:
            batch = leader.core.batch()
            job = leader.core.ledger.jobs[other.job_id]
            batch.update(job, weight=job.weight + 1.0)
            leader.core.queue(batch)
            await leader.settle()

        with monkeypatch.context() as patch:
            patch.setattr(store, "commit", commit_one)
            try:
                # There is always a commit of somebody else's under way, so that both of the opening's have to wait.
                # The call comes when the second of them has begun.
                await others_write()
                status = leader.worker.status()
                opening = asyncio.create_task(leader.dispatcher.stream_opened(worker_id, 1, status))
                await leader.settle()
                for _ in range(3):
                    await others_write()
                    may_commit.release()
                    await leader.settle()
                training = asyncio.create_task(leader.submit(model, specs.forward_backward(), 1))
                for _ in range(6):
                    await leader.settle()
                    assert None not in await stored_of_sent(leader)
                    may_commit.release()
            finally:
                for _ in range(50):
                    may_commit.release()
        await asyncio.gather(opening, training)
        await leader.settle()
        assert len(await stored_of_sent(leader)) == 1


async def stored_of_sent(leader: Leader) -> list[Call | None]:
    """The records in the store of the calls that were sent to a worker."""
    runs = [order.run_call.call.call_id for order in leader.transport.sent if order.HasField("run_call")]
    return [await leader.core.store.get_call(CallId(call_id)) for call_id in runs]
