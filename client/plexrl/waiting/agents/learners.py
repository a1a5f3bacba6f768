"""Agents that learn how long an operation takes from what they saw: intervals, never exact times.

A look in vain at a and a successful one at b say only a < T <= b. What the next schedule is planned on is a histogram
over logarithmic bins of time, and `estimates` and `mixtures` have ways to come by it. What came before a drift is
forgotten, once it is clear that there was one.

Knows the interface, estimates and dynamic programming; knows no laws.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from plexrl.waiting.agents.estimates import BayesianGamma, Estimate, Interval, coverage, grid
from plexrl.waiting.agents.interface import Action, History, Observation, Record, wait_by
from plexrl.waiting.agents.mixtures import EmpiricalEstimate
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
class _Regime:
    """A law that may be in force: what was seen of it and what it is thought to be."""

    estimate: Estimate
    intervals: list[Interval] = field(default_factory=list)

    def add(self, interval: Interval) -> None:
        self.intervals.append(interval)
        self.estimate.add(interval)


@dataclass
class _Memory:
    """What a learner holds of one operation."""

    regime: _Regime
    former: _Regime | None = None
    """The one before the last alarm, until it is clear whether that was a false one."""
    lead: float = 0.0
    """Logarithm of the odds for `regime` against `former`."""
    undecided: int = 0
    """Observations since the alarm."""
    seen: int = 0
    detector: DriftDetector = field(default_factory=DriftDetector)
    looks_s: tuple[float, ...] | None = None

    def mass(self) -> FloatArray:
        if self.former is None:
            return self.regime.estimate.mass()
        share = 1 / (1 + float(np.exp(-self.lead)))
        return share * self.regime.estimate.mass() + (1 - share) * self.former.estimate.mass()

    def compete(self, former: _Regime, interval: Interval, edges: FloatArray) -> None:
        """Takes an interval while two laws are possible; the one that foretells better stays."""
        seen = coverage(edges, interval)
        chances = []
        for regime in (self.regime, former):
            mass = regime.estimate.mass()
            chances.append(float(seen @ np.append(mass, max(1 - float(mass.sum()), 0.0))) + DriftDetector.LEAST)
            regime.add(interval)
        self.lead += float(np.log(chances[0] / chances[1]))
        self.undecided += 1
        if abs(self.lead) > _CLEAR or self.undecided >= _LONGEST_UNDECIDED:
            self.regime, self.former = (self.regime if self.lead > 0 else former), None


class Learner:
    """Follows the schedule that is best under its estimate.

    One with an empirical estimate also looks where no schedule would, if that tells enough: a learner that only does
    what seems best may never find out that an operation sometimes finishes long before its first look, or in which part
    of a long stretch between two looks it does.
    """

    def __init__(self, name: str, estimate: Callable[[FloatArray], Estimate], *, forgets: bool = True) -> None:
        self.name = name
        self._new_estimate = estimate
        self._forgets = forgets
        self._memories: dict[str, _Memory] = {}

    def act(self, observation: Observation, history: History) -> Action:
        return wait_by(observation, [*self.plan(observation, history), observation.operation.deadline_s])

    def plan(self, observation: Observation, history: History) -> tuple[float, ...]:
        """Times of looks, seconds since the request, all before the deadline."""
        operation = observation.operation
        edges = grid(operation.deadline_s)
        if operation.name not in self._memories:
            self._memories[operation.name] = _Memory(_Regime(self._new_estimate(edges)))
        memory = self._memories[operation.name]
        self._catch_up(memory, edges, history.get(operation.name, ()))
        if memory.looks_s is None:
            looks, expected = best_looks(edges, memory.mass(), (edges[:-1] + edges[1:]) / 2, observation.costs)
            estimate, count = memory.regime.estimate, len(memory.regime.intervals)
            if memory.former is None and isinstance(estimate, EmpiricalEstimate) and count in _PROBES:
                looks = estimate.probed(looks, expected, observation.costs, _PROBING_LOOKS)
            memory.looks_s = tuple(looks.tolist())
        return memory.looks_s

    def _catch_up(self, memory: _Memory, edges: FloatArray, records: Sequence[Record]) -> None:
        for record in records[memory.seen :]:
            interval = Interval(record.after_s, record.by_s)
            memory.looks_s = None
            if memory.former is not None:
                memory.compete(memory.former, interval, edges)
                continue
            fresh = 0
            if self._forgets and len(memory.regime.intervals) >= _BEFORE_DRIFT:
                fresh = memory.detector.update(interval, edges, memory.regime.estimate.mass())
            memory.regime.add(interval)
            if fresh:
                memory.former, memory.lead, memory.undecided = memory.regime, _ALARMED, 0
                memory.regime = _Regime(self._new_estimate(edges))
                for kept in memory.former.intervals[-fresh:]:
                    memory.regime.add(kept)
        memory.seen = len(records)


_BEFORE_DRIFT = 8  # observations that make an estimate worth defending
_ALARMED = 2.0  # nats: odds of 7 to 1 for a new law once the detector says so
_CLEAR = 4.0  # odds of 55 to 1
_LONGEST_UNDECIDED = 20  # observations: where both foretell alike it matters little, and the next drift may come

# Numbers of observations after which it may probe: nearly always while an operation is new, then each time there are
# twice as many. What is left out keeps the cost of the first ten waits down.
_PROBES = frozenset({*range(1, 29)} - {7, 9} | {56 * 2**k for k in range(8)})
_PROBING_LOOKS = 2


def empirical_quantiles(name: str = "empirical", *, forgets: bool = True) -> Learner:
    """Quantiles of the censored times; assumes no family, and believes in one hump or two where that foretells well."""
    return Learner(name, EmpiricalEstimate, forgets=forgets)


def bayesian_gamma(name: str = "bayes-gamma", *, forgets: bool = True) -> Learner:
    """Assumes a Gamma law of unknown shape and mean."""
    return Learner(name, BayesianGamma, forgets=forgets)
