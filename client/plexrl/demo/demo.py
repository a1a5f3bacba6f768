"""The demo from start to end: a cluster of one worker, the jobs warm, alone, shared and held, then the report."""

import shutil
import time
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from plexrl.cli import timeline
from plexrl.demo import figures, picture, runs
from plexrl.demo.report import Report

SEED = 0
ALONE_STEPS = 15
SHARED_STEPS = 38
HOLD_STEPS = 6
FIRST_BUSY_S = 1.5
"""Device time of a step, until one has been measured."""
BUSY_SHARE = 0.36
"""Of a job's time alone: what the stalls are set for. The service's own time on top makes it a little less."""
# A model of 300k parameters has 6.0 MB of state (weights, gradients, two moments, rollout weights): one fits, not two.
DEVICE_STATE_BYTES = 7_500_000
KV_CACHE_BYTES = "64M"
THREADS = 2


def run(out: Path, console: Console | None = None) -> int:
    """Runs everything and writes report.json, timeline.png and trace.json to `out`; 0 when every expectation holds."""
    from plexrl_controller.embedded.cluster import LocalCluster
    from plexrl_controller.embedded.settings import ClusterSettings

    console = console or Console()
    started = time.monotonic()
    data_dir = out / "cluster"
    shutil.rmtree(data_dir, ignore_errors=True)
    data_dir.parent.mkdir(parents=True, exist_ok=True)
    settings = ClusterSettings(
        data_dir=data_dir,
        workers=1,
        device_state_bytes=str(DEVICE_STATE_BYTES),
        kv_cache_bytes=KV_CACHE_BYTES,
        threads=THREADS,
    )
    total = 2 + len(runs.TASKS) * (ALONE_STEPS + SHARED_STEPS + HOLD_STEPS)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("starting Postgres, controller and worker", total=total)

        def tell(line: str) -> None:
            progress.update(bar, advance=1, description=line)

        with LocalCluster(settings) as local:
            endpoint = runs.Endpoint(local.endpoint, local.token)
            progress.update(bar, description="engines start, both jobs imitate")
            warm = runs.warm_up(endpoint, SEED, progress.console.print)
            stalls = {name: runs.Stalls(BUSY_SHARE) for name in runs.TASKS}
            for each in stalls.values():
                each.set_next(FIRST_BUSY_S, 1)
            alone = {
                name: runs.reinforce(
                    endpoint,
                    "alone",
                    [name],
                    SEED,
                    ALONE_STEPS,
                    warm,
                    tell,
                    stalls=stalls,
                    set_stalls=True,
                    fingerprint_at=ALONE_STEPS,
                )
                for name in runs.TASKS
            }
            shared = runs.reinforce(
                endpoint,
                "shared",
                runs.TASKS,
                SEED,
                SHARED_STEPS,
                warm,
                tell,
                stalls=stalls,
                fingerprint_at=ALONE_STEPS,
                evaluate=True,
            )
        with LocalCluster(replace(settings, policy="hold")) as local:
            endpoint = runs.Endpoint(local.endpoint, local.token)
            held = runs.reinforce(endpoint, "held", runs.TASKS, SEED, HOLD_STEPS, warm, tell, stalls=stalls)
        progress.update(bar, completed=total, description="done")
    report = _report(out, warm, alone, shared, held, time.monotonic() - started)
    report.write(out / "report.json")
    report.show(console)
    console.print(f"report: {out / 'report.json'} ({report.seconds:.0f} s)")
    return 0 if all(expectation.holds for expectation in report.expectations()) else 1


def _report(
    out: Path,
    warm: dict[str, runs.JobRun],
    alone: dict[str, runs.Phase],
    shared: runs.Phase,
    held: runs.Phase,
    seconds: float,
) -> Report:
    sharing = len(runs.TASKS)
    alone_runs = {name: phase.jobs[name] for name, phase in alone.items()}
    rows = [figures.job_figures(shared.jobs[name], alone_runs[name], sharing) for name in runs.TASKS]
    busy_share = sum(row.busy_share for row in rows) / len(rows)
    png, trace = out / "timeline.png", out / "trace.json"
    waits_s = [step.stall_s for run in shared.jobs.values() for step in run.steps]
    mean_saving = sum(row.saving for row in rows) / len(rows)
    picture.draw_timeline(png, shared, alone, f"The gaps of one job are filled by the other: {mean_saving:.0%} saved")
    timeline.write_trace(trace, shared.intervals, shared.job_names, shared.worker_names)
    return Report(
        jobs=rows,
        hold_saving=figures.held_saving(held.jobs, alone_runs, sharing),
        bound_saving=figures.bound(sharing, busy_share),
        device_state_bytes=DEVICE_STATE_BYTES,
        larger_state_bytes=max(run.state_bytes for run in warm.values()),
        stall_mean_s=sum(waits_s) / len(waits_s),
        seconds=seconds,
        timeline=png,
        trace=trace,
    )
