"""Takes orders, runs each once in its lane, and reports.

Four lanes, each in order: placement (deploy, drop), which may wait for an engine to start, and device (swap,
run_call), snapshots and prefetches, which wait for their model's placement only. Abort and yield act at once.
Whatever touches the device queues for its lock.
"""

import asyncio
from collections.abc import Awaitable

import structlog

from plexrl.v1 import registry_pb2 as r
from plexrl.v1 import worker_pb2 as w
from plexrl_worker.attempts import Attempt, AttemptLog
from plexrl_worker.calls import CallRunner, GaveWay, Outcome
from plexrl_worker.errors import (
    Cancelled,
    EngineFailed,
    InvalidOrder,
    ShuttingDown,
    WorkerError,
    to_status,
)
from plexrl_worker.execution import Execution, execution_name
from plexrl_worker.fences import Fences
from plexrl_worker.host import ModelHost
from plexrl_worker.journal import Journal
from plexrl_worker.lanes import Lane
from plexrl_worker.order_reports import OrderReports, Throttled, bounded, call_status, generated
from plexrl_worker.outbox import Outbox
from plexrl_worker.placement import Placement
from plexrl_worker.snapshotter import Snapshotter
from plexrl_worker.weight_pull import WeightPuller
from plexrl_worker.work import Sink, Work, generates

_log = structlog.get_logger(__name__)

MAX_QUEUED_ORDERS = 4096

_STOPPING = ShuttingDown("this worker is stopping; its next life, or another worker, can take the order")
_NOT_WANTED = Cancelled("the call was stopped: nobody waits for it any more, or its model goes")


class OrderDesk:
    """All orders of this worker."""

    def __init__(
        self, host: ModelHost, placement: Placement, puller: WeightPuller, fences: Fences, outbox: Outbox
    ) -> None:
        self._host = host
        self._placement = placement
        self._runner = CallRunner(host, puller)
        self._snapshotter = Snapshotter(host)
        self._fences = fences
        self._reports = OrderReports(host, fences)
        self._outbox = outbox
        self._attempts = AttemptLog()
        self._placing: dict[str, asyncio.Future[None]] = {}
        self._placement_lane: Lane[Work] = Lane(MAX_QUEUED_ORDERS)
        self._device_lane: Lane[Work] = Lane(MAX_QUEUED_ORDERS)
        self._snapshot_lane: Lane[Work] = Lane(MAX_QUEUED_ORDERS)
        self._prefetch_lane: Lane[Work] = Lane(MAX_QUEUED_ORDERS)
        self._lanes = (self._placement_lane, self._device_lane, self._snapshot_lane, self._prefetch_lane)
        self.lanes: list[asyncio.Task[None]] = []
        self._closed = False
        self._running: set[asyncio.Future[None]] = set()
        host.on_unordered_change = lambda model_ids: outbox.put(self._reports.unordered(model_ids))

    def start(self) -> None:
        """Begins to run what is queued."""
        self.lanes = [asyncio.create_task(self._run_lane(lane)) for lane in self._lanes]

    async def hand_back(self, limit_s: float) -> None:
        """Takes no more orders, and ends every one that it has: at once, or a running call after its present step.

        What still runs after `limit_s` is said to have ended, and left to the end of its engine.
        """
        self._closed = True
        for lane in self._lanes:
            for work in lane.drain():
                self._refuse(work, _STOPPING)
        for attempt in self._attempts.all_running():
            attempt.stop(_STOPPING)
        if self._running:
            await asyncio.wait(self._running, timeout=limit_s)
        for attempt in self._attempts.all_running():
            attempt.end(_STOPPING)

    async def close(self) -> None:
        """Ends the lanes."""
        self._closed = True
        for lane in self.lanes:
            lane.cancel()
        await asyncio.gather(*self.lanes, return_exceptions=True)
        self._snapshotter.close()

    def running(self) -> list[r.CallAttempt]:
        """Calls that run or are queued."""
        return [r.CallAttempt(call_id=a.call_id, attempt=a.number) for a in self._attempts.all_running()]

    def submit(self, order: w.Order, sink: Sink | None = None) -> None:
        """Takes an order; every outcome, refusal included, is a report."""
        sink = sink or self._outbox.put
        try:
            self._fences.check(order.leader_term, order.worker_incarnation)
            if self._closed:
                raise ShuttingDown("this worker is stopping and takes no orders")
            self._accept(Work(order, sink))
        except WorkerError as error:
            sink(self._reports.refused(order, error))

    async def reset(self) -> None:
        """A new life: stops what runs, forgets every outcome and report, drops every model."""
        for attempt in self._attempts.all_running():
            attempt.stop(_NOT_WANTED)
        for lane in self._lanes:
            for work in lane.drain():
                work.done.set_result(None)
        self._attempts.clear()
        await self._host.drop_all(Journal())
        self._outbox.clear()

    def placing(self) -> set[str]:
        """Models with a deployment or a drop queued or running."""
        return set(self._placing)

    async def drop_models(self, model_ids: set[str]) -> None:
        """Drops models that no longer belong here, behind the placements that are queued."""
        for model_id in model_ids:
            order = w.Order(drop=w.DropOrder(model_id=model_id))
            self._accept(Work(order, sink=lambda _: None))

    # Accepting.

    def _accept(self, work: Work) -> None:
        order = work.order
        match order.WhichOneof("action"):
            case "deploy":
                self._place(work, order.deploy.model_id)
            case "drop":
                self._abort_calls_of(order.drop.model_id)
                self._place(work, order.drop.model_id)
            case "swap_weights":
                swap = order.swap_weights
                self._queue(self._device_lane, work, [*swap.evict_model_ids, swap.load_model_id])
            case "run_call":
                self._accept_call(work)
            case "snapshot":
                self._queue(self._snapshot_lane, work, [order.snapshot.model_id])
            case "expire_snapshots":
                self._snapshot_lane.put(work)
            case "prefetch":
                self._queue(self._prefetch_lane, work, [order.prefetch.model_id])
            case "abort":
                self._abort(work)
            case "yield_call":
                self._yield(work)
            case _:
                raise InvalidOrder("order.action: not set, want one of the actions of Order")

    def _accept_call(self, work: Work) -> None:
        order = work.order.run_call
        if not order.call.call_id or not order.call.attempt:
            raise InvalidOrder("run_call.call: call_id and attempt must be set")
        known = self._attempts.find(order.call)
        if known is not None and known.outcome is not None:
            work.sink(self._reports.finished(work, known.outcome))
            return
        if known is not None and not known.parked:
            known.order_id = work.order.order_id
            if work.sink not in known.sinks:
                known.sinks.append(work.sink)
            return
        # One that is parked goes on as a new piece of work under the same name.
        if known is None and (older := self._attempts.running(order.call.call_id)):
            older.stop(_NOT_WANTED)
        work.execution = Execution(
            order,
            on_begin=lambda: work.sink(self._reports.started(work)),
            on_progress=Throttled(lambda done, total: work.sink(self._reports.progress(work, done, total))),
            journal=work.journal,
        )
        work.attempt = Attempt(
            call_id=order.call.call_id,
            number=order.call.attempt,
            order_id=work.order.order_id,
            model_id=order.model_id,
            stop=lambda reason: self._stop(work, reason),
            end=lambda reason: self._end_call(work, w.OrderFinished(error=to_status(reason))),
            give_way=lambda: self._give_way(work),
            sinks=[work.sink],
        )
        self._queue(self._device_lane, work, [order.model_id])
        self._attempts.begin(work.attempt)

    def _stop(self, work: Work, reason: WorkerError) -> None:
        """Ends a call at its next step; one that has not begun ends here and now, whatever it queues behind."""
        assert work.execution is not None
        assert work.attempt is not None
        work.stopped = reason
        work.execution.abort()
        if work.attempt.parked or not work.execution.begun:
            work.attempt.end(reason)

    def _refuse(self, work: Work, reason: WorkerError) -> None:
        """Ends a queued order that will not be run."""
        if work.attempt is not None:
            work.attempt.end(reason)
        else:
            work.sink(self._reports.finished(work, w.OrderFinished(error=to_status(reason))))
        work.done.set_result(None)

    def _end_call(self, work: Work, outcome: w.OrderFinished) -> None:
        assert work.attempt is not None
        if work.execution is not None:
            work.execution.end()
            if outcome.HasField("error") and generates(work):
                # It may have given way before, and not have come to go on.
                self._host.forget_execution(work.attempt.model_id, execution_name(work.execution.order))
        if work.attempt.outcome is None:
            self._attempts.finish(work.attempt, outcome)
            work.attempt.tell(self._reports.finished(work, outcome))
            work.attempt.let_go()
            work.execution = None

    def _place(self, work: Work, model_id: str) -> None:
        if not model_id:
            raise InvalidOrder("model_id: not set")
        self._placement_lane.put(work)
        self._placing[model_id] = work.done
        work.done.add_done_callback(lambda done: self._placed(model_id, done))

    def _placed(self, model_id: str, done: asyncio.Future[None]) -> None:
        if self._placing.get(model_id) is done:
            del self._placing[model_id]

    def _queue(self, lane: Lane[Work], work: Work, model_ids: list[str]) -> None:
        """Behind the placements of the models that it needs."""
        if self._placing:
            work.after = tuple(self._placing[model_id] for model_id in model_ids if model_id in self._placing)
        lane.put(work)

    def _abort(self, work: Work) -> None:
        call = work.order.abort.call
        attempt = self._attempts.running(call.call_id)
        if attempt is not None and attempt.number == call.attempt:
            attempt.stop(_NOT_WANTED)
        work.sink(self._reports.finished(work, w.OrderFinished()))

    def _yield(self, work: Work) -> None:
        call = work.order.yield_call.call
        attempt = self._attempts.find(call)
        if attempt is None:
            # Nothing of it is here: it begins when it is ordered.
            work.sink(call_status(work, call, yielded=w.OrderYielded()))
        elif attempt.outcome is not None:
            work.sink(call_status(work, call, finished=attempt.outcome))
        else:
            attempt.give_way()
        work.sink(self._reports.finished(work, w.OrderFinished()))

    def _give_way(self, work: Work) -> None:
        """Has a generate stop at its next step; what is queued or parked has stopped already."""
        assert work.execution is not None
        assert work.attempt is not None
        if not generates(work) or work.stopped is not None:
            return
        if work.attempt.parked:
            work.sink(self._reports.parked(work))
        elif not work.execution.give_way() and not work.execution.begun:
            self._park(work, GaveWay(0, 0))

    def _park(self, work: Work, gave_way: GaveWay) -> None:
        """A generate waits to be ordered again. One that was stopped meanwhile ends, if it has not ended yet."""
        if work.attempt is not None and work.attempt.outcome is not None:
            return
        assert work.execution is not None
        assert work.attempt is not None
        work.execution.end()
        work.attempt.parked = True
        if work.stopped is not None:
            self._stop(work, work.stopped)
            return
        work.attempt.tell(self._reports.gave_way(work, gave_way.done, gave_way.total))

    def _abort_calls_of(self, model_id: str) -> None:
        for attempt in self._attempts.all_running():
            if attempt.model_id == model_id:
                attempt.stop(_NOT_WANTED)

    # Running.

    async def _run_lane(self, lane: Lane[Work]) -> None:
        while True:
            work = await lane.get()
            self._running.add(work.done)
            work.done.add_done_callback(self._running.discard)
            try:
                for placement in work.after:
                    await placement
                if generates(work):
                    await self._run_generates(work)
                else:
                    await self._run(work)
            except asyncio.CancelledError:
                self._refuse(work, _STOPPING)
                raise
            finally:
                if not work.done.done():
                    work.done.set_result(None)
            del work  # its arguments need not wait for the next order

    async def _run(self, work: Work) -> None:
        order = work.order
        match order.WhichOneof("action"):
            case "deploy":
                work.sink(self._reports.finished(work, await self._outcome(work, self._deploy(work))))
            case "drop":
                work.sink(self._reports.finished(work, await self._outcome(work, self._drop(work))))
            case "swap_weights":
                work.sink(self._reports.finished(work, await self._outcome(work, self._swap(work))))
            case "snapshot":
                work.sink(self._reports.finished(work, await self._outcome(work, self._snapshot(work))))
            case "expire_snapshots":
                work.sink(self._reports.finished(work, await self._outcome(work, self._expire(work))))
            case "prefetch":
                work.sink(self._reports.finished(work, await self._outcome(work, self._prefetch(work))))
            case "run_call":
                if work.attempt is not None and work.attempt.outcome is None:
                    self._end_call(work, await self._outcome(work, self._call(work)))
            case action:
                raise InvalidOrder(f"order.action: {action} has no lane")

    async def _run_generates(self, first: Work) -> None:
        """Runs a generate call and those of the same model, concurrent like it or not, that come right behind it."""
        model_id, concurrent = first.order.run_call.model_id, first.order.run_call.concurrent
        works: dict[int, Work] = {}

        def wanted(work: Work) -> bool:
            run = work.order.run_call
            return generates(work) and (run.model_id, run.concurrent) == (model_id, concurrent) and not work.after

        def following() -> Execution | None:
            while (work := self._device_lane.take_if(wanted)) is not None:
                if (execution := self._due(work)) is not None:
                    works[id(execution)] = work
                    return execution
            return None

        def ended(execution: Execution, outcome: Outcome) -> None:
            work = works.pop(id(execution))
            if isinstance(outcome, Cancelled) and work.stopped is not None:
                outcome = work.stopped
            if isinstance(outcome, GaveWay):
                self._park(work, outcome)
            else:
                self._end_call(work, generated(outcome))

        if (execution := self._due(first)) is None:
            return
        works[id(execution)] = first
        try:
            if concurrent:
                came = asyncio.Event()
                self._device_lane.on_put = came.set
                await self._runner.run_concurrent(execution, following, ended, came)
            else:
                await self._runner.run_generates(execution, following, ended)
        except Exception as error:  # noqa: BLE001 - as in `_outcome`
            _log.exception("generates_failed", model_id=model_id, calls=len(works))
            failure = EngineFailed(f"a fault of the worker: {error!r}")
            for work in works.values():
                self._end_call(work, w.OrderFinished(error=to_status(failure)))
        finally:
            self._device_lane.on_put = None

    def _due(self, work: Work) -> Execution | None:
        """The execution of a call that has neither ended nor given way while it was queued."""
        attempt = work.attempt
        return work.execution if attempt is not None and attempt.outcome is None and not attempt.parked else None

    async def _outcome(self, work: Work, doing: Awaitable[w.OrderFinished]) -> w.OrderFinished:
        """How an order ended. A fault that no order explains ends this order, not the daemon and all its models."""
        try:
            return await doing
        except Cancelled as error:
            return w.OrderFinished(error=to_status(work.stopped or error))
        except WorkerError as error:
            return w.OrderFinished(error=to_status(error))
        except Exception as error:  # noqa: BLE001
            _log.exception("order_failed", order_id=work.order.order_id, action=work.order.WhichOneof("action"))
            return w.OrderFinished(error=to_status(EngineFailed(f"a fault of the worker: {error!r}")))

    async def _deploy(self, work: Work) -> w.OrderFinished:
        order = work.order.deploy
        if not self._placement.stands(order):
            # What was executed on the state that goes now must be executed again on the new one, not only said again.
            self._attempts.forget(order.model_id)
        return w.OrderFinished(deployed=await self._placement.deploy(order, work.journal))

    async def _drop(self, work: Work) -> w.OrderFinished:
        await self._host.drop(work.order.drop.model_id, work.journal)
        return w.OrderFinished()

    async def _swap(self, work: Work) -> w.OrderFinished:
        await self._host.swap(work.order.swap_weights, work.journal)
        return w.OrderFinished()

    async def _prefetch(self, work: Work) -> w.OrderFinished:
        # Its report says nothing of residency: a swap of the same model may be on its way, and would be taken back.
        await self._host.prefetch(work.order.prefetch)
        return w.OrderFinished()

    async def _snapshot(self, work: Work) -> w.OrderFinished:
        return w.OrderFinished(snapshot=await self._snapshotter.take(work.order.snapshot, work.journal))

    async def _expire(self, work: Work) -> w.OrderFinished:
        await self._snapshotter.expire(list(work.order.expire_snapshots.snapshot_ids))
        return w.OrderFinished()

    async def _call(self, work: Work) -> w.OrderFinished:
        assert work.execution is not None
        return bounded(w.OrderFinished(result=await self._runner.run(work.execution)))
