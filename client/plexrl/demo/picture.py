"""Draws the timeline: who had the device when, and what each job did meanwhile."""

from pathlib import Path
from typing import Any

from plexrl.demo.runs import Phase
from plexrl.v1 import types_pb2 as t

COLOURS = ("#2a78b5", "#e07b39", "#4d9a51", "#9467bd")
SWAP_COLOUR = "#222222"
WINDOW_S = 20.0


def draw_timeline(path: Path, shared: Phase, alone: dict[str, Phase], title: str) -> None:
    """Writes a PNG: each job alone, then both on one device, over a window of WINDOW_S from the third step on."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.patches import Patch

    names = list(shared.jobs)
    colour = {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(names)}
    rows = [*((f"{name} alone", alone[name]) for name in names), ("both, one device", shared)]
    figure, axes = plt.subplots(len(rows), 1, figsize=(11, 1.0 + 0.9 * len(rows)), sharex=True, layout="constrained")
    for axis, (label, phase) in zip(axes, rows, strict=True):
        _device_row(axis, phase, colour)
        axis.set_ylabel(label, rotation=0, ha="right", va="center")
        axis.set_yticks([])
        axis.set_xlim(0, WINDOW_S)
        for side in ("top", "right", "left"):
            axis.spines[side].set_visible(False)
    axes[-1].set_xlabel("seconds")
    handles = [Patch(color=colour[name], label=f"{name} on the device") for name in names]
    handles.append(Patch(color=SWAP_COLOUR, label="swap"))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _device_row(axis: Any, phase: Phase, colour: dict[str, str]) -> None:
    """Bars of one device; the window begins a third into the phase, when both jobs are in full swing."""
    intervals = phase.intervals
    if not intervals:
        return
    first, last = min(i.start_unix_ns for i in intervals), max(i.end_unix_ns for i in intervals)
    origin = first + max(0, (last - first) // 3)
    for interval in intervals:
        start, end = (interval.start_unix_ns - origin) / 1e9, (interval.end_unix_ns - origin) / 1e9
        if end < 0 or start > WINDOW_S:
            continue
        busy = interval.kind == t.INTERVAL_KIND_BUSY
        shade = colour[phase.job_names[interval.job_id]] if busy else SWAP_COLOUR
        axis.broken_barh([(start, max(end - start, 0.02))], (0, 1), color=shade, linewidth=0)
