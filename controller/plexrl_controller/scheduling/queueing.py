"""What sharing a group will cost each member: a closed queueing network with one server, solved exactly. Pure.

Every member is a class of its own with one customer: it works on the group for `busy_s` and stays away for the rest
of its iteration. Mean value analysis (Reiser and Lavenberg 1980, "Mean-value analysis of closed multichain queuing
networks") over the subsets of the members: in the set S, member j finds on arrival the mean queue Q of S without j, so
it spends `R_j = D_j (1 + Q(S - j))` there, its rate is `X_j = 1 / (Z_j + R_j)`, and `Q(S)` is the sum of `X_j R_j`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp

from plexrl_controller.scheduling.views import Demand


@dataclass(frozen=True, slots=True)
class Prediction:
    """How the members of a group will fare."""

    waits_s: tuple[float, ...]
    """Waiting per iteration that delays each member, in the members' order."""
    slowdowns: tuple[float, ...]
    """Iteration length over that without sharing."""
    work: float
    """Dedicated groups' worth of work that the group does: the sum of 1 / slowdown."""


def predict(demands: Sequence[Demand], *, swapping: bool, correct_variation: bool = True) -> Prediction:
    """Predicts slowdowns of members that share a group.

    `swapping`: their states do not fit the device together, so every stall costs the group the stall itself or a round
    trip of swaps, whichever is less. `correct_variation`: regular members wait less than exponential ones do.
    """
    busy = [demand.busy_s + (_stall_cost_s(demand) if swapping and len(demands) > 1 else 0.0) for demand in demands]
    away = [_away_s(demand, swapping and len(demands) > 1) for demand in demands]
    responses = mva(busy, away)
    lengths = [z + r for z, r in zip(away, responses, strict=True)]
    if correct_variation and len(demands) > 1:
        # With no variation at all the members queue only as far as they ask for more than there is.
        stretch = max(1.0, sum([b / (b + z) for b, z in zip(busy, away, strict=True)]))
        for i, demand in enumerate(demands):
            regular = stretch * (busy[i] + away[i])
            lengths[i] = regular + min(1.0, demand.variation) * max(0.0, lengths[i] - regular)
    waits, slowdowns = [], []
    for demand, length in zip(demands, lengths, strict=True):
        wait = _felt(max(0.0, length - demand.iteration_s), demand.slack_s)
        waits.append(wait)
        slowdowns.append(1.0 + wait / demand.iteration_s)
    return Prediction(tuple(waits), tuple(slowdowns), sum([1.0 / s for s in slowdowns]))


def mva(busy_s: Sequence[float], away_s: Sequence[float]) -> list[float]:
    """Mean seconds per iteration at the server, waiting included, of classes with one customer each.

    `busy_s` is each one's work there per iteration, `away_s` the rest of its iteration. Exact; 2^n steps for n classes.

    >>> [round(r, 3) for r in mva([1.0, 1.0], [1.0, 1.0])]
    [1.5, 1.5]
    """
    count = len(busy_s)
    queue = [0.0] * (1 << count)
    for members in range(1, 1 << count):
        total = 0.0
        for j in range(count):
            if members >> j & 1:
                response = busy_s[j] * (1.0 + queue[members ^ 1 << j])
                total += response / (away_s[j] + response) if response > 0.0 else 0.0
        queue[members] = total
    everyone = (1 << count) - 1
    return [busy_s[j] * (1.0 + queue[everyone ^ 1 << j]) for j in range(count)]


def _stall_cost_s(demand: Demand) -> float:
    """Seconds per iteration that the group loses to the member's stalls."""
    return demand.visits * min(_stall_s(demand), demand.round_trip_s)


def _away_s(demand: Demand, swapping: bool) -> float:
    """Seconds per iteration in which a member neither works nor occupies the group."""
    away = demand.iteration_s - demand.busy_s
    if swapping and _stall_s(demand) <= demand.round_trip_s:
        return 0.0
    # Its state goes out while it stalls already; only the way back in comes after.
    return away - (demand.visits * demand.round_trip_s / 2 if swapping else 0.0)


def _stall_s(demand: Demand) -> float:
    return max(0.0, demand.iteration_s - demand.busy_s) / demand.visits


def _felt(wait_s: float, slack_s: float) -> float:
    """The part of an exponentially distributed wait that exceeds the slack, in the mean."""
    return wait_s * exp(-slack_s / wait_s) if wait_s > 0.0 else 0.0
