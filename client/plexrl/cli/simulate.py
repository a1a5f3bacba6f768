"""`plexrl simulate`: what a cluster would save, and what it would cost each job, under the policy that would run it.

The flags are known to the client alone; the simulator comes with the `controller` extra and is imported when it runs.
"""

import argparse
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from plexrl.cli import options

DESCRIPTION = """Simulates a cluster: either --cluster and --workload, two YAML files (examples in deploy/simulate), or
--from-trace, a file that `plexrl timeline --format trace` wrote. The very code that runs live makes the decisions.
Policies: plexrl (the default), and B0 to B10 of docs/plexbench.md; `all` runs all of them. For a trace: plexrl, las,
hrrs, fifo, fifo-lock, phase-level, iteration-level."""


def add_parser(subparsers: options.Subparsers) -> None:
    """Adds `simulate` to the subcommands."""
    parser = subparsers.add_parser("simulate", help="what a cluster would save under a policy", description=DESCRIPTION)
    parser.set_defaults(run=run)
    parser.add_argument("--cluster", type=Path, metavar="FILE", help="cluster.yaml")
    parser.add_argument("--workload", type=Path, metavar="FILE", help="workload.yaml")
    parser.add_argument("--from-trace", type=Path, metavar="FILE", help="recorded device time, JSON lines")
    parser.add_argument(
        "--policy", action="append", metavar="NAME", help="may be given several times (default: plexrl, beside B0)"
    )
    parser.add_argument("--out", type=Path, default=Path("out/simulate"), metavar="DIR", help="CSV files and picture")


def run(args: argparse.Namespace) -> int:
    """Returns the exit status: 0, or 1 when the input cannot be used, the reason printed."""
    try:
        from plexrl_controller.simulation.operator import fields
    except ModuleNotFoundError as error:
        print(f"`plexrl simulate` needs {error.name}: pip install 'plexrl[controller]'", file=sys.stderr)
        return 1
    if (args.from_trace is None) == (args.cluster is None and args.workload is None):
        print("plexrl simulate: give --cluster and --workload, or --from-trace", file=sys.stderr)
        return 1
    try:
        return _replay(args) if args.from_trace is not None else _simulate(args)
    except fields.InputError as error:
        print(f"plexrl simulate: {error}", file=sys.stderr)
        return 1


def _simulate(args: argparse.Namespace) -> int:
    from plexrl_controller.simulation.operator import inputs
    from plexrl_controller.simulation.operator import run as simulator

    if args.cluster is None or args.workload is None:
        print("plexrl simulate: --cluster and --workload belong together", file=sys.stderr)
        return 1
    cluster = inputs.read_cluster(args.cluster)
    workload, jobs = inputs.read_workload(args.workload, cluster)
    wanted = args.policy or ["B0", simulator.OURS]
    if "all" in wanted:
        wanted = [name for name in simulator.names() if name != "B10"]
    with _bar() as bar:
        task = bar.add_task(f"{len(jobs)} jobs", total=len(wanted))
        outcomes = simulator.simulate(
            cluster,
            jobs,
            wanted,
            workload.warm_up_h * 3600.0,
            lambda done, total: bar.update(task, completed=done, total=total),
        )
    Console().print(simulator.table(outcomes))
    for path in simulator.write_outcomes(outcomes, args.out):
        print(path)
    return 0


def _replay(args: argparse.Namespace) -> int:
    from plexrl_controller.simulation.operator import run as simulator
    from plexrl_controller.simulation.operator import trace

    recorded = trace.recorded_jobs(trace.read_trace(args.from_trace))
    wanted = args.policy or [simulator.OURS]
    if "all" in wanted:
        wanted = list(simulator.REPLAYED)
    with _bar() as bar:
        task = bar.add_task(f"{len(recorded)} jobs", total=len(wanted))
        rows = simulator.replay(recorded, wanted, lambda done, total: bar.update(task, completed=done, total=total))
    Console().print(simulator.replay_table(rows))
    print(simulator.write_replay(rows, args.out))
    return 0


def _bar() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True))
