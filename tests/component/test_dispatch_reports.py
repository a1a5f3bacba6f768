"""Reports that come twice, and decisions that are rejected: nothing is kept for ever, nobody waits for ever."""

from collections.abc import Sequence
from typing import Any

import pytest

from plexrl import wire
from plexrl.v1 import types_pb2
from plexrl_controller.dispatch import cycle
from plexrl_controller.dispatch.submit import acknowledge, acknowledged
from plexrl_controller.domain.ids import CallId
from plexrl_controller.domain.states import CallState
from plexrl_controller.scheduling.invariants import violations
from tests.support import specs
from tests.support.leader import TENANT, running_leader


async def test_a_large_result_that_is_reported_twice_is_kept_once() -> None:
    async with running_leader() as leader:
        worker_id = await leader.join()
        job = await leader.job()
        model = await leader.model(job)
        call = await leader.submit(model, specs.generate())
        await leader.settle()
        incarnation = leader.core.ledger.workers[worker_id].incarnation
        tokens = wire.token_batch([[1] * 40_000])
        while reports := leader.worker.run(1):
            for report in reports:
                if report.HasField("call") and report.HasField("finished"):
                    report.finished.result.generate.CopyFrom(types_pb2.GenerateResult(completions=tokens))
            for _ in range(2):
                await leader.dispatcher.reports_came(worker_id, incarnation, reports)
                await leader.settle()
        assert leader.core.ledger.calls[CallId(call.call_id)].state is CallState.SUCCEEDED
        assert leader.core.payloads.stored_bytes(TENANT) > 160_000
        await acknowledged(leader.core, job, acknowledge(leader.core, job, [call.call_id]))
        assert leader.core.payloads.stored_bytes(TENANT) == 0


async def test_a_rejected_decision_is_looked_for_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """G13: a group whose decision broke an invariant does not wait for somebody else to wake it."""
    rejections = [("I1: told by the test",)]
    check = violations

    def reject_once(*arguments: Any) -> Sequence[Any]:
        return rejections.pop() if rejections else check(*arguments)

    async with running_leader() as leader:
        await leader.join()
        model = await leader.model(await leader.job())
        monkeypatch.setattr(cycle, "violations", reject_once)
        monkeypatch.setattr(cycle, "REJECTED_RETRY_S", 0.0)
        call = await leader.submit(model, specs.optim_step(), 1)
        await leader.work()
        assert leader.core.ledger.calls[CallId(call.call_id)].state is CallState.SUCCEEDED
        assert leader.core.invariant_violations == 1
