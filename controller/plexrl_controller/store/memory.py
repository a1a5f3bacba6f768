"""The store's twin in memory, for tests and simulation: the same guards and answers, nothing on disk."""

from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from plexrl_controller.domain.errors import ControllerError, LeadershipLost
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
from plexrl_controller.domain.states import CallState, IntervalKind
from plexrl_controller.lifecycle import calls, jobs, models, sessions
from plexrl_controller.store.batch import RowWrites, Update, changed_fixed_fields, coalesce, record_id
from plexrl_controller.store.paging import Position, newest_first
from plexrl_controller.store.port import Account, Changes, Listing, LiveState, Page, Tombstone

_INTERVAL_BATCH = 1000

_RECORDS = (Job, Model, Call, Session, Worker, Checkpoint, Snapshot, Token)

UniqueKey = tuple[str, ...]
"""What is unique, and its parts."""


def _job_live(job: Job) -> bool:
    return job.state not in jobs.TERMINAL


def _model_live(model: Model) -> bool:
    return model.state not in models.TERMINAL


def _session_live(session: Session) -> bool:
    return session.state not in sessions.TERMINAL


def _call_live(call: Call) -> bool:
    return call.state not in calls.TERMINAL


class MemoryStore:
    """Implements `Store`. Survives its leader: a new one on the same object finds everything committed."""

    def __init__(self) -> None:
        self._term = 0
        self._last_commit = ""
        self._tables: dict[type[Any], dict[str, Any]] = {t: {} for t in _RECORDS}
        self._taken: set[UniqueKey] = set()
        self._requests: dict[tuple[str, RequestId], Request] = {}
        self._events: list[Event] = []
        self._intervals: list[Interval] = []
        self._folded: dict[JobId, Account] = {}

    async def acquire_term(self, holder: str) -> int:
        self._term += 1
        self._last_commit = ""
        return self._term

    async def load(self) -> LiveState:
        live_jobs = {job.job_id for job in self._jobs.values() if _job_live(job)}
        live_models = {model.model_id for model in self._models.values() if _model_live(model)}
        held = [
            call
            for call in self._calls.values()
            if call.state is CallState.CANCELLING
            or (call.job_id in live_jobs and (_call_live(call) or not call.acknowledged))
        ]
        return LiveState(
            jobs=_oldest_first(job for job in self._jobs.values() if job.job_id in live_jobs),
            models=_oldest_first(model for model in self._models.values() if model.model_id in live_models),
            calls=_oldest_first(held),
            tombstones=tuple(
                Tombstone(call.job_id, call.request_id, call.request_hash, call.call_id)
                for call in _oldest_first(self._calls.values())
                if call.job_id in live_jobs and call.acknowledged and not _call_live(call)
            ),
            logged_calls=_oldest_first(
                call
                for call in self._calls.values()
                if call.job_id in live_jobs and call.acknowledged and not _call_live(call) and call.spec is not None
            ),
            sessions=_oldest_first(s for s in self._tables[Session].values() if _session_live(s)),
            workers=tuple(sorted(self._tables[Worker].values(), key=record_id)),
            checkpoints=_oldest_first(c for c in self._checkpoints.values() if c.model_id in live_models),
            snapshots=tuple(
                sorted(
                    (s for s in self._tables[Snapshot].values() if s.model_id in live_models),
                    key=lambda s: (s.model_id, s.slot),
                )
            ),
            tokens=await self.tokens(),
            requests=tuple(sorted(self._requests.values(), key=lambda r: (r.create_time, r.scope, r.request_id))),
            accounts=tuple(account for job_id, account in sorted(self._accounts().items()) if job_id in live_jobs),
        )

    async def tokens(self) -> Sequence[Token]:
        return tuple(sorted(self._tables[Token].values(), key=record_id))

    async def commit(self, term: int, changes: Changes) -> None:
        if term != self._term:
            raise LeadershipLost(f"term {term} is over: the newest is {self._term}")
        if changes.commit_id and changes.commit_id == self._last_commit:
            return
        writes = coalesce(changes)
        for update in writes.updates:
            self._check_update(update)
        freed, taken = self._check_unique(writes)
        self._check_parents(writes.inserts)
        requests = {(request.scope, request.request_id): request for request in changes.requests}
        if len(requests) < len(changes.requests) or requests.keys() & self._requests.keys():
            raise LeadershipLost("a request id is already stored in its scope")
        self._taken -= freed
        self._taken |= taken
        for record in (*writes.inserts, *(update.record for update in writes.updates)):
            self._tables[type(record)][record_id(record)] = record
        self._requests.update(requests)
        self._events.extend(changes.events)
        self._intervals.extend(changes.intervals)
        self._last_commit = changes.commit_id

    async def get_job(self, job_id: JobId) -> Job | None:
        return self._jobs.get(job_id)

    async def get_model(self, model_id: ModelId) -> Model | None:
        return self._models.get(model_id)

    async def get_call(self, call_id: CallId) -> Call | None:
        return self._calls.get(call_id)

    async def get_session(self, session_id: SessionId) -> Session | None:
        return self._tables[Session].get(session_id)

    async def get_checkpoint(self, checkpoint_id: CheckpointId) -> Checkpoint | None:
        return self._checkpoints.get(checkpoint_id)

    async def list_jobs(self, tenant: Tenant | None, live_only: bool, page: Page) -> Listing[Job]:
        return newest_first(
            self._jobs.values(),
            page,
            lambda job: tenant in (None, job.tenant) and (_job_live(job) or not live_only),
        )

    async def accounts(self, job_ids: Sequence[JobId]) -> Mapping[JobId, Account]:
        return {job_id: account for job_id, account in sorted(self._accounts().items()) if job_id in set(job_ids)}

    async def list_calls(self, tenant: Tenant | None, job_id: JobId | None, page: Page) -> Listing[Call]:
        listing = newest_first(
            self._calls.values(), page, lambda call: tenant in (None, call.tenant) and job_id in (None, call.job_id)
        )
        return Listing(tuple(replace(call, spec=None, result=None) for call in listing.items), listing.next)

    async def list_checkpoints(self, model_id: ModelId) -> Sequence[Checkpoint]:
        return tuple(reversed(_oldest_first(c for c in self._checkpoints.values() if c.model_id == model_id)))

    async def intervals(
        self, tenant: Tenant | None, job_id: JobId | None, since_unix_ns: int
    ) -> AsyncIterator[Sequence[Interval]]:
        wanted = [
            interval
            for interval in self._intervals
            if interval.end_unix_ns > since_unix_ns
            and job_id in (None, interval.job_id)
            and (tenant is None or self._tenant_of(interval.job_id) == tenant)
        ]
        wanted.sort(key=lambda interval: interval.end_unix_ns)
        for start in range(0, len(wanted), _INTERVAL_BATCH):
            yield tuple(wanted[start : start + _INTERVAL_BATCH])

    async def events(self, record_id: str) -> Sequence[Event]:
        return tuple(event for event in self._events if event.record_id == record_id)

    async def prune(self, before: float) -> int:
        held = self._rows()
        ended = {job.job_id for job in self._jobs.values() if not _job_live(job) and (job.end_time or before) < before}
        recent = [interval for interval in self._intervals if interval.end_unix_ns >= before * 1e9]
        old, self._intervals = [i for i in self._intervals if i.end_unix_ns < before * 1e9], recent
        for job_id, account in _accounts(old).items():
            self._folded[job_id] = self._folded.get(job_id, Account(job_id)) + account
        self._events = [event for event in self._events if event.at >= before]
        self._drop(Call, (c for c in self._calls.values() if c.job_id in ended and not _call_live(c)))
        grants = self._tables[Session]
        over = (s for s in grants.values() if not _session_live(s))
        self._drop(Session, (s for s in over if s.end_time is not None and s.end_time < before))
        models_gone = {m.model_id for m in self._models.values() if m.job_id in ended and not _model_live(m)}
        snapshots = self._tables[Snapshot]
        self._drop(Snapshot, (s for s in snapshots.values() if s.model_id in models_gone and not s.committed))
        needed = {c.model_id for c in self._calls.values()} | {c.model_id for c in self._checkpoints.values()}
        needed |= {snapshot.model_id for snapshot in snapshots.values()}
        needed |= {session.model_id for session in grants.values()}
        gone = (m for m in self._models.values() if m.job_id in ended and not _model_live(m))
        self._drop(Model, (model for model in gone if model.model_id not in needed))
        parents = {m.job_id for m in self._models.values()} | {c.job_id for c in self._calls.values()}
        self._drop(Job, (job for job in self._jobs.values() if job.job_id in ended - parents))
        self._folded = {j: account for j, account in self._folded.items() if j in self._jobs and j not in ended}
        self._requests = {
            key: request
            for key, request in self._requests.items()
            if request.create_time >= before or self._is_live(request.holder_id)
        }
        return held - self._rows()

    async def close(self) -> None:
        """Keeps everything: closing a store does not erase it."""

    @property
    def _jobs(self) -> dict[str, Job]:
        return self._tables[Job]

    @property
    def _models(self) -> dict[str, Model]:
        return self._tables[Model]

    @property
    def _calls(self) -> dict[str, Call]:
        return self._tables[Call]

    @property
    def _checkpoints(self) -> dict[str, Checkpoint]:
        return self._tables[Checkpoint]

    def _rows(self) -> int:
        return sum(map(len, self._tables.values())) + len(self._events) + len(self._intervals) + len(self._requests)

    def _drop(self, kind: type[Any], records: Iterable[Any]) -> None:
        for record in list(records):
            del self._tables[kind][record_id(record)]
            self._taken.difference_update(_unique_keys(record))

    def _is_live(self, resource_id: str) -> bool:
        job, model = self._jobs.get(resource_id), self._models.get(resource_id)
        return (job is not None and _job_live(job)) or (model is not None and _model_live(model))

    def _tenant_of(self, job_id: JobId) -> Tenant | None:
        job = self._jobs.get(job_id)
        return job.tenant if job else None

    def _check_update(self, update: Update) -> None:
        name = f"{type(update.record).__name__.lower()} {record_id(update.record)}"
        stored = self._tables[type(update.record)].get(record_id(update.record))
        if stored is None or stored.revision != update.base_revision:
            found = "absent" if stored is None else f"at revision {stored.revision}"
            raise LeadershipLost(f"{name} is {found}, not at revision {update.base_revision}")
        if changed := changed_fixed_fields(stored, update.record):
            raise ControllerError(f"{name} cannot change {', '.join(changed)}", reason="INCONSISTENT_CHANGES")

    def _check_unique(self, writes: RowWrites) -> tuple[set[UniqueKey], set[UniqueKey]]:
        """The unique keys that the commit frees and takes. Raises LeadershipLost when a key is another record's."""
        for record in writes.inserts:
            if record_id(record) in self._tables[type(record)]:
                raise LeadershipLost(f"{type(record).__name__.lower()} {record_id(record)} is already stored")
        changed = tuple(update.record for update in writes.updates)
        stored = (self._tables[type(record)][record_id(record)] for record in changed)
        freed = {key for record in stored for key in _unique_keys(record)}
        taken: set[UniqueKey] = set()
        for record in (*changed, *writes.inserts):
            for key in _unique_keys(record):
                if key in taken or (key in self._taken and key not in freed):
                    raise LeadershipLost(f"{key[0]} {key[1:]} is taken by another {type(record).__name__.lower()}")
                taken.add(key)
        return freed, taken

    def _check_parents(self, inserts: Sequence[Record]) -> None:
        new = {(type(record), record_id(record)) for record in inserts}
        for record in inserts:
            for kind, parent in _parents(record):
                if (kind, parent) not in new and parent not in self._tables[kind]:
                    raise ControllerError(
                        f"{type(record).__name__.lower()} {record_id(record)}: no {kind.__name__.lower()} {parent}",
                        reason="INCONSISTENT_CHANGES",
                    )

    def _accounts(self) -> dict[JobId, Account]:
        accounts = dict(self._folded)
        for job_id, account in _accounts(self._intervals).items():
            accounts[job_id] = accounts.get(job_id, Account(job_id)) + account
        succeeded = Counter(call.job_id for call in self._calls.values() if call.state is CallState.SUCCEEDED)
        for job_id, count in succeeded.items():
            accounts[job_id] = replace(accounts.get(job_id, Account(job_id)), calls=count)
        return accounts


def _accounts(intervals: Iterable[Interval]) -> dict[JobId, Account]:
    """What intervals add up to."""
    seconds: dict[JobId, dict[IntervalKind, float]] = defaultdict(lambda: dict.fromkeys(IntervalKind, 0.0))
    swaps: dict[JobId, int] = defaultdict(int)
    for interval in intervals:
        seconds[interval.job_id][interval.kind] += (interval.end_unix_ns - interval.start_unix_ns) / 1e9
        swaps[interval.job_id] += interval.kind in (IntervalKind.SWAP_IN, IntervalKind.SWAP_OUT)
    return {
        job_id: Account(
            job_id,
            by[IntervalKind.BUSY],
            by[IntervalKind.SWAP_IN] + by[IntervalKind.SWAP_OUT],
            by[IntervalKind.HOLD],
            swaps[job_id],
        )
        for job_id, by in seconds.items()
    }


def _position(record: Job | Model | Call | Session | Checkpoint) -> Position:
    return record.create_time, record_id(record)


T = TypeVar("T", Job, Model, Call, Session, Checkpoint)


def _oldest_first(records: Iterable[T]) -> tuple[T, ...]:
    return tuple(sorted(records, key=_position))


def _unique_keys(record: Record) -> Iterable[UniqueKey]:
    match record:
        case Job() if _job_live(record):
            yield "live job name", record.tenant, record.name
        case Model() if _model_live(record):
            yield "live model name", record.job_id, record.name
        case Call():
            yield "request id", record.job_id, record.request_id
            if record.kind.sequenced:
                yield "sequence number", record.model_id, str(record.sequence)
        case Snapshot():
            yield "snapshot slot", record.model_id, str(record.slot)
        case Token():
            yield "token hash", record.token_sha256


def _parents(record: Record) -> Iterable[tuple[type[Any], str]]:
    match record:
        case Model():
            yield Job, record.job_id
        case Call() | Session() | Checkpoint() | Snapshot():
            yield Model, record.model_id
