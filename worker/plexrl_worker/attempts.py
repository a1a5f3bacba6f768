"""Executions of calls that this life knows: none runs twice, and a known outcome is said again. Pure bookkeeping."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from plexrl.v1 import registry_pb2 as r
from plexrl.v1 import worker_pb2 as w
from plexrl_worker.errors import StaleAttempt, WorkerError

MAX_OUTCOMES = 1024
MAX_OUTCOME_BYTES = 256 * 1024 * 1024


def _ended(_: WorkerError) -> None:
    """There is nothing to stop any more."""


def _nothing() -> None:
    """There is nothing that could give way."""


@dataclass
class Attempt:
    """One execution: on its way while `outcome` is None.

    stop: ends it as soon as can be, for a reason. end: says now that it ended, whatever it still does. give_way: parks
    it at its next step. sinks: everybody who ordered it, and hears how it ends.
    """

    call_id: str
    number: int
    order_id: int
    model_id: str
    stop: Callable[[WorkerError], None]
    end: Callable[[WorkerError], None]
    give_way: Callable[[], None] = _nothing
    sinks: list[Callable[[w.Report], None]] = field(default_factory=list)
    outcome: w.OrderFinished | None = None
    outcome_bytes: int = 0
    parked: bool = False
    """It gave way: it is here, and waits to be ordered again."""

    def tell(self, report: w.Report) -> None:
        """Tells everybody who ordered it."""
        for sink in self.sinks:
            sink(report)

    def let_go(self) -> None:
        """Keeps the outcome alone: what it was ordered with, megabytes perhaps, must not be remembered with it."""
        self.stop = self.end = _ended
        self.give_way = _nothing
        self.sinks = []


class AttemptLog:
    """The newest attempt of each call. Outcomes are kept within bounds, oldest forgotten first."""

    def __init__(self, max_outcomes: int = MAX_OUTCOMES, max_outcome_bytes: int = MAX_OUTCOME_BYTES) -> None:
        self._max_outcomes = max_outcomes
        self._max_outcome_bytes = max_outcome_bytes
        self._running: dict[str, Attempt] = {}
        self._finished: OrderedDict[str, Attempt] = OrderedDict()
        self._finished_bytes = 0

    def find(self, call: r.CallAttempt) -> Attempt | None:
        """The attempt if it is known, running or finished. Raises StaleAttempt when a newer one is."""
        known = self._running.get(call.call_id) or self._finished.get(call.call_id)
        if known is None or known.number < call.attempt:
            return None
        if known.number > call.attempt:
            raise StaleAttempt(f"attempt {call.attempt} of call {call.call_id}: attempt {known.number} is known here")
        return known

    def running(self, call_id: str) -> Attempt | None:
        """The attempt of a call that runs or is queued."""
        return self._running.get(call_id)

    def all_running(self) -> list[Attempt]:
        """Everything that runs or is queued."""
        return list(self._running.values())

    def begin(self, attempt: Attempt) -> None:
        """A new attempt is on its way."""
        if older := self._finished.pop(attempt.call_id, None):
            self._finished_bytes -= older.outcome_bytes
        self._running[attempt.call_id] = attempt

    def finish(self, attempt: Attempt, outcome: w.OrderFinished) -> None:
        """An attempt ended. One that a newer attempt has superseded is not remembered."""
        attempt.outcome, attempt.outcome_bytes = outcome, outcome.ByteSize()
        if self._running.get(attempt.call_id) is not attempt:
            return
        del self._running[attempt.call_id]
        self._finished[attempt.call_id] = attempt
        self._finished_bytes += attempt.outcome_bytes
        while len(self._finished) > self._max_outcomes or (
            self._finished_bytes > self._max_outcome_bytes and len(self._finished) > 1
        ):
            _, oldest = self._finished.popitem(last=False)
            self._finished_bytes -= oldest.outcome_bytes

    def forget(self, model_id: str) -> None:
        """The state that a model's executions had their effect on is replaced: their outcomes are over."""
        for call_id in [a.call_id for a in self._finished.values() if a.model_id == model_id]:
            self._finished_bytes -= self._finished.pop(call_id).outcome_bytes

    def clear(self) -> None:
        """Forgets all: a new life begins."""
        self._running.clear()
        self._finished.clear()
        self._finished_bytes = 0
