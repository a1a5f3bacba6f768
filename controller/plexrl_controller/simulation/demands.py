"""What a controller knows of a job's appetite: the submission's estimate, then what was measured, as `Demand`s."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from statistics import fmean

from plexrl_controller.scheduling.place import Side
from plexrl_controller.scheduling.views import Demand
from plexrl_controller.simulation import rollout
from plexrl_controller.simulation.processes import Form
from plexrl_controller.simulation.workload import PROFILES, Iteration, Job, JobClass

LEARNED_AFTER = 3
"""Iterations after which measurements replace the submission's estimate."""
SAMPLE = 32
"""Iterations that an estimate is made of."""


def submitted(job: Job, _done: int, form: Form, side: Side, round_trip_s: float) -> Demand:
    """The submission's estimate: busy time is off by the job's factor, the iteration's length is not."""
    true = demand(job.job_class, job.iterations[:SAMPLE], form, side, round_trip_s)
    busy_s = min(true.busy_s * job.estimate_factor, 0.98 * true.iteration_s)
    return replace(true, busy_s=busy_s, slack_s=max(0.0, true.slack_s - (busy_s - true.busy_s)))


def measured(job: Job, done: int, form: Form, side: Side, round_trip_s: float) -> Demand:
    """From the last iterations that have ended."""
    return demand(job.job_class, job.iterations[max(0, done - SAMPLE) : done], form, side, round_trip_s)


def demand(c: JobClass, iterations: Sequence[Iteration], form: Form, side: Side, round_trip_s: float = 0.0) -> Demand:
    """The mean iteration as one side's group sees it, alone."""
    match side:
        case Side.BOTH:
            return _colocated(iterations, form, round_trip_s)
        case Side.TRAIN:
            return _training(c, iterations, form, round_trip_s)
        case Side.ROLLOUT:
            return _rolling_out(c, iterations, form, round_trip_s)


def stretch(c: JobClass, form: Form) -> float:
    """The form's iteration alone over the class's own: consolidating a tail makes a rollout longer."""
    if form.consolidation is None:
        return 1.0
    main, tail = parts(c, form.consolidation)
    return (c.rollout_s * (main + tail) + c.sync_s) / (c.rollout_s + c.sync_s)


@cache
def parts(c: JobClass, consolidation: tuple[int, int]) -> tuple[float, float]:
    """Mean parts of a consolidated rollout over the bank of profiles, as fractions of the plain one."""
    bank = [rollout.consolidation(c, p, *consolidation) for p in range(PROFILES)]
    return fmean(part.main for part in bank), fmean(part.tail for part in bank)


def _colocated(iterations: Sequence[Iteration], form: Form, round_trip_s: float) -> Demand:
    works, stalls = [], []
    for it in iterations:
        # A rollout without tool calls, and with an instant reward, is one stretch with training.
        works += [turn * form.rollout_scale for turn in it.turns]
        works.append(it.train * form.train_scale + it.sync)
        stalls += [*it.stalls, it.reward]
    count = len(iterations)
    busy_s, stall_s = math.fsum(works) / count, math.fsum(stalls) / count
    visits = len(works) / count
    variation = min(1.0, max(_variation(works), _variation(stalls)))
    return Demand(busy_s + stall_s, busy_s, visits, variation, 0.0, 0.0, round_trip_s)


def _training(c: JobClass, iterations: Sequence[Iteration], form: Form, round_trip_s: float) -> Demand:
    main, tail = parts(c, form.consolidation) if form.consolidation is not None else (1.0, 0.0)
    scale = form.rollout_scale * (main + tail)
    rollouts = [it.rollout * scale + math.fsum(it.stalls) for it in iterations]
    works = [it.train * form.train_scale + it.sync for it in iterations]
    reward_s, busy_s = fmean(it.reward for it in iterations), fmean(works)
    variation = min(1.0, _variation(works))
    if not form.staleness:
        return Demand(fmean(rollouts) + reward_s + busy_s, busy_s, 1.0, variation, 0.0, 0.0, round_trip_s)
    # The rollout of the next iteration hides training and waiting, as long as it takes.
    slacks = [
        max(0.0, rollout_s + it.sync - it.reward - work_s)
        for rollout_s, work_s, it in zip(rollouts, works, iterations, strict=True)
    ]
    iteration_s = fmean(
        max(rollout_s + it.sync, it.reward + work_s)
        for rollout_s, work_s, it in zip(rollouts, works, iterations, strict=True)
    )
    return Demand(iteration_s, busy_s, 1.0, variation, fmean(slacks), _variation(slacks), round_trip_s)


def _rolling_out(c: JobClass, iterations: Sequence[Iteration], form: Form, round_trip_s: float) -> Demand:
    main = parts(c, form.consolidation)[0] if form.consolidation is not None else 1.0
    rollouts = [it.rollout * form.rollout_scale for it in iterations]
    trained = _training(c, iterations, form, round_trip_s)
    busy_s = fmean(rollouts) * main + (c.sync_s if form.staleness else 0.0)
    return Demand(trained.iteration_s, busy_s, 1.0, min(1.0, _variation(rollouts)), 0.0, 0.0, round_trip_s)


def _variation(values: Sequence[float]) -> float:
    """Squared coefficient of variation."""
    mean = fmean(values)
    return fmean((v - mean) ** 2 for v in values) / (mean * mean) if mean > 0.0 else 0.0
