"""What the leader knows beside the records: volatile, never stored, found out anew by whoever leads next."""

from collections import OrderedDict
from dataclasses import dataclass, field

from plexrl_controller.dispatch.shares import DeviceShares
from plexrl_controller.domain.ids import CallId, JobId, ModelId, RequestId, WorkerId
from plexrl_controller.domain.states import CallKind, SessionGrant
from plexrl_controller.scheduling.estimates import Estimates
from plexrl_controller.scheduling.fairness import Accounts


@dataclass
class ModelCalls:
    """A model's calls that are not terminal."""

    sequenced: dict[int, CallId] = field(default_factory=dict)
    pending_generates: OrderedDict[CallId, None] = field(default_factory=OrderedDict)
    """Those that wait for their turn: those that yielded, as they began, then those that have not begun."""
    begun: dict[CallId, None] = field(default_factory=dict)
    """Those that were dispatched and have neither ended nor to begin anew, in the order of dispatch."""
    generates: dict[CallId, int] = field(default_factory=dict)
    """All of them, with the version each needs."""


@dataclass(frozen=True, slots=True)
class LastCall:
    """The call of a job that finished or yielded last."""

    finish: float
    kind: CallKind


@dataclass
class GroupState:
    """Volatile facts about one worker group."""

    connected: bool = False
    trouble: str = ""
    """Why orders could not be sent when that was last tried."""
    stopping: bool = False
    """Its daemon was asked to stop: it gets no more calls, and its models are saved."""
    last_sync: float = 0.0
    serving: JobId | None = None
    slice_start: float = 0.0
    held_since: float | None = None
    chunk_start: float = 0.0
    """When the calls in flight began, or were last asked to yield."""
    revoked_at: float | None = None
    """Since when the sessions of the served job have been revoked: another job is to have the group."""
    shares: DeviceShares = field(default_factory=DeviceShares)
    """Of the calls of sessions that run."""
    yielding: dict[CallId, None] = field(default_factory=dict)
    """Calls that were asked to yield and have neither done so nor ended."""
    on_device: set[ModelId] = field(default_factory=set)
    prefetched: ModelId | None = None
    """Ordered to be brought nearer to the device since the last load."""
    swaps: set[int] = field(default_factory=set)
    """Orders of residency changes whose end is not known: reports may be older than they are. `on_device` is what they
    will make of the device."""
    status_revision: int = 0
    """Of what the worker said when its stream opened: reports may be older than that as well."""
    swap_failed: bool = False
    """The last residency change that was ordered did not happen."""
    used_at: dict[ModelId, float] = field(default_factory=dict)
    held_orders: int = 0
    """Batches on their way to the store whose orders leave once they are there: nothing may pass these."""
    served_at: dict[JobId, float] = field(default_factory=dict)
    """When each job's last slice began."""
    last_calls: dict[JobId, LastCall] = field(default_factory=dict)
    """Of each job, here: what it does on other groups meanwhile is no turn of its on this one."""
    resident_bytes: int = 0
    estimates: Estimates = field(default_factory=Estimates)
    accounts: Accounts = field(default_factory=Accounts)


@dataclass(frozen=True, slots=True)
class HostImage:
    """The whole state of an earlier moment that a worker's host tier still holds, of a model whose state is lost."""

    worker_id: WorkerId
    incarnation: int
    sequence: int
    weights_version: int


@dataclass
class JobFacts:
    """Volatile facts about one job."""

    lease_end: float
    idle_until: float | None = None
    mid_iteration: bool = False
    last_finish: float = 0.0
    """Of any of its calls, wherever: what it said before of its idleness is over."""
    wait_s: float = 0.0
    calls_succeeded: int = 0
    client_state_keys: dict[RequestId, str] = field(default_factory=dict)
    """Requests that replaced the client state, oldest first, with the hash of their content."""


@dataclass
class SessionFacts:
    """Volatile facts about one open session."""

    last_use: float
    grant: SessionGrant = SessionGrant.WAITING
    live: set[CallId] = field(default_factory=set)
    """Its calls that are not terminal."""
    in_flight: set[CallId] = field(default_factory=set)
    """Of those the ones that its worker is to execute."""
