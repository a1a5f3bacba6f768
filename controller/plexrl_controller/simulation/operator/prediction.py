"""Foretells the second half of a recording from its first half, and says how far off that was.

Of the first half each job keeps its iterations, as stretches of work and stalls, and what it takes to become the one
that is served. The second half is then simulated under the live policy, with iterations drawn from these. Nothing
of the second half goes in: what is predicted is how long jobs wait for each other.

Slowdown is counted against a job's own work and stalls, in the same iterations: dispatch included, waiting and swaps
left out. Solo runs would be another machine's noise: the same step takes other times from one minute to the next, and
what is to be predicted is the waiting.
"""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median

from plexrl_controller.scheduling.policy import Policy
from plexrl_controller.simulation.bounds import Work
from plexrl_controller.simulation.live_policy import Decisions, LivePolicy
from plexrl_controller.simulation.operator.fields import InputError
from plexrl_controller.simulation.operator.trace import Interval
from plexrl_controller.simulation.scenarios import share

FEWEST_ITERATIONS = 5
"""Of each half: with fewer, the figures would be chance."""
LENGTHS = 40
"""Second halves that are simulated one after the other: the mean is the prediction, their spread what chance may do."""

Hints = Callable[[float], float | None]


@dataclass(frozen=True, slots=True)
class Stretch:
    """Device time of one job without a pause of its own."""

    ready_s: float
    """When the job could have had the device: its call was accepted, and had the time that dispatch takes."""
    start_s: float
    end_s: float
    took_over: bool
    """Somebody else had the device since the job's last stretch."""
    setup_s: float
    """From when the job was ready and the device free until it ran: a swap, and the way of reports and orders."""
    ends_iteration: bool


@dataclass(frozen=True, slots=True)
class Iteration:
    """From when a job was ready for its first stretch until it was ready for that of the next iteration."""

    ready_s: float
    next_ready_s: float
    works: tuple[Work, ...]

    @property
    def alone_s(self) -> float:
        """Work and stalls without waiting and swaps."""
        return math.fsum(work.busy_s + work.stall_s for work in self.works)


@dataclass(frozen=True, slots=True)
class Predicted:
    """One job: its slowdown in the second half as it was, and as the first half foretold."""

    job: str
    iterations_before: int
    iterations_after: int
    busy_share: float
    """In the second half, of the job's time without waiting."""
    setup_s: float
    first_half: float
    measured: float
    predicted: float
    low: float
    high: float
    """Between these lay 90 % of the simulated second halves."""

    @property
    def error(self) -> float:
        """Of the prediction, relative to what was measured."""
        return self.predicted / self.measured - 1.0


def predict_second_half(
    intervals: Sequence[Interval],
    policy: Policy,
    *,
    start_s: float,
    end_s: float,
    hints: Mapping[str, Hints] | None = None,
    seed: int = 0,
    lengths: int = LENGTHS,
) -> list[Predicted]:
    """For every job of a recording of one worker, between two times at which all of them ran.

    `hints`: what jobs say of a stall's length, by job; the others say nothing. `lengths`: simulated second halves.

    Raises:
        InputError: the recording has several workers, lacks the times of submission, or a half is too short.
    """
    if len(workers := {interval.worker for interval in intervals}) != 1:
        raise InputError(f"the recording has {len(workers)} workers: predict each of them alone")
    names = list(dict.fromkeys(i.job for i in intervals if i.kind == "busy" and start_s <= i.start_s < end_s))
    middle_s = (start_s + end_s) / 2
    before, after, setups_s = [], [], []
    for name in names:
        earlier = stretches(name, [i for i in intervals if start_s <= i.start_s and i.end_s <= middle_s])
        later = stretches(name, [i for i in intervals if middle_s < i.start_s and i.end_s <= end_s])
        before.append(_enough(name, "first", iterations_of(earlier)))
        after.append(_enough(name, "second", iterations_of(later)))
        setups_s.append(fmean([s.setup_s for s in earlier if s.took_over] or [0.0]))
    said = [(hints or {}).get(name, _silent) for name in names]
    simulated = _simulate(before, setups_s, said, policy, end_s - middle_s, seed, lengths)
    found = []
    for name, was, came, setup_s, slowdowns in zip(names, before, after, setups_s, simulated, strict=True):
        alone_s = math.fsum(iteration.alone_s for iteration in came)
        ordered = sorted(slowdowns)
        found.append(
            Predicted(
                job=name,
                iterations_before=len(was),
                iterations_after=len(came),
                busy_share=math.fsum(work.busy_s for it in came for work in it.works) / alone_s,
                setup_s=setup_s,
                first_half=_slowdown(was),
                measured=_slowdown(came),
                predicted=fmean(slowdowns),
                low=ordered[int(0.05 * len(ordered))],
                high=ordered[int(0.95 * len(ordered))],
            )
        )
    return found


def stretches(job: str, intervals: Sequence[Interval]) -> list[Stretch]:
    """A job's stretches, in order. Calls that were there when the last one ended continue its stretch.

    Raises:
        InputError: a call without the time of its submission.
    """
    busy = [i for i in intervals if i.job == job and i.kind == "busy"]
    others = [i for i in intervals if i.job != job and i.kind in ("busy", "hold")]
    runs: list[list[Interval]] = []
    foreign_until_s: list[float | None] = []
    for call in busy:
        if call.submitted_s is None:
            raise InputError(f"the recording does not say when {job} submitted its calls: record it anew")
        since_s = runs[-1][-1].end_s if runs else -math.inf
        between = [o.end_s for o in others if since_s <= o.start_s and o.end_s <= call.start_s + 1e-9]
        if runs and not between and call.submitted_s <= since_s and runs[-1][-1].function != "sync_weights":
            runs[-1].append(call)
        else:
            runs.append([call])
            foreign_until_s.append(max(between) if between else None)
    delay_s = _dispatch_s(runs, foreign_until_s)
    found = []
    for index, (run, foreign_s) in enumerate(zip(runs, foreign_until_s, strict=True)):
        submitted_s = run[0].submitted_s
        assert submitted_s is not None
        since_s = runs[index - 1][-1].end_s if index else -math.inf
        ready_s = max(submitted_s + delay_s, since_s) if submitted_s > since_s else since_s
        if foreign_s is None:
            # Nobody was in the way: whatever passed until it ran is the job's own time.
            ready_s = run[0].start_s
        ready_s = min(ready_s, run[0].start_s)
        free_s = ready_s if foreign_s is None else max(ready_s, foreign_s)
        found.append(
            Stretch(
                ready_s=ready_s,
                start_s=run[0].start_s,
                end_s=run[-1].end_s,
                took_over=foreign_s is not None,
                setup_s=max(0.0, run[0].start_s - free_s),
                ends_iteration=run[-1].function == "sync_weights",
            )
        )
    return found


def _dispatch_s(runs: Sequence[Sequence[Interval]], foreign_until_s: Sequence[float | None]) -> float:
    """How long a call takes from its submission to its start where nobody is in the way; 0 while unknown."""
    delays = [
        run[0].start_s - run[0].submitted_s
        for last, run, foreign_s in zip(runs, runs[1:], foreign_until_s[1:], strict=False)
        if foreign_s is None and run[0].submitted_s is not None and run[0].submitted_s > last[-1].end_s
    ]
    return median(delays) if delays else 0.0


def iterations_of(found: Sequence[Stretch]) -> list[Iteration]:
    """The whole iterations among a job's stretches, each from the one after a sync to the next sync."""
    iterations = []
    ends = [index for index, stretch in enumerate(found) if stretch.ends_iteration]
    for last, this in pairwise(ends):
        if this + 1 == len(found):
            break
        parts = found[last + 1 : this + 2]
        works = tuple(
            Work(now.end_s - now.start_s, max(0.0, after.ready_s - now.end_s)) for now, after in pairwise(parts)
        )
        iterations.append(Iteration(parts[0].ready_s, parts[-1].ready_s, works))
    return iterations


def _enough(job: str, half: str, iterations: list[Iteration]) -> list[Iteration]:
    if len(iterations) < FEWEST_ITERATIONS:
        raise InputError(
            f"job {job} ended {len(iterations)} whole iterations in the {half} half, want {FEWEST_ITERATIONS}: "
            "record for longer"
        )
    return iterations


def _slowdown(iterations: Sequence[Iteration]) -> float:
    actual_s = math.fsum(iteration.next_ready_s - iteration.ready_s for iteration in iterations)
    return actual_s / math.fsum(iteration.alone_s for iteration in iterations)


def _silent(_stall_s: float) -> None:
    """A job that says nothing of its stalls."""


def _simulate(
    fitted: Sequence[Sequence[Iteration]],
    setups_s: Sequence[float],
    hints: Sequence[Hints],
    policy: Policy,
    length_s: float,
    seed: int,
    lengths: int,
) -> list[list[float]]:
    """Slowdowns of each job in simulated stretches of time of `length_s`, after one to settle."""
    until_s = (lengths + 1) * length_s
    jobs = []
    for index, iterations in enumerate(fitted):
        draws = random.Random(f"{seed}/{index}")
        drawn: list[tuple[Work, ...]] = []
        total_s = 0.0
        # Nobody is faster than alone: so many iterations last until the end.
        while total_s <= until_s:
            iteration = draws.choice(iterations)
            drawn.append(iteration.works)
            total_s += iteration.alone_s
        jobs.append(drawn)
    shared = share(
        jobs,
        LivePolicy(policy, Decisions()),
        device_states=1.0,
        setups_s=setups_s,
        hints=hints,
        until_s=until_s,
    )
    found = []
    for drawn, ends in zip(jobs, shared.ends_s, strict=True):
        slowdowns = []
        first = next(index for index, end_s in enumerate(ends) if end_s > length_s)
        for part in range(1, lengths + 1):
            last = max((i for i, end_s in enumerate(ends) if end_s <= (part + 1) * length_s), default=first)
            if last > first:
                alone_s = math.fsum(work.busy_s + work.stall_s for it in drawn[first + 1 : last + 1] for work in it)
                slowdowns.append((ends[last] - ends[first]) / alone_s)
                first = last
        found.append(slowdowns)
    return found
