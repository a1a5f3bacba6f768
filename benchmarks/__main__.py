"""Runs the benchmarks and writes a report: tables on the terminal and report.json."""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks import durable_call, floors
from benchmarks.measurement import Measurement, ratio_interval
from benchmarks.peers.driver import PEERS


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(prog="benchmarks", description="Times PlexRL's control plane beside its peers.")
    parser.add_argument("--out", type=Path, default=Path("out/bench"), metavar="DIR", help="default: out/bench")
    parser.add_argument("--runs", type=int, default=5, help="repetitions, ours and the peers' in turn (default: 5)")
    parser.add_argument("--seconds", type=float, default=2.0, help="length of each repetition (default: 2)")
    parser.add_argument("--peers", default=",".join(PEERS), help=f"some of {', '.join(PEERS)} (default: all)")
    args = parser.parse_args()
    console = Console()
    peers = {name: PEERS[name]() for name in args.peers.split(",") if name}
    with tempfile.TemporaryDirectory(prefix="plexrl-bench-") as folder:
        fsync_ms = floors.fsync_ms(Path(folder), 1.0)
    calls = durable_call.run(peers, args.runs, args.seconds, console)
    payloads = floors.payload_throughput(args.runs)
    args.out.mkdir(parents=True, exist_ok=True)
    report = args.out / "report.json"
    content = {
        "what_runs": durable_call.WHAT_RUNS,
        "fsync_ms": fsync_ms,
        "processor_us_per_call": calls.processor_us,
        "promises": calls.promises,
        "left_out": calls.left_out,
        "cut_short": calls.cut_short,
        "load": os.getloadavg()[0],
        "measurements": [m.as_json() for m in (*calls.measurements, *payloads)],
    }
    report.write_text(json.dumps(content, indent=2) + "\n")
    console.print(f"the call: {durable_call.WHAT_RUNS}")
    console.print(table_of("durable call without work: submit → worker → durable result", calls.measurements))
    console.print(table_of("payloads: client → payload store and back", payloads))
    hops = ", ".join(f"{name} {us:.0f}" for name, us in calls.processor_us.items())
    console.print(f"processor time per call at 64 in flight, µs: {hops}; in all {sum(calls.processor_us.values()):.0f}")
    console.print(f"fsync of 8 KiB: median {fsync_ms['p50']:.2f} ms, p99 {fsync_ms['p99']:.2f} ms")
    for name, promise in calls.promises.items():
        console.print(f"{name}: {promise}")
    for name, why in calls.left_out.items():
        console.print(f"{name} was left out: {why}")
    if calls.cut_short:
        console.print(f"fewer repetitions than asked for: {calls.cut_short}")
    console.print(f"load of this machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors")
    console.print(f"report: {report}")
    return 0


def table_of(title: str, measurements: list[Measurement]) -> Table:
    """Medians with their range; the ratio is ours / peer's of the same repetition, with its 95 % interval."""
    table = Table(title=title)
    for heading in ("measurement", "unit", "PlexRL", "peer", "ratio"):
        table.add_column(heading, justify="left" if heading == "measurement" else "right")
    for m in measurements:
        ours, theirs = (f"{v.median:.3g} ({v.low:.3g} to {v.high:.3g})" for v in (m.ours, m.peer))
        low, high = ratio_interval(m.ratio)
        ratio = f"{m.ratio.median:.3g} [{low:.3g}, {high:.3g}]"
        table.add_row(m.name, m.unit, ours, f"{m.peer_name}: {theirs}", ratio)
    return table


if __name__ == "__main__":
    sys.exit(main())
