"""What a simulation showed: plexbench's metrics, from the executions and the groups' accounts. Pure arithmetic."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from plexrl_controller.simulation.cluster import Cluster
from plexrl_controller.simulation.pools import Mode
from plexrl_controller.simulation.processes import Execution

SLO = 1.3


@dataclass(frozen=True, slots=True)
class JobResult:
    """One job in the window, from the first to the last end of an iteration in it (or its start, if later)."""

    name: str
    job_class: str
    iterations: int
    cost_gpu_s: float
    dedicated_gpu_s: float
    """What the same iterations cost the job alone: G_j · ideal time."""
    ratios: tuple[float, ...]
    """Actual over ideal time of each iteration."""
    slowdown: float
    slowdown_target: float

    @property
    def saving(self) -> float:
        """1 - cost / dedicated cost."""
        return 1.0 - self.cost_gpu_s / self.dedicated_gpu_s


@dataclass(frozen=True)
class Metrics:
    """The columns of T1. Savings and shares are fractions, times are seconds."""

    saving: float
    """GPU-hours per iteration against the dedicated form, over all jobs in the window."""
    ecap: float
    """Dedicated GPUs' worth of iterations, per GPU of the cluster."""
    fleet_saving: float
    """1 - 1 / ecap."""
    slowdown_mean: float
    slowdown_p50: float
    slowdown_p99: float
    slowdown_worst: float
    setup_s: float
    """Mean set-up on the critical path of a call."""
    swap_share: float
    wait_mean_s: float
    wait_p99_s: float
    wait_max_s: float
    queue_mean_s: float
    """From a job's arrival to its start."""
    queue_p99_s: float
    queue_max_s: float
    jain: float
    """Jain's index over 1 / slowdown."""
    slo_iterations: float
    slo_jobs: float
    """Share of jobs whose mean slowdown is at most 1.3."""
    slo_jobs_own: float
    """The same for each job's own target, U(1.1, 2)."""
    goodput: float
    """Useful busy GPU-seconds over provisioned ones."""
    prefetch_hit_rate: float
    completion_s: float
    """When the last job of the trace ended; NaN where the run was cut."""
    completion_95_s: float
    """When 95 % of its dedicated GPU-hours were done."""
    jobs: int


def job_results(executions: Sequence[Execution], start_s: float, end_s: float) -> list[JobResult]:
    """Results of the jobs that ended an iteration in the window."""
    found = []
    for execution in executions:
        ends, ideal = execution.ends, execution.job.dedicated_ends
        inside = [i for i, at in enumerate(ends) if start_s < at <= end_s]
        if not inside:
            continue
        first, last = inside[0], inside[-1]
        # The iteration during which the window began gives only its end.
        if first > 0:
            first += 1
        if first > last:
            continue
        ratios = []
        for i in range(first, last + 1):
            before, ideal_before = (ends[i - 1], ideal[i - 1]) if i else (execution.launched_at, 0.0)
            ratios.append((ends[i] - before) / (ideal[i] - ideal_before))
        began, ideal_began = (ends[first - 1], ideal[first - 1]) if first else (execution.launched_at, 0.0)
        ideal_s = ideal[last] - ideal_began
        found.append(
            JobResult(
                name=execution.job.name,
                job_class=execution.job.job_class.name,
                iterations=last - first + 1,
                cost_gpu_s=execution.charges[last + 1] - execution.charges[first],
                dedicated_gpu_s=ideal_s * execution.job.job_class.dedicated_gpus,
                ratios=tuple(ratios),
                slowdown=(ends[last] - began) / ideal_s,
                slowdown_target=execution.job.slowdown_target,
            )
        )
    return found


def measure(cluster: Cluster, start_s: float, end_s: float, complete: bool) -> Metrics:
    """The metrics of a run that is over.

    Raises:
        ValueError: no job ended an iteration in the window.
    """
    results = job_results(cluster.executions, start_s, end_s)
    if not results:
        raise ValueError(f"no iteration ended between {start_s:g} and {end_s:g} s: take a longer window")
    slowdowns = np.array([r.slowdown for r in results])
    ratios = np.concatenate([r.ratios for r in results])
    done = sum(r.dedicated_gpu_s for r in results)
    ecap = done_in_window(cluster.executions, start_s, end_s) / (cluster.gpus * (end_s - start_s))
    spent = {mode: sum(c.spent_s[mode] * c.unit_gpus for c in cluster.closed) for mode in Mode}
    provisioned = sum(spent.values())
    waits = np.array(cluster.totals.waits_s or [0.0])
    queued = np.array([cluster.queued_s[e.job.index] for e in cluster.executions])
    finished = completion(cluster.executions, 1.0) if complete else float("nan")
    return Metrics(
        saving=1.0 - sum(r.cost_gpu_s for r in results) / done,
        ecap=ecap,
        fleet_saving=1.0 - 1.0 / ecap if ecap > 0 else float("-inf"),
        slowdown_mean=float(slowdowns.mean()),
        slowdown_p50=float(np.percentile(slowdowns, 50)),
        slowdown_p99=float(np.percentile(slowdowns, 99)),
        slowdown_worst=float(slowdowns.max()),
        setup_s=float(np.mean(cluster.totals.setups_s or [0.0])),
        swap_share=spent[Mode.SWAP] / provisioned,
        wait_mean_s=float(waits.mean()),
        wait_p99_s=float(np.percentile(waits, 99)),
        wait_max_s=float(waits.max()),
        queue_mean_s=float(queued.mean()),
        queue_p99_s=float(np.percentile(queued, 99)),
        queue_max_s=float(queued.max()),
        jain=float((1 / slowdowns).sum() ** 2 / (len(slowdowns) * ((1 / slowdowns) ** 2).sum())),
        slo_iterations=float((ratios <= SLO).mean()),
        slo_jobs=float((slowdowns <= SLO).mean()),
        slo_jobs_own=float(np.mean([r.slowdown <= r.slowdown_target for r in results])),
        goodput=spent[Mode.BUSY] / provisioned,
        prefetch_hit_rate=cluster.totals.prefetch_hits / max(1, cluster.totals.prefetch_hits + cluster.totals.swaps),
        completion_s=finished,
        completion_95_s=completion(cluster.executions, 0.95) if complete else float("nan"),
        jobs=len(results),
    )


def done_in_window(executions: Sequence[Execution], start_s: float, end_s: float) -> float:
    """Dedicated GPU-seconds of the iterations that ended in the window."""
    total = 0.0
    for execution in executions:
        ideal = execution.job.dedicated_ends
        inside = [i for i, at in enumerate(execution.ends) if start_s < at <= end_s]
        if inside:
            before = ideal[inside[0] - 1] if inside[0] else 0.0
            total += (ideal[inside[-1]] - before) * execution.job.job_class.dedicated_gpus
    return total


def completion(executions: Sequence[Execution], share: float) -> float:
    """When this share of all dedicated GPU-seconds was done."""
    done: list[tuple[float, float]] = []
    for execution in executions:
        ideal, gpus = execution.job.dedicated_ends, execution.job.job_class.dedicated_gpus
        before = 0.0
        for at, ideal_at in zip(execution.ends, ideal, strict=False):
            done.append((at, (ideal_at - before) * gpus))
            before = ideal_at
    done.sort()
    work = np.cumsum([gpu_s for _, gpu_s in done])
    index = int(np.searchsorted(work, share * work[-1] * (1 - 1e-12)))
    return done[index][0]
