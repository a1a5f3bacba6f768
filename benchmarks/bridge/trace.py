"""What happened on one device, and the benchmark's figures of it; the same for a live run and a simulated one. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

Stretch = tuple[float, float]
"""Begin and end, seconds."""


READY_S = 0.05
"""A load that takes no longer than this was one in name alone: the state had been brought before."""


@dataclass
class JobTrace:
    """One job. `idle`: all its rollouts slept. `loads`: its state came onto the device while it had to wait for it."""

    idle: list[Stretch] = field(default_factory=list)
    wakes: list[float] = field(default_factory=list)
    """When an idle stretch ended because somebody had to think."""
    busy: list[Stretch] = field(default_factory=list)
    loads: list[Stretch] = field(default_factory=list)


@dataclass
class Trace:
    """All jobs of a run."""

    jobs: dict[str, JobTrace]
    total_s: float
    swaps: int
    """Those that somebody waited for."""
    swap_s: float
    hold_s: float


@dataclass(frozen=True)
class Figures:
    """Of one run."""

    total_s: float
    given: float
    """Part of the jobs' idle time in which the device worked for another job."""
    swaps: int
    ready: float
    """Part of the wake-ups that found the model on the device."""
    lost_s: float
    """Device time of swaps that somebody waited for, and of holding the device for nobody."""


def figures(trace: Trace) -> Figures:
    """Reads the figures off a trace."""
    idle_s = given_s = 0.0
    wakes = ready = 0
    for name, job in trace.jobs.items():
        others = [stretch for other, found in trace.jobs.items() if other != name for stretch in found.busy]
        idle_s += sum(end - begin for begin, end in job.idle)
        given_s += sum(_overlap(stretch, others) for stretch in job.idle)
        for wake in job.wakes:
            starts = [begin for begin, _ in job.busy if begin >= wake]
            if starts:
                wakes += 1
                ready += _overlap((wake, min(starts)), job.loads) <= READY_S
    return Figures(
        total_s=trace.total_s,
        given=given_s / idle_s if idle_s else 0.0,
        swaps=trace.swaps,
        ready=ready / wakes if wakes else 0.0,
        lost_s=trace.swap_s + trace.hold_s,
    )


def _overlap(stretch: Stretch, others: Iterable[Stretch]) -> float:
    begin, end = stretch
    return sum(max(0.0, min(end, to) - max(begin, since)) for since, to in others)


def idle_stretches(lives: Sequence[Stretch], sleeps: Sequence[Stretch]) -> list[Stretch]:
    """When at least one life was on and everybody alive slept. Each sleep lies within its own life."""
    changes = sorted(
        [(at, step, 0) for begin, end in lives for at, step in ((begin, 1), (end, -1))]
        + [(at, 0, step) for begin, end in sleeps for at, step in ((begin, 1), (end, -1))]
    )
    found: list[Stretch] = []
    alive = asleep = 0
    since: float | None = None
    for at, life, sleep in changes:
        if since is not None and at > since:
            found.append((since, at))
        alive, asleep = alive + life, asleep + sleep
        since = at if alive and alive == asleep else None
    merged: list[Stretch] = []
    for begin, end in found:
        if merged and merged[-1][1] == begin:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((begin, end))
    return merged
