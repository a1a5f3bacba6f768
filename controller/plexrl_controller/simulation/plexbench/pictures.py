"""The pictures of plexbench's page, drawn with matplotlib from the tables' rows."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from plexrl_controller.simulation.plexbench.rows import Row, first_part
from plexrl_controller.simulation.plexbench.traces import TRACE_KEYS

OURS, OTHERS, GREY = "#2a78b5", "#e07b39", "#777777"
COLOURS = (OURS, "#4d9a51", OTHERS, "#9467bd")
SIZE, DPI = (7.5, 4.2), 110


def draw(tables: Mapping[str, Sequence[Row]], folder: Path, prefix: str) -> dict[str, str]:
    """Draws every picture, into files whose names begin with `prefix`; the names by table."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    drawn = {}
    for table, (subject, picture) in {
        "T1": ("policies", _policies),
        "T2": ("shared-training", _shared_training),
        "T4": ("swaps", _swaps),
        "T5b": ("decisions", _decisions),
    }.items():
        name = f"{prefix}-{subject}.png"
        figure, axis = plt.subplots(figsize=SIZE, layout="constrained")
        picture(axis, tables[table])
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
        # No software version inside: the same rows give the same bytes.
        figure.savefig(folder / name, dpi=DPI, metadata={"Software": None})
        plt.close(figure)
        drawn[table] = name
    return drawn


def _policies(axis: Any, rows: Sequence[Row]) -> None:
    """Saving against the share of jobs within 1.3; up and to the right is better."""
    for row in first_part(rows, TRACE_KEYS):
        ours = row["policy"].startswith("B10")
        x, y = 100 * row["slo_jobs"], 100 * row["fleet_saving"]
        half_x, half_y = (100 * row[f"{name}_ci95"] for name in ("slo_jobs", "fleet_saving"))
        axis.errorbar(x, y, xerr=half_x, yerr=half_y, fmt="o", color=OURS if ours else OTHERS, ecolor="#cccccc")
        axis.annotate(row["policy"], (x, y), textcoords="offset points", xytext=(5, 4), fontsize=8)
    axis.axvline(92, color=GREY, linewidth=0.8, linestyle=":")
    axis.set_xlabel("jobs within 1.3 times their dedicated time, %")
    axis.set_ylabel("fleet saving, %")


def _shared_training(axis: Any, rows: Sequence[Row]) -> None:
    """Saving by members, with the ceiling dotted."""
    for shape, colour in zip(
        dict.fromkeys(row["shape"] for row in rows), (OURS, OTHERS, "#4d9a51", "#9467bd"), strict=False
    ):
        mine = [row for row in rows if row["shape"] == shape]
        members = [row["k"] for row in mine]
        axis.plot(members, [100 * row["saving"] for row in mine], "o-", color=colour, label=shape)
        axis.plot(members, [100 * row["ceiling"] for row in mine], ":", color=colour)
    axis.set_xticks(sorted({row["k"] for row in rows}))
    axis.set_xlabel("jobs on the training group (dotted: ceiling)")
    axis.set_ylabel("saving, %")
    axis.legend(frameon=False, fontsize=8)


def _swaps(axis: Any, rows: Sequence[Row]) -> None:
    """Saving by the cost of a move, for each rule of holding."""
    for hold, colour in zip(
        dict.fromkeys(row["hold"] for row in rows), (OURS, "#4d9a51", OTHERS, "#9467bd"), strict=False
    ):
        mine = [row for row in rows if row["hold"] == hold]
        axis.plot(
            [row["swap_s"] for row in mine], [100 * row["saving"] for row in mine], "o-", color=colour, label=hold
        )
    axis.set_xscale("log")
    axis.axhline(0, color=GREY, linewidth=0.8)
    axis.set_xlabel("seconds of one move between host tier and device")
    axis.set_ylabel("saving, %")
    axis.legend(frameon=False, fontsize=8)


def _decisions(axis: Any, rows: Sequence[Row]) -> None:
    """Cost of a decision by members, beside n log n through the second point."""
    members = [row["members"] for row in rows]
    axis.plot(members, [row["decision_mean_us"] for row in rows], "o-", color=OURS, label="mean")
    axis.plot(members, [row["decision_p99_us"] for row in rows], "o--", color=OURS, label="p99")
    base = rows[1]
    curve = [
        base["decision_mean_us"] * m * math.log2(m) / (base["members"] * math.log2(base["members"])) for m in members
    ]
    axis.plot(members[1:], curve[1:], ":", color=GREY, label="n log n")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xlabel("members of the group")
    axis.set_ylabel("microseconds")
    axis.legend(frameon=False, fontsize=8)
