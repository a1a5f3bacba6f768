"""Learning curves: cost as a multiple of the floor's, over episodes, one panel per law."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from plexrl.waiting.bench.runs import Row
from plexrl.waiting.scenarios import DRIFT_AT

COLOURS = ("#2a78b5", "#e07b39", "#4d9a51", "#9467bd", "#c44e52", "#8c6d31", "#17a2b8", "#7f7f7f")
WINDOW = 6
HIGHEST = 4.0


def draw_curves(path: Path, rows: Sequence[Row]) -> None:
    """Writes a PNG or SVG. Each point is a ratio of sums over all seeds and the WINDOW episodes up to it."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    laws = list(dict.fromkeys(row.law for row in rows))
    # The floor is the line at 1, and being told is no way of waiting.
    agents = [name for name in dict.fromkeys(row.agent for row in rows) if name not in ("optimal", "blocking")]
    across = min(4, len(laws))
    down = -(-len(laws) // across)
    figure, axes = plt.subplots(
        down, across, figsize=(3.1 * across, 2.3 * down + 0.6), squeeze=False, sharey=True, layout="constrained"
    )
    for axis, law in zip(axes.flat, laws, strict=False):
        for agent, colour in zip(agents, COLOURS, strict=False):
            episodes, ratios = curve([row for row in rows if (row.law, row.agent) == (law, agent)])
            axis.plot(episodes, np.minimum(ratios, HIGHEST), color=colour, label=agent, linewidth=1.4)
        _frame(axis, law)
    for axis in list(axes.flat)[len(laws) :]:
        axis.set_visible(False)
    for axis in axes[:, 0]:
        axis.set_ylabel("cost / floor")
    for axis in axes[-1]:
        axis.set_xlabel("episode")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _frame(axis: Any, law: str) -> None:
    axis.axhline(1.0, color="#222222", linewidth=0.8)
    if law.startswith("drift"):
        axis.axvline(DRIFT_AT, color="#222222", linewidth=0.8, linestyle=":")
    axis.set_title(law, fontsize=9)
    axis.set_ylim(0.8, HIGHEST)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def curve(rows: Sequence[Row]) -> tuple[list[int], list[float]]:
    """Episodes, and the ratio of sums over all rows of the WINDOW episodes up to each."""
    episodes = sorted({row.episode for row in rows if row.episode is not None})
    ratios = []
    for episode in episodes:
        recent = [row for row in rows if row.episode is not None and episode - WINDOW < row.episode <= episode]
        floor = sum(row.floor_cost for row in recent)
        ratios.append(sum(row.cost for row in recent) / floor if floor else float("nan"))
    return episodes, ratios
