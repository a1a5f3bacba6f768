"""Runs an operator's workload or a recorded trace, and writes what came out: a table, CSV files and a picture.

Figures come from seeds and files alone: the same input gives the same bytes of CSV.
"""

import csv
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from plexrl_controller.scheduling.policy import HoldRule, Order, Policy
from plexrl_controller.simulation.cluster import Cluster
from plexrl_controller.simulation.disciplines import QueueDiscipline, Ranking
from plexrl_controller.simulation.live_policy import Decisions, LivePolicy
from plexrl_controller.simulation.metrics import JobResult, Metrics, job_results, measure
from plexrl_controller.simulation.operator.fields import InputError
from plexrl_controller.simulation.operator.inputs import ClusterFile
from plexrl_controller.simulation.operator.trace import RecordedJob
from plexrl_controller.simulation.plexbench.traces import TITLES, policies
from plexrl_controller.simulation.pools import Discipline
from plexrl_controller.simulation.scenarios import share
from plexrl_controller.simulation.workload import Job

OURS = "plexrl"
Progress = Callable[[int, int], None]
COLUMNS = {
    "saving": "saving",
    "ecap": "ECap",
    "slowdown_mean": "slower",
    "slowdown_worst": "worst",
    "slo_jobs": "within",
    "goodput": "goodput",
    "swap_share": "swap",
    "queue_mean_s": "queued h",
    "completion_s": "done h",
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one policy made of the workload."""

    policy: str
    title: str
    metrics: Metrics
    jobs: tuple[JobResult, ...]


def names() -> tuple[str, ...]:
    """The policies that there are; `plexrl` is B10."""
    return (OURS, *policies())


def simulate(
    cluster_file: ClusterFile, jobs: Sequence[Job], wanted: Sequence[str], warm_up_s: float, progress: Progress
) -> list[Outcome]:
    """Runs every wanted policy over the jobs, to the end of the last one.

    Raises:
        InputError: an unknown policy, or a job that a policy cannot place on the whole cluster.
    """
    makers = policies()
    outcomes = []
    for index, name in enumerate(wanted):
        known = "B10" if name == OURS else name
        if known not in makers:
            raise InputError(f"no policy {name!r}; there are {', '.join(names())}")
        cluster = Cluster(cluster_file.gpus, cluster_file.hardware(), makers[known]())
        cluster.run(jobs)
        if cluster.queue:
            job = cluster.queue[0]
            raise InputError(
                f"{name} cannot place {job.name} on {cluster_file.gpus} GPUs, even when nothing else runs: "
                "give the cluster more GPUs, or leave the class or the policy out"
            )
        try:
            end_s = max(execution.ends[-1] for execution in cluster.executions)
            metrics = measure(cluster, warm_up_s, end_s, complete=True)
        except ValueError as error:
            raise InputError(f"warm_up_h: {error}") from error
        results = tuple(job_results(cluster.executions, warm_up_s, end_s))
        outcomes.append(Outcome(name, TITLES[known], metrics, results))
        progress(index + 1, len(wanted))
    return outcomes


def table(outcomes: Sequence[Outcome]) -> Table:
    """One row for each policy."""
    shown = Table(title="shares in %; within: jobs at most 1.3 times slower than alone", box=box.SIMPLE, padding=(0, 1))
    shown.add_column("policy")
    for heading in COLUMNS.values():
        shown.add_column(heading, justify="right")
    for outcome in outcomes:
        values = asdict(outcome.metrics)
        shown.add_row(outcome.policy, *[_shown(column, values[column]) for column in COLUMNS])
    return shown


def _shown(column: str, value: float) -> str:
    if column in ("saving", "slo_jobs", "goodput", "swap_share"):
        return f"{100 * value:.1f}"
    return f"{value / 3600:.2f}" if column.endswith("_s") else f"{value:.2f}"


def write_outcomes(outcomes: Sequence[Outcome], folder: Path) -> list[Path]:
    """Writes policies.csv, jobs.csv and slowdowns.png; returns what was written."""
    folder.mkdir(parents=True, exist_ok=True)
    columns = [field.name for field in fields(Metrics)]
    rows = [[o.policy, o.title, *[_plain(asdict(o.metrics)[column]) for column in columns]] for o in outcomes]
    written = [_csv(folder / "policies.csv", ["policy", "title", *columns], rows)]
    job_columns = ("name", "job_class", "iterations", "cost_gpu_s", "dedicated_gpu_s", "slowdown", "slowdown_target")
    rows = [[o.policy, *[_plain(getattr(job, column)) for column in job_columns]] for o in outcomes for job in o.jobs]
    written.append(_csv(folder / "jobs.csv", ["policy", *job_columns], rows))
    picture = folder / "slowdowns.png"
    if _draw(outcomes, picture):
        written.append(picture)
    return written


def _csv(path: Path, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(rows)
    return path


def _plain(value: Any) -> Any:
    return f"{value:.6g}" if isinstance(value, float) else value


def _draw(outcomes: Sequence[Outcome], path: Path) -> bool:
    """Share of jobs within each slowdown, a line for each policy. False where matplotlib is not installed."""
    try:
        import matplotlib as mpl
    except ModuleNotFoundError:
        return False
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(7.5, 4.2), layout="constrained")
    for outcome in outcomes:
        slowdowns = sorted(job.slowdown for job in outcome.jobs)
        shares = [100 * (i + 1) / len(slowdowns) for i in range(len(slowdowns))]
        label = f"{outcome.policy}: saves {100 * outcome.metrics.saving:.0f} %"
        axis.step(slowdowns, shares, where="post", label=label)
    axis.axvline(1.3, color="#777777", linewidth=0.8, linestyle=":")
    axis.set_xlabel("time of an iteration over that on GPUs of the job's own")
    axis.set_ylabel("jobs within it, %")
    axis.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)
    return True


REPLAYED: dict[str, Callable[[], Discipline]] = {
    OURS: lambda: LivePolicy(Policy(), Decisions()),
    "las": lambda: LivePolicy(Policy(order=Order.LAS), Decisions()),
    "hrrs": lambda: LivePolicy(Policy(order=Order.HRRS), Decisions()),
    "phase-level": lambda: LivePolicy(Policy(hold=HoldRule.PHASE), Decisions()),
    "iteration-level": lambda: LivePolicy(Policy(hold=HoldRule.ITERATION), Decisions()),
    "fifo": lambda: QueueDiscipline(Ranking.FIFO),
    "fifo-lock": lambda: QueueDiscipline(Ranking.FIFO, hold_phase=True, full_snapshots=True),
}
"""Policies for one worker: a trace has no placement left to decide."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """One recorded job under one policy."""

    policy: str
    worker: str
    job: str
    iterations: int
    busy_share: float
    guessed_stalls: int
    recorded_slowdown: float
    simulated_slowdown: float


def replay(recorded: Sequence[RecordedJob], wanted: Sequence[str], progress: Progress) -> list[Replayed]:
    """Runs each worker's jobs again, all from the same moment, on the same segments.

    Swaps are paid as recorded, one state on the device at a time where any were recorded.
    """
    found = []
    for index, name in enumerate(wanted):
        if name not in REPLAYED:
            raise InputError(f"no policy {name!r} for a trace; there are {', '.join(REPLAYED)}")
        for worker in dict.fromkeys(job.worker for job in recorded):
            jobs = [job for job in recorded if job.worker == worker]
            swap_s = max(job.swap_s for job in jobs)
            states = 1.0 if swap_s > 0.0 else float("inf")
            shared = share([job.iterations for job in jobs], REPLAYED[name](), swap_s=swap_s, device_states=states)
            for job, ends in zip(jobs, shared.ends_s, strict=True):
                busy_s = sum(work.busy_s for it in job.iterations for work in it)
                last_stall_s = job.iterations[-1][-1].stall_s
                found.append(
                    Replayed(
                        name,
                        worker,
                        job.job,
                        len(job.iterations),
                        busy_s / job.alone_s,
                        job.guessed_stalls,
                        job.recorded_s / job.alone_s,
                        (ends[-1] - last_stall_s) / job.alone_s,
                    )
                )
        progress(index + 1, len(wanted))
    return found


def replay_table(rows: Sequence[Replayed]) -> Table:
    """One row for each job and policy."""
    shown = Table(title="a recorded trace again; slowdown against the device to oneself", box=box.SIMPLE)
    for column in fields(Replayed):
        shown.add_column(column.name, justify="left" if column.type is str else "right")
    for row in rows:
        shown.add_row(*[f"{v:.3f}" if isinstance(v, float) else str(v) for v in asdict(row).values()])
    return shown


def write_replay(rows: Sequence[Replayed], folder: Path) -> Path:
    """Writes replay.csv."""
    folder.mkdir(parents=True, exist_ok=True)
    columns = [field.name for field in fields(Replayed)]
    return _csv(folder / "replay.csv", columns, [[_plain(v) for v in asdict(row).values()] for row in rows])
