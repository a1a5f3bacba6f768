"""The scheduling cycle of one worker group: 1 view, 2 decide, 3 check, 4 commit, 5 dispatch. `reports` does 6, record.

A turn runs without a pause and only queues its commit; its orders leave once that is durable, unless they change
nothing. Clock, store and transport come with the core, so that live and simulation run the same cycle.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from plexrl.v1 import types_pb2, worker_pb2
from plexrl_controller.dispatch.background import begin_moves
from plexrl_controller.dispatch.cascade import fail, give_up_state
from plexrl_controller.dispatch.core import Core, log
from plexrl_controller.dispatch.learning import learn_interval, learn_return
from plexrl_controller.dispatch.ledger import Batch
from plexrl_controller.dispatch.pulls import weight_source
from plexrl_controller.dispatch.recovery import replay_orders, restore_order
from plexrl_controller.dispatch.replays import replayed_call
from plexrl_controller.dispatch.sessions import grace_left_s, note_shares, tell_grants
from plexrl_controller.dispatch.views import group_view
from plexrl_controller.dispatch.yielding import ask_to_yield, yields_s
from plexrl_controller.domain.errors import ControllerError, DataLoss, NotFound, Unavailable
from plexrl_controller.domain.ids import WorkerId
from plexrl_controller.domain.records import Call, Interval, Worker
from plexrl_controller.domain.states import CallKind, CallReason, CallState, IntervalKind, ModelState
from plexrl_controller.lifecycle.calls import CallEvent
from plexrl_controller.lifecycle.machine import Effect
from plexrl_controller.scheduling.invariants import violations
from plexrl_controller.scheduling.next_slice import next_slice
from plexrl_controller.scheduling.plan import Hold, Serve, Wait, Yield
from plexrl_controller.scheduling.views import ReadyCall

MAX_ARGUMENT_BYTES = 256 * 1024 * 1024
"""Of calls given to one worker and not finished; a single call may be larger. Arguments in its payloads alone count."""

REJECTED_RETRY_S = 1.0
"""A decision that breaks an invariant is looked for anew after this long, should nothing wake the group before."""

READ_AGAIN_S = 1.0
"""Arguments that the payload store could not give are read again after this long, unless it says when."""

Spawn = Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]]


class GroupCycle:
    """Decides and dispatches for one worker. `spawn` runs what reads arguments back from the payload store."""

    def __init__(self, core: Core, worker_id: WorkerId, spawn: Spawn) -> None:
        self._core = core
        self._worker_id = worker_id
        self._spawn = spawn
        self._reading: asyncio.Task[None] | None = None

    def turn(self) -> None:
        """Decides until there is nothing more to give, and asks for the next turn where only time will bring one."""
        if self._reading is None:
            self._core.turns.wake_after(self._worker_id, self._step())
        if self._core.ledger.sessions:
            tell_grants(self._core, self._worker_id)

    def _step(self) -> float | None:
        """Returns seconds until it must be asked again, if it must."""
        core = self._core
        self._deploy_due()
        while True:
            now = core.clock.now()
            note_shares(core.ledger, self._worker_id, now)
            if (left_s := yields_s(core, self._worker_id, now)) is not None:
                return left_s
            view = group_view(core.ledger, self._worker_id, now)
            plan = next_slice(view, now, core.policy)
            broken = violations(view, plan)
            group = core.ledger.groups[self._worker_id]
            if broken and group.prefetched is not None:
                # A hint must never stand in the way: the worker gives up what there is no room for.
                group.prefetched = None
                continue
            if broken:
                core.invariant_violations += 1
                log.error("decision_rejected", worker=self._worker_id, violations=broken, decision=str(plan))
                return REJECTED_RETRY_S
            if not isinstance(plan.action, Serve):
                # After a Serve comes another decision, which sees its residency changes.
                begin_moves(core, self._worker_id, plan.background)
            match plan.action:
                case Yield(job_id=job_id):
                    if (left_s := grace_left_s(core, self._worker_id, job_id, now)) > 0.0:
                        return left_s
                    ask_to_yield(core, self._worker_id)
                    return core.policy.chunk_s
                case Wait(revoked=revoked):
                    group.held_since = None
                    if revoked is None:
                        group.revoked_at = None
                    elif group.revoked_at is None:
                        group.revoked_at = now
                    return max(0.0, plan.again_at - now) if plan.again_at is not None else None
                case Hold(until=until):
                    group.revoked_at = None
                    group.held_since = group.held_since if group.held_since is not None else now
                    return max(0.0, until - now)
                case Serve() as serve:
                    calls = self._at_hand(serve.calls)
                    if not calls:
                        return None
                    self._serve(serve, calls, now)

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
                recovering = model.state is ModelState.RECOVERING
                order = (
                    restore_order(core, model, worker) if recovering else core.orders.deploy(model, worker.incarnation)
                )
                # A next leader that does not know what a model was built from would run calls on it that the state
                # has in it already.
                self._send_once_durable(core.batch(), [order])

    def _replay(self, decision: Serve, calls: Sequence[ReadyCall], now: float) -> None:
        """Gives calls of a recovering model to be executed again. Their records do not change."""
        core, worker = self._core, self._core.ledger.workers[self._worker_id]
        model = core.ledger.models[decision.calls[0].model_id]
        orders = [*self._swaps(decision, worker), *replay_orders(core, model, calls, worker)]
        batch = core.batch()
        self._occupy(batch, decision, calls, now)
        # The number of this recovery, which fences its attempts, is durable before any of them is sent.
        self._send_once_durable(batch, orders)

    def _occupy(self, batch: Batch, decision: Serve, calls: Sequence[ReadyCall], now: float) -> None:
        """The group is the served job's from now on, and the swap is on its way."""
        group = self._core.ledger.groups[self._worker_id]
        group.revoked_at = None
        self._charge_hold(batch, now)
        if group.serving != decision.job_id:
            group.serving, group.slice_start = decision.job_id, now
            group.served_at[decision.job_id] = now
        group.on_device.difference_update(decision.evict)
        if decision.load is not None:
            group.on_device.add(decision.load)
            group.prefetched = None
        for ready in calls:
            group.used_at[ready.model_id] = now

    def _swaps(self, decision: Serve, worker: Worker) -> list[worker_pb2.Order]:
        if decision.load is None and not decision.evict:
            return []
        order = self._core.orders.swap(decision.load, decision.evict, worker.incarnation)
        self._core.ledger.groups[self._worker_id].swaps.add(order.order_id)
        return [order]

    def _at_hand(self, ready: Sequence[ReadyCall]) -> list[ReadyCall]:
        """The first of the calls, as many as have their arguments in memory and may be given to the worker as well.
        Where the first has not, its arguments are read and a turn follows.
        """
        ledger = self._core.ledger
        given_bytes: int | None = None
        calls: list[ReadyCall] = []
        for call in ready:
            record = self._record(call)
            spec = record.spec if record is not None else None
            if spec is not None and spec.inline is None:
                if given_bytes is None:
                    given_bytes = sum(_argument_bytes(c) for c in ledger.in_flight(self._worker_id))
                given_bytes += spec.size_bytes
                if given_bytes > MAX_ARGUMENT_BYTES and given_bytes > spec.size_bytes:
                    break
            if call.call_id not in ledger.specs:
                if not calls:
                    self._reading = self._spawn(self._read(call), f"read-{self._worker_id}")
                break
            calls.append(call)
        return calls

    def _record(self, ready: ReadyCall) -> Call | None:
        """A call's record: one to be executed again may have been acknowledged, and is in its model's log alone."""
        ledger = self._core.ledger
        return ledger.calls.get(ready.call_id) or replayed_call(ledger, ready.model_id, ready.call_id)

    async def _read(self, ready: ReadyCall) -> None:
        """Reads a call's arguments back; a call, or a model that is rebuilt, whose arguments are lost fails here."""
        core = self._core
        try:
            call = self._record(ready)
            if call is not None:
                await core.spec(call)
        except (DataLoss, NotFound) as error:
            batch = core.batch()
            call, model = self._record(ready), core.ledger.models.get(ready.model_id)
            if model is not None and model.state is ModelState.RECOVERING:
                give_up_state(batch, model, f"the arguments of a call to execute again are gone: {error.message}")
            elif call is not None and call.state in (CallState.PENDING, CallState.YIELDED):
                fail(batch, call, CallReason.ENGINE_ERROR, error.message)
            core.queue(batch)
        except Unavailable as error:
            # The arguments are where they were: the call waits for the storage, and nobody else does.
            log.warning("arguments_not_read", call=ready.call_id, detail=error.message)
            await asyncio.sleep(error.retry_after_s or READ_AGAIN_S)
        finally:
            self._reading = None
            core.wake(self._worker_id)

    def _serve(self, decision: Serve, calls: Sequence[ReadyCall], now: float) -> None:
        core, ledger = self._core, self._core.ledger
        worker = ledger.workers[self._worker_id]
        if ledger.models[decision.calls[0].model_id].state is ModelState.RECOVERING:
            self._replay(decision, calls, now)
            return
        in_flight = ledger.in_flight(self._worker_id)
        batch = core.batch()
        orders = self._swaps(decision, worker)
        # A job waits while it has something to run and nothing of it runs.
        idle, waited_s = not any(call.job_id == decision.job_id for call in in_flight), 0.0
        yielded = any(ledger.calls[ready.call_id].state is CallState.YIELDED for ready in calls)
        if not in_flight:
            ledger.groups[self._worker_id].chunk_start = now
        if idle and not yielded:
            learn_return(ledger, self._worker_id, decision.job_id, min(ready.ready_since for ready in calls))
        for ready in calls:
            call = ledger.calls[ready.call_id]
            since = ledger.ready_since.pop(call.call_id, now)
            waited_s = max(waited_s, now - since) if idle else 0.0
            if call.state is CallState.YIELDED:
                call = batch.transition(call, CallEvent.CONTINUE, start_time=call.start_time or now)
            else:
                call = batch.transition(
                    call,
                    CallEvent.DISPATCH,
                    attempt=call.attempt + 1,
                    leader_term=core.term,
                    worker_id=worker.worker_id,
                    worker_incarnation=worker.incarnation,
                )
            run = core.orders.run(
                call,
                self._spec(call),
                ready.after_sequence,
                concurrent=ready.concurrent,
                weights=weight_source(ledger, call) if call.source_model_id is not None else None,
            )
            if call.kind is CallKind.GENERATE:
                ledger.run_orders[call.call_id] = run.order_id
            orders.append(run)
        if (facts := ledger.facts.get(decision.job_id)) is not None:
            facts.wait_s += waited_s
        self._occupy(batch, decision, calls, now)
        batch.take(Effect.SEND_ORDER)
        if self._may_leave_now(calls, orders):
            core.queue(batch)
            self._send(orders)
        else:
            self._send_once_durable(batch, orders)

    def _may_leave_now(self, calls: Sequence[ReadyCall], orders: Sequence[worker_pb2.Order]) -> bool:
        """Whether orders need not wait for the commit: generates and nothing else, on what the device holds.

        They change nothing, and nobody hears of them before they are durable: when this controller dies first, who
        wanted them asks again, and its successor has what nobody wants any more stopped. What waits goes first.
        """
        alone = len(orders) == len(calls)
        waiting = self._core.ledger.groups[self._worker_id].held_orders
        return alone and not waiting and all(ready.kind is CallKind.GENERATE for ready in calls)

    def _send_once_durable(self, batch: Batch, orders: Sequence[worker_pb2.Order]) -> None:
        """Sends orders when all that was decided so far is durable, `batch` included."""
        group = self._core.ledger.groups[self._worker_id]
        group.held_orders += 1

        def tell(error: ControllerError | None) -> None:
            group.held_orders -= 1
            if error is None:
                self._send(orders)

        self._core.queue(batch, tell)

    def _send(self, orders: Sequence[worker_pb2.Order]) -> None:
        self._core.transport.send(self._worker_id, orders)

    def _spec(self, call: Call) -> types_pb2.CallSpec:
        """A call's arguments; large ones leave memory with the order and are read again should it be sent again."""
        specs = self._core.ledger.specs
        large = call.spec is not None and call.spec.inline is None
        return specs.pop(call.call_id) if large else specs[call.call_id]

    def _charge_hold(self, batch: Batch, now: float) -> None:
        """Device time that was kept idle for a job while others waited is that job's."""
        group = self._core.ledger.groups[self._worker_id]
        held_since, group.held_since = group.held_since, None
        if held_since is None or now - held_since < 1e-3:
            return
        holder = group.serving
        models = self._core.ledger.models_of_job.get(holder) if holder is not None else None
        if holder is not None and models:
            held = Interval(
                kind=IntervalKind.HOLD,
                worker_id=self._worker_id,
                job_id=holder,
                model_id=next(iter(models)),
                call_id=None,
                call_kind=None,
                start_unix_ns=int(held_since * 1e9),
                end_unix_ns=int(now * 1e9),
            )
            batch.interval(held)
            learn_interval(self._core.ledger, held, now)


def _argument_bytes(call: Call) -> int:
    """Bytes of arguments that are too large for the call's row."""
    return call.spec.size_bytes if call.spec is not None and call.spec.inline is None else 0
