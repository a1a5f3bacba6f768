"""The immutable inputs of scheduling decisions, built by the live controller from its ledger and by the simulator.

Times are seconds on one clock; sizes are bytes of one rank: the ranks of a gang are alike, so what fits one fits all.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from plexrl_controller.domain.ids import CallId, GroupId, JobId, ModelId, Tenant, WorkerId
from plexrl_controller.domain.states import CallKind


@dataclass(frozen=True, slots=True)
class ReadyCall:
    """A call that may run now, as far as its own job is concerned; a yielded call is ready again."""

    call_id: CallId
    model_id: ModelId
    kind: CallKind
    ready_since: float
    after_sequence: int = 0
    """Sequenced calls: the number that must have been applied last when it runs."""
    expected_s: float | None = None
    """Estimated service, of a yielded call what remains of it; None while nothing is known."""
    concurrent: bool = False
    """It joins what runs and takes its share of the device then: nothing behind it waits for it alone. How many may run
    so is settled before they are ready."""


@dataclass(frozen=True, slots=True)
class ModelView:
    """A model on this group. Its place in the host tier is reserved as long as it is here."""

    model_id: ModelId
    state_bytes: int
    on_device: bool
    last_used: float = 0.0
    ready: tuple[ReadyCall, ...] = ()
    """In the order in which they must be dispatched."""
    dirty_bytes: int = 0
    """Bytes on the device that differ from the copy in the host tier: eviction must write them first."""
    changing: bool = False
    """A call in flight changes its training state: a copy made now would be stale at once."""
    moving: bool = False
    """A background move of it is under way. Off the device this means: it is arriving and has its bytes there."""
    load_s: float = 0.0
    """Expected seconds from the host tier onto the device."""
    parked_bytes: int = 0
    """KV of its yielded calls, kept on the device whether the model is there or not."""

    @property
    def occupies_bytes(self) -> int:
        """Bytes of the device that it takes, parked KV included."""
        return (self.state_bytes if self.on_device or self.moving else 0) + self.parked_bytes


@dataclass(frozen=True, slots=True)
class JobView:
    """A job with models on this group."""

    job_id: JobId
    models: tuple[ModelView, ...]
    in_flight: int = 0
    """Calls that the group has been given and not finished."""
    in_flight_left_s: float | None = None
    """Estimated work that remains of them; None while nothing is known."""
    idle_until: float | None = None
    """No call is expected before this time: the job's own statement, corrected by its learned factor."""
    mid_phase: bool = False
    """Between two calls of one phase (of a rollout, of a training step), as in a tool call."""
    mid_iteration: bool = False
    """It has run something since its last sync_weights."""
    last_finish: float = 0.0
    """When its last call on this group finished or yielded; 0 before the first."""
    round_trip_s: float = 0.05
    """What giving the group away and coming back costs: two swaps, as measured."""
    expected_stall_s: float | None = None
    """Learned: how long it usually stays away after a call like its last one; None while nothing is known."""
    attained_s: float = 0.0
    """Device seconds used so far, set-up included, divided by its weight (`fairness.Accounts`)."""
    over_quota: bool = False
    """Its tenant has used up its device seconds: it is served when nobody within quota waits, or when it starves."""
    last_served: float = 0.0
    """When its last slice on this group began; 0 before the first."""
    weight: float = 1.0
    """Share weight of the job."""

    @property
    def ready(self) -> tuple[ReadyCall, ...]:
        """Its ready calls over all models, oldest first."""
        return tuple(sorted((c for m in self.models for c in m.ready), key=lambda c: (c.ready_since, c.call_id)))


@dataclass(frozen=True, slots=True)
class GroupView:
    """One worker group at one moment. A gang of n ranks is one server: all of them run a call, or none."""

    worker_id: WorkerId
    """Of rank 0, which names the group."""
    available: bool
    device_state_bytes: int
    jobs: tuple[JobView, ...]
    serving: JobId | None = None
    """The job whose slice it is."""
    slice_start: float = 0.0
    world_size: int = 1
    lost_ranks: int = 0
    """Ranks that are not connected: with any of them the gang runs nothing."""
    can_yield: bool = False
    """Calls in flight can be parked and resumed with no token lost."""
    chunk_start: float = 0.0
    """When the calls in flight began or resumed to run."""
    background_moves: bool = False
    """Its workers copy between host tier and device while calls run."""

    def job(self, job_id: JobId) -> JobView | None:
        """The view of one job."""
        for job in self.jobs:
            if job.job_id == job_id:
                return job
        return None

    @property
    def in_flight(self) -> int:
        """Calls given to the group and not finished."""
        return sum([job.in_flight for job in self.jobs])


@dataclass(frozen=True, slots=True)
class Demand:
    """One iteration of a job as one of its groups sees it, from a recorded trace or learned online."""

    iteration_s: float
    """Mean length of an iteration with the groups to itself."""
    busy_s: float
    """Of that, seconds in which this group works for it."""
    visits: float = 1.0
    """Separate stretches of work per iteration, with stalls between them."""
    variation: float = 1.0
    """Squared coefficient of variation of one visit's work and stall: 1 for exponential, 0 for clockwork."""
    slack_s: float = 0.0
    """Waiting per iteration that delays nothing, because the job's other side is still at work (asynchronous jobs)."""
    round_trip_s: float = 0.0
    """What giving the group away and coming back costs, when the device cannot hold it beside the others."""
    slack_variation: float = 0.0
    """Squared coefficient of variation of the slack."""

    @property
    def busy_share(self) -> float:
        """Part of its dedicated time in which it needs the group."""
        return self.busy_s / self.iteration_s


@dataclass(frozen=True, slots=True)
class Requirements:
    """What a job's models ask of their workers, whatever the load."""

    architecture: str | None = None
    """Hugging Face architecture name, where the base tells it."""
    catalogue: str | None = None
    lora_rank: int = 0
    labels: Mapping[str, str] = field(default_factory=dict)
    colocate: frozenset[ModelId] = frozenset()
    avoid: frozenset[ModelId] = frozenset()


NOTHING_REQUIRED = Requirements()


@dataclass(frozen=True, slots=True)
class MemberView:
    """A job's share of a placed group."""

    job_id: JobId
    state_bytes: int
    """On each rank's device while it runs, and in each rank's host tier while it is parked."""
    model_ids: frozenset[ModelId] = frozenset()
    demand: Demand | None = None
    """None for a job of which nothing is known yet."""
    slowdown_target: float = 1.3
    private: bool = False
    """Nobody else may join its group."""
    elsewhere_wait_s: float = 0.0
    """Predicted waiting per iteration on the job's other groups."""
    requirements: Requirements = NOTHING_REQUIRED
    ends_at: float | None = None
    """Estimated end of the job, where it is known: reservations rest on it."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """What each rank of a group or each worker of a node offers. Alike workers share one object."""

    device_state_bytes: int
    host_state_bytes: int
    labels: Mapping[str, str] = field(default_factory=dict)
    architectures: frozenset[str] = frozenset()
    catalogue: frozenset[str] = frozenset()
    max_lora_rank: int = 0


@dataclass(frozen=True, slots=True)
class PlacedGroupView:
    """A worker group as placement sees it; groups never overlap."""

    group_id: GroupId
    worker_ids: tuple[WorkerId, ...]
    """Rank 0 first."""
    hardware: Hardware
    ready: bool = True
    """All ranks are connected and take new models."""
    members: tuple[MemberView, ...] = ()

    @property
    def world_size(self) -> int:
        """Ranks of the gang."""
        return len(self.worker_ids)


@dataclass(frozen=True, slots=True)
class NodeView:
    """A host with workers that belong to no group."""

    node_id: str
    hardware: Hardware
    free: tuple[WorkerId, ...]


@dataclass(frozen=True, slots=True)
class Reservation:
    """A future start promised to a job: what is placed meanwhile must not delay it."""

    job_id: JobId
    start_at: float
    free_workers: int = 0
    """Workers it needs outside present groups at its start."""
    group_ids: frozenset[GroupId] = frozenset()
    """Groups that it is to have at its start: jobs that join them meanwhile must have ended by then."""


@dataclass(frozen=True, slots=True)
class TenantUse:
    """Device seconds of a tenant in the present accounting window."""

    used_s: float
    quota_s: float
    resets_at: float


@dataclass(frozen=True, slots=True)
class ClusterView:
    """All groups and all free workers at one moment."""

    groups: Sequence[PlacedGroupView] = ()
    nodes: Sequence[NodeView] = ()
    now: float = 0.0
    reservations: Sequence[Reservation] = ()
    tenants: Mapping[Tenant, TenantUse] = field(default_factory=dict)
    """Tenants with a quota; the others have none."""
