"""Whom a shared group serves next, for the policies that ours is compared with."""

from dataclasses import dataclass
from enum import Enum

from plexrl_controller.simulation.pools import Call, Keep, Resident, Run, SharedGroup, State


class Ranking(Enum):
    """The order of the waiting calls."""

    FIFO = "fifo"
    HRRS = "hrrs"
    """Highest (wait + service + set-up) / (service + set-up)."""
    CYCLIC = "cyclic"
    """Residents in turn, in the order in which they came; nobody is overtaken."""


@dataclass(frozen=True)
class QueueDiscipline:
    """One call at a time, run to its end."""

    ranking: Ranking
    hold_phase: bool = False
    """A job keeps the group through the tool calls of its rollout."""
    full_snapshots: bool = False
    """Every change of job writes the whole state out and reads the other in, whatever would fit."""

    def decide(self, group: SharedGroup, now: float) -> Run | Keep | None:
        """Serves the first of the order."""
        serving = group.serving
        if self.hold_phase and serving is not None and serving.call is None and serving.mid_phase:
            return Keep(float("inf"))
        if serving is not None and serving.call is not None and serving.call.started:
            return Run(serving)
        if self.hold_phase and serving is not None and serving.call is not None and serving.mid_phase:
            return Run(serving)
        waiting = [resident for resident in group.residents if resident.call is not None]
        if not waiting:
            return None
        chosen = self._choose(group, waiting, now)
        return Run(chosen, self._setup_s(group, chosen))

    def _choose(self, group: SharedGroup, waiting: list[Resident], now: float) -> Resident:
        match self.ranking:
            case Ranking.FIFO:
                return min(waiting, key=_ready_since)
            case Ranking.HRRS:
                return max(waiting, key=lambda r: _response_ratio(group, r, now))
            case Ranking.CYCLIC:
                serving = group.serving
                turn = group.residents.index(serving) + 1 if serving in group.residents else 0
                order = group.residents[turn:] + group.residents[:turn]
                return next(resident for resident in order if resident.call is not None)

    def arrived(self, group: SharedGroup, call: Call) -> None:
        """Learns nothing."""

    def ran(self, group: SharedGroup, call: Call, seconds: float, done: bool) -> None:
        """Learns nothing."""

    def left(self, group: SharedGroup, resident: Resident) -> None:
        """Has nothing to forget."""

    def interrupt(self, group: SharedGroup, now: float) -> float | None:
        """Calls run to their end."""
        return None

    def _setup_s(self, group: SharedGroup, chosen: Resident) -> float:
        """Makes the state of the chosen resident's call resident; returns the seconds on the critical path."""
        assert chosen.call is not None
        if not self.full_snapshots:
            return load(group, chosen.state_for(chosen.call))
        if all(state.on_device for state in chosen.states):
            return 0.0
        seconds = sum([_remove(s, always=True) for r in group.residents for s in r.states if s.on_device])
        for state in chosen.states:
            state.on_device = True
            seconds += state.load_s
        return seconds


def load(group: SharedGroup, wanted: State) -> float:
    """Evicts the least recently used states until the wanted one fits, and loads it; returns seconds."""
    if wanted.on_device:
        return 0.0
    present = [s for r in group.residents for s in r.states if s.on_device]
    present.sort(key=lambda s: (s.last_used, s.model_id))
    used, seconds = sum([s.bytes for s in present]), 0.0
    for state in present:
        if used + wanted.bytes <= group.device_state_bytes:
            break
        used -= state.bytes
        seconds += _remove(state, always=False)
    wanted.on_device = True
    return seconds + wanted.load_s


def _remove(state: State, always: bool) -> float:
    """Takes a state off the device; a clean copy is dropped unless `always`. Returns seconds."""
    state.on_device = False
    seconds = state.store_s if always or state.dirty else 0.0
    state.dirty = False
    return seconds


def _ready_since(resident: Resident) -> tuple[float, int]:
    assert resident.call is not None
    return resident.call.ready_since, resident.job


def _response_ratio(group: SharedGroup, resident: Resident, now: float) -> tuple[float, int]:
    call = resident.call
    assert call is not None
    state = resident.state_for(call)
    work_s = call.remaining_s + (0.0 if state.on_device else state.load_s)
    return (now - call.ready_since + work_s) / max(work_s, 1e-9), -resident.job
