"""Worker groups as servers: who is on them, what they spend their time on, and what each resident is charged.

A group serves one call at a time. `PrivateGroup` has one resident; `SharedGroup` asks a `Discipline` whom to serve;
`OverlappingGroup` runs residents at once and slower. All keep busy + swap + idle = time, checked by `Group.close`.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from plexrl_controller.domain.states import CallKind
from plexrl_controller.simulation.engine import Process, Simulation

GENERATE, TRAIN = CallKind.GENERATE, CallKind.FORWARD_BACKWARD


class Mode(Enum):
    """What a group does."""

    IDLE = "idle"
    BUSY = "busy"
    SWAP = "swap"
    HOLD = "hold"


@dataclass(slots=True)
class Totals:
    """What a simulation counts over all groups: seconds, and events by number."""

    waits_s: list[float]
    setups_s: list[float]
    swaps: int = 0
    """Calls that waited for a swap."""
    prefetch_hits: int = 0
    """Calls whose state a prefetch had brought or begun to bring."""


class State:
    """A resident's rollout weights or training state on its group; bytes per GPU."""

    __slots__ = (
        "arrives_at",
        "bytes",
        "dirty",
        "last_used",
        "load_s",
        "model_id",
        "on_device",
        "prefetched",
        "store_s",
        "writing",
    )

    def __init__(self, model_id: str, bytes_per_gpu: float, move_s: float) -> None:
        self.model_id = model_id
        self.bytes = int(bytes_per_gpu)
        self.load_s = move_s
        """Seconds to bring it onto the device."""
        self.store_s = move_s
        """Seconds to write it to the host tier."""
        self.on_device = False
        self.dirty = False
        self.last_used = 0.0
        self.arrives_at: float | None = None
        """A prefetch is under way."""
        self.writing = False
        """A background copy to the host tier is under way."""
        self.prefetched = False
        """Brought by a prefetch and not used yet."""


class Resident:
    """A job on a group."""

    __slots__ = (
        "call",
        "changed",
        "group",
        "hint_s",
        "job",
        "last_finish",
        "last_kind",
        "last_served",
        "mid_iteration",
        "mid_phase",
        "name",
        "rollout",
        "stalled_at",
        "train",
    )

    def __init__(self, group: "Group", job: int, name: str, rollout: State | None, train: State | None) -> None:
        self.group = group
        self.job = job
        self.name = name
        self.rollout = rollout
        self.train = train
        self.call: Call | None = None
        self.last_finish = 0.0
        self.last_served = 0.0
        self.last_kind = GENERATE
        self.hint_s: float | None = None
        self.stalled_at = 0.0
        self.mid_phase = False
        self.mid_iteration = False
        self.changed = True

    @property
    def states(self) -> tuple[State, ...]:
        """What it has on this group; one state may serve both sides."""
        if self.rollout is self.train or self.train is None:
            return (self.rollout,) if self.rollout is not None else ()
        return (self.train,) if self.rollout is None else (self.rollout, self.train)

    @property
    def bytes(self) -> int:
        """Of all its states, per GPU."""
        return sum([state.bytes for state in self.states])

    def state_for(self, call: "Call") -> State:
        """The state that a call needs on the device."""
        state = self.rollout if call.kind is GENERATE else self.train
        assert state is not None, "calls go to the group that has their state"
        return state

    def run(self, kind: CallKind, service_s: float, mid_phase: bool = False, ends_iteration: bool = False) -> "Call":
        """A call that a process yields; `mid_phase`: a tool call follows."""
        return Call(self, kind, service_s, mid_phase, ends_iteration)

    def stall(self, seconds: float, hint_s: float | None) -> float:
        """A stall that a process yields, with what the job says of its length."""
        self.hint_s = hint_s
        self.stalled_at = self.group.simulation.now
        self.changed = True
        return seconds


class Call:
    """One function execution."""

    __slots__ = (
        "ends_iteration",
        "kind",
        "mid_phase",
        "process",
        "ready_since",
        "remaining_s",
        "resident",
        "service_s",
        "started",
    )

    def __init__(
        self, resident: Resident, kind: CallKind, service_s: float, mid_phase: bool, ends_iteration: bool
    ) -> None:
        self.resident = resident
        self.kind = kind
        self.service_s = service_s
        self.remaining_s = service_s
        self.mid_phase = mid_phase
        self.ends_iteration = ends_iteration
        self.ready_since = 0.0
        self.started = False
        self.process: Process | None = None

    def wait(self, process: Process) -> None:
        """Submits the call; the process resumes when it has run."""
        self.process = process
        resident = self.resident
        self.ready_since = resident.group.simulation.now
        resident.call = self
        resident.changed = True
        resident.group.submit(self)


class Group(ABC):
    """A worker group: its GPUs, residents and accounts."""

    def __init__(self, simulation: Simulation, totals: Totals, name: str, gpus: int) -> None:
        self.simulation = simulation
        self.totals = totals
        self.name = name
        self.gpus = gpus
        self.residents: list[Resident] = []
        self.created_at = simulation.now
        self.mode = Mode.IDLE
        self.spent_s = dict.fromkeys(Mode, 0.0)
        self.mode_since = simulation.now
        self._share_gpu_s = 0.0
        self._share_at = simulation.now

    @property
    def unit_gpus(self) -> int:
        """GPUs that do one thing at a time: those of the group."""
        return self.gpus

    @abstractmethod
    def submit(self, call: Call) -> None:
        """Takes a call of a resident."""

    def join(self, job: int, name: str, rollout: State | None, train: State | None) -> Resident:
        """Adds a resident."""
        self.charged_gpu_s()
        resident = Resident(self, job, name, rollout, train)
        self.residents.append(resident)
        return resident

    def leave(self, resident: Resident) -> None:
        """Removes a resident that has nothing to run any more."""
        self.charged_gpu_s()
        self.residents.remove(resident)

    def charged_gpu_s(self) -> float:
        """GPU-seconds so far of one resident that has been here all along: provisioned time split equally."""
        now = self.simulation.now
        if self.residents:
            self._share_gpu_s += (now - self._share_at) * self.gpus / len(self.residents)
        self._share_at = now
        return self._share_gpu_s

    def enter(self, mode: Mode) -> None:
        """Notes what the group does from now on."""
        now = self.simulation.now
        self.spent_s[self.mode] += now - self.mode_since
        self.mode, self.mode_since = mode, now

    def close(self) -> float:
        """Ends the accounts; returns the group's lifetime in seconds.

        Raises:
            AssertionError: the modes do not add up to it.
        """
        self.enter(Mode.IDLE)
        lifetime = self.simulation.now - self.created_at
        assert abs(sum(self.spent_s.values()) - lifetime) < 1e-6 * max(1.0, lifetime), "time of a group is unaccounted"
        return lifetime

    def _resume(self, call: Call) -> None:
        process = call.process
        assert process is not None
        call.resident.changed = True
        call.resident.call = None
        call.resident.mid_phase = call.mid_phase
        call.resident.mid_iteration = not call.ends_iteration
        call.resident.last_finish = self.simulation.now
        call.resident.last_kind = call.kind
        self.simulation.resume(process)


class PrivateGroup(Group):
    """One resident, never a queue, its model always on the device."""

    def submit(self, call: Call) -> None:
        """Runs the call at once."""
        self.enter(Mode.BUSY)
        self.simulation.at(self.simulation.now + call.remaining_s, self._finish, call)

    def _finish(self, call: Call) -> None:
        self.enter(Mode.IDLE)
        self._resume(call)


@dataclass(frozen=True, slots=True)
class Run:
    """Serve this resident's call after `setup_s` of swapping."""

    resident: Resident
    setup_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Keep:
    """Stay idle until a time or an arrival."""

    until: float


class Discipline(Protocol):
    """Whom a shared group serves next."""

    def decide(self, group: "SharedGroup", now: float) -> Run | Keep | None:
        """The group is free: what it does; None waits for an arrival."""
        ...

    def arrived(self, group: "SharedGroup", call: Call) -> None:
        """A call was submitted."""
        ...

    def ran(self, group: "SharedGroup", call: Call, seconds: float, done: bool) -> None:
        """A call ran for so long, to its end or until it yielded."""
        ...

    def left(self, group: "SharedGroup", resident: Resident) -> None:
        """A job has left the group."""
        ...

    def interrupt(self, group: "SharedGroup", now: float) -> float | None:
        """Others wait while a call runs: when to ask again, `now` to stop it at once, None to let it end."""
        ...


class SharedGroup(Group):
    """Several residents, one call at a time."""

    def __init__(
        self,
        simulation: Simulation,
        totals: Totals,
        name: str,
        gpus: int,
        discipline: Discipline,
        device_state_bytes: float = float("inf"),
    ) -> None:
        super().__init__(simulation, totals, name, gpus)
        self.discipline = discipline
        self.device_state_bytes = device_state_bytes
        self.running: Call | None = None
        self.serving: Resident | None = None
        self.slice_start = 0.0
        self.run_start = 0.0
        self.run_end = 0.0
        self._token = 0
        self._busy = False
        """A call runs, a swap is under way, or a decision is being made."""

    def submit(self, call: Call) -> None:
        """Queues the call."""
        self.discipline.arrived(self, call)
        if not self._busy:
            self._decide()
        elif self.running is not None and self.mode is Mode.BUSY:
            self._consider(self._token)

    def moved(self) -> None:
        """A background move has ended: the discipline may want another, or something else altogether."""
        if not self._busy:
            self._decide()
        elif self.running is not None and self.mode is Mode.BUSY:
            self._consider(self._token)

    def leave(self, resident: Resident) -> None:
        """Removes a resident that has nothing to run any more."""
        super().leave(resident)
        self.discipline.left(self, resident)
        if self.serving is resident:
            self.serving = None
        if not self._busy:
            self._decide()

    def _decide(self) -> None:
        self._busy = True
        self._token += 1
        now = self.simulation.now
        decision = self.discipline.decide(self, now)
        if decision is None or isinstance(decision, Keep):
            self._busy = False
            self.enter(Mode.IDLE if decision is None else Mode.HOLD)
            if decision is not None:
                self.simulation.at(decision.until, self._wake, self._token)
            return
        resident = decision.resident
        call = resident.call
        assert call is not None, "only a resident with a call is served"
        if self.serving is not resident:
            self.serving, self.slice_start = resident, now
            resident.last_served = now
        if not call.started:
            call.started = True
            self.totals.waits_s.append(now - call.ready_since)
            self.totals.setups_s.append(decision.setup_s)
        resident.changed = True
        self.running = call
        if decision.setup_s > 0.0:
            self.enter(Mode.SWAP)
            self.totals.swaps += 1
            self.simulation.at(now + decision.setup_s, self._start, call)
        else:
            self._start(call)

    def _start(self, call: Call) -> None:
        self.enter(Mode.BUSY)
        self.run_start = self.simulation.now
        self.run_end = self.run_start + call.remaining_s
        self.simulation.at(self.run_end, self._finish, self._token)
        if any(r.call is not None and r.call is not call for r in self.residents):
            self._consider(self._token)

    def _consider(self, token: int) -> None:
        if token != self._token or self.mode is not Mode.BUSY:
            return
        now = self.simulation.now
        again_at = self.discipline.interrupt(self, now)
        if again_at is None or again_at >= self.run_end:
            return
        if again_at <= now:
            self._token += 1
            self._finish(self._token)
        else:
            self.simulation.at(again_at, self._consider, token)

    def _wake(self, token: int) -> None:
        if token == self._token and not self._busy:
            self._decide()

    def _finish(self, token: int) -> None:
        if token != self._token:
            return
        call = self.running
        assert call is not None
        resident = call.resident
        now = self.simulation.now
        ran_s = now - self.run_start
        call.remaining_s -= ran_s
        resident.changed = True
        state = resident.state_for(call)
        state.last_used = now
        state.dirty = state.dirty or call.kind is TRAIN
        self.running = None
        done = call.remaining_s <= 1e-9
        self.discipline.ran(self, call, ran_s, done)
        if done:
            self._resume(call)
        else:
            call.ready_since = resident.last_finish = now
        self._decide()


class OverlappingGroup(Group):
    """At most two residents at once in memory: calls that overlap run slower by a factor each."""

    def __init__(
        self, simulation: Simulation, totals: Totals, name: str, gpus: int, rollout_factor: float, train_factor: float
    ) -> None:
        super().__init__(simulation, totals, name, gpus)
        self._rollout_factor = rollout_factor
        self._train_factor = train_factor
        self._running: list[Call] = []
        self._since = simulation.now
        self._token = 0

    def submit(self, call: Call) -> None:
        """Runs the call at once beside what runs."""
        self._advance()
        self.totals.waits_s.append(0.0)
        self.totals.setups_s.append(0.0)
        self._running.append(call)
        self._schedule()

    def _factor(self) -> float:
        if len(self._running) < 2:
            return 1.0
        both = all(call.kind is GENERATE for call in self._running)
        return (self._rollout_factor if both else self._train_factor) * len(self._running) / 2

    def _advance(self) -> None:
        now = self.simulation.now
        done = (now - self._since) / self._factor()
        for call in self._running:
            call.remaining_s -= done
        self._since = now

    def _schedule(self) -> None:
        self._token += 1
        self.enter(Mode.BUSY if self._running else Mode.IDLE)
        if self._running:
            left = min(call.remaining_s for call in self._running) * self._factor()
            self.simulation.at(self.simulation.now + max(0.0, left), self._finish, self._token)

    def _finish(self, token: int) -> None:
        if token != self._token:
            return
        self._advance()
        call = min(self._running, key=lambda c: c.remaining_s)
        self._running.remove(call)
        self._schedule()
        self._resume(call)
