"""Inspection schedules by dynamic programming over a grid of times: for any distribution, known or estimated.

Slower and coarser than the recurrence of `schedules`, and sure of its optimum: it checks that one, and plans for
learners, whose estimates are histograms.
"""

import numpy as np

from plexrl.waiting.laws import FloatArray
from plexrl.waiting.schedules import Costs


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
