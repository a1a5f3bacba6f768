"""Inspection schedules by dynamic programming over a grid of times: for any distribution, known or estimated.

Coarser than the recurrence of `schedules`, and sure of its optimum: it checks that one, stands in for it where a law
has no density for a while, and plans for learners, whose estimates are histograms.
"""

from __future__ import annotations  # `schedules` knows this module

from typing import TYPE_CHECKING

import numpy as np

from plexrl.waiting.laws import FloatArray, Law

if TYPE_CHECKING:
    from plexrl.waiting.schedules import Costs

_FINER = 8
_NEGLIGIBLE = 1e-9


def best_looks(edges: FloatArray, mass: FloatArray, mean_s: FloatArray, costs: Costs) -> tuple[FloatArray, float]:
    """The cheapest schedule whose looks lie on the grid, and its expected cost.

    edges: float64 [n + 1], ascending from 0 to the deadline. mass, mean_s: float64 [n], probability that T lies in the
    bin (edges[i], edges[i + 1]] and its mean there; what is missing to 1 does not finish before the deadline. Returns
    the looks before the deadline.

    With W(i) the cost to come after a look in vain at edges[i], times the chance of that, and j the next look:
    W(i) = min over j > i of
    delay * (sum over bins i to j - 1 of mass (edges[j] - mean_s)) + query P(T > edges[j]) + W(j).
    """
    count = mass.size
    probability = np.concatenate(([0.0], np.cumsum(mass)))
    moment = np.concatenate(([0.0], np.cumsum(mass * mean_s)))
    left = np.maximum(1.0 - probability, 0.0)
    to_come = np.zeros(count + 1)
    following = np.full(count + 1, count)
    look = costs.query * left
    look[count] = 0.0  # the deadline tells by itself
    for i in range(count - 1, -1, -1):
        j = slice(i + 1, count + 1)
        late = edges[j] * (probability[j] - probability[i]) - (moment[j] - moment[i])
        total = costs.delay * late + look[j] + to_come[j]
        best = int(np.argmin(total))
        to_come[i], following[i] = total[best], i + 1 + best
    looks = []
    at = int(following[0])
    while at < count:
        looks.append(edges[at])
        at = int(following[at])
    return np.array(looks, np.float64), float(to_come[0])


def best_schedule(law: Law, costs: Costs, deadline_s: float, bins: int, zooms: int = 0) -> tuple[FloatArray, float]:
    """The cheapest schedule of a law that may finish before the deadline, and its expected cost.

    Half of the grid is even in probability, half even in time; `zooms` times more points are laid around the looks.
    """
    finishing = float(law.cdf(deadline_s))
    even = law.quantile(np.linspace(0, finishing * (1 - 1e-7), bins // 2))
    edges = np.unique(np.concatenate(([0.0], np.minimum(even, deadline_s), np.linspace(0, deadline_s, bins // 2))))
    looks, cost = _worth_it(law, *best_looks(edges, *_binned(law, edges), costs))
    for _ in range(zooms):
        at = np.searchsorted(edges, looks)
        around = np.linspace(edges[at - 1], edges[at + 1], 2 * _FINER + 1)
        edges = np.unique(np.concatenate((edges, around.ravel())))
        looks, cost = _worth_it(law, *best_looks(edges, *_binned(law, edges), costs))
    return looks, cost


def _worth_it(law: Law, looks: FloatArray, cost: float) -> tuple[FloatArray, float]:
    """Without what comes after a look that is in vain with no chance: it costs nothing, wherever it is."""
    return looks[: 1 + int((law.sf(looks) > _NEGLIGIBLE).sum())], cost


def _binned(law: Law, edges: FloatArray) -> tuple[FloatArray, FloatArray]:
    """The law's mass and mean between neighbouring edges."""
    nodes, weights = np.polynomial.legendre.leggauss(8)
    low, high = edges[:-1], edges[1:]
    mass = np.diff(law.cdf(edges))
    at = (low + high)[:, None] / 2 + (high - low)[:, None] / 2 * nodes
    inner = (law.cdf(at) * weights).sum(1) / 2 * (high - low)  # the integral of F over the bin
    moment = high * law.cdf(high) - low * law.cdf(low) - inner
    mean_s = np.where(mass > 1e-300, moment / np.maximum(mass, 1e-300), low)
    return mass, np.clip(mean_s, low, high)
