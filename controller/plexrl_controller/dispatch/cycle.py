"""The scheduling cycle of one worker group: 1 view, 2 decide, 3 check, 4 commit, 5 dispatch. `reports` does 6, record.

One task per group. Clock, store and transport come with the core, so that live and simulation run the same cycle.
"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from plexrl.v1 import types_pb2, worker_pb2
from plexrl_controller.dispatch.background import begin_moves
from plexrl_controller.dispatch.cascade import fail
from plexrl_controller.dispatch.core import Core, log
from plexrl_controller.dispatch.ledger import Batch
from plexrl_controller.dispatch.views import group_view
from plexrl_controller.domain.errors import DataLoss
from plexrl_controller.domain.ids import CallId, WorkerId
from plexrl_controller.domain.records import Call, Interval
from plexrl_controller.domain.states import CallReason, CallState, IntervalKind, ModelState
from plexrl_controller.lifecycle.calls import CallEvent
from plexrl_controller.lifecycle.machine import Effect
from plexrl_controller.scheduling.invariants import violations
from plexrl_controller.scheduling.next_slice import next_slice
from plexrl_controller.scheduling.plan import Hold, Serve, Wait, Yield


class GroupCycle:
    """Decides and dispatches for one worker."""

    def __init__(self, core: Core, worker_id: WorkerId) -> None:
        self._core = core
        self._worker_id = worker_id

    async def run(self) -> None:
        """Runs until cancelled: once per wake-up, or when a hold ends."""
        wake = self._core.wake_event(self._worker_id)
        while True:
            wait_s = await self.step()
            with suppress(TimeoutError):
                await asyncio.wait_for(wake.wait(), wait_s)
            wake.clear()

    async def step(self) -> float | None:
        """Decides until there is nothing more to give; returns seconds until it must be asked again, if it must."""
        core = self._core
        self._deploy_due()
        while True:
            now = core.clock.now()
            view = group_view(core.ledger, self._worker_id, now)
            plan = next_slice(view, now, core.policy)
            broken = violations(view, plan)
            if broken:
                core.invariant_violations += 1
                log.error("decision_rejected", worker=self._worker_id, violations=broken, decision=str(plan))
                return None
            if not isinstance(plan.action, Serve):
                # After a Serve comes another decision, which sees its residency changes.
                begin_moves(core, self._worker_id, plan.background)
            match plan.action:
                case Yield():
                    raise AssertionError("the view says that calls cannot yield")
                case Wait():
                    core.ledger.groups[self._worker_id].held_since = None
                    return None
                case Hold(until=until):
                    group = core.ledger.groups[self._worker_id]
                    group.held_since = group.held_since if group.held_since is not None else now
                    return max(0.0, until - now)
                case Serve() as serve:
                    await self._serve(serve, now)

    def _deploy_due(self) -> None:
        """Sends deploy orders for models that their worker should build and has not been told to."""
        core, worker = self._core, self._core.ledger.workers[self._worker_id]
        if not core.ledger.groups[self._worker_id].connected:
            return
        for model_id in list(core.ledger.models_of_worker[self._worker_id]):
            model = core.ledger.models[model_id]
            due = model.state in (ModelState.CREATING, ModelState.RECOVERING)
            if due and core.ledger.deploying.get(model_id) != worker.incarnation:
                core.ledger.deploying[model_id] = worker.incarnation
                core.transport.send(self._worker_id, [core.orders.deploy(model, worker.incarnation)])

    async def _serve(self, decision: Serve, now: float) -> None:
        core, ledger = self._core, self._core.ledger
        worker, group = ledger.workers[self._worker_id], ledger.groups[self._worker_id]
        on_worker = ledger.calls_on_worker[self._worker_id]
        specs = await self._specs([call.call_id for call in decision.calls])
        batch = core.batch()
        dispatched: list[tuple[Call, int]] = []
        # A job waits while it has something to run and nothing of it runs.
        idle, waited_s = not any(ledger.calls[c].job_id == decision.job_id for c in on_worker), 0.0
        for ready in decision.calls:
            call = ledger.calls.get(ready.call_id)
            if call is None or call.state is not CallState.PENDING or ready.call_id not in specs:
                break
            since = ledger.ready_since.pop(call.call_id, now)
            waited_s = max(waited_s, now - since) if idle else 0.0
            call = batch.transition(
                call,
                CallEvent.DISPATCH,
                attempt=call.attempt + 1,
                leader_term=core.term,
                worker_id=worker.worker_id,
                worker_incarnation=worker.incarnation,
            )
            dispatched.append((call, ready.after_sequence))
        if not dispatched:
            return
        if (facts := ledger.facts.get(decision.job_id)) is not None:
            facts.wait_s += waited_s
        self._charge_hold(batch, now)
        if group.serving != decision.job_id:
            group.serving, group.slice_start = decision.job_id, now
        group.on_device.difference_update(decision.evict)
        if decision.load is not None:
            group.on_device.add(decision.load)
            group.prefetched = None
        for ready in decision.calls:
            group.used_at[ready.model_id] = now
        batch.take(Effect.SEND_ORDER)
        await core.commit(batch)
        orders: list[worker_pb2.Order] = []
        if decision.load is not None or decision.evict:
            orders.append(core.orders.swap(decision.load, decision.evict, worker.incarnation))
        orders.extend(core.orders.run(call, specs[call.call_id], after) for call, after in dispatched)
        core.transport.send(self._worker_id, orders)

    async def _specs(self, call_ids: Sequence[CallId]) -> dict[CallId, types_pb2.CallSpec]:
        """The arguments of the calls; a call whose arguments are lost fails here."""
        found: dict[CallId, types_pb2.CallSpec] = {}
        for call_id in call_ids:
            call = self._core.ledger.calls[call_id]
            try:
                found[call_id] = await self._core.spec(call)
            except DataLoss as error:
                batch = self._core.batch()
                fail(batch, call, CallReason.ENGINE_ERROR, error.message)
                await self._core.commit(batch)
                break
        return found

    def _charge_hold(self, batch: Batch, now: float) -> None:
        """Device time that was kept idle for a job while others waited is that job's."""
        group = self._core.ledger.groups[self._worker_id]
        held_since, group.held_since = group.held_since, None
        if held_since is None or now - held_since < 1e-3:
            return
        holder = group.serving
        models = self._core.ledger.models_of_job.get(holder) if holder is not None else None
        if holder is not None and models:
            batch.interval(
                Interval(
                    kind=IntervalKind.HOLD,
                    worker_id=self._worker_id,
                    job_id=holder,
                    model_id=next(iter(models)),
                    call_id=None,
                    call_kind=None,
                    start_unix_ns=int(held_since * 1e9),
                    end_unix_ns=int(now * 1e9),
                )
            )
