"""Agents that learn how long an operation takes from what they saw: intervals, never exact times.

A look in vain at a and a successful one at b say only a < T <= b. What the next schedule is planned on is a histogram
over logarithmic bins of time, and `estimates` has two ways to come by it. What came before a drift is forgotten.

Knows the interface, estimates and dynamic programming; knows no laws.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from plexrl.waiting.agents.estimates import BayesianGamma, Estimate, Interval, SmoothedTurnbull, grid
from plexrl.waiting.agents.interface import Action, History, Observation, Record, wait_by
from plexrl.waiting.dynamic_programming import best_looks
from plexrl.waiting.laws import FloatArray


class DriftDetector:
    """CUSUM charts (Page 1954), one per factor: has everything begun to take that many times as long?

    A chart sums how much likelier the seen intervals are under the stretched estimate than under the estimate made
    before them, and starts anew whenever that falls below nothing. What a look has not told apart counts for what it
    is: if all finish before the first look, that too becomes unlikely in time.
    """

    FACTORS = (1 / 3, 1 / 2, 2.0, 3.0)
    ALARM = 6.5
    LEAST = 0.02
    """Probability added to either side, so that one surprise alone is not a drift."""

    def __init__(self) -> None:
        self._sums = dict.fromkeys(self.FACTORS, 0.0)
        self._since = dict.fromkeys(self.FACTORS, 0)

    def update(self, interval: Interval, edges: FloatArray, mass: FloatArray) -> int:
        """Takes an interval and the estimate made before it; returns how many of the last ones are of a new law.

        0 means no alarm. After an alarm the charts start anew.
        """
        below = np.concatenate(([0.0], np.cumsum(mass)))

        def probability(factor: float) -> float:
            after, by = np.interp([interval.after_s / factor, interval.by_s / factor], edges, below)
            return float(by if np.isfinite(interval.by_s) else 1.0) - float(after)

        usual = probability(1.0) + self.LEAST
        for factor in self.FACTORS:
            total = self._sums[factor] + float(np.log((probability(factor) + self.LEAST) / usual))
            self._sums[factor] = max(total, 0.0)
            self._since[factor] = self._since[factor] + 1 if total > 0 else 0
        loudest = max(self.FACTORS, key=lambda factor: self._sums[factor])
        if self._sums[loudest] <= self.ALARM:
            return 0
        fresh = self._since[loudest]
        self._sums = dict.fromkeys(self.FACTORS, 0.0)
        self._since = dict.fromkeys(self.FACTORS, 0)
        return fresh


@dataclass
class _Memory:
    """What a learner holds of one operation."""

    estimate: Estimate
    seen: int = 0
    intervals: list[Interval] = field(default_factory=list)
    detector: DriftDetector = field(default_factory=DriftDetector)
    looks_s: tuple[float, ...] | None = None


class Learner:
    """Follows the schedule that is best under its estimate.

    With `probes`, now and then, and ever more seldom, it looks twice where no schedule would: inside the stretch in
    which it expects the end and has not seen what happens. A learner that only does what seems best may never find out
    that an operation sometimes finishes long before its first look.
    """

    def __init__(
        self, name: str, estimate: Callable[[FloatArray], Estimate], *, forgets: bool = True, probes: bool = False
    ) -> None:
        self.name = name
        self._new_estimate = estimate
        self._forgets = forgets
        self._probes = probes
        self._memories: dict[str, _Memory] = {}

    def act(self, observation: Observation, history: History) -> Action:
        return wait_by(observation, [*self.plan(observation, history), observation.operation.deadline_s])

    def plan(self, observation: Observation, history: History) -> tuple[float, ...]:
        """Times of looks, seconds since the request, all before the deadline."""
        operation = observation.operation
        edges = grid(operation.deadline_s)
        if operation.name not in self._memories:
            self._memories[operation.name] = _Memory(self._new_estimate(edges))
        memory = self._memories[operation.name]
        self._catch_up(memory, edges, history.get(operation.name, ()))
        if memory.looks_s is None:
            mass = memory.estimate.mass()
            looks, _ = best_looks(edges, mass, (edges[:-1] + edges[1:]) / 2, observation.costs)
            if self._probes and len(memory.intervals) in _PROBES:
                looks = probed(edges, mass, looks, len(memory.intervals))
            memory.looks_s = tuple(looks.tolist())
        return memory.looks_s

    def _catch_up(self, memory: _Memory, edges: FloatArray, records: Sequence[Record]) -> None:
        for record in records[memory.seen :]:
            interval = Interval(record.after_s, record.by_s)
            fresh = 0
            if self._forgets and len(memory.intervals) >= _BEFORE_DRIFT:
                fresh = memory.detector.update(interval, edges, memory.estimate.mass())
            memory.intervals.append(interval)
            if fresh:
                memory.intervals = memory.intervals[-fresh:]
                memory.estimate = self._new_estimate(edges)
                for kept in memory.intervals:
                    memory.estimate.add(kept)
            else:
                memory.estimate.add(interval)
            memory.looks_s = None
        memory.seen = len(records)


_BEFORE_DRIFT = 8  # observations that make an estimate worth defending

# Numbers of observations after which it probes: often while that pays, then each time there are twice as many.
_PROBES = frozenset({1, 2, 3, 4, 5, 6, 8, 10, 12, 14, 17, 20, 24, 28} | {56 * 2**k for k in range(8)})
_PROBING_LOOKS = 2
_GOLDEN = 0.6180339887498949


def probed(edges: FloatArray, mass: FloatArray, looks: FloatArray, count: int) -> FloatArray:
    """The schedule with two looks more, each in the stretch that is then likeliest, at ever other places in it."""
    below = np.concatenate(([0.0], np.cumsum(mass)))
    for number in range(_PROBING_LOOKS):
        ends = np.concatenate(([0.0], looks, [edges[-1]]))
        stretch = int(np.argmax(np.diff(np.interp(ends, edges, below))))
        part = 0.2 + 0.6 * (((3 * count + number) * _GOLDEN) % 1.0)
        looks = np.sort(np.append(looks, ends[stretch] + part * (ends[stretch + 1] - ends[stretch])))
    return looks


def empirical_quantiles(name: str = "empirical", *, forgets: bool = True) -> Learner:
    """Assumes no family: smoothed empirical quantiles of the censored times."""
    return Learner(name, SmoothedTurnbull, forgets=forgets, probes=True)


def bayesian_gamma(name: str = "bayes-gamma", *, forgets: bool = True) -> Learner:
    """Assumes a Gamma law of unknown shape and mean."""
    return Learner(name, BayesianGamma, forgets=forgets)
