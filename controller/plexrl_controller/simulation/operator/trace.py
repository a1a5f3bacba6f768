"""Recorded device time as JSON lines, and the jobs that it shows.

The first line says what the file is; every other line is one interval of one worker's device time (here broken in two):

    {"format": "plexrl-trace", "version": 1}
    {"kind": "busy", "worker": "w1", "job": "j1", "function": "generate", "start_s": 0.0, "end_s": 1.5,
     "submitted_s": -0.01}

`kind` is busy, swap_in, swap_out or hold; `function` is there when it is busy, and `submitted_s`, when the call was
accepted, where that was recorded. Times are seconds on the worker's clock.

A job's own stalls are the gaps between its busy intervals, up to when it asked for more. Where a recording does not say
when that was, and the device served somebody else until the job came back, the gap is longer than the stall by an
unknown wait: such a stall is taken to be the median of those after the same function that were seen whole, within what
the gap allows.
"""

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from plexrl_controller.simulation.bounds import Work
from plexrl_controller.simulation.operator.fields import InputError

FORMAT, VERSION = "plexrl-trace", 1
KINDS = ("busy", "swap_in", "swap_out", "hold")
TRAINING = frozenset({"forward_backward", "optim_step", "sync_weights", "save_checkpoint", "load_checkpoint"})
ADJACENT_S = 0.05
"""A gap that ends so soon after somebody else's device time may have been longer than the stall."""


@dataclass(frozen=True, slots=True)
class Interval:
    """One line of the file."""

    kind: str
    worker: str
    job: str
    function: str
    start_s: float
    end_s: float
    submitted_s: float | None = None


@dataclass(frozen=True, slots=True)
class RecordedJob:
    """A job as one worker saw it."""

    worker: str
    job: str
    iterations: tuple[tuple[Work, ...], ...]
    recorded_s: float
    """From its first to its last busy moment."""
    alone_s: float
    """The same work with the device to itself."""
    swap_s: float
    """Mean of its moves onto the device; 0 where there was none."""
    guessed_stalls: int
    """Stalls of which only a range is known."""


def read_trace(path: Path) -> tuple[Interval, ...]:
    """The file's intervals, by start.

    Raises:
        InputError: the line, and what is wrong with it.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from error
    header = _json(f"{path}:1", lines[0]) if lines else {}
    if header.get("format") != FORMAT or header.get("version") != VERSION:
        raise InputError(
            f'{path}:1: want {{"format": "{FORMAT}", "version": {VERSION}}}; '
            "`plexrl timeline --format trace` writes such a file"
        )
    found = [
        _interval(f"{path}:{n}", _json(f"{path}:{n}", line)) for n, line in enumerate(lines[1:], 2) if line.strip()
    ]
    if not any(interval.kind == "busy" for interval in found):
        raise InputError(f"{path}: has no busy interval: nothing to replay")
    return tuple(sorted(found, key=lambda i: (i.start_s, i.end_s, i.job)))


def _json(where: str, line: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(f"{where}: is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise InputError(f"{where}: want a JSON object")
    return value


def _interval(where: str, value: dict[str, Any]) -> Interval:
    for name in ("kind", "worker", "job"):
        if not isinstance(value.get(name), str):
            raise InputError(f"{where}: {name} is {value.get(name)!r}, want a string")
    if value["kind"] not in KINDS:
        raise InputError(f"{where}: kind is {value['kind']!r}, want one of {', '.join(KINDS)}")
    times = [_seconds(where, name, value.get(name)) for name in ("start_s", "end_s")]
    if times[1] < times[0]:
        raise InputError(f"{where}: ends at {times[1]}, before its start at {times[0]}")
    function = value.get("function") or ""
    if not isinstance(function, str) or (value["kind"] == "busy" and not function):
        raise InputError(f"{where}: function is {function!r}, want the name of what ran, such as generate")
    submitted_s = value.get("submitted_s")
    if submitted_s is not None:
        submitted_s = _seconds(where, "submitted_s", submitted_s)
    return Interval(value["kind"], value["worker"], value["job"], function, times[0], times[1], submitted_s)


def _seconds(where: str, name: str, number: object) -> float:
    if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
        raise InputError(f"{where}: {name} is {number!r}, want seconds")
    return float(number)


def recorded_jobs(intervals: Iterable[Interval]) -> tuple[RecordedJob, ...]:
    """Every job of every worker, in the order in which they first ran."""
    by_worker: dict[str, list[Interval]] = defaultdict(list)
    for interval in intervals:
        by_worker[interval.worker].append(interval)
    found = []
    for worker, mine in by_worker.items():
        names = dict.fromkeys(i.job for i in mine if i.kind == "busy")
        found += [_recorded(worker, job, mine) for job in names]
    return tuple(found)


def _recorded(worker: str, job: str, intervals: Sequence[Interval]) -> RecordedJob:
    busy = [i for i in intervals if i.job == job and i.kind == "busy"]
    others = [i for i in intervals if i.job != job]
    moves = [i.end_s - i.start_s for i in intervals if i.job == job and i.kind == "swap_in"]
    gaps = [_gap(before, after, others, intervals, job) for before, after in pairwise(busy)]
    whole: dict[str, list[float]] = defaultdict(list)
    for before, (least, most) in zip(busy, gaps, strict=False):
        if most - least <= ADJACENT_S:
            whole[before.function].append(most)
    stalls, guessed = [], 0
    for before, (least, most) in zip(busy, gaps, strict=False):
        guessed += most - least > ADJACENT_S
        typical = median(whole[before.function]) if whole[before.function] else (least + most) / 2
        stalls.append(min(max(typical, least), most))
    iterations: list[tuple[Work, ...]] = []
    current: list[Work] = []
    for interval, stall_s in zip(busy, (*stalls, 0.0), strict=True):
        current.append(Work(interval.end_s - interval.start_s, stall_s))
        if interval.function == "sync_weights":
            iterations.append(tuple(current))
            current = []
    if current:
        iterations.append(tuple(current))
    return RecordedJob(
        worker,
        job,
        tuple(iterations),
        recorded_s=busy[-1].end_s - busy[0].start_s,
        alone_s=math.fsum(work.busy_s + work.stall_s for it in iterations for work in it),
        swap_s=math.fsum(moves) / len(moves) if moves else 0.0,
        guessed_stalls=guessed,
    )


def _gap(
    before: Interval, after: Interval, others: Sequence[Interval], intervals: Sequence[Interval], job: str
) -> tuple[float, float]:
    """The shortest and the longest stall that the gap between two busy intervals allows."""
    start, end = before.end_s, after.start_s
    if after.submitted_s is not None:
        stall_s = min(max(0.0, after.submitted_s - start), max(0.0, end - start))
        return stall_s, stall_s
    swaps = [i for i in intervals if i.job == job and i.kind != "busy" and start <= i.start_s and i.end_s <= end + 1e-9]
    ready_by = min([i.start_s for i in swaps if i.kind == "swap_in"], default=end)
    most = max(0.0, ready_by - start)
    # Back from the end: as long as somebody else had the device, the job may have been waiting.
    at = ready_by
    for other in sorted((o for o in others if o.start_s < ready_by and o.end_s > start), key=lambda o: -o.end_s):
        if other.end_s < at - ADJACENT_S:
            break
        at = min(at, other.start_s)
    return max(0.0, at - start), most
