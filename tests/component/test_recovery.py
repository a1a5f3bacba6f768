"""G21, G15, G16: what a dead worker costs. The leader is real; workers and their disk are doubles.

The double's state is the list of calls whose effect is in it, so that "bit-equal" is equality of lists.
"""

from dataclasses import replace

import pytest
from google.rpc import code_pb2

from plexrl_controller.dispatch import reaper, snapshots
from plexrl_controller.dispatch.readiness import blocked
from plexrl_controller.dispatch.replay_log import RecoveryPolicy
from plexrl_controller.dispatch.submit import acknowledge, acknowledged
from plexrl_controller.dispatch.workers import synchronize
from plexrl_controller.domain.errors import ResourceExhausted
from plexrl_controller.domain.records import Model
from plexrl_controller.domain.states import CallState, ModelState, WorkerState
from plexrl_controller.payloads.memory import MemoryPayloadStore
from plexrl_controller.store.memory import MemoryStore
from tests.support import specs
from tests.support.leader import Leader, running_leader
from tests.support.worker_double import CHANGES, WorkerDouble, join

STEP = (specs.forward_backward, specs.optim_step, specs.sync)
LARGE_TOKENS = 20_000
EAGER = RecoveryPolicy(replay_s=0.0)


async def trained(leader: Leader, model: Model, first: int, calls: int) -> int:
    """Runs `calls` calls of the training loop; returns the last number."""
    for number in range(first, first + calls):
        await leader.submit(model, STEP[(number - 1) % 3](), number)
    await leader.work()
    return first + calls - 1


def present(leader: Leader, model: Model) -> Model:
    return leader.core.ledger.models[model.model_id]


def state(leader: Leader, model: Model, worker: WorkerDouble | None = None) -> tuple[int, ...]:
    return (worker or leader.worker).models[model.model_id].state


async def snapshot(leader: Leader, model: Model) -> None:
    await snapshots.order(leader.core, present(leader, model))
    await leader.work()


async def kill(leader: Leader) -> None:
    """Kill -9 of the worker, and its next life."""
    leader.worker.die()
    await leader.join()
    await leader.work()


async def acknowledge_all(leader: Leader, model: Model) -> None:
    ledger = leader.core.ledger
    job = ledger.jobs[model.job_id]
    freed = acknowledge(leader.core, job, list(ledger.calls))
    await acknowledged(leader.core, job, freed)


async def test_a_worker_that_dies_is_given_its_models_calls_again_and_nobody_hears_of_it() -> None:
    async with running_leader() as leader:
        await leader.join()
        model = await leader.model(await leader.job())
        generated = await leader.submit(model, specs.generate())
        last = await trained(leader, model, 1, 7)
        scored = await leader.submit(model, specs.score(), last + 1)
        await leader.work()
        delivered = {c.call_id: c.revision for c in leader.core.ledger.calls.values()}
        leader.worker.executed.clear()
        await kill(leader)
        assert present(leader, model).state is ModelState.PLACED
        assert state(leader, model) == (1, 2, 3, 4, 5, 6, 7)
        assert len(leader.worker.executed) == 7, "what changes nothing, and what is not sequenced, is not run again"
        assert {generated.call_id, scored.call_id}.isdisjoint(leader.worker.executed)
        assert {c.call_id: c.revision for c in leader.core.ledger.calls.values()} == delivered
        await trained(leader, model, last + 2, 2)
        assert state(leader, model) == (1, 2, 3, 4, 5, 6, 7, 9, 10)


@pytest.mark.parametrize("function", ["forward_backward", "optim_step", "sync_weights"])
async def test_a_state_given_up_in_a_replay_can_be_loaded_over_on_the_same_worker(function: str) -> None:
    async with running_leader() as leader:
        await leader.join()
        model = await leader.model(await leader.job())
        last = await trained(leader, model, 1, 6)
        leader.worker.die()
        await leader.join()
        leader.worker.fail_next[function] = (code_pb2.FAILED_PRECONDITION, "NON_FINITE")
        await leader.work()
        assert present(leader, model).state is ModelState.STATE_LOST
        load = await leader.submit(model, specs.load(), last + 1)
        await leader.work()
        assert leader.core.ledger.calls[load.call_id].state is CallState.SUCCEEDED  # type: ignore[index]
        await trained(leader, model, last + 2, 2)
        assert present(leader, model).state is ModelState.PLACED


async def test_replay_begins_at_the_newest_snapshot() -> None:
    async with running_leader() as leader:
        await leader.join()
        model = await leader.model(await leader.job())
        await trained(leader, model, 1, 5)
        await snapshot(leader, model)
        await trained(leader, model, 6, 3)
        leader.worker.executed.clear()
        await kill(leader)
        assert len(leader.worker.executed) == 3
        assert state(leader, model) == tuple(range(1, 9))
        assert leader.worker.models[model.model_id].version == present(leader, model).weights_version == 6


async def test_a_call_in_flight_runs_after_the_replay_once() -> None:
    """Applied and not reported when the worker died: its effect went with the state, so that it is due again."""
    async with running_leader() as leader:
        await leader.join()
        model = await leader.model(await leader.job())
        last = await trained(leader, model, 1, 4)
        accepted = [await leader.submit(model, STEP[n % 3](), last + 1 + n) for n in range(3)]
        await leader.settle()
        leader.worker.run(2)  # a swap is not due: two calls are applied, and nobody hears of it
        await kill(leader)
        assert state(leader, model) == tuple(range(1, last + 4))
        ended = [leader.core.ledger.calls[c.call_id] for c in accepted]  # type: ignore[index]
        assert {call.state for call in ended} == {CallState.SUCCEEDED}


async def test_an_outcome_that_was_never_heard_is_made_again_and_delivered() -> None:
    """A later call succeeded on top of it, and its own report was lost with the stream: then the worker died."""
    async with running_leader() as leader:
        worker_id = await leader.join()
        model = await leader.model(await leader.job())
        await trained(leader, model, 1, 1)
        unheard = await leader.submit(model, specs.optim_step(), 2)
        await leader.submit(model, specs.forward_backward(), 3)
        await leader.settle()
        reports = leader.worker.run()
        lost = {unheard.call_id}
        incarnation = leader.core.ledger.workers[worker_id].incarnation
        await leader.dispatcher.reports_came(worker_id, incarnation, [r for r in reports if r.call.call_id not in lost])
        await leader.settle()
        assert present(leader, model).applied_sequence == 3
        await kill(leader)
        assert state(leader, model) == (1, 2, 3)
        assert leader.core.ledger.calls[unheard.call_id].state is CallState.SUCCEEDED  # type: ignore[index]


async def test_arguments_are_kept_until_two_copies_cover_them_and_then_released() -> None:
    """Acknowledged or not; large ones leave the payload store, small ones their rows."""
    payloads = MemoryPayloadStore()
    async with running_leader(payloads=payloads) as leader:
        await leader.join()
        model = await leader.model(await leader.job())
        tenant, ledger = model.tenant, leader.core.ledger
        for number in (1, 2):
            await leader.submit(model, specs.forward_backward(LARGE_TOKENS + number), number)
        await leader.work()
        held = payloads.stored_bytes(tenant)
        assert held > 2 * LARGE_TOKENS * 4
        await acknowledge_all(leader, model)
        assert payloads.stored_bytes(tenant) == held, "acknowledging a result gives up nothing that a replay needs"
        await snapshot(leader, model)
        assert payloads.stored_bytes(tenant) == held, "the base is the only other copy: the log reaches back to it"
        await leader.submit(model, specs.forward_backward(LARGE_TOKENS + 3), 3)
        await leader.work()
        await snapshot(leader, model)
        await leader.settle()
        assert payloads.stored_bytes(tenant) < held, "two snapshots cover the first two calls"
        assert len(ledger.log(model.model_id)) == 1
        assert present(leader, model).log_start == 2
        await kill(leader)
        assert state(leader, model) == (1, 2, 3)


async def test_a_log_over_its_budget_reaches_back_to_the_newest_copy_only() -> None:
    async with running_leader(recovery_policy=RecoveryPolicy(log_bytes=1000)) as leader:
        await leader.join()
        model = await leader.model(await leader.job())
        await leader.submit(model, specs.forward_backward(500), 1)
        await leader.work()
        assert snapshots.is_due(leader.core, present(leader, model)), "half the budget of arguments makes one due"
        await reaper.reap(leader.core)
        await leader.work()
        assert len(leader.core.ledger.log(model.model_id)) == 0
        await kill(leader)
        assert state(leader, model) == (1,)


async def test_work_is_refused_only_when_no_snapshot_can_be_written_and_the_log_is_full() -> None:
    async with running_leader(recovery_policy=RecoveryPolicy(log_bytes=1000)) as leader:
        await leader.join()
        model = await leader.model(await leader.job())
        number = 0
        while leader.core.ledger.log(model.model_id).kept_bytes < 4000:
            leader.worker.fail_next["snapshot"] = (code_pb2.RESOURCE_EXHAUSTED, "STORAGE_FAILED")
            number += 1
            await leader.submit(model, specs.forward_backward(200), number)
            await leader.work()
            await reaper.reap(leader.core)
            await leader.work()
        number += 1
        with pytest.raises(ResourceExhausted) as refused:
            await leader.submit(model, specs.forward_backward(200), number)
        assert refused.value.reason == "REPLAY_LOG_FULL"
        assert "STORAGE_FAILED" in refused.value.message
        leader.worker.fail_next.clear()
        leader.clock.time += snapshots.MAX_BACKOFF_S
        leader.core.ledger.groups[leader.worker_id].last_sync = leader.clock.time  # type: ignore[index]
        leader.core.ledger.facts[model.job_id].lease_end += snapshots.MAX_BACKOFF_S
        await reaper.reap(leader.core)
        await leader.work()
        await leader.submit(model, specs.forward_backward(200), number)
        await leader.work()
        assert state(leader, model) == tuple(range(1, number + 1))


async def test_snapshots_are_ordered_by_the_seconds_that_a_replay_would_take() -> None:
    async with running_leader(recovery_policy=RecoveryPolicy(replay_s=0.0035)) as leader:
        await leader.join()
        model = await leader.model(await leader.job())
        await trained(leader, model, 1, 3)  # a millisecond each, as the double measures
        await reaper.reap(leader.core)
        await leader.work()
        assert leader.worker.disk == {}
        await trained(leader, model, 4, 1)
        await reaper.reap(leader.core)
        await leader.work()
        assert [copy.state for copy in leader.worker.disk.values()] == [(1, 2, 3, 4)]
        await leader.submit(model, specs.score(), 5)
        await leader.work()
        await reaper.reap(leader.core)
        await leader.work()
        assert len(leader.worker.disk) == 1, "what changes nothing makes no snapshot due"


async def test_a_model_has_a_few_places_and_overwrites_the_oldest() -> None:
    """G22: neither disk nor database grows with time."""
    store = MemoryStore()
    async with running_leader(store) as leader:
        await leader.join()
        model = await leader.model(await leader.job())
        for number in range(1, 12):
            await trained(leader, model, number, 1)
            await snapshot(leader, model)
        assert len(leader.worker.disk) == 3
        assert sorted(s.sequence for s in (await store.load()).snapshots) == [9, 10, 11]


@pytest.mark.parametrize("damage", ["gone", "other content"])
async def test_a_damaged_snapshot_is_passed_over_for_the_one_before(damage: str) -> None:
    """G15."""
    async with running_leader() as leader:
        await leader.join()
        model = await leader.model(await leader.job())
        for number in (1, 2, 3):
            await trained(leader, model, number, 1)
            await snapshot(leader, model)
        await trained(leader, model, 4, 1)
        newest = max(leader.core.ledger.snapshots_of_model[model.model_id].values(), key=lambda s: s.sequence)
        if damage == "gone":
            del leader.worker.disk[newest.snapshot_id]
        else:
            leader.worker.disk[newest.snapshot_id] = next(iter(leader.worker.disk.values()))
        leader.worker.executed.clear()
        await kill(leader)
        assert state(leader, model) == (1, 2, 3, 4)
        assert len(leader.worker.executed) == 2, "from the snapshot before, two calls are executed again"


async def test_a_lost_workers_model_goes_on_on_another_that_shares_the_disk_and_is_alike() -> None:
    async with running_leader() as leader:
        await leader.join()
        model = await leader.model(await leader.job())
        await trained(leader, model, 1, 4)
        await snapshot(leader, model)
        await trained(leader, model, 5, 2)
        stranger, twin = WorkerDouble("stranger"), WorkerDouble("twin")
        twin.disk, twin.saved = leader.worker.disk, leader.worker.saved
        stranger.capabilities.threads = 7
        for other in (stranger, twin):
            leader.transport.doubles[other.name] = other
        ids = {w.name: await join(leader.core, leader.dispatcher, leader.transport, w) for w in (stranger, twin)}
        leader.worker.die()
        leader.clock.time += 11
        for worker_id in ids.values():
            leader.core.ledger.groups[worker_id].last_sync = leader.clock.time
        await reaper.reap(leader.core)
        await leader.settle()
        assert leader.core.ledger.workers[leader.worker_id].state is WorkerState.LOST  # type: ignore[index]
        assert present(leader, model).worker_id == ids["twin"]
        leader.worker, leader.worker_id = twin, ids["twin"]
        await leader.work()
        assert state(leader, model) == (1, 2, 3, 4, 5, 6)
        assert stranger.models == {}
        await trained(leader, model, 7, 2)
        assert state(leader, model) == tuple(range(1, 9))


async def test_a_new_leader_goes_on_with_a_recovery_where_the_worker_stands() -> None:
    """G20: the controller dies in the middle of a replay; nothing is applied twice."""
    store, worker = MemoryStore(), WorkerDouble()
    async with running_leader(store, worker) as leader:
        await leader.join()
        model = await leader.model(await leader.job())
        await trained(leader, model, 1, 6)
        await acknowledge_all(leader, model)
        worker.die()
        worker_id = await leader.join()
        for _ in range(4):  # deploy, swap and two replays
            reports = worker.run(1)
            incarnation = leader.core.ledger.workers[worker_id].incarnation
            await leader.dispatcher.reports_came(worker_id, incarnation, reports)
            await leader.settle()
        assert present(leader, model).state is ModelState.RECOVERING
        assert len(state(leader, model)) == 2
    async with running_leader(store, worker) as leader:
        await leader.join()
        await leader.work()
        assert present(leader, model).state is ModelState.PLACED
        assert state(leader, model) == (1, 2, 3, 4, 5, 6)
        await trained(leader, model, 7, 1)
        assert state(leader, model) == tuple(range(1, 8))


async def test_a_replay_with_another_result_is_an_event_and_never_silent() -> None:
    store = MemoryStore()
    async with running_leader(store) as leader:
        await leader.join()
        model = await leader.model(await leader.job())
        await trained(leader, model, 1, 3)
        leader.worker.drift = 1e-7
        await kill(leader)
        recovered = present(leader, model)
        assert recovered.state is ModelState.PLACED
        assert "REPLAY_DIVERGED" in recovered.message
        assert leader.core.replay_divergences == 1
        noted = [event for event in await store.events(model.model_id) if event.event == "REPLAY_DIVERGED"]
        assert [event.reason.split(":")[0] for event in noted] == ["sequence 1"]


async def test_explain_says_how_far_a_recovery_is() -> None:
    async with running_leader() as leader:
        worker_id = await leader.join()
        model = await leader.model(await leader.job())
        await trained(leader, model, 1, 4)
        waiting = await leader.submit(model, specs.generate())
        leader.worker.die()
        await leader.join()
        for _ in range(3):
            incarnation = leader.core.ledger.workers[worker_id].incarnation
            await leader.dispatcher.reports_came(worker_id, incarnation, leader.worker.run(1))
            await leader.settle()
        why = blocked(leader.core.ledger, leader.core.ledger.calls[waiting.call_id])  # type: ignore[index]
        assert why is not None
        assert "RECOVERING" in why.explanation
        assert "1 of 4 calls executed again" in why.explanation


async def test_a_worker_that_is_asked_to_stop_is_saved_first_and_gets_no_more_calls() -> None:
    async with running_leader() as leader:
        worker_id = await leader.join()
        model = await leader.model(await leader.job())
        await trained(leader, model, 1, 2)
        asked = leader.worker.synchronize(leader.core.ledger.workers[worker_id], stopping=True)
        await synchronize(leader.core, asked)
        assert snapshots.being_saved(leader.core, worker_id) == [model.model_id]
        held_back = await leader.submit(model, specs.sync(), 3)
        await leader.work()
        assert [copy.state for copy in leader.worker.disk.values()] == [(1, 2)]
        assert leader.core.ledger.calls[held_back.call_id].state is CallState.PENDING  # type: ignore[index]
        assert snapshots.being_saved(leader.core, worker_id) == []
        leader.worker.executed.clear()
        await kill(leader)
        assert state(leader, model) == (1, 2, 3)
        assert leader.worker.executed == [held_back.call_id], "nothing had to be executed again"


async def test_a_planned_restart_of_the_worker_needs_no_snapshot_and_no_replay() -> None:
    async with running_leader() as leader:
        await leader.join()
        model = await leader.model(await leader.job())
        await trained(leader, model, 1, 3)
        leader.worker.executed.clear()
        leader.worker.restart()
        await leader.join()
        await leader.work()
        assert state(leader, model) == (1, 2, 3)
        assert leader.worker.executed == []
        assert leader.core.ledger.models[model.model_id].state is ModelState.PLACED
        await trained(leader, model, 4, 1)
        assert state(leader, model) == (1, 2, 3, 4)


async def test_what_a_restarted_worker_kept_of_an_earlier_moment_is_replayed_from_there() -> None:
    async with running_leader() as leader:
        await leader.join()
        model = await leader.model(await leader.job())
        await trained(leader, model, 1, 2)
        earlier = replace(leader.worker.models[model.model_id])
        await trained(leader, model, 3, 2)
        leader.worker.executed.clear()
        leader.worker.restart()
        leader.worker.kept[model.model_id] = earlier
        await leader.join()
        await leader.work()
        assert state(leader, model) == (1, 2, 3, 4)
        assert len(leader.worker.executed) == 2


async def test_the_last_snapshot_of_a_job_that_nobody_renewed_stays_and_a_deleted_models_go() -> None:
    """G16, G11."""
    store = MemoryStore()
    async with running_leader(store) as leader:
        worker_id = await leader.join()
        job = await leader.job("expires", lease_s=5)
        kept, dropped = await leader.model(job), await leader.model(await leader.job("finishes"))
        for number in (1, 2):
            for model in (kept, dropped):
                await trained(leader, model, number, 1)
                await snapshot(leader, model)
        assert len(leader.worker.disk) == 4
        leader.clock.time += 6
        leader.core.ledger.groups[worker_id].last_sync = leader.clock.time
        await reaper.reap(leader.core)
        await leader.work()
        of_kept = leader.core.ledger.snapshots_of_model[kept.model_id].values()
        assert [s.sequence for s in of_kept if s.committed] == [2]
        assert len(leader.worker.disk) == 3
        from plexrl_controller.dispatch.models import delete_model

        await delete_model(leader.core, present(leader, dropped))
        await leader.work()
        assert len(leader.worker.disk) == 1


async def test_every_changing_function_is_in_the_log_and_no_other() -> None:
    async with running_leader() as leader:
        await leader.join()
        model = await leader.model(await leader.job())
        for number, spec in enumerate((*[make() for make in STEP], specs.score(), specs.save("a")), start=1):
            await leader.submit(model, spec, number)
        await leader.work()
        logged = [call.kind.name.lower() for call in leader.core.ledger.log(model.model_id).after(0)]
        assert logged == list(CHANGES)
