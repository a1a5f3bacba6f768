"""Runs the benchmarks and writes a report: a table on the terminal and report.json."""

import argparse
import json
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks import durable_call
from benchmarks.measurement import Measurement


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(prog="benchmarks", description="Times PlexRL's control plane beside its peers.")
    parser.add_argument("--out", type=Path, default=Path("out/bench"), metavar="DIR", help="default: out/bench")
    parser.add_argument("--runs", type=int, default=5, help="repetitions, ours and the peer's in turn (default: 5)")
    parser.add_argument("--seconds", type=float, default=3.0, help="length of each repetition (default: 3)")
    args = parser.parse_args()
    console = Console()
    measurements = durable_call.run(args.runs, args.seconds, console)
    args.out.mkdir(parents=True, exist_ok=True)
    report = args.out / "report.json"
    report.write_text(json.dumps({"measurements": [m.as_json() for m in measurements]}, indent=2) + "\n")
    console.print(table_of(measurements))
    console.print(f"report: {report}")
    return 0


def table_of(measurements: list[Measurement]) -> Table:
    """Medians with their range; the ratio is ours / peer's of the same repetition."""
    table = Table(title="durable call without work: submit → worker → durable result, beside a Ray actor call")
    for heading in ("measurement", "unit", "PlexRL", "peer", "ratio"):
        table.add_column(heading, justify="left" if heading == "measurement" else "right")
    for m in measurements:
        cells = [f"{v.median:.3g} ({v.low:.3g} to {v.high:.3g})" for v in (m.ours, m.peer, m.ratio)]
        table.add_row(m.name, m.unit, cells[0], f"{m.peer_name}: {cells[1]}", cells[2])
    return table


if __name__ == "__main__":
    sys.exit(main())
