"""A simulated cluster: jobs arrive, are placed by a `Placement`, run, and leave; what happened is kept for the metrics.

GPUs are counted, not numbered: gangs are multiples of half nodes, and topology is the live placement's matter.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from plexrl_controller.simulation.engine import Simulation
from plexrl_controller.simulation.pools import Group, Mode, PrivateGroup, Resident, State, Totals
from plexrl_controller.simulation.processes import Execution, Form, Profile, launch
from plexrl_controller.simulation.workload import Hardware, Job


@dataclass(frozen=True, slots=True)
class Seat:
    """A place on a group, or on one yet to be made."""

    rollout_bytes: float = 0.0
    """Per GPU; 0: no rollouts here."""
    train_bytes: float = 0.0
    """Per GPU; 0: no training here."""
    group: Group | None = None
    make: "Callable[[Cluster], Group] | None" = None
    """None with no group: a private one."""
    gpus: int = 0


@dataclass(frozen=True, slots=True)
class Admission:
    """Where a job goes: one seat if its form is colocated, else rollout and training."""

    form: Form
    seats: tuple[Seat, ...]
    profile: Profile | None = None

    @property
    def new_gpus(self) -> int:
        """GPUs that are not in a group yet."""
        return sum([seat.gpus for seat in self.seats if seat.group is None])


class Placement(Protocol):
    """Which waiting jobs start now."""

    def next(self, cluster: "Cluster") -> tuple[Job, Admission] | None:
        """One job of `cluster.queue` that can start, and where; None when none can."""
        ...

    def ended(self, cluster: "Cluster", execution: Execution) -> None:
        """A job has left its groups."""
        ...


@dataclass(slots=True)
class Closed:
    """A group that is gone: its accounts."""

    unit_gpus: int
    """GPUs that do one thing at a time."""
    lifetime_s: float
    spent_s: dict[Mode, float] = field(default_factory=dict)


class Cluster:
    """The state of one simulation."""

    def __init__(self, gpus: int, hardware: Hardware, placement: Placement, swap_s: float | None = None) -> None:
        """`swap_s` replaces what the hardware says of the seconds of one move."""
        self.simulation = Simulation()
        self.totals = Totals([], [])
        self.gpus = gpus
        self.free_gpus = gpus
        self.hardware = hardware
        self.placement = placement
        self.swap_s = swap_s
        self.queue: list[Job] = []
        self.groups: list[Group] = []
        self.executions: list[Execution] = []
        self.running: dict[int, Execution] = {}
        self.closed: list[Closed] = []
        self.queued_s: dict[int, float] = {}
        """How long each started job waited for its place."""
        self._names = 0

    def run(self, jobs: Sequence[Job], until: float = float("inf")) -> None:
        """Runs the jobs to their end or to `until`, and closes the accounts of what is still there."""
        for job in jobs:
            self.simulation.at(job.arrival_s, self._arrive, job)
        self.simulation.run(until)
        for group in self.groups:
            self._close(group)
        self.groups.clear()

    def name(self, kind: str) -> str:
        """A name for a new group."""
        self._names += 1
        return f"{kind}-{self._names}"

    def _arrive(self, job: Job) -> None:
        self.queue.append(job)
        self.drain()

    def drain(self) -> None:
        """Starts whatever can start."""
        while self.queue and (found := self.placement.next(self)) is not None:
            job, admission = found
            self.queue.remove(job)
            self._start(job, admission)

    def _start(self, job: Job, admission: Admission) -> None:
        now = self.simulation.now
        residents = tuple(self._seat(job, seat) for seat in admission.seats)
        execution = Execution(job, admission.form, residents, now)
        self.executions.append(execution)
        self.running[job.index] = execution
        self.queued_s[job.index] = now - job.arrival_s
        cold_s = max(self.hardware.cold_s(seat.rollout_bytes + seat.train_bytes) for seat in admission.seats)
        self.simulation.at(
            now + cold_s, lambda e: launch(self.simulation, e, self._finished, admission.profile), execution
        )

    def _seat(self, job: Job, seat: Seat) -> Resident:
        group = seat.group
        if group is None:
            self.free_gpus -= seat.gpus
            assert self.free_gpus >= 0, "a placement handed out more GPUs than the cluster has"
            if seat.make is not None:
                group = seat.make(self)
            else:
                group = PrivateGroup(self.simulation, self.totals, self.name("private"), seat.gpus)
            self.groups.append(group)
        rollout = self._state(f"{job.name}/rollout", seat.rollout_bytes)
        return group.join(job.index, job.name, rollout, self._state(f"{job.name}/train", seat.train_bytes))

    def _state(self, model_id: str, bytes_per_gpu: float) -> State | None:
        move_s = self.swap_s if self.swap_s is not None else self.hardware.move_s(bytes_per_gpu)
        return State(model_id, bytes_per_gpu, move_s) if bytes_per_gpu > 0.0 else None

    def _finished(self, execution: Execution) -> None:
        for resident in execution.residents:
            group = resident.group
            group.leave(resident)
            if not group.residents:
                self._close(group)
                self.groups.remove(group)
                self.free_gpus += group.gpus
        del self.running[execution.job.index]
        self.placement.ended(self, execution)
        # The group that has just finished the call decides first, without the job that left.
        self.simulation.at(self.simulation.now, lambda _: self.drain(), None)

    def _close(self, group: Group) -> None:
        self.closed.append(Closed(group.unit_gpus, group.close(), group.spent_s))
