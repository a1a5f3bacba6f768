"""States that can be checked: a digest over all that was ever applied, and what outlives every worker process."""

from dataclasses import dataclass, field
from hashlib import sha256

from plexrl.v1 import types_pb2

DIGEST_BITS = 24


def digest(*parts: object) -> int:
    """A number below 2**24 (exact in float32) that depends on every part and their order."""
    return int.from_bytes(sha256(repr(parts).encode()).digest()[: DIGEST_BITS // 8], "big")


@dataclass(frozen=True)
class State:
    """Everything that a snapshot of a model holds."""

    train: int
    rollout: int
    step: int = 0

    @staticmethod
    def base(seed: int) -> "State":
        """As created."""
        first = digest("base", seed)
        return State(first, first)

    def after(self, function: str, spec: types_pb2.CallSpec) -> "State":
        """What a function that succeeded makes of it. save and load are not here: they need more than the state."""
        match function:
            case "forward_backward":
                return State(digest(self.train, spec.SerializeToString(deterministic=True)), self.rollout, self.step)
            case "optim_step":
                changed = digest(self.train, spec.SerializeToString(deterministic=True))
                return State(changed, self.rollout, self.step + 1)
            case "sync_weights":
                return State(self.train, self.train, self.step)
            case _:
                return self


@dataclass(frozen=True)
class Copy:
    """A whole state at a moment."""

    state: State
    version: int
    applied: int


@dataclass(frozen=True)
class Made:
    """Who made a result: for the checker."""

    call_id: str
    attempt: int
    worker: str
    worker_incarnation: int


@dataclass
class Shared:
    """What outlives every process: the directories of checkpoints and snapshots, and the log of executions."""

    checkpoints: dict[str, tuple[str, int, State]] = field(default_factory=dict)
    snapshots: dict[str, tuple[str, Copy]] = field(default_factory=dict)
    """By id: the manifest's hash and what is inside."""
    made: list[Made] = field(default_factory=list)
    last: dict[str, int] = field(default_factory=dict)
    """By call: its last execution. A replay is the same computation, and says the same."""
    replayed: set[int] = field(default_factory=set)
