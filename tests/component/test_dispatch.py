"""The leader's promises over calls, sequences, versions, swaps and losses, with everything real but worker and disk."""

import asyncio
from dataclasses import replace

import pytest
from google.rpc import status_pb2

from plexrl import wire
from plexrl.v1 import model_pb2, types_pb2, worker_pb2
from plexrl_controller.dispatch import jobs, models, reaper, submit
from plexrl_controller.domain.errors import AlreadyExists, ControllerError, FailedPrecondition, InvalidArgument
from plexrl_controller.domain.states import CallReason, CallState, JobState, ModelState
from plexrl_controller.scheduling.policy import HoldRule, Policy
from plexrl_controller.store.memory import MemoryStore
from tests.support import specs
from tests.support.leader import running_leader
from tests.support.worker_double import STATE_BYTES, WorkerDouble


async def test_a_call_is_executed_and_its_result_is_durable() -> None:
    async with running_leader() as leader:
        await leader.join()
        model = await leader.model(await leader.job())
        accepted = await leader.submit(model, specs.generate())
        await leader.work()
        stored = await leader.core.store.get_call(leader.call(accepted.call_id).call_id)
        assert stored is not None
        assert stored.state is CallState.SUCCEEDED
        assert stored.result is not None


async def test_the_same_request_is_the_same_call_and_other_content_is_refused() -> None:
    """G01: whoever resends, the work is done once."""
    async with running_leader() as leader:
        await leader.join()
        model = await leader.model(await leader.job())
        first = await leader.submit(model, specs.optim_step(), 1, request_id="once")
        await leader.work()
        again = await leader.submit(model, specs.optim_step(), 1, request_id="once")
        await leader.work()
        assert again.call_id == first.call_id
        assert again.state == types_pb2.CALL_STATE_SUCCEEDED
        assert leader.worker.executed == [first.call_id]
        with pytest.raises(AlreadyExists) as refused:
            await leader.submit(model, specs.optim_step(lr=2.0), 1, request_id="once")
        assert refused.value.reason == "REQUEST_ID_REUSED"


async def test_a_sequence_runs_in_order_whatever_the_order_of_arrival() -> None:
    async with running_leader() as leader:
        await leader.join()
        model = await leader.model(await leader.job())
        third = await leader.submit(model, specs.sync(), 3)
        second = await leader.submit(model, specs.optim_step(), 2)
        await leader.work()
        assert leader.worker.executed == []
        first = await leader.submit(model, specs.forward_backward(), 1)
        await leader.work()
        assert leader.worker.executed == [first.call_id, second.call_id, third.call_id]
        assert leader.core.ledger.models[model.model_id].weights_version == 3


async def test_a_failed_call_fails_its_successors_until_the_sequence_is_resumed() -> None:
    async with running_leader() as leader:
        await leader.join()
        model = await leader.model(await leader.job())
        leader.worker.fail_next["forward_backward"] = (3, "NON_FINITE")
        bad = await leader.submit(model, specs.forward_backward(), 1)
        step = await leader.submit(model, specs.optim_step(), 2)
        sync = await leader.submit(model, specs.sync(), 3)
        waiting = await leader.submit(model, specs.generate())
        await leader.work()
        assert leader.call(bad.call_id).reason is CallReason.NON_FINITE
        for successor in (step, sync, waiting):
            assert leader.call(successor.call_id).reason is CallReason.PREDECESSOR_FAILED
        with pytest.raises(FailedPrecondition) as refused:
            await leader.submit(model, specs.optim_step(), 4)
        assert refused.value.reason == "PREDECESSOR_FAILED"
        number = await models.resume_sequence(
            leader.core, leader.key("resume"), leader.core.ledger.models[model.model_id]
        )
        assert number == 4
        good = await leader.submit(model, specs.optim_step(), number)
        await leader.work()
        assert leader.call(good.call_id).state is CallState.SUCCEEDED


async def test_generate_uses_the_last_sync_submitted_before_it_and_sync_drains_older_ones() -> None:
    """G06: generation never uses weights other than those named."""
    async with running_leader() as leader:
        await leader.join()
        model = await leader.model(await leader.job())
        old = await leader.submit(model, specs.generate())
        await leader.submit(model, specs.sync(), 1)
        new = await leader.submit(model, specs.generate())
        assert (old.weights_version, new.weights_version) == (0, 1)
        await leader.work()
        assert [leader.call(c.call_id).state for c in (old, new)] == [CallState.SUCCEEDED] * 2
        assert leader.worker.executed[0] == old.call_id
        with pytest.raises(FailedPrecondition) as gone:
            await leader.submit(model, specs.generate_at(exact=0))
        assert gone.value.reason == "VERSION_GONE"
        with pytest.raises(InvalidArgument):
            await leader.submit(model, specs.generate_at(exact=7))


async def test_a_sync_lets_earlier_generates_finish_also_where_both_waited_for_the_worker() -> None:
    """G06: sequenced calls are looked at first; a sync among them must not overtake."""
    async with running_leader() as leader:
        worker_id = await leader.join()
        model = await leader.model(await leader.job())
        leader.dispatcher.stream_closed(worker_id, 1)
        old = await leader.submit(model, specs.generate())
        sync = await leader.submit(model, specs.sync(), 1)
        new = await leader.submit(model, specs.generate())
        await leader.dispatcher.stream_opened(worker_id, 1, leader.worker.status())
        await leader.work()
        assert leader.worker.executed == [old.call_id, sync.call_id, new.call_id]


async def test_two_jobs_swap_on_a_device_that_holds_one() -> None:
    async with running_leader() as leader:
        await leader.join()
        a = await leader.model(await leader.job("a"))
        b = await leader.model(await leader.job("b"))
        for _ in range(2):
            for model in (a, b):
                await leader.submit(model, specs.generate())
                await leader.work()
                leader.clock.time += 1.0
        assert len(leader.worker.executed) == 4
        assert leader.worker.swaps == 4
        assert leader.core.invariant_violations == 0


async def test_models_beyond_the_host_tier_go_where_a_disk_tier_takes_them() -> None:
    double = WorkerDouble()
    double.capabilities.host_state_bytes = 2 * STATE_BYTES
    double.capabilities.disk_state_bytes = 4 * STATE_BYTES
    async with running_leader(worker=double) as leader:
        await leader.join()
        job = await leader.job()
        for number in range(5):
            await leader.model(job, f"model-{number}")
        with pytest.raises(FailedPrecondition) as refused:
            await leader.model(job, "one-too-many")
        assert refused.value.reason == "NO_FEASIBLE_WORKER"


async def test_a_prefetch_that_is_out_of_date_never_keeps_the_group_from_serving() -> None:
    double = WorkerDouble(device_state_bytes=STATE_BYTES * 3 // 2)
    double.capabilities.prefetch = True
    async with running_leader(worker=double) as leader:
        worker_id = await leader.join()
        first, second = [await leader.model(await leader.job(name)) for name in ("a", "b")]
        await leader.submit(first, specs.generate())
        await leader.work()
        # As after a report that came late: both cannot be there at once.
        leader.core.ledger.groups[worker_id].prefetched = second.model_id
        await leader.submit(first, specs.generate())
        await leader.work()
        assert len(double.executed) == 2


@pytest.mark.parametrize("offered", [True, False])
async def test_the_next_jobs_model_is_prefetched_once_while_another_runs(offered: bool) -> None:
    """Only by a worker that offers it."""
    double = WorkerDouble(device_state_bytes=2 * STATE_BYTES)
    double.capabilities.prefetch = offered
    async with running_leader(worker=double) as leader:
        worker_id = await leader.join()
        first, second = [await leader.model(await leader.job(name)) for name in ("a", "b")]
        await leader.submit(first, specs.generate())
        await leader.submit(second, specs.generate())
        await leader.settle()
        await leader.submit(first, specs.generate())
        await leader.settle()
        prefetched = [order.prefetch for order in leader.transport.sent if order.HasField("prefetch")]
        wanted = [worker_pb2.PrefetchOrder(model_id=second.model_id, tier=types_pb2.TIER_DEVICE)]
        assert prefetched == (wanted if offered else [])
        await leader.work()
        leader.clock.time += 1.0
        leader.core.wake(worker_id)
        await leader.work()
        assert len(double.executed) == 3
        assert leader.core.invariant_violations == 0


async def test_hold_by_iteration_keeps_the_group_until_the_sync() -> None:
    async with running_leader(policy=Policy(hold=HoldRule.ITERATION)) as leader:
        await leader.join()
        a = await leader.model(await leader.job("a"))
        b = await leader.model(await leader.job("b"))
        await leader.submit(a, specs.generate())
        await leader.work()
        other = await leader.submit(b, specs.generate())
        leader.clock.time += 5.0
        await leader.work()
        assert leader.call(other.call_id).state is CallState.PENDING
        await leader.submit(a, specs.sync(), 1)
        await leader.work()
        assert leader.call(other.call_id).state is CallState.SUCCEEDED
        account = leader.core.ledger.account(a.job_id)
        assert account.hold_s == pytest.approx(5.0, abs=0.1)


async def test_a_new_leader_goes_on_where_the_old_one_stopped() -> None:
    """G14, G20: what was accepted is executed once, by whichever leader."""
    store, worker = MemoryStore(), WorkerDouble()
    async with running_leader(store, worker) as old:
        await old.join()
        model = await old.model(await old.job())
        accepted = await old.submit(model, specs.forward_backward(), 1)
        await old.settle()
        reports = worker.run()  # executed, but the old leader never hears of it
        assert any(r.WhichOneof("event") == "finished" for r in reports)
    async with running_leader(store, worker) as new:
        new.worker_id = next(iter(new.core.ledger.workers))
        await new.dispatcher.stream_opened(new.worker_id, 1, worker.status())
        await new.work()
        assert new.call(accepted.call_id).state is CallState.SUCCEEDED
        assert worker.executed == [accepted.call_id]


async def test_a_lost_worker_costs_a_model_at_its_base_only_time() -> None:
    async with running_leader() as leader:
        await leader.join()
        model = await leader.model(await leader.job())
        call = await leader.submit(model, specs.generate())
        await leader.settle()
        leader.worker.die()
        await leader.join()
        await leader.work()
        assert leader.call(call.call_id).state is CallState.SUCCEEDED
        assert leader.call(call.call_id).attempt == 2
        assert leader.core.ledger.models[model.model_id].state is ModelState.PLACED


async def test_a_state_that_nothing_brings_back_is_said_plainly_with_what_is_left() -> None:
    """STATE_LOST remains where a copy that everything rests on is gone; a checkpoint that is left goes on."""
    async with running_leader() as leader:
        await leader.join()
        model = await leader.model(await leader.job())
        saved = [await leader.submit(model, specs.save(label), n) for n, label in ((1, "good"), (2, "doomed"))]
        await leader.work()
        good, doomed = (leader.call(call.call_id).checkpoint_id or "" for call in saved)
        await leader.submit(model, specs.load(doomed), 3)
        await leader.submit(model, specs.optim_step(), 4)
        await leader.work()
        late = await leader.submit(model, specs.sync(), 5)
        del leader.worker.saved[doomed]
        leader.worker.die()
        await leader.join()
        await leader.work()
        lost = leader.core.ledger.models[model.model_id]
        assert lost.state is ModelState.STATE_LOST
        assert f"good={good}@1" in lost.message
        assert leader.call(late.call_id).reason is CallReason.STATE_LOST
        error = wire.error_info(status_pb2.Status.FromString(leader.call(late.call_id).error or b""))
        assert error is not None
        assert f"good={good}@1" in error.metadata["checkpoints"]
        with pytest.raises(FailedPrecondition) as refused:
            await leader.submit(model, specs.optim_step(), 6)
        assert refused.value.reason == "STATE_LOST"
        loaded = await leader.submit(model, specs.load(good), 6)
        await leader.work()
        assert leader.call(loaded.call_id).state is CallState.SUCCEEDED
        step = await leader.submit(model, specs.optim_step(), 7)
        await leader.work()
        assert leader.call(step.call_id).state is CallState.SUCCEEDED


async def test_an_expired_lease_frees_the_worker_and_ends_every_call() -> None:
    """G11, G03: a lost client frees what it held; nothing hangs."""
    async with running_leader() as leader:
        await leader.join()
        job = await leader.job(lease_s=10.0)
        model = await leader.model(job)
        call = await leader.submit(model, specs.sync(), 2)
        leader.clock.time += 11.0
        leader.core.ledger.groups[leader.worker_id or ""].last_sync = leader.clock.time  # type: ignore[index]
        await reaper.reap(leader.core)
        await leader.work()
        assert leader.core.ledger.jobs[job.job_id].state is JobState.EXPIRED
        assert leader.call(call.call_id).reason is CallReason.JOB_ENDED
        assert leader.worker.models == {}


async def test_finishing_a_job_stops_its_running_call_and_another_job_goes_on() -> None:
    """G12: one job's end never stalls another."""
    async with running_leader() as leader:
        await leader.join()
        first, second = await leader.job("a"), await leader.job("b")
        a, b = await leader.model(first), await leader.model(second)
        running = await leader.submit(a, specs.generate())
        await leader.settle()
        assert leader.call(running.call_id).state is CallState.DISPATCHED
        await jobs.finish_job(leader.core, leader.core.ledger.jobs[first.job_id])
        other = await leader.submit(b, specs.generate())
        await leader.work()
        assert leader.call(running.call_id).state is CallState.CANCELLED
        assert leader.call(other.call_id).state is CallState.SUCCEEDED
        assert leader.core.ledger.jobs[first.job_id].state is JobState.FINISHED


async def test_attempts_that_keep_dying_end_the_call() -> None:
    """G03, G04."""
    async with running_leader() as leader:
        await leader.join()
        model = await leader.model(await leader.job())
        call = await leader.submit(model, specs.generate())
        for _ in range(3):
            leader.worker.fail_next["generate"] = (14, "ENGINE_DIED")
            await leader.settle()
            reports = leader.worker.run()
            assert leader.worker_id is not None
            await leader.dispatcher.reports_came(leader.worker_id, 1, reports)
        await leader.settle()
        assert leader.call(call.call_id).reason is CallReason.ATTEMPTS_EXHAUSTED


async def test_a_deadline_ends_a_call_that_waits() -> None:
    """G03."""
    async with running_leader() as leader:
        await leader.join()
        model = await leader.model(await leader.job(lease_s=3600.0))
        call = await leader.submit(model, specs.sync(), 2)
        leader.clock.time += 3500.0
        leader.core.ledger.groups[leader.worker_id or ""].last_sync = leader.clock.time + 200.0  # type: ignore[index]
        await reaper.reap(leader.core)
        assert leader.call(call.call_id).state is CallState.PENDING
        jobs.heartbeat(leader.core, leader.core.ledger.jobs[model.job_id], None)
        leader.clock.time += 101.0
        await reaper.reap(leader.core)
        assert leader.call(call.call_id).state is CallState.EXPIRED


async def test_refusals_change_nothing() -> None:
    """G17: what cannot be honoured is refused at submit, and the next good call works."""
    async with running_leader() as leader:
        await leader.join()
        model = await leader.model(await leader.job())
        bad: list[tuple[types_pb2.CallSpec, int]] = [
            (types_pb2.CallSpec(), 1),
            (specs.generate(n=0), 0),
            (specs.generate(temperature=float("nan")), 0),
            (specs.generate(), 1),
            (specs.optim_step(lr=-1.0), 1),
            (specs.optim_step(), 0),
            (specs.optim_step(), 1_000_000),
            (specs.load("../../etc"), 1),
            (specs.save("a/b"), 1),
        ]
        for spec, sequence in bad:
            with pytest.raises((ControllerError, ValueError)) as refused:
                await leader.submit(model, spec, sequence)
            assert "INTERNAL" not in str(getattr(refused.value, "code", ""))
        good = await leader.submit(model, specs.optim_step(), 1)
        await leader.work()
        assert leader.call(good.call_id).state is CallState.SUCCEEDED


async def test_a_large_call_does_not_overtake_or_delay_the_order_of_acceptance() -> None:
    """Bytes above the inline limit are written first; what memory and store see keeps the order of arrival."""
    async with running_leader() as leader:
        await leader.join()
        model = await leader.model(await leader.job())
        large = specs.forward_backward(tokens=40_000)
        submits = [
            leader.submit(model, spec, sequence)
            for sequence, spec in enumerate([large, specs.optim_step(), large, specs.sync()], start=1)
        ]
        calls = await asyncio.gather(*submits, leader.submit(model, specs.generate()))
        await leader.work()
        assert [leader.call(c.call_id).state for c in calls] == [CallState.SUCCEEDED] * 5
        assert leader.worker.executed == [c.call_id for c in calls]
        assert calls[-1].weights_version == 4


async def test_the_same_request_twice_at_once_is_one_call() -> None:
    """G01, in the narrowest moment: the resend arrives while the first is being written."""
    async with running_leader() as leader:
        await leader.join()
        model = await leader.model(await leader.job())
        spec = specs.forward_backward(tokens=40_000)
        calls = await asyncio.gather(*(leader.submit(model, spec, 1, request_id="once") for _ in range(3)))
        await leader.work()
        assert len({c.call_id for c in calls}) == 1
        assert leader.worker.executed == [calls[0].call_id]


async def test_a_model_that_left_the_device_unheard_is_loaded_again() -> None:
    """An engine that dies while idle says so late: the controller corrects its picture, and no call pays for it."""
    async with running_leader() as leader:
        await leader.join()
        model = await leader.model(await leader.job())
        await leader.submit(model, specs.generate())
        await leader.work()
        for _ in range(5):
            leader.worker.models[model.model_id].on_device = False
            call = await leader.submit(model, specs.generate())
            await leader.work()
            assert leader.call(call.call_id).state is CallState.SUCCEEDED
            assert leader.call(call.call_id).lost_attempts == 0


async def test_a_swap_that_keeps_failing_ends_the_calls_that_need_it() -> None:
    """G03: what cannot be mended is not tried for ever."""
    async with running_leader(worker=WorkerDouble(device_state_bytes=STATE_BYTES - 1)) as leader:
        await leader.join()
        model = await leader.model(await leader.job())
        leader.core.ledger.workers[leader.worker_id] = replace(  # type: ignore[index]
            leader.core.ledger.workers[leader.worker_id],  # type: ignore[index]
            capabilities=WorkerDouble().capabilities.SerializeToString(),
        )
        call = await leader.submit(model, specs.generate())
        await leader.work()
        assert leader.call(call.call_id).reason is CallReason.ATTEMPTS_EXHAUSTED


async def test_outcomes_heard_out_of_order_never_move_a_sequence_backwards() -> None:
    """G20: after a broken stream an earlier call may be heard of behind a later one; the next call still runs."""
    async with running_leader() as leader:
        worker_id = await leader.join()
        model = await leader.model(await leader.job())
        for sequence, spec in enumerate([specs.forward_backward(), specs.optim_step(), specs.sync()], start=1):
            await leader.submit(model, spec, sequence)
        await leader.settle()
        for report in reversed(leader.worker.run()):
            if report.WhichOneof("event") != "started":
                await leader.dispatcher.reports_came(worker_id, 1, [report])
        heard = leader.core.ledger.models[model.model_id]
        assert (heard.applied_sequence, heard.due_sequence, heard.weights_version) == (3, 4, 3)
        next_call = await leader.submit(model, specs.optim_step(), 4)
        await leader.work()
        assert leader.call(next_call.call_id).state is CallState.SUCCEEDED
        assert leader.call(next_call.call_id).attempt == 1


async def test_a_load_that_fails_leaves_a_lost_state_lost() -> None:
    """G08: what a worker built only to load into is never served as the training state."""
    async with running_leader() as leader:
        await leader.join()
        model = await leader.model(await leader.job())
        saved = await leader.submit(model, specs.save("doomed"), 1)
        await leader.work()
        doomed = leader.call(saved.call_id).checkpoint_id or ""
        await leader.submit(model, specs.load(doomed), 2)
        await leader.submit(model, specs.optim_step(), 3)
        await leader.work()
        del leader.worker.saved[doomed]
        leader.worker.die()
        await leader.join()
        await leader.work()
        assert leader.core.ledger.models[model.model_id].state is ModelState.STATE_LOST
        leader.worker.fail_next["load_checkpoint"] = (15, "CHECKPOINT_CORRUPT")
        load = await leader.submit(model, specs.load(), 4)
        await leader.work()
        assert leader.call(load.call_id).reason is CallReason.CHECKPOINT_CORRUPT
        assert leader.core.ledger.models[model.model_id].state is ModelState.STATE_LOST
        again = await leader.submit(model, specs.load(), 5)
        step = await leader.submit(model, specs.optim_step(), 6)
        await leader.work()
        assert [leader.call(c.call_id).state for c in (again, step)] == [CallState.SUCCEEDED] * 2


async def test_a_cancel_whose_end_was_lost_with_a_stream_still_ends() -> None:
    """G03: the worker is asked again how a call ended that is being cancelled."""
    async with running_leader() as leader:
        worker_id = await leader.join()
        model = await leader.model(await leader.job())
        call = await leader.submit(model, specs.forward_backward(), 1)
        await leader.settle()
        leader.worker.run()  # applied, and its report is lost with the stream
        leader.dispatcher.stream_closed(worker_id, 1)
        await submit.cancel(leader.core, leader.call(call.call_id))
        assert leader.call(call.call_id).state is CallState.CANCELLING
        await leader.dispatcher.stream_opened(worker_id, 1, leader.worker.status())
        await leader.work()
        assert leader.call(call.call_id).state is CallState.SUCCEEDED


async def test_a_lora_rank_that_no_worker_offers_is_refused() -> None:
    """G17."""
    async with running_leader() as leader:
        await leader.join()
        job = await leader.job()
        base = model_pb2.ModelBase(
            init=model_pb2.InitBase(config_json='{"architectures": ["Qwen3ForCausalLM"]}', seed=1)
        )
        settings = model_pb2.ModelSettings(lora=model_pb2.LoraSettings(rank=8))
        spec = models.ModelSpec("policy", base, model_pb2.MODEL_ROLE_POLICY, settings, types_pb2.Affinity())
        with pytest.raises(FailedPrecondition, match="LoRA ranks: none, not 8"):
            await models.create_model(leader.core, leader.key("model"), job, spec)
