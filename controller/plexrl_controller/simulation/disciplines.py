"""Whom a shared group serves next, for the policies that ours is compared with."""

from dataclasses import dataclass
from enum import Enum

from plexrl_controller.simulation.pools import Keep, Resident, Run, SharedGroup


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
        match self.ranking:
            case Ranking.FIFO:
                chosen = min(waiting, key=_ready_since)
            case Ranking.HRRS:
                chosen = max(waiting, key=lambda r: _response_ratio(group, r, now))
            case Ranking.CYCLIC:
                turn = group.residents.index(serving) + 1 if serving in group.residents else 0
                order = group.residents[turn:] + group.residents[:turn]
                chosen = next(resident for resident in order if resident.call is not None)
        return Run(chosen, self._setup_s(group, chosen))

    def interrupt(self, group: SharedGroup, now: float) -> float | None:
        """Calls run to their end."""
        return None

    def _setup_s(self, group: SharedGroup, chosen: Resident) -> float:
        """Makes the chosen resident's model resident; returns the seconds on the critical path."""
        if self.full_snapshots:
            if chosen.on_device:
                return 0.0
            out_s = sum([_remove(r, always=True) for r in group.residents if r.on_device])
            chosen.on_device = True
            return out_s + chosen.load_s
        return load(group, chosen)


def load(group: SharedGroup, chosen: Resident) -> float:
    """Evicts the least recently used models until the chosen one fits, and loads it; returns seconds."""
    if chosen.on_device:
        return 0.0
    residents = sorted((r for r in group.residents if r.on_device), key=lambda r: (r.last_used, r.job))
    used, seconds = sum([r.bytes for r in residents]), 0.0
    for resident in residents:
        if used + chosen.bytes <= group.device_state_bytes:
            break
        used -= resident.bytes
        seconds += _remove(resident, always=False)
    chosen.on_device = True
    return seconds + chosen.load_s


def _remove(resident: Resident, always: bool) -> float:
    """Takes a model off the device; a clean copy is dropped unless `always`. Returns seconds."""
    resident.on_device = False
    seconds = resident.store_s if always or resident.dirty else 0.0
    resident.dirty = False
    return seconds


def _ready_since(resident: Resident) -> tuple[float, int]:
    assert resident.call is not None
    return resident.call.ready_since, resident.job


def _response_ratio(group: SharedGroup, resident: Resident, now: float) -> tuple[float, int]:
    call = resident.call
    assert call is not None
    work_s = call.remaining_s + (0.0 if resident.on_device else resident.load_s)
    return (now - call.ready_since + work_s) / max(work_s, 1e-9), -resident.job
