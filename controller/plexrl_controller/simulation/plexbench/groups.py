"""T2, T4 and T6: single groups, where bounds and theory say what to expect."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean

import numpy as np

from plexrl_controller.scheduling.policy import HoldRule, Order, Policy
from plexrl_controller.scheduling.queueing import predict
from plexrl_controller.scheduling.views import Demand
from plexrl_controller.simulation.bounds import Work, sharing_bound, two_job_optimum
from plexrl_controller.simulation.disciplines import QueueDiscipline, Ranking
from plexrl_controller.simulation.live_policy import Decisions, LivePolicy
from plexrl_controller.simulation.metrics import job_results
from plexrl_controller.simulation.plexbench.rows import Row, Runner, Task
from plexrl_controller.simulation.pools import Discipline
from plexrl_controller.simulation.processes import Form
from plexrl_controller.simulation.scenarios import share, share_two_pools
from plexrl_controller.simulation.workload import BY_NAME, Job, JobClass, iterations_of

PUBLISHED_SHAPE = replace(
    BY_NAME["big-235B"], name="g=.75, 20 % busy", rollout_s=480, train_s=84, sync_s=16, reward_s=2, drift=0.0
)
"""The shape of the bar: three quarters of the GPUs train, and are busy a fifth of the time."""
SHAPES = {c.name: c for c in (*[BY_NAME[n] for n in ("math-7B", "math-30B-A3B", "big-235B")], PUBLISHED_SHAPE)}
SWAPS_S = (0.1, 1.0, 4.0, 11.0, 30.0, 80.0)
STALLS = ((0.2, 4), (0.4, 3), (0.5, 2))
"""Busy share and members of the fully shared groups."""


def generator(*seed: int) -> np.random.Generator:
    """The stream of one job."""
    return np.random.Generator(np.random.PCG64(list(seed)))


def private_rollout(shape: str, members: int, iterations: int, seed: int) -> Mapping[str, float]:
    """Members with a rollout group each and one training group, one-step asynchronous, against split-async alone."""
    c = SHAPES[shape]
    jobs = [Job(i, c, 0.0, iterations_of(c, iterations, generator(seed, i)), 1.3, 1.0) for i in range(members)]
    executions, groups = share_two_pools(
        jobs, Form(c.rollout_gpus, c.train_gpus, 1), lambda: LivePolicy(Policy(), Decisions()), share_rollout=False
    )
    until_s = min(execution.ends[-1] for execution in executions)
    results = job_results(executions, 2 * c.rollout_s, until_s)
    cost, dedicated = sum(r.cost_gpu_s for r in results), sum(r.dedicated_gpu_s for r in results)
    slowdowns = [r.slowdown for r in results]
    return {
        "saving": 1.0 - cost / dedicated,
        "slowdown_mean": fmean(slowdowns),
        "slowdown_worst": max(slowdowns),
        "events": float(groups[0].simulation.events),
    }


def table_2(reps: int, iterations: int, runner: Runner) -> list[Row]:
    """7B, 30B, 235B and the published shape, k = 2 to 5, with the ceiling beside it."""
    published = {"math-7B": 0.3136, "math-30B-A3B": 0.3010, "big-235B": 0.3758}
    tasks = []
    for shape, c in SHAPES.items():
        g = c.train_gpus / (c.rollout_gpus + c.train_gpus)
        for members in (2, 3, 4, 5):
            keys = {
                "shape": shape,
                "k": members,
                "g": g,
                "ceiling": 1.0 - ((1.0 - g) + g / members),
                "published": published.get(shape) if members == 2 else None,
            }
            tasks.append((keys, [Task(private_rollout, (shape, members, iterations, rep)) for rep in range(reps)]))
    return runner.run_all("T2", tasks)


def stalling(c: JobClass, busy_share: float, iterations: int, rng: np.random.Generator) -> list[list[Work]]:
    """Iterations of a class on one group, tool calls and rewards stretched so that it is busy for this share."""
    drawn = iterations_of(c, iterations, rng)
    busy_s = fmean(it.rollout + it.train + it.sync for it in drawn)
    stretch = busy_s * (1.0 - busy_share) / busy_share / fmean(it.stall for it in drawn)
    return [
        [
            *[Work(turn, stall * stretch) for turn, stall in zip(it.turns, (*it.stalls, it.reward), strict=True)],
            Work(it.train + it.sync, 0.0),
        ]
        for it in drawn
    ]


HOLDS = {
    "turn-level, ski rental": Policy(),
    "turn-level, never held": Policy(hold=HoldRule.NEVER),
    "phase-level": Policy(hold=HoldRule.PHASE),
    "iteration-level": Policy(hold=HoldRule.ITERATION, hold_limit_s=3600.0),
}


def fully_shared(
    job_class: str, busy_share: float, members: int, hold: str, swap_s: float, iterations: int, seed: int
) -> Mapping[str, float]:
    """Members that share one group for everything, stalling at tools. With swaps the device holds one state."""
    c = BY_NAME[job_class]
    jobs = [stalling(c, busy_share, iterations, generator(seed, i)) for i in range(members)]
    errors = generator(seed, members, 99)

    def hint(stall_s: float) -> float | None:
        return stall_s * math.exp(0.25 * errors.standard_normal()) if errors.random() < 0.8 else None

    shared = share(
        jobs,
        LivePolicy(HOLDS[hold], Decisions()),
        swap_s=swap_s,
        device_states=float("inf") if swap_s == 0.0 else 1.0,
        hints=hint,
    )
    saving, slowdown = shared.until_first_end(jobs)
    iteration_s = fmean(math.fsum(w.busy_s + w.stall_s for w in it) for job in jobs for it in job)
    stalls_s = [fmean(it[n].stall_s for job in jobs for it in job) for n in range(c.turns)]
    bound = sharing_bound(members, busy_share, stalls_s, iteration_s, swap_s)
    total_s = sum(shared.spent_s.values())
    return {
        "saving": saving,
        "slowdown_mean": slowdown,
        "ecap_over_bound": 1.0 / (1.0 - saving) / bound,
        "swap_share": sum(s for m, s in shared.spent_s.items() if m.value == "swap") / total_s,
        "hold_share": sum(s for m, s in shared.spent_s.items() if m.value == "hold") / total_s,
    }


def table_2b(reps: int, iterations: int, runner: Runner) -> list[Row]:
    """Fully shared groups with tool stalls; also turn-level against phase-level."""
    measured = {(0.2, 4): (0.702, 1.18), (0.4, 3): (0.534, 1.39), (0.5, 2): (0.371, 1.25)}
    tasks = []
    for busy_share, members in STALLS:
        for hold in ("turn-level, ski rental", "phase-level"):
            saving, slowdown = measured[busy_share, members]
            keys = {
                "job_class": "tool-8B",
                "d": busy_share,
                "k": members,
                "granularity": hold.split(",")[0],
                "prototype_saving": saving,
                "prototype_slowdown": slowdown,
            }
            arguments = ("tool-8B", busy_share, members, hold, 0.0, iterations)
            tasks.append((keys, [Task(fully_shared, (*arguments, rep)) for rep in range(reps)]))
    return runner.run_all("T2b", tasks)


def table_4(reps: int, iterations: int, runner: Runner) -> list[Row]:
    """Swap-cost sweep: two jobs, 40 % busy, a device that holds one state; what admission says of the pair."""
    c, busy_share, members = BY_NAME["tool-8B"], 0.4, 2
    drawn = stalling(c, busy_share, 200, generator(0))
    iteration_s = fmean(math.fsum(w.busy_s + w.stall_s for w in it) for it in drawn)
    tasks = []
    for swap_s in SWAPS_S:
        one = Demand(iteration_s, busy_share * iteration_s, c.turns + 1.0, 1.0, round_trip_s=2.0 * swap_s)
        predicted = predict([one] * members, swapping=True)
        alone = predict([one], swapping=False)
        admitted = max(predicted.slowdowns) <= 1.3 and predicted.work >= alone.work + Policy().min_gain
        for hold in HOLDS:
            keys = {
                "swap_s": swap_s,
                "hold": hold,
                "predicted_slowdown": predicted.slowdowns[0],
                "admitted": admitted,
            }
            arguments = ("tool-8B", busy_share, members, hold, swap_s, iterations)
            tasks.append((keys, [Task(fully_shared, (*arguments, rep)) for rep in range(reps)]))
    return runner.run_all("T4", tasks)


def two_jobs(busy_share: float, cv: float, order: str, iterations: int, seed: int) -> Mapping[str, float]:
    """Two noisy jobs of three turns on one group, against the exact optimum that knows the future."""
    sigma = math.sqrt(math.log1p(cv * cv))
    jobs = []
    for index in range(2):
        rng = generator(seed, index, round(busy_share * 100))
        noise = np.exp(sigma * rng.standard_normal((iterations, 3, 2)) - sigma * sigma / 2)
        jobs.append(
            [
                [Work(float(b) * 100.0 * busy_share / 3, float(z) * 100.0 * (1 - busy_share) / 3) for b, z in it]
                for it in noise
            ]
        )
    flat = [[work for it in job for work in it] for job in jobs]
    online_s = max(ends[-1] for ends in share(jobs, _ordered(order)).ends_s)
    return {"online_over_opt": online_s / two_job_optimum(*flat)}


def _ordered(order: str) -> Discipline:
    if order == "cyclic":
        return QueueDiscipline(Ranking.CYCLIC)
    return LivePolicy(Policy(order=Order(order), chunking=False), Decisions())


def table_6(reps: int, iterations: int, runner: Runner) -> list[Row]:
    """Two-job exact ratio. The optimum runs calls to their end, so chunking is off here."""
    tasks = []
    for busy_share in (0.2, 0.3, 0.4, 0.5, 0.6):
        for cv in (0.15, 0.5):
            for order in (*[o.value for o in Order], "cyclic"):
                keys = {"d": busy_share, "cv": cv, "order": order}
                arguments = (busy_share, cv, order, iterations)
                tasks.append((keys, [Task(two_jobs, (*arguments, rep)) for rep in range(reps)]))
    return runner.run_all("T6", tasks)


def homogeneous(members: int, busy_share: float, iterations: int, seed: int) -> Mapping[str, float]:
    """ECap over its bound for alike jobs with noise cv .35, no swaps."""
    sigma = math.sqrt(math.log1p(0.35**2))
    jobs: list[Sequence[Sequence[Work]]] = []
    for index in range(members):
        noise = np.exp(sigma * generator(seed, index).standard_normal((iterations, 3, 2)) - sigma**2 / 2)
        jobs.append(
            [
                [Work(float(b) * 100.0 * busy_share / 3, float(z) * 100.0 * (1 - busy_share) / 3) for b, z in it]
                for it in noise
            ]
        )
    saving, _ = share(jobs, LivePolicy(Policy(), Decisions())).until_first_end(jobs)
    return {"ecap_over_bound": 1.0 / (1.0 - saving) / min(float(members), 1.0 / busy_share)}
