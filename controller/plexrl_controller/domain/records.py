"""The controller's records: frozen, one per row, changed only through `lifecycle` or as plain data beside it.

Times are seconds of Unix time. `revision` counts a record's durable changes; the store refuses a change that was made
from another revision than the stored one.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any, TypeVar

from plexrl_controller.domain.ids import (
    CallId,
    CheckpointId,
    JobId,
    ModelId,
    RequestId,
    SessionId,
    SnapshotId,
    Tenant,
    TokenId,
    WorkerId,
)
from plexrl_controller.domain.states import (
    CallKind,
    CallReason,
    CallState,
    IntervalKind,
    JobState,
    ModelState,
    Role,
    SessionState,
    WorkerState,
)


@dataclass(frozen=True, slots=True)
class Payload:
    """Serialized bytes: inline up to 64 KiB, else a reference into the payload store."""

    sha256: str
    size_bytes: int
    inline: bytes | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """One RLVR run. The lease's end is not here: renewals are frequent, and a restart grants a fresh lease."""

    job_id: JobId
    tenant: Tenant
    name: str
    state: JobState
    create_time: float
    lease_s: float
    weight: float = 1.0
    slowdown_target: float = 1.3
    labels: Mapping[str, str] = field(default_factory=dict)
    end_time: float | None = None
    message: str = ""
    client_state: bytes = b""
    revision: int = 1


@dataclass(frozen=True, slots=True)
class Model:
    """An LLM of a job and its place in its sequence. `base`, `settings`, `affinity` are serialized wire messages."""

    model_id: ModelId
    job_id: JobId
    tenant: Tenant
    name: str
    state: ModelState
    create_time: float
    role: int
    base: bytes
    settings: bytes
    affinity: bytes
    worker_id: WorkerId | None = None
    worker_incarnation: int = 0
    weights_version: int = 0
    """Version of the rollout weights that the worker serves."""
    applied_sequence: int = 0
    """Highest sequence number whose effect is in the training state."""
    due_sequence: int = 1
    """The number that may run next."""
    last_sequence: int = 0
    """Highest number submitted."""
    failed_sequence: int = 0
    """Number whose call ended other than SUCCEEDED and blocks the sequence; 0 when it is free."""
    step: int = 0
    """Optimizer steps in the training state."""
    log_start: int = 0
    """Every succeeded call above this number that changed the state can be executed again: its arguments are kept."""
    recoveries: int = 0
    """How often the state was rebuilt: the fence of replays, which belong to one recovery."""
    parameter_count: int = 0
    state_bytes: int = 0
    has_tokenizer: bool = False
    message: str = ""
    revision: int = 1


@dataclass(frozen=True, slots=True)
class Call:
    """One requested function execution. `spec` and `result` hold serialized CallSpec and CallResult."""

    call_id: CallId
    request_id: RequestId
    request_hash: str
    job_id: JobId
    model_id: ModelId
    tenant: Tenant
    kind: CallKind
    state: CallState
    sequence: int
    weights_version: int
    """generate: the version it resolved to; load_checkpoint of rollout weights: their version in their own model."""
    spec: Payload | None
    create_time: float
    deadline: float
    reason: CallReason = CallReason.NONE
    error: bytes | None = None
    """Serialized google.rpc.Status."""
    result: Payload | None = None
    attempt: int = 0
    lost_attempts: int = 0
    leader_term: int = 0
    worker_id: WorkerId | None = None
    worker_incarnation: int = 0
    checkpoint_id: CheckpointId | None = None
    """save_checkpoint: the id its checkpoint gets; load_checkpoint: the id it reads."""
    start_time: float | None = None
    end_time: float | None = None
    acknowledged: bool = False
    outcome_sha256: str = ""
    """Hash of the result of a call that can be replayed: what a replay is compared with."""
    session_id: SessionId | None = None
    """generate: the session that it was submitted in."""
    source_model_id: ModelId | None = None
    """load_checkpoint of rollout weights: the model that they are of."""
    revision: int = 1


@dataclass(frozen=True, slots=True)
class Session:
    """A grant for generates of one model that run together. When it was last used is not here, as with leases."""

    session_id: SessionId
    job_id: JobId
    model_id: ModelId
    tenant: Tenant
    state: SessionState
    max_concurrent: int
    """Most of its calls that are with the engine at a time."""
    grace_s: float
    """How long its running calls have to end once another job is to have the group."""
    idle_limit_s: float
    """It expires when nothing of it was asked for so long."""
    create_time: float
    end_time: float | None = None
    revision: int = 1


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker daemon. `capabilities` is a serialized wire message."""

    worker_id: WorkerId
    name: str
    state: WorkerState
    address: str
    incarnation: int
    life_nonce: int
    capabilities: bytes
    labels: Mapping[str, str] = field(default_factory=dict)
    version: str = ""
    cordoned: bool = False
    """An operator's word, which holds for the lives to come."""
    revision: int = 1


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A committed copy of a model's full training state."""

    checkpoint_id: CheckpointId
    model_id: ModelId
    job_id: JobId
    tenant: Tenant
    label: str
    sequence: int
    step: int
    weights_version: int
    size_bytes: int
    manifest_sha256: str
    create_time: float
    revision: int = 1


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A place for an automatic copy of a model's full state. A model has a few and uses them in turn."""

    snapshot_id: SnapshotId
    model_id: ModelId
    job_id: JobId
    tenant: Tenant
    slot: int
    committed: bool = False
    """False while it is being written, and when it was found damaged: the fields below mean nothing then."""
    sequence: int = 0
    step: int = 0
    weights_version: int = 0
    size_bytes: int = 0
    manifest_sha256: str = ""
    create_time: float = 0.0
    revision: int = 1


@dataclass(frozen=True, slots=True)
class Interval:
    """A stretch of one worker's device time, nanoseconds of Unix time on the worker's clock."""

    kind: IntervalKind
    worker_id: WorkerId
    job_id: JobId
    model_id: ModelId
    call_id: CallId | None
    call_kind: CallKind | None
    start_unix_ns: int
    end_unix_ns: int
    moved_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Event:
    """One transition of one record, kept for explanation and audit."""

    machine: str
    record_id: str
    event: str
    source: str | None
    target: str
    at: float
    reason: str = ""
    attempt: int = 0
    leader_term: int = 0


@dataclass(frozen=True, slots=True)
class Token:
    """A bearer token, known by its SHA-256 only."""

    token_id: TokenId
    token_sha256: str
    label: str
    role: Role
    tenant: Tenant | None
    revoked: bool = False
    revision: int = 1


@dataclass(frozen=True, slots=True)
class Request:
    """What became of a mutating request that made something other than a call: its key, content hash and resource."""

    scope: str
    """Tenant, or tenant and job, within which the key is unique."""
    request_id: RequestId
    request_hash: str
    resource_id: str
    """Of a job, a model or a session; of the first two, what it was answered may follow, after an "@"."""
    create_time: float

    @property
    def holder_id(self) -> str:
        """The job or model that the key lives as long as; one of a session goes with history."""
        return self.resource_id.partition("@")[0]


Record = Job | Model | Call | Session | Worker | Checkpoint | Snapshot | Token

R = TypeVar("R")
_Access = tuple[Callable[[Any], tuple[Any, ...]], dict[str, int]]
_ACCESS: dict[type[Any], _Access] = {}
"""By record type: how to read all fields at once, and the place of each."""


def changed(record: R, **changes: Any) -> R:
    """The record with some fields changed: `dataclasses.replace` at a third of its cost, for the path of every call."""
    kind: type[Any] = type(record)
    if kind not in _ACCESS:
        names = [each.name for each in fields(kind)]
        _ACCESS[kind] = attrgetter(*names), {name: place for place, name in enumerate(names)}
    read, places = _ACCESS[kind]
    values = list(read(record))
    for name, value in changes.items():
        values[places[name]] = value
    copy: R = kind(*values)
    return copy
