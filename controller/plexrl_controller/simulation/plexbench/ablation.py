"""T3: what each lever of our policy is worth, one at a time, each where it is meant to help.

`worth` is the difference that a lever makes in the same repetition: positive where it helps.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from plexrl_controller.domain.ids import Tenant
from plexrl_controller.scheduling.fairness import Quota
from plexrl_controller.scheduling.policy import HoldRule, Order, Policy
from plexrl_controller.simulation.bounds import Work
from plexrl_controller.simulation.live_policy import Decisions, LivePolicy
from plexrl_controller.simulation.plexbench.groups import generator, stalling
from plexrl_controller.simulation.plexbench.rows import Row, Runner, Task, summarise
from plexrl_controller.simulation.plexbench.traces import TIMED, Trace, ours, run_placement
from plexrl_controller.simulation.scenarios import share
from plexrl_controller.simulation.workload import BY_NAME

ALL_ON = "all on (B10)"
OURS = Policy()


@dataclass(frozen=True)
class Lever:
    """B10 with one thing changed."""

    policy: Policy = OURS
    placement: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of `LivePlacement`."""
    group: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of `LivePolicy`."""
    decided: str = ""
    """What became of it, and why."""


ITERATIONS = Policy(hold=HoldRule.ITERATION, hold_limit_s=3600.0)
ON_TRACES = {
    ALL_ON: Lever(),
    "granularity: phase-level": Lever(Policy(hold=HoldRule.PHASE), decided="a switch, to compare with what others do"),
    "granularity: iteration-level": Lever(ITERATIONS, decided="a switch, which the demo measures"),
    "order: las": Lever(Policy(order=Order.LAS), decided="a switch, for jobs of unlike weight"),
    "order: fifo": Lever(Policy(order=Order.FIFO), decided="a switch, the order that all know"),
    "chunking off": Lever(Policy(chunking=False), decided="chunking kept: for short calls behind long ones, below"),
    "placement: no prediction, two at most": Lever(
        Policy(predict_slowdown=False, max_members=2), decided="prediction kept"
    ),
    "placement: variation unknown": Lever(Policy(correct_variation=False), decided="variation kept"),
    "placement: no backfill": Lever(placement={"backfill": False}, decided="backfill kept"),
    "consolidated tails off": Lever(
        placement={"consolidate": False}, decided="kept: live jobs ask for it, `RolloutReplicas`"
    ),
}


def trace_without(trace: Trace, rep: int, lever: str) -> Mapping[str, float]:
    """The trace with one lever changed."""
    chosen = ON_TRACES[lever]
    return run_placement(trace, rep, ours(chosen.policy, **chosen.placement))


def table_3(trace: Trace, reps: int, runner: Runner) -> list[Row]:
    """The levers that act on whole clusters, on a loaded trace."""
    tasks = [
        ({"lever": name, "decided": lever.decided}, [Task(trace_without, (trace, rep, name)) for rep in range(reps)])
        for name, lever in ON_TRACES.items()
    ]
    found = runner.collect("T3", tasks)
    reference = found[0][1]
    rows = []
    for keys, results in found:
        compared = [
            {
                **result,
                "worth_saving": on["saving"] - result["saving"],
                "worth_slo_jobs": on["slo_jobs"] - result["slo_jobs"],
                "worth_queue_s": result["queue_mean_s"] - on["queue_mean_s"],
            }
            for result, on in zip(results, reference, strict=True)
        ]
        rows.append(summarise(keys, compared))
    return rows


Jobs = Sequence[Sequence[Sequence[Work]]]


def tool_jobs(count: int, busy_share: float, iterations: int, seed: int) -> list[list[list[Work]]]:
    """Jobs with tool calls, stretched to a busy share."""
    return [stalling(BY_NAME["tool-8B"], busy_share, iterations, generator(seed, index)) for index in range(count)]


def swapping(lever: Lever, iterations: int, seed: int, swap_s: float, busy_share: float, states: float) -> float:
    """Saving of three tool jobs on a device that holds some of their states."""
    jobs = tool_jobs(3, busy_share, iterations, seed)
    errors = generator(seed, 99)

    def hint(stall_s: float) -> float | None:
        return stall_s * math.exp(0.25 * errors.standard_normal()) if errors.random() < 0.8 else None

    discipline = LivePolicy(lever.policy, Decisions(every=TIMED), **lever.group)
    return share(jobs, discipline, swap_s=swap_s, device_states=states, hints=hint).until_first_end(jobs)[0]


def dear_swaps(lever: Lever, iterations: int, seed: int) -> float:
    """80 s a move, one state at a time: nothing that placement would admit of jobs that it knows."""
    return swapping(lever, iterations, seed, 80.0, 0.25, 1.0)


def cheap_swaps(lever: Lever, iterations: int, seed: int) -> float:
    """4 s a move, two states at a time."""
    return swapping(lever, iterations, seed, 4.0, 0.3, 2.0)


def long_calls(lever: Lever, iterations: int, seed: int) -> float:
    """Slowdown of two tool jobs, 15 % busy each, beside calls of ten minutes that take half of the group's time."""
    ahead = [[Work(600.0, 500.0), Work(120.0, 220.0)]] * (4 * iterations)
    jobs: Jobs = [*tool_jobs(2, 0.15, iterations, seed), ahead]
    return share(jobs, LivePolicy(lever.policy, Decisions(every=TIMED), **lever.group)).slowdown_of((0, 1), jobs)


def over_quota(lever: Lever, iterations: int, seed: int) -> float:
    """Slowdown of two tool jobs beside a third whose tenant has used up its device seconds; each 45 % busy."""
    jobs = tool_jobs(3, 0.45, iterations, seed)
    discipline = LivePolicy(lever.policy, Decisions(every=TIMED), tenants={2: Tenant("over")}, **lever.group)
    return share(jobs, discipline).slowdown_of((0, 1), jobs)


QUOTA = {"quotas": {Tenant("over"): Quota(device_s=1.0, window_s=1e9)}}


@dataclass(frozen=True)
class Trial:
    """Where a lever is meant to help."""

    scenario: Callable[[Lever, int, int], float]
    figure: str
    more_is_better: bool
    without: Lever
    with_it: Lever = Lever()


_NO_HINTS = Lever(Policy(use_hints=False))
_BLIND = Lever(Policy(use_hints=False, use_learned_stalls=False))
TRIALS = {
    "clean eviction": Trial(cheap_swaps, "saving", True, Lever(group={"clean_eviction": False})),
    "write-back": Trial(cheap_swaps, "saving", True, Lever(Policy(write_back=False))),
    "prefetch": Trial(cheap_swaps, "saving", True, Lever(Policy(prefetch=False))),
    "learned stalls, without hints": Trial(cheap_swaps, "saving", True, _BLIND, _NO_HINTS),
    "hints, beside learned stalls": Trial(cheap_swaps, "saving", True, _NO_HINTS),
    "hold": Trial(dear_swaps, "saving", True, Lever(Policy(hold=HoldRule.NEVER))),
    "chunking": Trial(long_calls, "slowdown of the others", False, Lever(Policy(chunking=False))),
    "quota": Trial(over_quota, "slowdown of the others", False, Lever(), Lever(group=QUOTA)),
}


def trial(name: str, iterations: int, seed: int) -> Mapping[str, float]:
    """One lever's scenario with and without it, on the same segments."""
    chosen = TRIALS[name]
    on = chosen.scenario(chosen.with_it, iterations, seed)
    off = chosen.scenario(chosen.without, iterations, seed)
    return {"with_it": on, "without": off, "worth": on - off if chosen.more_is_better else off - on}


def table_3b(reps: int, iterations: int, runner: Runner) -> list[Row]:
    """The levers that act on one group, each in the situation that it is for."""
    tasks = []
    for name, chosen in TRIALS.items():
        keys = {"lever": name, "scenario": chosen.scenario.__name__.replace("_", " "), "figure": chosen.figure}
        tasks.append((keys, [Task(trial, (name, iterations, rep)) for rep in range(reps)]))
    return runner.run_all("T3 groups", tasks)
