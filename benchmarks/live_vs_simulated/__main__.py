"""Three real jobs share one real worker; the simulator, fitted on the first half, foretells the second.

    python -m benchmarks.live_vs_simulated --out out/live-vs-simulated

Writes recording.jsonl, which `plexrl simulate --from-trace` reads too, and report.json; prints the table. The exit
status says whether every prediction was within BOUND of what was measured.
"""

import argparse
import json
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.live_vs_simulated.jobs import SHAPES, run_together
from plexrl.cli import timeline
from plexrl.demo.runs import Endpoint
from plexrl_controller.embedded.cluster import LocalCluster
from plexrl_controller.embedded.settings import ClusterSettings
from plexrl_controller.scheduling.policy import Policy
from plexrl_controller.simulation.operator.prediction import Predicted, predict_second_half
from plexrl_controller.simulation.operator.trace import read_trace

BOUND = 0.10
# A model of 300k parameters has 6.0 MB of state: one fits, not two.
DEVICE_STATE_BYTES = 7_500_000
RUN_S = 220.0


def record(out: Path, engine: str, run_s: float, console: Console) -> tuple[float, float]:
    """Runs the jobs and writes recording.jsonl; returns the times in it between which all jobs were at their steps."""
    data_dir = out / "cluster"
    shutil.rmtree(data_dir, ignore_errors=True)
    settings = ClusterSettings(
        data_dir=data_dir,
        workers=1,
        engine=engine,
        device_state_bytes=str(DEVICE_STATE_BYTES) if engine == "vllm" else None,
        kv_cache_bytes="64M" if engine == "vllm" else None,
        threads=2,
        # A busy machine takes minutes to start an engine.
        worker_flags=("--engine-start-timeout-s", "1200", "--hang-timeout-s", "1200"),
    )
    with LocalCluster(settings) as local:
        endpoint = Endpoint(local.endpoint, local.token)
        console.print("the jobs warm up, then run together")
        run = run_together(endpoint, run_s, engine == "vllm", console.print)
        with endpoint.connect() as cluster:
            intervals = [i for i in timeline.read_intervals(cluster.connection) if i.job_id in run.job_ids]
            submitted = timeline.read_submissions(cluster.connection)
            _, workers = timeline.read_names(cluster.connection)
    for interval in intervals:
        interval.job_id = run.job_ids[interval.job_id]
    timeline.write_recording(out / "recording.jsonl", intervals, workers, submitted)
    origin_s = min(interval.start_unix_ns for interval in intervals) / 1e9
    return run.start_s - origin_s, run.end_s - origin_s


def compare(recording: Path, start_s: float, end_s: float) -> list[Predicted]:
    """What the first half of a recording foretells of the second, and what came."""
    hints = {shape.name: lambda stall_s: stall_s for shape in SHAPES if shape.hints}
    found = predict_second_half(read_trace(recording), Policy(), start_s=start_s, end_s=end_s, hints=hints)
    order = [shape.name for shape in SHAPES]
    return sorted(found, key=lambda row: order.index(row.job))


def table(rows: Sequence[Predicted]) -> Table:
    """One row for each job."""
    shown = Table(
        title="slowdown in the second half, against the job's own work and stalls", box=None, padding=(0, 1, 0, 0)
    )
    for heading in ("job", "steps", "busy", "set-up", "before", "foretold", "90 %", "measured", "error"):
        shown.add_column(heading, justify="left" if heading == "job" else "right", no_wrap=True)
    for row in rows:
        shown.add_row(
            row.job,
            f"{row.iterations_before}+{row.iterations_after}",
            f"{row.busy_share:.0%}",
            f"{1000 * row.setup_s:.0f} ms",
            f"{row.first_half:.3f}",
            f"{row.predicted:.3f}",
            f"{row.low:.2f}-{row.high:.2f}",
            f"{row.measured:.3f}",
            f"{row.error:+.1%}",
        )
    return shown


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.live_vs_simulated", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/live-vs-simulated"))
    parser.add_argument("--seconds", type=float, default=RUN_S, help="for which the jobs run together")
    parser.add_argument("--engine", choices=("vllm", "fake"), default="vllm", help="fake: computes nothing, for tests")
    args = parser.parse_args(arguments)
    console = Console()
    began = time.monotonic()
    args.out.mkdir(parents=True, exist_ok=True)
    start_s, end_s = record(args.out, args.engine, args.seconds, console)
    rows = compare(args.out / "recording.jsonl", start_s, end_s)
    worst = max(abs(row.error) for row in rows)
    report = {
        "bound": BOUND,
        "engine": args.engine,
        "start_s": start_s,
        "end_s": end_s,
        "seconds": time.monotonic() - began,
        "jobs": [asdict(row) | {"error": row.error} for row in rows],
        "ok": worst <= BOUND,
    }
    (args.out / "report.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    console.print(table(rows))
    console.print(f"largest error {worst:.1%}, bound {BOUND:.0%}; {args.out / 'report.json'}")
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
