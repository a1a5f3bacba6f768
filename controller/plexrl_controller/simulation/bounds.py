"""What no scheduler can beat: bounds on sharing and on completion, and the exact optimum of two jobs on one group.

The optimum is Akers' geometric path (Akers 1956, "A graphical approach to production scheduling problems"), found by
the network of Brucker 1988 ("An efficient algorithm for the job-shop problem with two jobs"). Calls run to their end.
"""

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from plexrl_controller.simulation.workload import Job


@dataclass(frozen=True, slots=True)
class Work:
    """A busy stretch and the stall after it, seconds."""

    busy_s: float
    stall_s: float


def sharing_bound(
    members: int, busy_share: float, stalls_s: Sequence[float], iteration_s: float, swap_s: float
) -> float:
    """ECap that a group cannot exceed: min(k, 1 / d_eff).

    d_eff = d + Σ min(stall, σ) / T: every stall costs the group the stall itself or a swap of `swap_s` seconds.
    """
    effective = busy_share + math.fsum(min(stall, swap_s) for stall in stalls_s) / iteration_s
    return min(float(members), 1.0 / effective) if effective > 0.0 else float(members)


def completion_bound(jobs: Iterable[Job], gpus: int) -> float:
    """LB1: seconds before which no schedule completes the trace in the jobs' own forms.

    The longest of: each job alone after its arrival, and all useful GPU-seconds on all GPUs.
    """
    jobs = tuple(jobs)
    longest = max(job.arrival_s + job.dedicated_ends[-1] for job in jobs)
    return max(longest, math.fsum(job.busy_gpu_s for job in jobs) / gpus)


def two_job_optimum(a: Sequence[Work], b: Sequence[Work]) -> float:
    """Shortest time in which both finish all their work on one group, without swaps.

    In the plane of the two jobs' own progress a path goes from the origin to both ends: diagonally while both advance,
    along an axis while one waits. Where both would be busy there is an obstacle. O(n² log n) for n stretches.
    """
    a_busy, a_end = _intervals(a)
    b_busy, b_end = _intervals(b)
    best: dict[tuple[float, float], float] = {(0.0, 0.0): 0.0}
    order = [(0.0, 0.0)]
    optimum = math.inf
    # Successors lie above and to the right, so that corners are settled in the order of their sums.
    while order:
        order.sort(key=lambda p: (-(p[0] + p[1]), p))
        point = order.pop()
        cost = best[point]
        hit = _first_obstacle(point, a_busy, b_busy)
        if hit is None:
            optimum = min(optimum, cost + max(a_end - point[0], b_end - point[1]))
            continue
        (a_start, a_stop), (b_start, b_stop) = hit
        for corner in ((a_start, b_stop), (a_stop, b_start)):
            if corner[0] < point[0] - 1e-12 or corner[1] < point[1] - 1e-12:
                continue
            reached = cost + max(corner[0] - point[0], corner[1] - point[1])
            if corner not in best:
                order.append(corner)
            if reached < best.get(corner, math.inf):
                best[corner] = reached
    return optimum


def _intervals(work: Sequence[Work]) -> tuple[list[tuple[float, float]], float]:
    """Busy intervals in the job's own time, and its end."""
    busy, at = [], 0.0
    for stretch in work:
        if stretch.busy_s > 0.0:
            busy.append((at, at + stretch.busy_s))
        at += stretch.busy_s + stretch.stall_s
    return busy, at


def _first_obstacle(
    point: tuple[float, float], a_busy: Sequence[tuple[float, float]], b_busy: Sequence[tuple[float, float]]
) -> tuple[tuple[float, float], tuple[float, float]] | None:
    """The first pair of busy intervals whose interiors the diagonal from `point` would enter together."""
    x, y = point
    i = bisect_right(a_busy, x, key=lambda interval: interval[1])
    j = bisect_right(b_busy, y, key=lambda interval: interval[1])
    while i < len(a_busy) and j < len(b_busy):
        # Both clocks run alike: compare the intervals as times from here.
        a_from, a_to = a_busy[i][0] - x, a_busy[i][1] - x
        b_from, b_to = b_busy[j][0] - y, b_busy[j][1] - y
        if max(a_from, b_from, 0.0) < min(a_to, b_to) - 1e-12:
            return a_busy[i], b_busy[j]
        if a_to <= b_to:
            i += 1
        else:
            j += 1
    return None
