"""Virtual time: a clock that moves only when told to, and runs what falls due on the way, in order.

Knows numbers of seconds and callbacks; knows nothing of clusters, wall clocks or event loops.
"""

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

EPOCH = datetime(2026, 1, 1, tzinfo=UTC)


@dataclass(order=True, slots=True)
class Timer:
    """A callback that is due at a time. Timers of the same time run in the order in which they were set."""

    due_s: float
    order: int
    callback: Callable[[], None] | None = field(compare=False)

    def cancel(self) -> None:
        """The callback will not run. Cancelling twice, or after it ran, does nothing."""
        self.callback = None


class VirtualClock:
    """Seconds since `epoch`."""

    def __init__(self, epoch: datetime = EPOCH) -> None:
        self.epoch = epoch
        self._now_s = 0.0
        self._timers: list[Timer] = []
        self._set = 0

    @property
    def now_s(self) -> float:
        return self._now_s

    def call_at(self, due_s: float, callback: Callable[[], None]) -> Timer:
        """Sets a timer; one in the past is due now. An infinite time is never due.

        Raises ValueError for NaN.
        """
        if math.isnan(due_s):
            raise ValueError("due_s: want a time, not NaN")
        timer = Timer(max(due_s, self._now_s), self._set, callback)
        self._set += 1
        if due_s < math.inf:
            heapq.heappush(self._timers, timer)
        return timer

    def next_due_s(self) -> float | None:
        """When the next timer is due, or None."""
        while self._timers and self._timers[0].callback is None:
            heapq.heappop(self._timers)
        return self._timers[0].due_s if self._timers else None

    def run_next(self) -> None:
        """Moves to the next timer's time and runs that timer alone. Raises LookupError when there is none."""
        if self.next_due_s() is None:
            raise LookupError("no timer is set")
        timer = heapq.heappop(self._timers)
        callback, timer.callback = timer.callback, None
        self._now_s = timer.due_s
        if callback is not None:
            callback()

    def move_to(self, now_s: float) -> None:
        """Moves forward over an empty stretch. Raises ValueError if a timer is due before, or for a step back."""
        due_s = self.next_due_s()
        if not self._now_s <= now_s < math.inf:
            raise ValueError(f"now_s: want a time from {self._now_s} on, not {now_s}")
        if due_s is not None and due_s < now_s:
            raise ValueError(f"now_s: a timer is due at {due_s}, before {now_s}")
        self._now_s = now_s

    def datetime_at(self, at_s: float) -> datetime:
        return self.epoch + timedelta(seconds=at_s)

    def timestamp(self) -> str:
        """Now as Kubernetes writes times: RFC 3339, whole seconds, UTC."""
        return self.datetime_at(self._now_s).strftime("%Y-%m-%dT%H:%M:%SZ")

    def micro_timestamp(self) -> str:
        """Now with microseconds, as in leases and events."""
        return self.datetime_at(self._now_s).strftime("%Y-%m-%dT%H:%M:%S.%fZ")

    def seconds_since(self, timestamp: str) -> float:
        """Age of a Kubernetes timestamp at this moment."""
        return self._now_s - (datetime.fromisoformat(timestamp) - self.epoch).total_seconds()
