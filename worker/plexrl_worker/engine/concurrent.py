"""Generates that run together, but for what an engine computes: one alone is the least of them; whose time it was."""

from collections.abc import Callable, Sequence

from plexrl_worker.engine.errors import EngineError
from plexrl_worker.engine.port import Arrivals, ConcurrentGenerate, Generation


class _Alone:
    """Arrivals of one generate that nobody joins."""

    def __init__(self, generate: ConcurrentGenerate) -> None:
        self._coming = [generate]
        self.outcome: Generation | EngineError | None = None

    def take(self) -> Sequence[ConcurrentGenerate]:
        """See port.Arrivals."""
        coming, self._coming = self._coming, []
        return coming

    def ended(self, generate: ConcurrentGenerate, outcome: Generation | EngineError) -> None:
        """See port.Arrivals."""
        self.outcome = outcome


def alone(run: Callable[[Arrivals], None], generate: ConcurrentGenerate) -> Generation:
    """One generate through `run`, which runs generates together. Raises what it ends with."""
    arrivals = _Alone(generate)
    run(arrivals)
    if isinstance(arrivals.outcome, EngineError):
        raise arrivals.outcome
    assert arrivals.outcome is not None
    return arrivals.outcome


class Checked:
    """Arrivals of which only those come through that `check` does not refuse by an EngineError: they end with that."""

    def __init__(self, arrivals: Arrivals, check: Callable[[ConcurrentGenerate], None]) -> None:
        self._arrivals = arrivals
        self._check = check

    def take(self) -> Sequence[ConcurrentGenerate]:
        """See port.Arrivals."""
        taken: list[ConcurrentGenerate] = []
        for generate in self._arrivals.take():
            try:
                self._check(generate)
            except EngineError as error:
                self._arrivals.ended(generate, error)
            else:
                taken.append(generate)
        return taken

    def ended(self, generate: ConcurrentGenerate, outcome: Generation | EngineError) -> None:
        """See port.Arrivals."""
        self._arrivals.ended(generate, outcome)


class SharedTime:
    """Divides a stretch of time among the functions that run in it: at each moment, equally among those that are there.

    Told the time, in nanoseconds: a clock that is set back meanwhile costs what passed, and no share is negative. At
    least one function is there from the first to the last.
    """

    def __init__(self, now_ns: int) -> None:
        self._start_ns = self._last_ns = now_ns
        self._given_ns = 0.0
        """Shares of those that have left: the next one's stretch is laid behind them."""
        self._each_ns = 0.0
        """What a function has had that was there all the time."""
        self._joined: dict[int, float] = {}

    def join(self, number: int, now_ns: int) -> None:
        """A function begins."""
        self._advance(now_ns)
        self._joined[number] = self._each_ns

    def leave(self, number: int, now_ns: int) -> tuple[int, int]:
        """A function ends: where its stretch begins and ends, which is as long as its share and overlaps no other's."""
        self._advance(now_ns)
        start_ns = self._start_ns + round(self._given_ns)
        self._given_ns += self._each_ns - self._joined.pop(number)
        return start_ns, self._start_ns + round(self._given_ns)

    def _advance(self, now_ns: int) -> None:
        if self._joined:
            self._each_ns += max(0, now_ns - self._last_ns) / len(self._joined)
        self._last_ns = now_ns
