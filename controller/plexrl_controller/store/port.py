"""What the controller asks of durable storage. One leader writes; anybody reads.

Memory is ahead of the store: the leader applies a transition in memory at once, and releases its effects (replies,
orders, results) only when `commit` has returned. So a commit has no business conflicts: a guard that fails means that
somebody else wrote, and the leader must stop (LeadershipLost).
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from plexrl_controller.domain.ids import CallId, CheckpointId, JobId, ModelId, RequestId, SessionId, Tenant
from plexrl_controller.domain.records import (
    Call,
    Checkpoint,
    Event,
    Interval,
    Job,
    Model,
    Record,
    Request,
    Session,
    Snapshot,
    Token,
    Worker,
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Changes:
    """What one commit writes. Applied wholly or not at all.

    `inserts` are new records (revision as given). `updates` carry changed records; several of one record stand in the
    order of their revisions, without a gap. The guard of each: the stored revision is the one before the first of them.
    One row write is made of them, their events are all kept.
    """

    inserts: tuple[Record, ...] = ()
    updates: tuple[Record, ...] = ()
    events: tuple[Event, ...] = ()
    intervals: tuple[Interval, ...] = ()
    requests: tuple[Request, ...] = ()
    commit_id: str = ""
    """Names the commit, so that a repetition after an uncertain outcome is recognised. The writer gives it."""


@dataclass(frozen=True, slots=True)
class Tombstone:
    """What stays of an acknowledged call until its job ends."""

    job_id: JobId
    request_id: RequestId
    request_hash: str
    call_id: CallId


@dataclass(frozen=True, slots=True)
class LiveState:
    """Everything a leader needs in memory: live jobs and what belongs to them, workers, tokens."""

    jobs: Sequence[Job] = ()
    models: Sequence[Model] = ()
    """Models that are not terminal, of any job."""
    calls: Sequence[Call] = ()
    """Calls that are not terminal, or not acknowledged and of a live job."""
    tombstones: Sequence[Tombstone] = ()
    """Acknowledged calls of live jobs."""
    logged_calls: Sequence[Call] = ()
    """Acknowledged calls of live jobs whose arguments are kept, because no snapshot covers them yet."""
    sessions: Sequence[Session] = ()
    """That are open."""
    workers: Sequence[Worker] = ()
    checkpoints: Sequence[Checkpoint] = ()
    snapshots: Sequence[Snapshot] = ()
    """Of models that are not terminal."""
    tokens: Sequence[Token] = ()
    requests: Sequence[Request] = ()
    accounts: Sequence["Account"] = ()


@dataclass(frozen=True, slots=True)
class Account:
    """Device seconds charged to a job, summed over its intervals, and how many of its calls succeeded."""

    job_id: JobId
    busy_s: float = 0.0
    swap_s: float = 0.0
    hold_s: float = 0.0
    swaps: int = 0
    calls: int = 0

    def __add__(self, other: "Account") -> "Account":
        """The seconds of both, which are of the same job."""
        return Account(
            self.job_id,
            self.busy_s + other.busy_s,
            self.swap_s + other.swap_s,
            self.hold_s + other.hold_s,
            self.swaps + other.swaps,
            self.calls + other.calls,
        )


@dataclass(frozen=True, slots=True)
class Page:
    """A slice of a listing, newest first."""

    size: int = 100
    after: str | None = None
    """Opaque: the `next` of the previous page."""


@dataclass(frozen=True, slots=True)
class Listing(Generic[T]):
    """One page of a listing."""

    items: Sequence[T] = field(default_factory=tuple)
    next: str | None = None


class Store(Protocol):
    """The port. Implementations: `postgres`, and `memory` as its twin in tests and simulation.

    Every method raises Unavailable when the storage does not answer; a commit that raised Unavailable may or may not
    have happened. Committing the same Changes again, with nothing between, is safe when they carry a `commit_id`.
    """

    async def acquire_term(self, holder: str) -> int:
        """Takes leadership: returns a term higher than every earlier one, durable."""
        ...

    async def load(self) -> LiveState:
        """Reads what a new leader needs."""
        ...

    async def tokens(self) -> Sequence[Token]:
        """All tokens, revoked ones too."""
        ...

    async def commit(self, term: int, changes: Changes) -> None:
        """Writes `changes` durably, all or nothing.

        Raises LeadershipLost when `term` is not the newest or a guard fails: a revision, a taken id, a taken name.
        """
        ...

    async def get_job(self, job_id: JobId) -> Job | None:
        """A job in any state."""
        ...

    async def get_model(self, model_id: ModelId) -> Model | None:
        """A model in any state."""
        ...

    async def get_call(self, call_id: CallId) -> Call | None:
        """A call in any state; result and spec are gone once acknowledged."""
        ...

    async def get_session(self, session_id: SessionId) -> Session | None:
        """A session in any state."""
        ...

    async def get_checkpoint(self, checkpoint_id: CheckpointId) -> Checkpoint | None:
        """A committed checkpoint."""
        ...

    async def list_jobs(self, tenant: Tenant | None, live_only: bool, page: Page) -> Listing[Job]:
        """Jobs of a tenant (None: of all), newest first."""
        ...

    async def accounts(self, job_ids: Sequence[JobId]) -> Mapping[JobId, Account]:
        """What jobs in any state have used, by job; nothing of a job that has used nothing."""
        ...

    async def list_calls(self, tenant: Tenant | None, job_id: JobId | None, page: Page) -> Listing[Call]:
        """Calls without spec and result, newest first. Those that are live the leader knows from memory."""
        ...

    async def list_checkpoints(self, model_id: ModelId) -> Sequence[Checkpoint]:
        """A model's committed checkpoints, newest first."""
        ...

    def intervals(
        self, tenant: Tenant | None, job_id: JobId | None, since_unix_ns: int
    ) -> AsyncIterator[Sequence[Interval]]:
        """Device time in batches, oldest first."""
        ...

    async def events(self, record_id: str) -> Sequence[Event]:
        """A record's transitions, oldest first."""
        ...

    async def prune(self, before: float) -> int:
        """Deletes history from before a time; returns the number of rows that went.

        Events and intervals of anything; sessions that ended before it; calls, models, jobs and request keys of jobs
        that did. What a
        checkpoint belongs to stays. Accounts keep what deleted intervals summed up to.
        """
        ...

    async def close(self) -> None:
        """Releases connections."""
        ...
