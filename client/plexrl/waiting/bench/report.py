"""What the benchmark found: means with intervals, the table, report.json and rows.csv.

Knows rows; knows nothing of how they came about.
"""

import csv
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.table import Table

from plexrl.waiting.bench.runs import Row

FIRST_EPISODES = 10
LEARNED_AFTER = 30
_RESAMPLES = 400


@dataclass(frozen=True)
class Summary:
    """One agent under one law, over seeds and a stretch of episodes. Costs are per operation, in seconds' worth."""

    agent: str
    law: str
    episodes: str
    queries: float
    overshoot_s: float
    cost: float
    floor_cost: float
    ratio: float | None
    """Sum of costs by sum of floor costs, on the same draws; None where the floor is 0."""
    ratio_low: float | None
    """2.5th percentile of a bootstrap over seeds and episodes ..."""
    ratio_high: float | None
    """... and 97.5th."""
    held_s: float
    not_detected: int
    prompt_tokens: float


def summarise(rows: Sequence[Row], learned_after: int = LEARNED_AFTER) -> list[Summary]:
    """Per agent and law: the first FIRST_EPISODES episodes, and those from `learned_after` on (if there are any)."""
    found = []
    for law, agent in dict.fromkeys((row.law, row.agent) for row in rows):
        own = [row for row in rows if (row.law, row.agent) == (law, agent) and row.episode is not None]
        first = [row for row in own if row.episode is not None and row.episode < FIRST_EPISODES]
        later = [row for row in own if row.episode is not None and row.episode >= learned_after]
        found += [_summary(agent, law, f"0-{FIRST_EPISODES - 1}", first)]
        found += [_summary(agent, law, f"{learned_after}-", later)] if later else []
    return found


def _summary(agent: str, law: str, episodes: str, rows: Sequence[Row]) -> Summary:
    operations = sum(row.operations for row in rows)
    costs = np.array([row.cost for row in rows])
    floors = np.array([row.floor_cost for row in rows])
    ratio = low = high = None
    if floors.sum() > 0:
        picks = np.random.default_rng(0).integers(0, len(rows), (_RESAMPLES, len(rows)))
        ratios = costs[picks].sum(axis=1) / np.maximum(floors[picks].sum(axis=1), 1e-12)
        ratio = float(costs.sum() / floors.sum())
        low, high = (float(value) for value in np.quantile(ratios, [0.025, 0.975]))
    return Summary(
        agent=agent,
        law=law,
        episodes=episodes,
        queries=sum(row.queries for row in rows) / operations,
        overshoot_s=sum(row.overshoot_s for row in rows) / operations,
        cost=float(costs.sum()) / operations,
        floor_cost=float(floors.sum()) / operations,
        ratio=ratio,
        ratio_low=low,
        ratio_high=high,
        held_s=sum(row.held_s for row in rows) / operations,
        not_detected=sum(row.not_detected for row in rows),
        prompt_tokens=sum(row.prompt_tokens for row in rows) / operations,
    )


def table(summaries: Sequence[Summary], title: str) -> Table:
    """Laws by agents: cost as a multiple of the floor's, in the last stretch of episodes that each law has."""
    agents = [name for name in dict.fromkeys(summary.agent for summary in summaries) if name not in _NOT_COMPARED]
    last = {(summary.law, summary.agent): summary for summary in summaries}
    shown = Table(title=title, title_justify="left", box=None, header_style="bold", pad_edge=False)
    shown.add_column("law", no_wrap=True)
    shown.add_column("floor", justify="right")
    for agent in agents:
        shown.add_column(agent.replace("-", " "), justify="right")
    for law in dict.fromkeys(summary.law for summary in summaries):
        cells = [last[law, agent] for agent in agents]
        best = min((cell.ratio for cell in cells if cell.ratio is not None), default=None)
        floor_cost = next(summary.floor_cost for summary in last.values() if summary.law == law)
        shown.add_row(law, f"{floor_cost:.3g}", *(_cell(cell, best) for cell in cells))
    return shown


# The one is the floor, the other is told and does not wait; both are in the report.
_NOT_COMPARED = ("optimal", "blocking")


def _cell(summary: Summary, best: float | None) -> str:
    if summary.ratio is None:
        return "-"
    text = f"{summary.ratio:.2f}"
    return f"[bold]{text}[/bold]" if summary.ratio == best else text


def write(folder: Path, rows: Sequence[Row], summaries: Sequence[Summary], settings: dict[str, object]) -> None:
    """report.json (settings, summary, rows) and rows.csv."""
    folder.mkdir(parents=True, exist_ok=True)
    listed = [{**asdict(row), "ratio": row.ratio} for row in rows]
    report = {"settings": settings, "summary": [asdict(summary) for summary in summaries], "rows": listed}
    (folder / "report.json").write_text(json.dumps(report, indent=1, allow_nan=False) + "\n")
    with (folder / "rows.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(listed[0]))
        writer.writeheader()
        writer.writerows(listed)
