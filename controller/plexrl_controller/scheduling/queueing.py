"""What sharing a group will cost each member: a closed queueing network with one server. Pure.

Every member is a class of its own with one customer: it works on the group for `busy_s` of its iteration, in `visits`
stretches, and is away for the rest. Mean value analysis (Reiser and Lavenberg 1980, "Mean-value analysis of closed
multichain queuing networks") goes over the subsets of the members: in the set S, member j finds on arrival the queue
Q(S - j) of S without j. It spends `R_j` at the group per iteration: its own work, and for each member it finds there a
wait. Its rate is `X_j = 1 / (Z_j + R_j)`, and it adds `X_j R_j` to the queue Q(S).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import exp, inf, sqrt
from operator import mul

from plexrl_controller.scheduling.views import Demand

REGULAR_SHARE = 0.4
"""Part of the exponential members' waiting that even clockwork members have, because their periods differ."""

EXACT_LIMIT = 8
SCHWEITZER_ROUNDS = 50
REMEMBERED = 16_384
"""Predictions that are kept: a job that waits is tried on the same groups at every event."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """How the members of a group will fare."""

    waits_s: tuple[float, ...]
    """Waiting per iteration that delays each member, in the members' order."""
    slowdowns: tuple[float, ...]
    """Iteration length over that without sharing."""
    work: float
    """Dedicated groups' worth of work that the group does: the sum of 1 / slowdown."""


def predict(
    demands: Sequence[Demand],
    *,
    swapping: bool,
    correct_variation: bool = True,
    chunk_s: float = inf,
    at_least: bool = False,
) -> Prediction:
    """Predicts slowdowns of members that share a group.

    `swapping`: their states do not fit the device together, so every stall costs the group the stall itself or a round
    trip of swaps, whichever is less. `correct_variation`: regular members wait less than exponential ones do.
    `chunk_s`: after that much work a call yields to others. `at_least`: bounds from below instead, for n^3 steps.
    """
    return _predict(tuple(demands), swapping and len(demands) > 1, correct_variation, chunk_s, at_least)


@lru_cache(maxsize=REMEMBERED)
def _predict(
    demands: tuple[Demand, ...], swapping: bool, correct_variation: bool, chunk_s: float, at_least: bool
) -> Prediction:
    busy_s = [d.busy_s + (d.visits * min(_stall_s(d), d.round_trip_s) if swapping else 0.0) for d in demands]
    away_s = [_away_s(d, swapping) for d in demands]
    visit_s = [b / d.visits for b, d in zip(busy_s, demands, strict=True)]
    responses = mva_at_least(busy_s, away_s, visit_s, chunk_s) if at_least else mva(busy_s, away_s, visit_s, chunk_s)
    # With no waiting but for what is asked beyond the capacity, everyone is stretched alike.
    stretch = max(1.0, sum([b / (b + z) for b, z in zip(busy_s, away_s, strict=True)]))
    waits, slowdowns = [], []
    for demand, busy, away, response in zip(demands, busy_s, away_s, responses, strict=True):
        length = away + response
        if correct_variation and len(demands) > 1:
            least = stretch * (busy + away)
            length = least + _irregularity(demand.variation) * max(0.0, length - least)
        # Slack hides queueing, never a lack of capacity.
        wait = _felt(max(0.0, length - demand.iteration_s), demand)
        slowdown = max(stretch, 1.0 + wait / demand.iteration_s)
        waits.append((slowdown - 1.0) * demand.iteration_s)
        slowdowns.append(slowdown)
    return Prediction(tuple(waits), tuple(slowdowns), sum([1.0 / s for s in slowdowns]))


def mva(
    busy_s: Sequence[float], away_s: Sequence[float], visit_s: Sequence[float] | None = None, chunk_s: float = inf
) -> list[float]:
    """Mean seconds per iteration at the server, waiting included, of classes with one customer each.

    `busy_s` is each one's work there per iteration, `away_s` the rest of its iteration. Exact, for exponential work,
    while all are alike, or while the server is shared evenly (`visit_s` left out). With `visit_s`, the work of one
    visit, members are served in order of arrival: each one that an arrival finds there costs it that one's work, cut to
    a chunk, or to its own work if that is longer. That is Reiser's approximation; it errs towards too much waiting.
    Takes 2^n n^2 steps for n classes; beyond 8, Schweitzer's approximation of the queues that an arrival finds.

    >>> [round(r, 3) for r in mva([1.0, 1.0], [1.0, 1.0])]
    [1.5, 1.5]
    """
    count = len(busy_s)
    costs = [[own] * count for own in busy_s] if visit_s is None else _costs(busy_s, visit_s, chunk_s)
    if count > EXACT_LIMIT:
        return _schweitzer(busy_s, away_s, costs)
    queues: list[list[float]] = [[0.0] * count]
    for members in range(1, 1 << count):
        queue = [0.0] * count
        for j in range(count):
            if members >> j & 1:
                response = busy_s[j] + sum(map(mul, queues[members ^ 1 << j], costs[j]))
                queue[j] = response / (away_s[j] + response) if response > 0.0 else 0.0
        queues.append(queue)
    everyone = (1 << count) - 1
    return [busy_s[j] + sum(map(mul, queues[everyone ^ 1 << j], costs[j])) for j in range(count)]


def mva_at_least(
    busy_s: Sequence[float], away_s: Sequence[float], visit_s: Sequence[float], chunk_s: float = inf
) -> list[float]:
    """Less than `mva` says, for n^3 steps: an arrival finds at least those who would be there with nobody else's help.

    Queues only grow with the members. So the queue of i that j finds is at least what i's own work makes, lengthened by
    waiting for the others' work alone.
    """
    costs = _costs(busy_s, visit_s, chunk_s)
    members = range(len(busy_s))
    alone = [b / (b + z) if b > 0.0 else 0.0 for b, z in zip(busy_s, away_s, strict=True)]
    lengthened = [
        b + sum(map(mul, alone, row)) - alone[i] * row[i] for i, (b, row) in enumerate(zip(busy_s, costs, strict=True))
    ]
    responses = []
    for j in members:
        response = busy_s[j]
        for i in members:
            if i != j:
                longer = lengthened[i] - alone[j] * costs[i][j]
                response += costs[j][i] * (longer / (away_s[i] + longer) if longer > 0.0 else 0.0)
        responses.append(response)
    return responses


def _costs(busy_s: Sequence[float], visit_s: Sequence[float], chunk_s: float) -> list[list[float]]:
    """Seconds per iteration that j waits for each unit of i's queue, in row j."""
    return [
        [own / visit * min(other, max(visit, chunk_s)) if visit > 0.0 else 0.0 for other in visit_s]
        for own, visit in zip(busy_s, visit_s, strict=True)
    ]


def _schweitzer(busy_s: Sequence[float], away_s: Sequence[float], costs: Sequence[Sequence[float]]) -> list[float]:
    """With one customer to a class, an arrival finds the others as they are on average, itself not among them."""
    count = len(busy_s)
    queue = [0.5] * count
    responses = list(busy_s)
    for _ in range(SCHWEITZER_ROUNDS):
        for j in range(count):
            responses[j] = busy_s[j] + sum(map(mul, queue, costs[j])) - queue[j] * costs[j][j]
            queue[j] = responses[j] / (away_s[j] + responses[j]) if responses[j] > 0.0 else 0.0
    return responses


def _irregularity(variation: float) -> float:
    """Part of an exponential member's waiting that one with this squared coefficient of variation has.

    Fitted to simulations of gamma-distributed work and stalls with 2 to 6 members (docs/scheduling.md).
    """
    return max(REGULAR_SHARE, sqrt(sqrt(min(1.0, variation))))


def _away_s(demand: Demand, swapping: bool) -> float:
    """Seconds per iteration in which a member neither works nor occupies the group."""
    away = demand.iteration_s - demand.busy_s
    if swapping and _stall_s(demand) <= demand.round_trip_s:
        return 0.0
    # Its state goes out while it stalls already; only the way back in comes after.
    return max(0.0, away - (demand.visits * demand.round_trip_s / 2 if swapping else 0.0))


def _stall_s(demand: Demand) -> float:
    return max(0.0, demand.iteration_s - demand.busy_s) / demand.visits


def _felt(wait_s: float, demand: Demand) -> float:
    """The part of an exponentially distributed wait that exceeds a gamma-distributed slack, in the mean."""
    if wait_s <= 0.0:
        return 0.0
    ratio, variation = demand.slack_s / wait_s, demand.slack_variation
    return wait_s * (float((1.0 + ratio * variation) ** (-1.0 / variation)) if variation > 1e-6 else exp(-ratio))
