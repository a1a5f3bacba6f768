"""A call that ended badly blocks what comes after it, and nothing else (G03)."""

from plexrl_controller.dispatch import models, submit
from plexrl_controller.domain.states import CallReason, CallState
from tests.support import specs
from tests.support.leader import running_leader


async def test_a_cancelled_call_does_not_stop_the_calls_before_it() -> None:
    """G03: what comes before a call that ended badly still runs; only what comes after it is blocked."""
    async with running_leader() as leader:
        await leader.join()
        model = await leader.model(await leader.job())
        first = await leader.submit(model, specs.forward_backward(), 1)
        second = await leader.submit(model, specs.optim_step(), 2)
        third = await leader.submit(model, specs.sync(), 3)
        await leader.submit(model, specs.generate())
        await submit.cancel(leader.core, leader.call(third.call_id))
        await leader.work()
        assert [leader.call(c.call_id).state for c in (first, second)] == [CallState.SUCCEEDED] * 2
        assert (
            await models.resume_sequence(leader.core, leader.key("resume"), leader.core.ledger.models[model.model_id])
            == 4
        )


async def test_a_failure_before_a_cancelled_call_fails_what_lies_between() -> None:
    """G03: the sequence is blocked at the earliest call that ended badly."""
    async with running_leader() as leader:
        await leader.join()
        model = await leader.model(await leader.job())
        leader.worker.fail_next["forward_backward"] = (3, "NON_FINITE")
        await leader.submit(model, specs.forward_backward(), 1)
        between = await leader.submit(model, specs.optim_step(), 2)
        last = await leader.submit(model, specs.sync(), 3)
        await submit.cancel(leader.core, leader.call(last.call_id))
        await leader.work()
        assert leader.call(between.call_id).reason is CallReason.PREDECESSOR_FAILED


async def test_giving_up_a_gap_ends_the_generates_that_wait_for_a_version_behind_it() -> None:
    """G03: a version that will never be made is not waited for."""
    async with running_leader() as leader:
        await leader.join()
        model = await leader.model(await leader.job())
        await leader.submit(model, specs.sync(), 2)
        waiting = await leader.submit(model, specs.generate())
        assert waiting.weights_version == 2
        await models.resume_sequence(leader.core, leader.key("resume"), leader.core.ledger.models[model.model_id])
        assert leader.call(waiting.call_id).reason is CallReason.PREDECESSOR_FAILED
