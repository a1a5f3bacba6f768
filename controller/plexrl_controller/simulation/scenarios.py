"""Small closed systems whose answer is known: the bounds' and the queueing theory's other side.

A group with a fixed set of jobs for ever, with the discipline asked for. Used by tables T2, T4, T6 and the checks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from plexrl_controller.simulation.bounds import Work
from plexrl_controller.simulation.engine import Process, Simulation
from plexrl_controller.simulation.pools import GENERATE, TRAIN, Discipline, Mode, Resident, SharedGroup, State, Totals
from plexrl_controller.simulation.processes import Execution, Form, launch
from plexrl_controller.simulation.workload import Job


@dataclass(frozen=True, slots=True)
class Shared:
    """What happened on one group."""

    ends_s: tuple[tuple[float, ...], ...]
    """End of each iteration, by job."""
    spent_s: dict[Mode, float]
    waits_s: tuple[float, ...]
    setups_s: tuple[float, ...]
    prefetch_hits: int
    events: int

    def until_first_end(self, jobs: Sequence[Sequence[Sequence[Work]]]) -> tuple[float, float]:
        """Saving against groups of their own and mean slowdown, while all jobs are there."""
        until_s = min(ends[-1] for ends in self.ends_s)
        done_s, slowdowns = 0.0, []
        for iterations, ends in zip(jobs, self.ends_s, strict=True):
            ideal_s, slowdown = _until(until_s, iterations, ends)
            done_s += ideal_s
            slowdowns.append(slowdown)
        return 1.0 - until_s / done_s, sum(slowdowns) / len(slowdowns)

    def slowdown_of(self, chosen: Sequence[int], jobs: Sequence[Sequence[Sequence[Work]]]) -> float:
        """Mean slowdown of the chosen jobs until the first of them ends."""
        until_s = min(self.ends_s[index][-1] for index in chosen)
        return sum([_until(until_s, jobs[index], self.ends_s[index])[1] for index in chosen]) / len(chosen)


def _until(until_s: float, iterations: Sequence[Sequence[Work]], ends_s: Sequence[float]) -> tuple[float, float]:
    """A job's work done by then, in seconds alone, and its slowdown."""
    inside = [end for end in ends_s if end <= until_s]
    ideal_s = sum([work.busy_s + work.stall_s for it in iterations[: len(inside)] for work in it])
    return ideal_s, inside[-1] / ideal_s


def share(
    jobs: Sequence[Sequence[Sequence[Work]]],
    discipline: Discipline,
    *,
    swap_s: float = 0.0,
    device_states: float = float("inf"),
    hints: Callable[[float], float | None] | Sequence[Callable[[float], float | None]] = lambda stall_s: None,
    until_s: float = float("inf"),
    setups_s: Sequence[float] = (),
) -> Shared:
    """Runs jobs, each a sequence of iterations, each a sequence of stretches, on one group.

    `device_states`: how many jobs' states the device holds at once; where it holds all, no swap is ever paid.
    `setups_s`: instead of `swap_s`, for each job what becoming the one that is served takes, evictions included.
    `hints` is what a job says of a stall, for each job or for all. With `until_s` iterations that end later are cut
    off. The last stretch of an iteration is its training.
    """
    simulation, totals = Simulation(), Totals([], [])
    group = SharedGroup(simulation, totals, "shared", 1, discipline, device_states * 1000.0)
    ends: list[list[float]] = [[] for _ in jobs]
    for index, iterations in enumerate(jobs):
        name = f"job{index:03d}"
        state = State(f"{name}/model", 1000.0, setups_s[index] if setups_s else swap_s)
        if setups_s:
            state.store_s = 0.0
        # One state serves both sides: a colocated model.
        resident = group.join(index, name, state, None)
        resident.train = state
        state.on_device = device_states >= len(jobs)
        says = hints if callable(hints) else hints[index]
        simulation.start(_run(simulation, resident, iterations, ends[index], says))
    simulation.run(until_s)
    group.close()
    return Shared(
        tuple(tuple(e) for e in ends),
        group.spent_s,
        tuple(totals.waits_s),
        tuple(totals.setups_s),
        totals.prefetch_hits,
        simulation.events,
    )


def share_two_pools(
    jobs: Sequence[Job],
    form: Form,
    discipline: Callable[[], Discipline],
    share_rollout: bool,
    until_s: float = float("inf"),
) -> tuple[list[Execution], list[SharedGroup]]:
    """Runs split jobs on a training group and, shared too or one each, rollout groups. States fit the devices."""
    simulation, totals = Simulation(), Totals([], [])
    train = SharedGroup(simulation, totals, "train", form.train_gpus, discipline())
    groups = [train]
    executions = []
    for job in jobs:
        if not share_rollout or len(groups) == 1:
            groups.append(SharedGroup(simulation, totals, "rollout", form.rollout_gpus, discipline()))
        residents = []
        for group in (groups[-1], train):
            state = State(f"{job.name}/{group.name}", 1.0, 0.0)
            rollout = group is not train
            residents.append(group.join(job.index, job.name, state if rollout else None, None if rollout else state))
        executions.append(Execution(job, form, tuple(residents), 0.0))
    for execution in executions:
        launch(simulation, execution, lambda _: None, None)
    simulation.run(until_s)
    for group in groups:
        group.close()
    return executions, groups


def _run(
    simulation: Simulation,
    resident: Resident,
    iterations: Sequence[Sequence[Work]],
    ends: list[float],
    hints: Callable[[float], float | None],
) -> Process:
    for stretches in iterations:
        last = len(stretches) - 1
        for n, work in enumerate(stretches):
            final = n == last
            yield resident.run(TRAIN if final else GENERATE, work.busy_s, mid_phase=n < last - 1, ends_iteration=final)
            if work.stall_s > 0.0:
                yield resident.stall(work.stall_s, hints(work.stall_s))
        ends.append(simulation.now)
