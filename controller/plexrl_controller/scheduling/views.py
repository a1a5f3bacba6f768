"""The immutable inputs of scheduling decisions, built by the live controller from its ledger and by the simulator.

Times are seconds on one clock; sizes are bytes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from plexrl_controller.domain.ids import CallId, JobId, ModelId, WorkerId
from plexrl_controller.domain.states import CallKind


@dataclass(frozen=True, slots=True)
class ReadyCall:
    """A call that may run now, as far as its own job is concerned."""

    call_id: CallId
    model_id: ModelId
    kind: CallKind
    ready_since: float
    after_sequence: int = 0
    """Sequenced calls: the number that must have been applied last when it runs."""


@dataclass(frozen=True, slots=True)
class ModelView:
    """A model on this group."""

    model_id: ModelId
    state_bytes: int
    on_device: bool
    last_used: float = 0.0
    ready: tuple[ReadyCall, ...] = ()
    """In the order in which they must be dispatched."""


@dataclass(frozen=True, slots=True)
class JobView:
    """A job with models on this group."""

    job_id: JobId
    models: tuple[ModelView, ...]
    in_flight: int = 0
    """Calls that the group has been given and not finished."""
    idle_until: float | None = None
    """The job's own statement: no call before this time."""
    mid_iteration: bool = False
    """It has run something since its last sync_weights."""
    last_finish: float = 0.0
    """When its last call on this group finished."""
    round_trip_s: float = 0.05
    """What giving the group away and coming back costs: two swaps, as measured."""

    @property
    def ready(self) -> tuple[ReadyCall, ...]:
        """Its ready calls over all models, oldest first."""
        return tuple(sorted((c for m in self.models for c in m.ready), key=lambda c: (c.ready_since, c.call_id)))


@dataclass(frozen=True, slots=True)
class GroupView:
    """One worker group at one moment."""

    worker_id: WorkerId
    available: bool
    device_state_bytes: int
    jobs: tuple[JobView, ...]
    serving: JobId | None = None
    """The job whose slice it is."""
    slice_start: float = 0.0

    def job(self, job_id: JobId) -> JobView | None:
        """The view of one job."""
        return next((job for job in self.jobs if job.job_id == job_id), None)

    @property
    def in_flight(self) -> int:
        """Calls given to the group and not finished."""
        return sum(job.in_flight for job in self.jobs)


@dataclass(frozen=True, slots=True)
class WorkerView:
    """A worker as placement sees it."""

    worker_id: WorkerId
    ready: bool
    labels: Mapping[str, str]
    architectures: frozenset[str]
    catalogue: frozenset[str]
    device_state_bytes: int
    host_state_bytes: int
    model_ids: frozenset[ModelId] = frozenset()
    placed_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ClusterView:
    """All workers at one moment."""

    workers: Sequence[WorkerView] = field(default_factory=tuple)
