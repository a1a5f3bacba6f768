"""T1, T3 and T5: whole clusters under generated traces, every policy on the same realised segments."""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from time import process_time
from typing import Any

import numpy as np

from plexrl_controller.scheduling.policy import HoldRule, Order, Policy
from plexrl_controller.simulation.baselines import baselines
from plexrl_controller.simulation.bounds import completion_bound
from plexrl_controller.simulation.cluster import Cluster, Placement
from plexrl_controller.simulation.live_placement import LivePlacement
from plexrl_controller.simulation.live_policy import Decisions, LivePolicy
from plexrl_controller.simulation.metrics import measure
from plexrl_controller.simulation.plexbench.groups import generator, stalling
from plexrl_controller.simulation.plexbench.rows import Progress, Row, Task, collect, run_all, summarise
from plexrl_controller.simulation.scenarios import share
from plexrl_controller.simulation.workload import BY_NAME, CLASSES, GeneratorSettings, Hardware, Job, generate

WARM_UP_S = 2 * 3600.0
TIMED = 16
"""In traces one decision in so many is timed and checked; the tests check every one."""


@dataclass(frozen=True, slots=True)
class Trace:
    """What a trace is generated from."""

    gpus: int
    load: float
    window_s: float
    mean_iterations: float
    complete: bool = True
    """Run until the last job has ended; otherwise until the window's end."""


CI_TRACE = Trace(512, 1.2, 8 * 3600.0, 30.0)


@cache
def jobs_of(trace: Trace, rep: int) -> tuple[Job, ...]:
    """The trace's jobs; drawn once in each process."""
    return generate(
        GeneratorSettings(trace.gpus, trace.load, rep, window_s=trace.window_s, mean_iterations=trace.mean_iterations)
    )


@dataclass(frozen=True, slots=True)
class Lever:
    """One change of our policy, to tell what it is worth."""

    policy: Mapping[str, Any]
    placement: Mapping[str, Any]
    group: Mapping[str, Any]
    """For the single group: arguments of `LivePolicy`, and `hints`."""


def _lever(
    *, placement: Mapping[str, Any] | None = None, group: Mapping[str, Any] | None = None, **policy: Any
) -> Lever:
    return Lever(policy, placement or {}, group or {})


LEVERS: dict[str, Lever] = {
    "all on (B10)": _lever(),
    "granularity: phase-level": _lever(hold=HoldRule.PHASE),
    "granularity: iteration-level": _lever(hold=HoldRule.ITERATION, hold_limit_s=3600.0),
    "hold: never": _lever(hold=HoldRule.NEVER),
    "clean eviction off": _lever(placement={"clean_eviction": False}, group={"clean_eviction": False}),
    "write-back off": _lever(write_back=False),
    "prefetch off": _lever(prefetch=False),
    "hints off": _lever(use_hints=False),
    "hints and learned stalls off": _lever(use_hints=False, use_learned_stalls=False),
    "chunking off": _lever(chunking=False),
    "chunks of 15 s": _lever(chunk_s=15.0),
    "order: las": _lever(order=Order.LAS),
    "order: hrrs": _lever(order=Order.HRRS),
    "order: fifo": _lever(order=Order.FIFO),
    "placement: no prediction, two at most": _lever(predict_slowdown=False, max_members=2),
    "placement: variation unknown": _lever(correct_variation=False),
    "placement: no backfill": _lever(placement={"backfill": False}),
    "consolidated tails off": _lever(placement={"consolidate": False}),
}


def ours(lever: Lever | None = None) -> LivePlacement:
    """B10, with the defaults of the live controller but for the lever."""
    lever = lever or _lever()
    decisions = Decisions(every=TIMED)
    return LivePlacement(policy=replace(Policy(), **lever.policy), decisions=decisions, **lever.placement)


def policies() -> dict[str, Callable[[], Placement]]:
    """B0 to B10 by name."""
    found: dict[str, Callable[[], Placement]] = {}
    for index, baseline in enumerate(baselines()):
        found[baseline.name] = lambda index=index: baselines()[index]  # type: ignore[misc]
    found["B10-no-tails"] = lambda: ours(LEVERS["consolidated tails off"])
    found["B10"] = ours
    return found


TITLES = {b.name: b.title for b in baselines()} | {
    "B10": "PlexRL as in this repository",
    "B10-no-tails": "the same without consolidated tails",
}


def run_trace(trace: Trace, rep: int, policy: str, lever: str | None = None) -> Mapping[str, float]:
    """Runs one policy over one trace."""
    placement = policies()[policy]() if lever is None else ours(LEVERS[lever])
    jobs = jobs_of(trace, rep)
    cluster = Cluster(trace.gpus, Hardware(), placement)
    end_s = trace.window_s + (0.0 if trace.complete else WARM_UP_S)
    cluster.run(jobs, math.inf if trace.complete else end_s)
    measured = asdict(measure(cluster, WARM_UP_S, end_s, trace.complete))
    if trace.complete:
        measured["lb1_s"] = completion_bound(jobs, trace.gpus)
    if isinstance(placement, LivePlacement):
        decided = np.array(placement.decisions.seconds or [0.0])
        measured["decision_p50_us"] = float(np.percentile(decided, 50)) * 1e6
        measured["decision_p99_us"] = float(np.percentile(decided, 99)) * 1e6
    else:
        measured["decision_p50_us"] = measured["decision_p99_us"] = math.nan
    return measured


def table_1(traces: list[Trace], reps: int, workers: int, progress: Progress) -> list[Row]:
    """Every policy on every trace; completion relative to Isolated = 100, which is B0 of the same repetition."""
    tasks = []
    for trace in traces:
        for name in policies():
            keys: dict[str, Any] = {
                "policy": name,
                "what": TITLES[name],
                "gpus": trace.gpus,
                "load": trace.load,
                "mean_iterations": trace.mean_iterations,
            }
            tasks.append((keys, [Task(run_trace, (trace, rep, name)) for rep in range(reps)]))
    repetitions = collect("T1", tasks, workers, progress)
    rows = []
    isolated: list[Mapping[str, float]] = []
    for row_keys, results in repetitions:
        isolated = results if row_keys["policy"] == "B0" else isolated
        relative = [
            {
                **result,
                "completion": 100.0 * result["completion_s"] / alone["completion_s"],
                "completion_95": 100.0 * result["completion_95_s"] / alone["completion_95_s"],
            }
            for result, alone in zip(results, isolated, strict=True)
        ]
        rows.append(summarise(row_keys, relative))
    return rows


MARGINS = (0.0, 0.05, 0.1, 0.2)


def with_margin(trace: Trace, rep: int, margin: float) -> Mapping[str, float]:
    """Our policy with this much kept free below each target."""
    placement = ours(_lever(slowdown_margin=margin))
    cluster = Cluster(trace.gpus, Hardware(), placement)
    cluster.run(jobs_of(trace, rep))
    return asdict(measure(cluster, WARM_UP_S, trace.window_s, complete=True))


def table_1b(trace: Trace, reps: int, workers: int, progress: Progress) -> list[Row]:
    """Saving against SLO attainment: the margin below the target is an operator's choice."""
    tasks = [
        ({"slowdown_margin": margin}, [Task(with_margin, (trace, rep, margin)) for rep in range(reps)])
        for margin in MARGINS
    ]
    return run_all("T1b", tasks, workers, progress)


def swapping_group(lever: str, iterations: int, seed: int) -> Mapping[str, float]:
    """Three tool jobs, 30 % busy each, on a device that holds two of their states; 4 s a move."""
    chosen = LEVERS[lever]
    jobs = [stalling(BY_NAME["tool-8B"], 0.3, iterations, generator(seed, i)) for i in range(3)]
    errors = generator(seed, 99)

    def hint(stall_s: float) -> float | None:
        return stall_s * math.exp(0.25 * errors.standard_normal()) if errors.random() < 0.8 else None

    discipline = LivePolicy(replace(Policy(), **chosen.policy), Decisions(), **chosen.group)
    shared = share(jobs, discipline, swap_s=4.0, device_states=2.0, hints=hint)
    saving, slowdown = shared.until_first_end(jobs)
    swapped = sum(1 for s in shared.setups_s if s > 0.0)
    return {
        "group_saving": saving,
        "group_slowdown_mean": slowdown,
        "group_setup_s": sum(shared.setups_s) / len(shared.setups_s),
        "group_prefetch_hit_rate": shared.prefetch_hits / max(1, shared.prefetch_hits + swapped),
    }


def table_3(trace: Trace, reps: int, iterations: int, workers: int, progress: Progress) -> list[Row]:
    """Ablation: one lever at a time, on the trace and on a group whose states do not fit the device together."""
    tasks = [({"lever": name}, [Task(run_trace, (trace, rep, "B10", name)) for rep in range(reps)]) for name in LEVERS]
    rows = run_all("T3", tasks, workers, progress)
    tasks = [
        ({"lever": name}, [Task(swapping_group, (name, iterations, rep)) for rep in range(reps)]) for name in LEVERS
    ]
    for row, more in zip(rows, run_all("T3 group", tasks, workers, progress), strict=True):
        row.update(more)
    reference = rows[0]
    for row in rows:
        row["worth_saving"] = reference["saving"] - row["saving"]
        row["worth_slo_jobs"] = reference["slo_jobs"] - row["slo_jobs"]
        row["worth_group_saving"] = reference["group_saving"] - row["group_saving"]
    return rows


def scale(gpus: int, load: float, window_s: float, small_jobs: bool, policy: str, rep: int) -> Mapping[str, float]:
    """Processor time of one run. Small jobs: those of 8 GPUs alone, for as many jobs as possible."""
    classes = tuple(c for c in CLASSES if c.dedicated_gpus <= 8) if small_jobs else CLASSES
    jobs = generate(
        GeneratorSettings(gpus, load, rep, window_s=window_s, mean_iterations=30.0, initial_share=1.0, classes=classes)
    )
    placement = policies()[policy]()
    cluster = Cluster(gpus, Hardware(), placement)
    most = 0
    began = process_time()
    cluster.run(jobs, window_s)
    seconds = process_time() - began
    most = len(cluster.executions)
    measured = {
        "jobs": float(len(jobs)),
        "jobs_started": float(most),
        "events": float(cluster.simulation.events),
        "run_s": seconds,
        "events_per_s": cluster.simulation.events / seconds,
    }
    if isinstance(placement, LivePlacement):
        decided, placed = np.array(placement.decisions.seconds), np.array(placement.placement_s)
        measured |= {
            "jobs_running": float(len(cluster.running)),
            "decision_p50_us": float(np.percentile(decided, 50)) * 1e6,
            "decision_p99_us": float(np.percentile(decided, 99)) * 1e6,
            "placement_p50_ms": float(np.percentile(placed, 50)) * 1e3,
            "placement_p99_ms": float(np.percentile(placed, 99)) * 1e3,
        }
    return measured


def table_5(runs: list[tuple[int, float, bool]], reps: int, workers: int, progress: Progress) -> list[Row]:
    """Scale, run time and decision latency: (GPUs, hours, small jobs), the engine alone (B0) and with our policy."""
    tasks = []
    for gpus, hours, small in runs:
        for policy in ("B0", "B10"):
            keys = {"gpus": gpus, "policy": policy, "hours": hours, "mix": "8-GPU jobs" if small else "all classes"}
            tasks.append((keys, [Task(scale, (gpus, 1.2, hours * 3600.0, small, policy, rep)) for rep in range(reps)]))
    return run_all("T5", tasks, workers, progress)


def decision_cost(members: int, seed: int) -> Mapping[str, float]:
    """View, decision and check on a group of so many tool jobs."""
    jobs = [stalling(BY_NAME["tool-8B"], 0.8 / members, 6, generator(seed, i)) for i in range(members)]
    decisions = Decisions()
    share(jobs, LivePolicy(Policy(), decisions))
    decided = np.array(decisions.seconds)
    return {
        "decision_mean_us": float(decided.mean()) * 1e6,
        "decision_p50_us": float(np.percentile(decided, 50)) * 1e6,
        "decision_p99_us": float(np.percentile(decided, 99)) * 1e6,
    }


def table_5b(reps: int, progress: Progress) -> list[Row]:
    """Cost of a decision by members of the group; in one process, because it measures time."""
    tasks = [
        ({"members": members}, [Task(decision_cost, (members, rep)) for rep in range(reps)])
        for members in (1, 2, 4, 8, 16, 32)
    ]
    return run_all("T5 decisions", tasks, 1, progress)
