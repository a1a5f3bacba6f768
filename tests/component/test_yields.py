"""Under a whole leader: a long generate gives way to a job that waits, and goes on in the same attempt."""

import asyncio

import pytest

from plexrl.v1 import call_pb2, registry_pb2, types_pb2, worker_pb2
from plexrl_controller.api.explain import explain
from plexrl_controller.dispatch.views import group_view
from plexrl_controller.domain.errors import DataLoss
from plexrl_controller.domain.ids import CallId, JobId
from plexrl_controller.domain.records import Call, Model
from plexrl_controller.domain.states import CallKind, CallState
from plexrl_controller.scheduling.policy import HoldRule, Policy
from plexrl_controller.store.memory import MemoryStore
from tests.support import specs
from tests.support.gated_store import GatedStore
from tests.support.leader import Leader, running_leader

POLICY = Policy(quantum_s=1.0, chunk_s=5.0, hold=HoldRule.NEVER)


async def two_jobs(leader: Leader) -> tuple[Model, Model]:
    await leader.join()
    return await leader.model(await leader.job("long")), await leader.model(await leader.job("short"))


def record(leader: Leader, call: call_pb2.Call) -> Call:
    return leader.core.ledger.calls[CallId(call.call_id)]


async def yielded(leader: Leader) -> tuple[call_pb2.Call, call_pb2.Call]:
    """A long generate has given way to another job's, which is given to the worker."""
    long, short = await two_jobs(leader)
    assert leader.worker_id is not None
    running = await leader.submit(long, specs.generate())
    await leader.settle()
    leader.clock.time += 4.0
    waiting = await leader.submit(short, specs.generate())
    await leader.settle()
    assert asked(leader) == []
    leader.clock.time += 2.0
    leader.core.wake(leader.worker_id)
    await leader.settle()
    assert asked(leader) == [running.call_id]
    leader.core.wake(leader.worker_id)
    await leader.settle()
    assert asked(leader) == [running.call_id]
    incarnation = leader.core.ledger.workers[leader.worker_id].incarnation
    while record(leader, running).state is not CallState.YIELDED:
        await leader.dispatcher.reports_came(leader.worker_id, incarnation, leader.worker.run(1))
        await leader.settle()
    return running, waiting


async def heard(leader: Leader, report: worker_pb2.Report) -> None:
    """The worker reports something."""
    assert leader.worker_id is not None
    incarnation = leader.core.ledger.workers[leader.worker_id].incarnation
    await leader.dispatcher.reports_came(leader.worker_id, incarnation, [report])
    await leader.settle()


def asked(leader: Leader) -> list[str]:
    return [order.yield_call.call.call_id for order in leader.transport.sent if order.HasField("yield_call")]


async def test_a_long_call_gives_way_and_goes_on_in_the_same_attempt() -> None:
    async with running_leader(policy=POLICY) as leader:
        running, waiting = await yielded(leader)
        assert record(leader, waiting).state is CallState.DISPATCHED
        ready = group_view(leader.core.ledger, leader.worker_id, leader.clock.now()).job(JobId(running.job_id))  # type: ignore[arg-type]
        assert ready is not None
        assert [call.call_id for call in ready.ready] == [running.call_id]
        assert ready.in_flight == 0
        assert "YIELDED" in explain(leader.core, record(leader, running), leader.clock.now())[0]
        await leader.work()
        assert record(leader, waiting).state is CallState.SUCCEEDED
        assert (record(leader, running).state, record(leader, running).attempt) == (CallState.SUCCEEDED, 1)
        assert leader.worker.executed == [waiting.call_id, running.call_id]


async def test_a_call_of_unknown_length_gives_way_to_one_of_known_length() -> None:
    """Of it may be left as much as of any: nothing known of it is not nothing left of it."""
    async with running_leader(policy=POLICY) as leader:
        long, short = await two_jobs(leader)
        assert leader.worker_id is not None
        estimates = leader.core.ledger.groups[leader.worker_id].estimates
        for _ in range(estimates.MIN_OBSERVATIONS):
            estimates.service(short.job_id, CallKind.GENERATE, 1.0)
        running = await leader.submit(long, specs.generate())
        await leader.settle()
        leader.clock.time += 6.0
        await leader.submit(short, specs.generate())
        await leader.settle()
        leader.clock.time += 0.5
        leader.core.wake(leader.worker_id)
        await leader.settle()
        assert asked(leader) == [running.call_id]


async def test_a_stall_is_not_learned_from_waiting_after_a_yield() -> None:
    async with running_leader(policy=POLICY) as leader:
        running, _ = await yielded(leader)
        leader.clock.time += 3.0
        await leader.work()
        estimates = leader.core.ledger.groups[leader.worker_id].estimates  # type: ignore[index]
        assert not estimates._jobs[JobId(running.job_id)].stall
        assert estimates._jobs[JobId(running.job_id)].service[CallKind.GENERATE].observations == 1


async def test_a_yielded_call_is_cancelled_like_a_running_one() -> None:
    async with running_leader(policy=POLICY) as leader:
        running, waiting = await yielded(leader)
        await leader.calls.CancelCall(call_pb2.CancelCallRequest(request_id="cancel", call_id=running.call_id), None)
        assert record(leader, running).state is CallState.CANCELLING
        await leader.work()
        assert record(leader, waiting).state is CallState.SUCCEEDED


async def test_a_new_leader_goes_on_with_a_call_that_yielded() -> None:
    """It is durable that it yielded; its worker is asked for nothing until its turn comes."""
    store = MemoryStore()
    async with running_leader(store, policy=POLICY) as leader:
        running, waiting = await yielded(leader)
        worker = leader.worker
        worker.queue.clear()
    async with running_leader(store, worker, policy=POLICY) as leader:
        assert record(leader, running).state is CallState.YIELDED
        await leader.join()
        await leader.work()
        assert (record(leader, running).state, record(leader, running).attempt) == (CallState.SUCCEEDED, 1)
        assert record(leader, waiting).state is CallState.SUCCEEDED


async def test_a_yielded_call_of_a_lost_worker_runs_anew() -> None:
    async with running_leader(policy=POLICY) as leader:
        running, _ = await yielded(leader)
        leader.worker.die()
        await leader.join()
        await leader.work()
        assert (record(leader, running).state, record(leader, running).attempt) == (CallState.SUCCEEDED, 2)


async def test_a_yielded_call_of_a_lost_state_waits_for_whichever_worker_rebuilds_it() -> None:
    """It is no call of the worker's any more, which may refuse to rebuild the state."""
    async with running_leader(policy=POLICY) as leader:
        running, _ = await yielded(leader)
        lost = registry_pb2.DeploymentStatus(model_id=running.model_id, state_lost=True)
        await heard(leader, worker_pb2.Report(deployments=[lost]))
        assert record(leader, running).state is CallState.PENDING
        await leader.work()
        assert (record(leader, running).state, record(leader, running).attempt) == (CallState.SUCCEEDED, 2)


async def test_the_result_of_a_call_that_went_on_counts_where_its_yield_was_heard_late() -> None:
    """After a break of the stream it is ordered again, and then comes the report that the break had kept."""
    async with running_leader(policy=POLICY) as leader:
        running, _ = await yielded(leader)
        result = types_pb2.CallResult(generate=types_pb2.GenerateResult())
        call = registry_pb2.CallAttempt(call_id=running.call_id, attempt=1)
        await heard(leader, worker_pb2.Report(call=call, finished=worker_pb2.OrderFinished(result=result)))
        assert (record(leader, running).state, record(leader, running).attempt) == (CallState.SUCCEEDED, 1)


async def test_a_yielded_call_whose_arguments_are_gone_fails_and_its_worker_keeps_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running_leader(policy=POLICY) as leader:
        running, waiting = await yielded(leader)

        async def gone(call: Call) -> types_pb2.CallSpec:
            raise DataLoss(f"the arguments of call {call.call_id} are gone")

        leader.core.ledger.specs.pop(CallId(running.call_id))
        monkeypatch.setattr(leader.core, "spec", gone)
        await leader.work()
        assert record(leader, waiting).state is CallState.SUCCEEDED
        assert record(leader, running).state is CallState.FAILED
        assert [o.abort.call.call_id for o in leader.transport.sent if o.HasField("abort")] == [running.call_id]


@pytest.mark.parametrize("yields", [True, False])
async def test_only_workers_that_can_are_asked(yields: bool) -> None:
    async with running_leader(policy=POLICY) as leader:
        leader.worker.capabilities.yields = yields
        long, short = await two_jobs(leader)
        await leader.submit(long, specs.generate())
        await leader.settle()
        await leader.submit(short, specs.generate())
        leader.clock.time += 6.0
        leader.core.wake(leader.core.ledger.models[long.model_id].worker_id)  # type: ignore[arg-type]
        await leader.settle()
        assert bool(asked(leader)) == yields
        await leader.work()


async def test_the_group_is_looked_at_again_when_the_chunk_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although nothing is heard from the worker meanwhile."""
    async with running_leader(policy=POLICY) as leader:
        long, short = await two_jobs(leader)
        await leader.submit(long, specs.generate())
        await leader.settle()
        leader.clock.time += 2.0
        again: list[float | None] = []
        monkeypatch.setattr(leader.core.turns, "wake_after", lambda _, delay_s: again.append(delay_s))
        await leader.submit(short, specs.generate())
        await leader.settle()
        assert again[-1] == pytest.approx(3.0)


async def test_nothing_is_asked_to_give_way_before_it_is_ordered() -> None:
    """A worker that does not know it would say that it has, and run it all the same when its order comes."""
    store = GatedStore()
    async with running_leader(store, policy=POLICY) as leader:
        long, short = await two_jobs(leader)
        await leader.submit(long, specs.generate())
        await leader.settle()
        await leader.submit(short, specs.generate())
        await leader.settle()
        with store.closed():
            ahead = asyncio.ensure_future(leader.submit(long, specs.generate()))
            await leader.settle()
            leader.clock.time += 6.0
            leader.core.wake(leader.worker_id)  # type: ignore[arg-type]
            await leader.settle()
            assert leader.core.ledger.groups[leader.worker_id].yielding  # type: ignore[index]
            assert asked(leader) == []
        call_id = (await ahead).call_id
        await leader.settle()
        sent = [o.run_call.call.call_id or o.yield_call.call.call_id for o in leader.transport.sent]
        assert call_id in asked(leader)
        assert sent.index(call_id) < len(sent) - 1 - sent[::-1].index(call_id)


async def test_a_parked_call_that_says_so_once_more_still_runs_where_it_was_told_to_go_on() -> None:
    """At a stream's opening it is asked again, and its answer comes when it runs again: it must go on to be counted."""
    async with running_leader() as leader:
        worker_id = await leader.join()
        model = await leader.model(await leader.job())
        await leader.submit(model, specs.generate())
        await leader.work()
        call = await leader.submit(model, specs.generate())
        await leader.settle()
        (run,) = [order for order in leader.worker.queue if order.run_call.call.call_id == call.call_id]
        leader.worker.queue.clear()
        leader.dispatcher.stream_closed(worker_id, 1)
        parked = worker_pb2.Report(
            order_id=run.order_id, call=run.run_call.call, yielded=worker_pb2.OrderYielded(done=1, total=9)
        )
        await leader.dispatcher.reports_came(worker_id, 1, [parked])
        assert leader.call(call.call_id).state is CallState.YIELDED
        status = leader.worker.status()
        status.attempts.append(run.run_call.call)
        await leader.dispatcher.stream_opened(worker_id, 1, status)
        await leader.settle()
        assert leader.call(call.call_id).state is CallState.RUNNING
        await leader.dispatcher.reports_came(worker_id, 1, [parked])
        assert leader.call(call.call_id).state is CallState.RUNNING
        (again,) = [order for order in leader.worker.queue if order.run_call.call.call_id == call.call_id]
        parked.order_id = again.order_id
        await leader.dispatcher.reports_came(worker_id, 1, [parked])
        assert leader.call(call.call_id).state is CallState.YIELDED
