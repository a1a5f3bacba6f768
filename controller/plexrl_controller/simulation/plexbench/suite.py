"""Which tables a run has, and how large they are."""

from dataclasses import dataclass
from typing import Any

from plexrl_controller.simulation.plexbench import ablation, groups, traces
from plexrl_controller.simulation.plexbench.checks import checks
from plexrl_controller.simulation.plexbench.consolidation import table_7
from plexrl_controller.simulation.plexbench.rows import Row, Runner, Task
from plexrl_controller.simulation.plexbench.traces import Trace

HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class Size:
    """Repetitions, iterations and traces of a run."""

    name: str
    reps: int
    group_iterations: int
    exact_iterations: int
    traces: tuple[Trace, ...]
    ablation: Trace
    scales: tuple[tuple[int, float, bool], ...]
    """GPUs, hours, 8-GPU jobs alone."""


CI = Size(
    "ci",
    reps=3,
    group_iterations=60,
    exact_iterations=15,
    traces=(traces.CI_TRACE,),
    ablation=traces.CI_TRACE,
    scales=((8, 8.0, False), (64, 8.0, False), (512, 4.0, False), (2048, 1.0, False)),
)
FULL = Size(
    "full",
    reps=5,
    group_iterations=150,
    exact_iterations=30,
    traces=(
        Trace(512, 1.2, 24 * HOUR_S, 30.0),
        Trace(512, 1.2, 8 * HOUR_S, 30.0),
        Trace(512, 0.8, 24 * HOUR_S, 30.0),
        Trace(512, 2.0, 24 * HOUR_S, 30.0),
        Trace(512, 1.2, 24 * HOUR_S, 300.0, complete=False),
        Trace(2048, 1.2, 8 * HOUR_S, 30.0),
    ),
    ablation=Trace(512, 1.2, 24 * HOUR_S, 30.0, complete=False),
    scales=(
        (8, 24.0, False),
        (64, 24.0, False),
        (512, 8.0, False),
        (2048, 4.0, False),
        (10_000, 4.0, False),
        (10_000, 1.0, True),
    ),
)
SIZES = {size.name: size for size in (CI, FULL)}


def run(size: Size, runner: Runner) -> dict[str, Any]:
    """Runs every table; the report as plain values."""
    iterations = size.group_iterations
    tables: dict[str, list[Row]] = {
        "T1": traces.table_1(list(size.traces), size.reps, runner),
        "T1b": traces.table_1b(size.traces[0], size.reps, runner),
        "T2": groups.table_2(size.reps, iterations, runner),
        "T2b": groups.table_2b(size.reps, iterations, runner),
        "T3": ablation.table_3(size.ablation, 2 * size.reps, runner),
        "T3b": ablation.table_3b(4 * size.reps, iterations, runner),
        "T4": groups.table_4(size.reps, iterations, runner),
        "T5": traces.table_5(list(size.scales), 1, runner),
        "T5b": traces.table_5b(size.reps, runner),
        "T6": groups.table_6(size.reps, size.exact_iterations, runner),
        "T7": table_7(size.reps, iterations, runner),
        "bounds": runner.run_all(
            "bounds",
            [
                (
                    {"k": members, "d": busy_share},
                    [Task(groups.homogeneous, (members, busy_share, iterations, rep)) for rep in range(size.reps)],
                )
                for members, busy_share in ((2, 0.8), (3, 0.5), (4, 0.4), (6, 0.3))
            ],
        ),
    }
    return {
        "size": size.name,
        "seed": {
            "rule": "1000 * gpus + rep, one PCG64 stream per job",
            "first": 1000 * size.traces[0].gpus,
            "reps": size.reps,
        },
        "tables": tables,
        "checks": [check.as_json() for check in checks(tables)],
    }
