"""`plexrl waiting bench`: runs, shows and writes."""

import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from plexrl.waiting.bench.picture import draw_curves
from plexrl.waiting.bench.report import LEARNED_AFTER, Summary, summarise, table, write
from plexrl.waiting.bench.runs import AGENTS, Row, check_names, run_all
from plexrl.waiting.scenarios import SCENARIOS


def run(
    out: Path, laws: Sequence[str], agents: Sequence[str], *, episodes: int, seeds: int, processes: int
) -> list[Summary]:
    """Runs the benchmark (empty `laws`, `agents`: all), prints the table, writes report.json, rows.csv, curves.png."""
    laws, agents = list(laws) or list(SCENARIOS), list(agents) or list(AGENTS)
    check_names(laws, agents)
    console = Console()
    start = time.monotonic()
    rows: list[Row] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("episodes", total=len(laws) * len(agents) * seeds * episodes)
        for found in run_all(laws, agents, episodes=episodes, seeds=seeds, processes=processes):
            rows += found
            progress.advance(task, episodes)
    rows.sort(key=lambda row: (laws.index(row.law), agents.index(row.agent), row.seed, row.episode is None))
    summaries = summarise(rows, min(LEARNED_AFTER, max(episodes - 1, 0)))
    settings: dict[str, object] = {"laws": laws, "agents": agents, "episodes": episodes, "seeds": seeds}
    write(out, rows, summaries, settings)
    draw_curves(out / "curves.png", rows)
    first = min(LEARNED_AFTER, max(episodes - 1, 0))
    title = (
        f"Cost as a multiple of the floor's, episodes {first} to {episodes - 1}, {seeds} seeds (floor: per operation)"
    )
    console.print(table(summaries, title))
    console.print(f"\n{sum(row.operations for row in rows if row.episode is None):,} operations in ", end="")
    console.print(
        f"{time.monotonic() - start:.0f} s. Wrote report.json, rows.csv and curves.png to {out}/", highlight=False
    )
    return summaries
