"""Random histories of calls, acknowledgements, snapshots and deaths, against a model: no call's effect is ever missing.

The model is a list: which calls' effects the state must have. A payload that was given up too early would leave a hole
after the next death, so that every history ends with one.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from google.rpc import code_pb2
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from plexrl_controller.dispatch import snapshots
from plexrl_controller.dispatch.replay_log import RecoveryPolicy
from plexrl_controller.dispatch.restore import restore_points
from plexrl_controller.dispatch.submit import acknowledge, acknowledged
from plexrl_controller.domain.states import CallState, ModelState
from plexrl_controller.payloads.memory import MemoryPayloadStore
from plexrl_controller.store.memory import MemoryStore
from tests.support import specs
from tests.support.leader import Leader, ManualClock, running_leader
from tests.support.worker_double import CHANGES, WorkerDouble

HISTORIES = int(os.environ.get("PLEXRL_HISTORIES", "40"))
LARGE = 20_000  # tokens of arguments that go to the payload store
POLICY = RecoveryPolicy(log_bytes=3 * LARGE * 8)

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("call"), st.sampled_from(["forward_backward", "large", "optim_step", "sync", "score"])),
        st.tuples(st.just("save"), st.just("")),
        st.tuples(st.just("load"), st.sampled_from(["base", "newest", "oldest"])),
        st.tuples(st.just("acknowledge"), st.integers(0, 3)),
        st.tuples(st.just("snapshot"), st.sampled_from(["written", "failed", "not reported"])),
        st.tuples(st.just("damage"), st.integers(0, 2)),
        st.tuples(st.just("kill"), st.integers(0, 4)),
        st.tuples(st.just("kill in flight"), st.integers(0, 3)),
        st.tuples(st.just("new leader"), st.integers(0, 3)),
    ),
    min_size=1,
    max_size=24,
)


class History:
    """One history: the leader as it is, and what must be true of it."""

    def __init__(self) -> None:
        self.store, self.payloads, self.clock = MemoryStore(), MemoryPayloadStore(), ManualClock()
        self.worker = WorkerDouble()
        self.leader: Leader
        self.model_id: Any = None
        self.number = 0
        self.expected: tuple[int, ...] = ()
        self.saved: list[tuple[str, tuple[int, ...]]] = []

    @property
    def model(self) -> Any:
        return self.leader.core.ledger.models[self.model_id]

    async def submit(self, spec: Any) -> str:
        self.number += 1
        accepted = await self.leader.submit(self.model, spec, self.number, f"call-{self.number}")
        return accepted.call_id

    async def call(self, kind: str) -> None:
        made = specs.forward_backward(LARGE) if kind == "large" else getattr(specs, kind)()
        await self.submit(made)
        if made.WhichOneof("function") in CHANGES:
            self.expected = (*self.expected, self.number)
        await self.leader.work()

    async def save(self, _: str) -> None:
        call_id = await self.submit(specs.save(f"label-{self.number}"))
        await self.leader.work()
        checkpoint_id = self.leader.core.ledger.calls[call_id].checkpoint_id  # type: ignore[index]
        self.saved.append((checkpoint_id or "", self.expected))

    async def load(self, which: str) -> None:
        if which == "base" or not self.saved:
            await self.submit(specs.load())
            self.expected = ()
        else:
            checkpoint_id, self.expected = self.saved[-1 if which == "newest" else 0]
            await self.submit(specs.load(checkpoint_id))
        await self.leader.work()

    async def acknowledge(self, keep: int) -> None:
        core = self.leader.core
        done = [c.call_id for c in core.ledger.calls.values() if c.state is CallState.SUCCEEDED]
        job = core.ledger.jobs[self.model.job_id]
        await acknowledged(core, job, acknowledge(core, job, done[: len(done) - keep]))

    async def snapshot(self, how: str) -> None:
        if how == "failed":
            self.worker.fail_next["snapshot"] = (code_pb2.RESOURCE_EXHAUSTED, "STORAGE_FAILED")
        await snapshots.order(self.leader.core, self.model)
        await self.leader.settle()
        if how == "not reported":
            self.worker.run()
            await self.die()
        else:
            await self.leader.work()

    async def damage(self, which: int) -> None:
        """One snapshot is damaged, as long as another copy on disk is left to begin from."""
        points = restore_points(self.leader.core.ledger, self.model, on_disk=True)
        readable = [p for p in points if p.copy_id not in self.worker.disk or self.intact(p)]
        found = [p for p in readable if p.copy_id in self.worker.disk]
        if len(readable) > 1 and found:
            del self.worker.disk[found[which % len(found)].copy_id]

    def intact(self, point: Any) -> bool:
        return bool(self.worker.disk[point.copy_id].manifest == point.manifest_sha256)

    async def die(self) -> None:
        self.worker.die()
        await self.leader.join()
        await self.leader.work()

    async def kill(self, orders: int) -> None:
        """The next life dies too, in the middle of its recovery."""
        self.worker.die()
        await self.leader.join()
        await self.report(orders)
        await self.die()

    async def kill_in_flight(self, applied: int) -> None:
        """Calls are given to the worker, some are applied, and nobody hears of it."""
        for spec in (specs.forward_backward(), specs.optim_step(), specs.sync()):
            await self.submit(spec)
            self.expected = (*self.expected, self.number)
        await self.leader.settle()
        self.worker.run(applied)
        await self.die()

    async def report(self, orders: int) -> None:
        core, worker_id = self.leader.core, self.leader.worker_id
        assert worker_id is not None
        for _ in range(orders):
            reports = self.worker.run(1)
            await self.leader.dispatcher.reports_came(worker_id, core.ledger.workers[worker_id].incarnation, reports)
            await self.leader.settle()

    def check(self) -> None:
        model = self.model
        assert model.state is ModelState.PLACED, model.message
        assert self.worker.models[self.model_id].state == self.expected
        assert self.leader.core.replay_divergences == 0
        assert self.leader.core.invariant_violations == 0


async def live(steps: list[tuple[str, Any]]) -> None:
    history = History()
    rest = list(steps)
    first = True
    while first or rest:
        async with running_leader(
            history.store, history.worker, history.clock, payloads=history.payloads, recovery_policy=POLICY
        ) as leader:
            history.leader = leader
            await leader.join()
            if first:
                history.model_id = (await leader.model(await leader.job(lease_s=3600))).model_id
                first = False
            await leader.work()
            history.check()
            while rest:
                name, argument = rest.pop(0)
                if name == "new leader":
                    # It takes over in the middle of a recovery.
                    history.worker.die()
                    await leader.join()
                    await history.report(argument)
                    break
                act: Callable[[Any], Awaitable[None]] = getattr(history, name.replace(" ", "_"))
                await act(argument)
                history.check()
            if not rest:
                await history.die()
                history.check()


@pytest.mark.timeout(900)
@given(STEPS)
@settings(max_examples=HISTORIES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_no_history_loses_a_call_before_a_copy_covers_it(steps: list[tuple[str, Any]]) -> None:
    """G21, G02: whatever the order of snapshots, acknowledgements and deaths."""
    asyncio.run(live(steps))
