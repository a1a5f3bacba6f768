"""What is said of an order: that it began, how far it is, how it ended, what it made of the models that it touched."""

import time

import structlog

from plexrl import wire
from plexrl.v1 import registry_pb2 as r
from plexrl.v1 import types_pb2 as t
from plexrl.v1 import worker_pb2 as w
from plexrl_worker.engine.call import ProgressListener
from plexrl_worker.errors import EngineFailed, WorkerError, to_status
from plexrl_worker.fences import Fences
from plexrl_worker.host import ModelHost
from plexrl_worker.work import Work

_log = structlog.get_logger(__name__)

_PROGRESS_INTERVAL_S = 0.2
# A report must fit a message, with room for its frame.
_MAX_RESULT_BYTES = wire.MAX_MESSAGE_BYTES - 1024 * 1024


class OrderReports:
    """Makes the reports of this worker's orders; whoever has them made sends them."""

    def __init__(self, host: ModelHost, fences: Fences) -> None:
        self._host = host
        self._fences = fences

    def finished(self, work: Work, outcome: w.OrderFinished) -> w.Report:
        """How it ended, the device time that it took, and how the models that it touched stand."""
        return self._with_effects(work, _report(work, finished=outcome))

    def refused(self, order: w.Order, error: WorkerError) -> w.Report:
        """Why it was not even queued."""
        _log.warning("order_refused", order_id=order.order_id, reason=error.reason, message=error.message)
        return _report(Work(order, lambda _: None), finished=w.OrderFinished(error=to_status(error)))

    def started(self, work: Work) -> w.Report:
        """It has the device."""
        return _report(work, started=w.OrderStarted())

    def progress(self, work: Work, done: int, total: int) -> w.Report:
        """How far it is."""
        return _report(work, progress=w.OrderProgress(done=done, total=total))

    def gave_way(self, work: Work, done: int, total: int) -> w.Report:
        """It stopped for another job's sake, as far as this, and can go on."""
        report = self._with_effects(work, _report(work))
        report.yielded.CopyFrom(w.OrderYielded(done=done, total=total))
        return report

    def parked(self, work: Work) -> w.Report:
        """It gave way before, and that has been said."""
        return _report(work, yielded=w.OrderYielded())

    def unordered(self, model_ids: set[str]) -> w.Report:
        """How models stand that no order changed."""
        return w.Report(
            worker_incarnation=self._fences.worker_incarnation,
            deployments=[self._host.status(model_id) for model_id in sorted(model_ids)],
        )

    def _with_effects(self, work: Work, report: w.Report) -> w.Report:
        intervals, touched = work.journal.take()
        report.intervals.extend(intervals)
        report.deployments.extend(self._host.status(model_id) for model_id in sorted(touched))
        return report


def call_status(
    work: Work,
    call: r.CallAttempt,
    *,
    yielded: w.OrderYielded | None = None,
    finished: w.OrderFinished | None = None,
) -> w.Report:
    """How a call stands that another order is about."""
    return w.Report(
        order_id=work.order.order_id,
        worker_incarnation=work.order.worker_incarnation,
        call=call,
        yielded=yielded,
        finished=finished,
    )


class Throttled:
    """Lets through a few progress reports a second."""

    def __init__(self, listener: ProgressListener) -> None:
        self._listener = listener
        self._next_s = 0.0

    def __call__(self, done: int, total: int) -> None:
        if time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + _PROGRESS_INTERVAL_S
            self._listener(done, total)


def generated(outcome: t.GenerateResult | WorkerError) -> w.OrderFinished:
    """The outcome of a generate call, an error where it is too large to be told."""
    if isinstance(outcome, WorkerError):
        return w.OrderFinished(error=to_status(outcome))
    finished = w.OrderFinished()
    finished.result.generate.CopyFrom(outcome)
    try:
        return bounded(finished)
    except EngineFailed as error:
        return w.OrderFinished(error=to_status(error))


def bounded(finished: w.OrderFinished) -> w.OrderFinished:
    """The outcome, if a report can carry it. Raises EngineFailed."""
    size_bytes = finished.ByteSize()
    if size_bytes > _MAX_RESULT_BYTES:
        raise EngineFailed(
            f"the result has {size_bytes} bytes, the limit is {_MAX_RESULT_BYTES}: ask for less in one call"
        )
    return finished


def _report(
    work: Work,
    *,
    started: w.OrderStarted | None = None,
    progress: w.OrderProgress | None = None,
    finished: w.OrderFinished | None = None,
    yielded: w.OrderYielded | None = None,
) -> w.Report:
    order = work.order
    return w.Report(
        order_id=work.attempt.order_id if work.attempt else order.order_id,
        # The life that the order was for: a late report of an older life must not pass for one of this.
        worker_incarnation=order.worker_incarnation,
        # An abort's report names no call: being heard is not how a call ended.
        call=order.run_call.call if order.HasField("run_call") else None,
        started=started,
        progress=progress,
        finished=finished,
        yielded=yielded,
    )
