"""States, kinds and reasons as Python enums, with the wire's names and numbers."""

from enum import IntEnum


class JobState(IntEnum):
    """Where a job stands (JobState in job.proto)."""

    ACTIVE = 1
    PAUSED = 2
    FINISHING = 3
    FINISHED = 4
    FAILED = 5
    EXPIRED = 6


class ModelState(IntEnum):
    """Where a model stands (ModelState in model.proto)."""

    CREATING = 1
    PLACED = 2
    RECOVERING = 3
    STATE_LOST = 4
    DELETING = 5
    DELETED = 6
    FAILED = 7


class WorkerState(IntEnum):
    """Where a worker stands (WorkerState in admin.proto)."""

    JOINING = 1
    READY = 2
    CORDONED = 3
    DRAINING = 4
    DRAINED = 5
    LOST = 6


class CallState(IntEnum):
    """Where a call stands (CallState in types.proto)."""

    PENDING = 1
    DISPATCHED = 2
    RUNNING = 3
    YIELDED = 4
    CANCELLING = 5
    SUCCEEDED = 6
    FAILED = 7
    CANCELLED = 8
    EXPIRED = 9


class SessionState(IntEnum):
    """Whether a session takes calls (SessionState in session.proto)."""

    OPEN = 1
    CLOSED = 2
    EXPIRED = 3


class SessionGrant(IntEnum):
    """Whether an open session's calls may run now (SessionGrant in session.proto)."""

    WAITING = 1
    GRANTED = 2
    REVOKED = 3


class CallKind(IntEnum):
    """The function of a call (CallKind in types.proto)."""

    GENERATE = 1
    SCORE = 2
    FORWARD_BACKWARD = 3
    OPTIM_STEP = 4
    SYNC_WEIGHTS = 5
    SAVE_CHECKPOINT = 6
    LOAD_CHECKPOINT = 7

    @property
    def sequenced(self) -> bool:
        """Whether calls of this kind form the model's sequence."""
        return self is not CallKind.GENERATE

    @property
    def makes_version(self) -> bool:
        """Whether success of the call makes a new version of the rollout weights."""
        return self in (CallKind.SYNC_WEIGHTS, CallKind.LOAD_CHECKPOINT)


class CallReason(IntEnum):
    """Why a call waits or how it ended (CallReason in types.proto)."""

    NONE = 0
    SEQUENCE_GAP = 1
    PREDECESSOR_UNFINISHED = 2
    VERSION_NOT_READY = 3
    DRAINING_GENERATES = 4
    GROUP_BUSY = 5
    MODEL_NOT_READY = 6
    WORKER_UNAVAILABLE = 7
    PREDECESSOR_FAILED = 8
    INVALID_ARGUMENT = 9
    NON_FINITE = 10
    ATTEMPTS_EXHAUSTED = 11
    STATE_LOST = 12
    OUT_OF_MEMORY = 13
    ENGINE_ERROR = 14
    CANCELLED_BY_CLIENT = 15
    JOB_ENDED = 16
    VERSION_REPLACED = 17
    DEADLINE_EXCEEDED = 18
    CHECKPOINT_CORRUPT = 19
    VERSION_GONE = 20
    MODEL_DELETED = 21
    MODEL_NOT_ACTIVE = 22
    SESSION_FULL = 23


class Role(IntEnum):
    """What an account may do (Role in admin.proto)."""

    ADMIN = 1
    TENANT = 2
    VIEWER = 3
    WORKER = 4


class IntervalKind(IntEnum):
    """What device time was spent on (IntervalKind in types.proto)."""

    BUSY = 1
    SWAP_IN = 2
    HOLD = 3
    SWAP_OUT = 4
