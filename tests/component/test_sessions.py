"""Sessions under a whole leader: how many run, who waits for whom, what a revocation does, what a restart keeps."""

import pytest

from plexrl.v1 import call_pb2, registry_pb2, session_pb2, worker_pb2
from plexrl_controller.dispatch.views import group_view
from plexrl_controller.domain.ids import CallId, SessionId
from plexrl_controller.domain.records import Model
from plexrl_controller.domain.states import CallKind, CallState
from plexrl_controller.lifecycle import calls as call_lifecycle
from plexrl_controller.scheduling.policy import HoldRule, Policy
from plexrl_controller.store.memory import MemoryStore
from tests.support import specs
from tests.support.leader import Leader, running_leader
from tests.support.session_calls import one_model, opened, record, runs, session, states, submitted

POLICY = Policy(quantum_s=1.0, chunk_s=5.0, hold=HoldRule.NEVER)
GRANTED, REVOKED = session_pb2.SESSION_GRANT_GRANTED, session_pb2.SESSION_GRANT_REVOKED
WAITING = session_pb2.SESSION_GRANT_WAITING


def asked(leader: Leader) -> list[str]:
    return [order.yield_call.call.call_id for order in leader.transport.sent if order.HasField("yield_call")]


async def step(leader: Leader, orders: int = 1) -> None:
    """The worker executes some of what it has."""
    assert leader.worker_id is not None
    incarnation = leader.core.ledger.workers[leader.worker_id].incarnation
    await leader.dispatcher.reports_came(leader.worker_id, incarnation, leader.worker.run(orders))
    await leader.settle()


async def wake(leader: Leader, after_s: float) -> None:
    assert leader.worker_id is not None
    leader.clock.time += after_s
    leader.core.wake(leader.worker_id)
    await leader.settle()


async def test_as_many_run_as_it_may_have_and_every_end_makes_room() -> None:
    async with running_leader() as leader:
        model = await one_model(leader)
        session_id = await opened(leader, model)
        calls = await submitted(leader, model, session_id, 10)
        assert [run.concurrent for run in runs(leader)] == [True] * 4
        while {CallState.SUCCEEDED} != call_lifecycle.TERMINAL and leader.worker.queue:
            await step(leader)
            live = [c for c in calls if record(leader, c).state in call_lifecycle.IN_FLIGHT]
            assert len(live) == min(4, sum(record(leader, c).state is not CallState.SUCCEEDED for c in calls))
        assert set(states(leader, calls)) == {CallState.SUCCEEDED}
        assert sorted(leader.worker.executed) == sorted(call.call_id for call in calls)


async def test_a_call_that_waits_for_its_session_says_so() -> None:
    async with running_leader() as leader:
        model = await one_model(leader)
        calls = await submitted(leader, model, await opened(leader, model, 2), 3)
        request = call_pb2.ExplainCallRequest(call_id=calls[2].call_id)
        explained = await leader.calls.ExplainCall(request, None)
        assert (
            "SESSION_FULL: 2 calls of its session are with the engine; the session may have 2" in explained.explanation
        )
        assert set(explained.blocking_call_ids) == {calls[0].call_id, calls[1].call_id}


async def test_a_call_outside_is_found_behind_those_of_a_full_session() -> None:
    async with running_leader() as leader:
        model = await one_model(leader)
        crowd = await submitted(leader, model, await opened(leader, model, 1), 40)
        alone = await leader.submit(model, specs.generate())
        await leader.settle()
        assert [run.call.call_id for run in runs(leader)] == [crowd[0].call_id, alone.call_id]


async def test_a_worker_that_runs_fewer_together_is_given_no_more() -> None:
    """Sessions of one model share them; a worker of an older version runs one at a time."""
    async with running_leader() as leader:
        leader.worker.capabilities.max_concurrent_generates = 3
        model = await one_model(leader)
        first, second = await opened(leader, model, 2), await opened(leader, model, 2)
        calls = [*await submitted(leader, model, first, 4), *await submitted(leader, model, second, 4)]
        assert (await session(leader, first)).running == 2
        assert (await session(leader, second)).running == 1
        await leader.work()
        assert set(states(leader, calls)) == {CallState.SUCCEEDED}
    async with running_leader() as leader:
        leader.worker.capabilities.max_concurrent_generates = 0
        model = await one_model(leader)
        await submitted(leader, model, await opened(leader, model, 8), 4)
        assert len(runs(leader)) == 1


async def test_sessions_that_become_ready_together_share_what_the_worker_runs() -> None:
    async with running_leader(policy=POLICY) as leader:
        leader.worker.capabilities.max_concurrent_generates = 3
        model = await one_model(leader)
        other = await leader.model(await leader.job("other"))
        await leader.submit(other, specs.generate())
        await leader.settle()
        first, second = await opened(leader, model, 2), await opened(leader, model, 2)
        calls = [*await submitted(leader, model, first, 4), *await submitted(leader, model, second, 4)]
        assert states(leader, calls) == [CallState.PENDING] * 8
        await step(leader, 2)
        assert [(await session(leader, each)).running for each in (first, second)] == [2, 1]
        await leader.work()
        assert set(states(leader, calls)) == {CallState.SUCCEEDED}


async def test_calls_outside_and_of_the_sequence_keep_their_places() -> None:
    """What changes the weights comes behind the generates that need the old ones, and new ones need the new."""
    async with running_leader() as leader:
        model = await one_model(leader)
        session_id = await opened(leader, model)
        before = await submitted(leader, model, session_id, 2)
        alone = await leader.submit(model, specs.generate())
        train = await leader.submit(model, specs.forward_backward(), 1)
        sync = await leader.submit(model, specs.sync(), 2)
        after = await submitted(leader, model, session_id, 2)
        assert not any(run.call.call_id == sync.call_id for run in runs(leader))
        assert [run.concurrent for run in runs(leader) if run.call.call_id in (alone.call_id, train.call_id)] == [
            False
        ] * 2
        await leader.work()
        order = leader.worker.executed
        assert order.index(sync.call_id) > max(order.index(c.call_id) for c in (*before, alone, train))
        assert min(order.index(call.call_id) for call in after) > order.index(sync.call_id)
        assert [record(leader, call).weights_version for call in after] == [2, 2]


async def test_revoked_it_gets_a_grace_then_all_is_parked_and_later_all_goes_on() -> None:
    async with running_leader(policy=POLICY) as leader:
        model = await one_model(leader)
        other = await leader.model(await leader.job("other"))
        session_id = await opened(leader, model, 3)
        told = leader.core.hub.watch_job(model.job_id)
        calls = await submitted(leader, model, session_id, 5)
        assert (await session(leader, session_id)).grant == GRANTED
        assert [s.session_id for s in told.take_sessions()] == [session_id]
        leader.clock.time += 6.0
        waiting = await leader.submit(other, specs.generate())
        await leader.settle()
        assert (await session(leader, session_id)).grant == REVOKED
        assert [s.session_id for s in told.take_sessions()] == [session_id]
        assert asked(leader) == []
        # One ends within the grace: nothing takes its place.
        await step(leader, 2)
        assert states(leader, calls).count(CallState.SUCCEEDED) == 1
        assert len(runs(leader)) == 3
        await wake(leader, 1.0)
        assert asked(leader) == []
        await wake(leader, 1.5)
        assert len(asked(leader)) == 2
        await step(leader, 2)
        assert states(leader, calls).count(CallState.YIELDED) == 2
        assert (await session(leader, session_id)).grant == WAITING
        assert record(leader, waiting).state is CallState.DISPATCHED
        await leader.work()
        assert set(states(leader, [*calls, waiting])) == {CallState.SUCCEEDED}
        assert {record(leader, call).attempt for call in calls} == {1}
        assert (await session(leader, session_id)).grant == GRANTED
        assert sorted(leader.worker.executed) == sorted(call.call_id for call in [*calls, waiting])


async def test_what_gave_way_goes_on_in_the_order_in_which_it_began() -> None:
    """And before what has not begun, in whichever order it gave way."""
    for backwards in (False, True):
        async with running_leader(policy=POLICY) as leader:
            model = await one_model(leader)
            other = await leader.model(await leader.job("other"))
            calls = await submitted(leader, model, await opened(leader, model, 4, grace_s=0), 6)
            began = [run.call.call_id for run in runs(leader)]
            await parked(leader, other, backwards=backwards)
            assert [record(leader, call).state for call in calls[:4]] == [CallState.YIELDED] * 4
            leader.transport.sent.clear()
            await leader.work()
            assert [run.call.call_id for run in runs(leader)] == [*began, calls[4].call_id, calls[5].call_id]


async def parked(leader: Leader, other: Model, *, backwards: bool = False) -> call_pb2.Call:
    """What runs gives way to a call of another job, which is given to the worker."""
    before = len(asked(leader))
    leader.clock.time += 6.0
    waiting = await leader.submit(other, specs.generate())
    await wake(leader, 0.5)
    count = len(asked(leader)) - before
    assert count
    queue = leader.worker.queue
    if backwards:
        queue.extendleft([queue.popleft() for _ in range(count)])
    await step(leader, count)
    assert record(leader, waiting).state is CallState.DISPATCHED
    return waiting


async def test_what_went_on_is_parked_again_when_another_job_comes_again() -> None:
    """The time in which it was parked is no time in which it ran: what is left of it is as long as it was."""
    async with running_leader(policy=POLICY) as leader:
        model = await one_model(leader)
        other = await leader.model(await leader.job("other"))
        assert leader.worker_id is not None
        estimates = leader.core.ledger.groups[leader.worker_id].estimates
        for _ in range(estimates.MIN_OBSERVATIONS):
            estimates.service(model.job_id, CallKind.GENERATE, 60.0)
            estimates.service(other.job_id, CallKind.GENERATE, 1.0)
        calls = await submitted(leader, model, await opened(leader, model, 4, grace_s=0), 4)
        await step(leader)  # the swap
        await begun(leader, calls)
        await parked(leader, other)
        leader.clock.time += 300.0
        await step(leader, 2)
        assert states(leader, calls) == [CallState.RUNNING] * 4
        view = group_view(leader.core.ledger, leader.worker_id, leader.clock.now()).job(model.job_id)
        assert view is not None
        assert view.in_flight_left_s == pytest.approx(4 * 60.0, rel=0.05)
        await parked(leader, other)
        assert states(leader, calls) == [CallState.YIELDED] * 4


async def begun(leader: Leader, calls: list[call_pb2.Call]) -> None:
    """The worker says that they run."""
    assert leader.worker_id is not None
    incarnation = leader.core.ledger.workers[leader.worker_id].incarnation
    reports = [
        worker_pb2.Report(
            call=registry_pb2.CallAttempt(call_id=call.call_id, attempt=1), started=worker_pb2.OrderStarted()
        )
        for call in calls
    ]
    await leader.dispatcher.reports_came(leader.worker_id, incarnation, reports)
    await leader.settle()


async def test_a_session_of_the_same_job_elsewhere_gives_no_grace_here() -> None:
    async with running_leader(policy=POLICY) as leader:
        model = await one_model(leader)
        other = await leader.model(await leader.job("other"))
        elsewhere = await leader.model(leader.core.ledger.jobs[model.job_id], "elsewhere")
        calls = await submitted(leader, model, await opened(leader, model, 1, grace_s=0), 1)
        away = SessionId(await opened(leader, elsewhere, 1, grace_s=60))
        # As if its model were on another worker and a call of it ran there.
        ledger = leader.core.ledger
        assert leader.worker_id is not None
        del ledger.models_of_worker[leader.worker_id][elsewhere.model_id]
        ledger.session_facts[away].in_flight.add(CallId("there"))
        await parked(leader, other)
        assert states(leader, calls) == [CallState.YIELDED]


async def test_a_session_without_grace_yields_at_once_and_whoever_asked_in_vain_takes_nothing_away() -> None:
    async with running_leader(policy=POLICY) as leader:
        model = await one_model(leader)
        other = await leader.model(await leader.job("other"))
        session_id = await opened(leader, model, 3, grace_s=10)
        await submitted(leader, model, session_id, 5)
        leader.clock.time += 6.0
        waiting = await leader.submit(other, specs.generate())
        await leader.settle()
        assert (await session(leader, session_id)).grant == REVOKED
        await leader.calls.CancelCall(call_pb2.CancelCallRequest(request_id="c", call_id=waiting.call_id), None)
        await leader.settle()
        assert (await session(leader, session_id)).grant == GRANTED
        at_once = await opened(leader, other, 3, grace_s=0)
        assert (await session(leader, at_once)).grant == WAITING


async def test_the_device_is_one_service_of_the_job_however_many_run() -> None:
    """The worker lays the stretches of what runs together end to end: they add up to what was used."""
    async with running_leader() as leader:
        model = await one_model(leader)
        await submitted(leader, model, await opened(leader, model, 8), 8)
        await leader.work()
        assert leader.core.ledger.account(model.job_id).busy_s == pytest.approx(8 * 1e-3)
        estimates = leader.core.ledger.groups[leader.worker_id].estimates  # type: ignore[index]
        assert estimates.expected_s(model.job_id, CallKind.GENERATE) == pytest.approx(1e-3, rel=0.1)


async def test_a_new_leader_goes_on_with_the_session_and_runs_nothing_twice() -> None:
    store = MemoryStore()
    async with running_leader(store) as leader:
        model = await one_model(leader)
        session_id = await opened(leader, model)
        calls = await submitted(leader, model, session_id, 8)
        await step(leader, 3)
        worker = leader.worker
        worker.queue.clear()
    async with running_leader(store, worker) as leader:
        await leader.join()
        await leader.settle()
        assert (await session(leader, session_id)).running == 4
        assert all(run.concurrent for run in runs(leader))
        again = await leader.submit(model, specs.generate(), request_id=calls[0].request_id, session_id=session_id)
        assert again.call_id == calls[0].call_id
        await leader.work()
        assert set(states(leader, calls)) == {CallState.SUCCEEDED}
        assert sorted(worker.executed) == sorted(call.call_id for call in calls)


async def test_a_dead_worker_costs_each_of_them_an_attempt() -> None:
    async with running_leader() as leader:
        model = await one_model(leader)
        calls = await submitted(leader, model, await opened(leader, model), 6)
        leader.worker.die()
        await leader.join()
        await leader.work()
        assert set(states(leader, calls)) == {CallState.SUCCEEDED}
        assert sorted(record(leader, call).attempt for call in calls) == [1, 1, 2, 2, 2, 2]


async def test_one_is_cancelled_and_the_others_go_on() -> None:
    async with running_leader() as leader:
        model = await one_model(leader)
        calls = await submitted(leader, model, await opened(leader, model), 6)
        request = call_pb2.CancelCallRequest(request_id="cancel", call_id=calls[1].call_id)
        await leader.calls.CancelCall(request, None)
        await leader.work()
        assert record(leader, calls[1]).state is CallState.CANCELLED
        del calls[1]
        assert set(states(leader, calls)) == {CallState.SUCCEEDED}
