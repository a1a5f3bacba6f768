"""What recovery remembers of one model: its log, the copies that it can start from, and how far a replay is.

The log: succeeded calls that changed its state and whose arguments are kept, so that they can run again.

A call is in the log exactly while its record says so (`is_logged`): nothing beside the records has to be remembered,
and a restart finds the same log. Pure bookkeeping.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from plexrl_controller.domain.ids import WorkerId
from plexrl_controller.domain.records import Call
from plexrl_controller.domain.states import CallKind, CallState

REPLAYED = frozenset({CallKind.FORWARD_BACKWARD, CallKind.OPTIM_STEP, CallKind.SYNC_WEIGHTS, CallKind.LOAD_CHECKPOINT})
"""What changes the state of a model. Other sequenced calls leave no trace in it and are never executed again."""


def is_logged(call: Call) -> bool:
    """Whether the call belongs to its model's log."""
    return call.state is CallState.SUCCEEDED and call.kind in REPLAYED and call.spec is not None


class ReplayLog:
    """The log of one model, by sequence number."""

    def __init__(self) -> None:
        self.kept_bytes = 0
        """Bytes of arguments that it keeps, wherever they lie."""
        self._calls: dict[int, Call] = {}
        self._busy_s: dict[int, float] = {}

    def __len__(self) -> int:
        return len(self._calls)

    def put(self, call: Call) -> None:
        """Takes over a call's newest record: in the log or no longer in it."""
        before = self._calls.pop(call.sequence, None)
        if before is not None and before.spec is not None:
            self.kept_bytes -= before.spec.size_bytes
        if is_logged(call):
            assert call.spec is not None
            self._calls[call.sequence] = call
            self.kept_bytes += call.spec.size_bytes
            if call.sequence not in self._busy_s:
                self._busy_s[call.sequence] = _recorded_s(call)
        else:
            self._busy_s.pop(call.sequence, None)

    def measured(self, sequence: int, busy_s: float) -> None:
        """Device seconds that the call of a number took, as its worker measured them."""
        self._busy_s[sequence] = busy_s

    def after(self, sequence: int) -> Sequence[Call]:
        """Its calls above a number, in order."""
        return [self._calls[number] for number in sorted(self._calls) if number > sequence]

    def up_to(self, sequence: int) -> Sequence[Call]:
        """Its calls up to a number, in order."""
        return [self._calls[number] for number in sorted(self._calls) if number <= sequence]

    def busy_s_after(self, sequence: int) -> float:
        """Estimated seconds to execute again what is above a number."""
        return sum(seconds for number, seconds in self._busy_s.items() if number > sequence)

    def bytes_after(self, sequence: int) -> int:
        """Bytes of arguments above a number."""
        return sum(c.spec.size_bytes for n, c in self._calls.items() if n > sequence and c.spec is not None)


def _recorded_s(call: Call) -> float:
    """What the record tells of a call that was measured in an earlier life of the controller."""
    return max(0.0, (call.end_time or 0.0) - (call.start_time or call.end_time or 0.0))


class Source(IntEnum):
    """Kinds of restore points, the cheapest to restore last."""

    BASE = 1
    CHECKPOINT = 2
    SNAPSHOT = 3
    HOST_IMAGE = 4


@dataclass(frozen=True, slots=True)
class RestorePoint:
    """A copy of the whole state as it stood at a sequence number."""

    source: Source
    sequence: int
    weights_version: int
    copy_id: str = ""
    """Of a checkpoint or snapshot."""
    manifest_sha256: str = ""

    def __str__(self) -> str:
        match self.source:
            case Source.BASE:
                return f"its base at sequence {self.sequence}"
            case Source.HOST_IMAGE:
                return f"the host tier at sequence {self.sequence}"
            case Source.CHECKPOINT | Source.SNAPSHOT:
                return f"{self.source.name.lower()} {self.copy_id[:8]} at sequence {self.sequence}"


@dataclass(frozen=True, slots=True)
class Replay:
    """A call to execute again: on a state that stands at `after`, which stands at `through` afterwards."""

    call: Call
    after: int
    through: int


@dataclass
class Recovery:
    """The rebuilding of a model's state in one life of its worker. Volatile: a new leader begins it anew."""

    point: RestorePoint
    incarnation: int
    started: float
    order_id: int
    """Of the deploy order whose report says that the copy is there; one of an earlier order says nothing about it."""
    replays: list[Replay] | None = None
    """None until the copy is restored."""
    stands_at: int = 0
    """Sequence number of what is on the worker."""
    position: int = 0
    """Replays before this one are done."""
    in_flight: set[int] = field(default_factory=set)
    """Replays that the worker has, by their place."""
    stalled: bool = False
    """One did not run: nothing is given until the worker has answered for all that it has."""
    diverged: int = 0
    """Replays whose result was not the recorded one."""
    retries: int = 0

    @property
    def due(self) -> Sequence[Replay]:
        """Replays that may be given to the worker now, in order."""
        if self.replays is None or (self.stalled and self.in_flight):
            return ()
        return self.replays[max((self.position, *(place + 1 for place in self.in_flight))) :]

    def ended(self, place: int, *, done: bool) -> None:
        """The worker answered for a replay."""
        self.in_flight.discard(place)
        if done:
            self.position = max(self.position, place + 1)
        else:
            self.stalled, self.retries = True, self.retries + 1
        if not self.in_flight:
            self.stalled = False


@dataclass
class SnapshotOfModel:
    """Volatile: the snapshot of a model that is being written, and how the last tries went."""

    worker_id: WorkerId | None = None
    incarnation: int = 0
    failures: int = 0
    not_before: float = 0.0
    failure: str = ""


@dataclass(frozen=True, slots=True)
class RecoveryPolicy:
    """How much a death may cost, and how much room that may take. The operator's settings."""

    replay_s: float = 30.0
    """A snapshot is due when executing again what came after the newest copy would take this long."""
    log_bytes: int = 256 * 2**20
    """Arguments that are kept per model: half of it since the newest copy makes a snapshot due. Never a reason to
    refuse work before `max_log_bytes`."""
    log_calls: int = 2048
    """Calls since the newest copy that make a snapshot due."""
    snapshots_kept: int = 2
    """Newest snapshots of a model that are kept: the second serves when the first is damaged."""

    @property
    def max_log_bytes(self) -> int:
        """What a model's log may hold when no snapshot can be written: beyond it new work is refused."""
        return 4 * self.log_bytes
