"""Inspection schedules: what waiting costs, and the schedule that costs least when the law is known (the floor).

An operation starts at 0 and finishes at T. A schedule x_1 < x_2 < ... says when to look. With x_q the first look at or
after T, it costs `query` (q - 1) for the looks in vain and `delay` (x_q - T) for finding out late. At the deadline the
agent is told the state without having to look.

Knows laws and costs; knows nothing of agents. Pure: no chance, no clock.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from plexrl.waiting.dynamic_programming import best_schedule
from plexrl.waiting.laws import FloatArray, Law

# Beyond this chance of being still unfinished the recurrence has no digits left, and nothing that it says matters.
NEGLIGIBLE = 1e-9
MAX_INSPECTIONS = 2000
_CANDIDATES = 65
_ZOOMS = 12
_MINIMA = 6
_GROWTH = 1.25
_BINS = 800


@dataclass(frozen=True)
class Costs:
    """The price of one look in vain, and of one second of not knowing that the operation has finished."""

    query: float = 5.0
    delay: float = 1.0

    def __post_init__(self) -> None:
        if not (self.query > 0 and self.delay > 0 and np.isfinite(self.query) and np.isfinite(self.delay)):
            raise ValueError(f"query, delay: want positive numbers, not {self.query}, {self.delay}")

    def of(self, queries: int, overshoot_s: float) -> float:
        """Of one operation: its looks, the successful one included, and seconds between its end and that look."""
        return self.query * max(queries - 1, 0) + self.delay * overshoot_s


@dataclass(frozen=True)
class Expectation:
    """What a schedule comes to on average. `queries` counts the successful look (or the deadline's news) too."""

    queries: float
    overshoot_s: float
    cost: float


def expectation(law: Law, costs: Costs, schedule: Sequence[float], deadline_s: float) -> Expectation:
    """The average over the law of T of one operation under a schedule; looks at or after the deadline do not happen.

    Raises ValueError if the schedule does not ascend from above 0.
    """
    looks = np.asarray(schedule, np.float64)
    if looks.size and not (looks[0] > 0 and bool(np.all(np.diff(looks) > 0))):
        raise ValueError("schedule: want ascending times above 0")
    times = np.concatenate(([0.0], looks[looks < deadline_s], [deadline_s]))
    left = law.sf(times)
    in_vain = float(left[1:-1].sum())
    # Until it is found finished, time passes at the chance of not being finished at the last look; of that, the time
    # before T is not overshoot.
    overshoot_s = max(float((left[:-1] * np.diff(times)).sum()) - restricted_mean_s(law, deadline_s), 0.0)
    return Expectation(1 + in_vain, overshoot_s, costs.query * in_vain + costs.delay * overshoot_s)


def optimal_schedule(law: Law, costs: Costs, deadline_s: float) -> tuple[float, ...]:
    """The schedule of least expected cost for a known law: the recurrence's, or that of dynamic programming if cheaper.

    Where the density is above 0 from the first look to the last the recurrence has the optimum to the last digit, and a
    grid comes close. A law with a gap between its humps has its best looks at the edges of the gap, which a recurrence
    that divides by the density cannot find. Raises ValueError for a deadline that is none.
    """
    if deadline_s <= 0 or not np.isfinite(deadline_s):
        raise ValueError(f"deadline_s: want a positive number of seconds, not {deadline_s}")
    if float(law.cdf(deadline_s)) <= 0:
        return ()
    followed = by_recurrence(law, costs, deadline_s)
    gridded = tuple(best_schedule(law, costs, deadline_s, _BINS, zooms=2)[0].tolist())
    return min(followed, gridded, key=lambda looks: expectation(law, costs, looks, deadline_s).cost)


def by_recurrence(law: Law, costs: Costs, deadline_s: float) -> tuple[float, ...]:
    """What an optimum with density at every look must be (Barlow, Hunter and Proschan 1963).

    At an optimum the derivative by each x_k vanishes, so that each look follows from the two before it:
    x_{k+1} - x_k = (F(x_k) - F(x_{k-1})) / f(x_k) - query / delay. Only x_1 is free. The recurrence is unstable: from
    an x_1 slightly off, intervals soon turn negative or explode. So many x_1 run at once, a run that breaks is carried
    on with growing intervals, each is priced as it stands, and the search narrows around the cheapest. A law whose
    density has valleys has a stationary schedule for each of them, so the search begins everywhere.
    """
    mass = float(law.cdf(deadline_s))
    best: FloatArray = np.array([deadline_s])
    best_cost = float("inf")
    for first in _brackets(law, costs, mass, deadline_s):
        for _ in range(_ZOOMS):
            runs, prices = _run(law, costs, first, deadline_s)
            cheapest = int(np.argmin(prices))
            if prices[cheapest] < best_cost:
                best, best_cost = runs[:, cheapest], float(prices[cheapest])
            low, high = first[max(cheapest - 1, 0)], first[min(cheapest + 1, first.size - 1)]
            if high - low <= 1e-14 * high:
                break
            first = np.linspace(low, high, _CANDIDATES)
    return tuple(float(x) for x in np.unique(best) if x < deadline_s)


def _brackets(law: Law, costs: Costs, mass: float, deadline_s: float) -> list[FloatArray]:
    """Ranges of x_1, each around one of the cheapest local minima among many x_1 all over the distribution."""
    spread = law.quantile(np.linspace(0, 1, 801)[1:-1] * mass)
    tail = law.quantile(mass * -np.expm1(np.linspace(np.log(0.004), np.log(1e-9), 60)))
    times = np.geomspace(max(float(spread[0]), 1e-6 * deadline_s), deadline_s, 400)
    first = np.unique(np.clip(np.concatenate((spread, tail, times)), 1e-9, deadline_s))
    prices = np.concatenate(([np.inf], _run(law, costs, first, deadline_s)[1], [np.inf]))
    minima = np.flatnonzero((prices[1:-1] <= prices[:-2]) & (prices[1:-1] <= prices[2:]))
    chosen = minima[np.argsort(prices[1:-1][minima], kind="stable")][:_MINIMA]
    return [
        np.linspace(first[max(at - 1, 0)], first[min(at + 1, first.size - 1)], _CANDIDATES) for at in chosen.tolist()
    ]


def restricted_mean_s(law: Law, deadline_s: float) -> float:
    """E[min(T, deadline)], the integral of the survival function from 0 to the deadline."""
    finishing = float(law.cdf(deadline_s))
    body = law.quantile(np.linspace(0, finishing, 65)[:-1]) if finishing > 0 else np.zeros(1)
    tail = body[-1] + (deadline_s - body[-1]) * np.geomspace(1e-3, 1, 17)
    knots = np.unique(np.clip(np.concatenate(([0.0], body, tail)), 0, deadline_s))
    nodes, weights = np.polynomial.legendre.leggauss(12)
    half = np.diff(knots) / 2
    at = (knots[:-1] + half)[:, None] + half[:, None] * nodes
    return float((law.sf(at) * weights * half[:, None]).sum())


def _run(law: Law, costs: Costs, first: FloatArray, deadline_s: float) -> tuple[FloatArray, FloatArray]:
    """The recurrence from each x_1: looks, float64 [looks, candidates], padded with the deadline; prices [candidates].

    Prices leave out what every schedule has alike.
    """
    ratio = costs.query / costs.delay
    rows: list[FloatArray] = []
    live = np.arange(first.size)
    before_left, now, interval, sound = np.ones_like(first), first, first, np.ones(first.shape, bool)
    prices = costs.delay * first
    cheapest = float("inf")
    while live.size and len(rows) < MAX_INSPECTIONS:
        row = np.full(first.shape, deadline_s, np.float64)
        row[live] = now
        rows.append(row)
        # A difference of survival keeps its digits in the tail, where F is 1 to machine precision.
        left = law.sf(now)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            follows = (before_left - left) / law.pdf(now) - ratio
        sound &= np.isfinite(follows) & (follows > 0)
        interval = np.where(sound, follows, np.maximum(interval, ratio) * _GROWTH)
        following = np.where(left > NEGLIGIBLE, np.minimum(now + interval, deadline_s), deadline_s)
        prices[live] += np.where(now < deadline_s, costs.query * left + costs.delay * left * (following - now), 0.0)
        ended = following >= deadline_s
        if bool(ended.any()):
            cheapest = min(cheapest, float(prices[live[ended]].min()))
        # What has already cost more than a whole other run cannot be the cheapest.
        going = ~ended & (prices[live] <= cheapest)
        live, before_left, now, interval, sound = (
            live[going],
            left[going],
            following[going],
            interval[going],
            sound[going],
        )
    return np.stack(rows), prices
