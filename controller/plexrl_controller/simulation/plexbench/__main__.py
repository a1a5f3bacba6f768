"""Runs plexbench: `python -m plexrl_controller.simulation.plexbench --size ci --out out/plexbench`."""

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from plexrl_controller.simulation.plexbench.report import write_json, write_markdown
from plexrl_controller.simulation.plexbench.rows import Runner
from plexrl_controller.simulation.plexbench.suite import SIZES, run


def main() -> int:
    """Returns the exit status: 0 once the report is written, whatever its checks say."""
    parser = argparse.ArgumentParser(prog="plexbench", description="How the scheduler is measured: docs/plexbench.md.")
    parser.add_argument("--size", choices=sorted(SIZES), default="ci", help="ci: minutes; full: all scales")
    parser.add_argument("--reps", type=int, metavar="N", help="repetitions (default: 3 for ci, 5 for full)")
    parser.add_argument("--out", type=Path, default=Path("out/plexbench"), metavar="DIR")
    parser.add_argument(
        "--docs", type=Path, metavar="FILE", help="also write the report as Markdown, pictures beside it"
    )
    parser.add_argument(
        "--workers", type=int, default=min(2, os.cpu_count() or 1), help="processes (default: 2 at most)"
    )
    args = parser.parse_args()
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as bar:
        tasks: dict[str, TaskID] = {}

        def progress(table: str, done: int, total: int) -> None:
            if table not in tasks:
                tasks[table] = bar.add_task(table, total=total)
            bar.update(tasks[table], completed=done, total=total)

        size = SIZES[args.size]
        with Runner(args.workers, progress) as runner:
            report = run(replace(size, reps=args.reps or size.reps), runner)
    path = write_json(report, args.out)
    if args.docs is not None:
        write_markdown(report, args.docs, f"make plexbench-{'full' if args.size == 'full' else 'docs'}")
    for check in report["checks"]:
        console.print(("[green]ok[/]   " if check["ok"] else "[red]MISS[/] ") + f"{check['name']}: {check['value']}")
    print(f"report: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
