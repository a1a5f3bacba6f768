"""T1 and T5: whole clusters under generated traces, every policy on the same realised segments."""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from time import process_time
from typing import Any

import numpy as np

from plexrl_controller.scheduling.policy import Policy
from plexrl_controller.simulation.baselines import baselines
from plexrl_controller.simulation.bounds import completion_bound
from plexrl_controller.simulation.cluster import Cluster, Placement
from plexrl_controller.simulation.live_placement import LivePlacement
from plexrl_controller.simulation.live_policy import Decisions, LivePolicy
from plexrl_controller.simulation.metrics import measure
from plexrl_controller.simulation.plexbench.groups import generator, stalling
from plexrl_controller.simulation.plexbench.rows import Row, Runner, Task, summarise
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


TRACE_KEYS = ("gpus", "load", "hours", "mean_iterations")
"""What tells the traces of T1 apart, in its rows."""

CI_TRACE = Trace(512, 1.2, 8 * 3600.0, 30.0)


@cache
def jobs_of(trace: Trace, rep: int) -> tuple[Job, ...]:
    """The trace's jobs; drawn once in each process."""
    return generate(
        GeneratorSettings(trace.gpus, trace.load, rep, window_s=trace.window_s, mean_iterations=trace.mean_iterations)
    )


def ours(policy: Policy | None = None, **placement: Any) -> LivePlacement:
    """B10, with the defaults of the live controller unless `policy` says otherwise."""
    return LivePlacement(policy=policy or Policy(), decisions=Decisions(every=TIMED), **placement)


def policies() -> dict[str, Callable[[], Placement]]:
    """B0 to B10 by name."""
    found: dict[str, Callable[[], Placement]] = {}
    for index, baseline in enumerate(baselines()):
        found[baseline.name] = lambda index=index: baselines()[index]  # type: ignore[misc]
    found["B10-no-tails"] = lambda: ours(consolidate=False)
    found["B10"] = ours
    return found


TITLES = {b.name: b.title for b in baselines()} | {
    "B10": "PlexRL as in this repository",
    "B10-no-tails": "the same without consolidated tails",
}


def run_trace(trace: Trace, rep: int, policy: str) -> Mapping[str, float]:
    """Runs one policy over one trace."""
    return run_placement(trace, rep, policies()[policy]())


def run_placement(trace: Trace, rep: int, placement: Placement) -> Mapping[str, float]:
    """Metrics of one placement over one trace, and LB1 where it ran to its end."""
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


def table_1(traces: list[Trace], reps: int, runner: Runner) -> list[Row]:
    """Every policy on every trace; completion relative to Isolated = 100, which is B0 of the same repetition."""
    tasks = []
    for trace in traces:
        for name in policies():
            keys: dict[str, Any] = {
                "policy": name,
                "what": TITLES[name],
                "gpus": trace.gpus,
                "load": trace.load,
                "hours": trace.window_s / 3600.0,
                "mean_iterations": trace.mean_iterations,
            }
            tasks.append((keys, [Task(run_trace, (trace, rep, name)) for rep in range(reps)]))
    repetitions = runner.collect("T1", tasks)
    rows = []
    isolated: list[Mapping[str, float]] = []
    for row_keys, results in repetitions:
        isolated = results if row_keys["policy"] == "B0" else isolated
        relative = [
            {
                **result,
                "completion": 100.0 * result["completion_s"] / alone["completion_s"],
                "completion_95": 100.0 * result["completion_95_s"] / alone["completion_95_s"],
                "floor": 100.0 * result.get("lb1_s", math.nan) / alone["completion_s"],
            }
            for result, alone in zip(results, isolated, strict=True)
        ]
        rows.append(summarise(row_keys, relative))
    return rows


MARGINS = (0.0, 1 / 6, 1 / 3, 2 / 3, 5 / 6, 11 / 12)


def with_margin(trace: Trace, rep: int, margin: float) -> Mapping[str, float]:
    """Our policy with this part of what each target allows kept free."""
    return run_placement(trace, rep, ours(Policy(slowdown_margin=margin)))


def table_1b(trace: Trace, reps: int, runner: Runner) -> list[Row]:
    """Saving against SLO attainment: the margin below the target is an operator's choice."""
    tasks = [
        ({"slowdown_margin": margin}, [Task(with_margin, (trace, rep, margin)) for rep in range(reps)])
        for margin in MARGINS
    ]
    return runner.run_all("T1b", tasks)


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


def table_5(runs: list[tuple[int, float, bool]], reps: int, runner: Runner) -> list[Row]:
    """Scale, run time and decision latency: (GPUs, hours, small jobs), the engine alone (B0) and with our policy."""
    tasks = []
    for gpus, hours, small in runs:
        for policy in ("B0", "B10"):
            keys = {"gpus": gpus, "policy": policy, "hours": hours, "mix": "8-GPU jobs" if small else "all classes"}
            tasks.append((keys, [Task(scale, (gpus, 1.2, hours * 3600.0, small, policy, rep)) for rep in range(reps)]))
    return runner.run_all("T5", tasks, alone=True)


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


def table_5b(reps: int, runner: Runner) -> list[Row]:
    """Cost of a decision by members of the group; in one process, because it measures time."""
    tasks = [
        ({"members": members}, [Task(decision_cost, (members, rep)) for rep in range(reps)])
        for members in (1, 2, 4, 8, 16, 32)
    ]
    return runner.run_all("T5 decisions", tasks, alone=True)
