"""The leader's memory: every live record, indexed, and the volatile facts beside them.

`Batch` changes it: records at once, in memory, and the same changes for the store; whoever made the batch releases its
outward effects only when the store has them. Nothing here waits or talks to anybody, and between a batch's first change
and its posting nobody else may run: the store gets changes in the order in which memory got them.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Iterable
from enum import Enum
from typing import Any, TypeVar

from plexrl.v1 import model_pb2, types_pb2
from plexrl_controller.dispatch.facts import GroupState, HostImage, JobFacts, ModelCalls, SessionFacts
from plexrl_controller.dispatch.replay_log import REPLAYED, Recovery, ReplayLog, SnapshotOfModel
from plexrl_controller.domain.errors import NotFound
from plexrl_controller.domain.ids import (
    CallId,
    CheckpointId,
    JobId,
    ModelId,
    RequestId,
    SessionId,
    Tenant,
    TokenId,
    WorkerId,
)
from plexrl_controller.domain.records import (
    Call,
    Checkpoint,
    Event,
    Interval,
    Job,
    Model,
    Payload,
    Record,
    Request,
    Session,
    Snapshot,
    Token,
    Worker,
    changed,
)
from plexrl_controller.domain.states import CallState, IntervalKind
from plexrl_controller.lifecycle import calls, jobs, models, sessions, workers
from plexrl_controller.lifecycle.machine import Effect, Machine
from plexrl_controller.scheduling.fairness import Accounts
from plexrl_controller.scheduling.views import Demand
from plexrl_controller.store.batch import Key, record_key
from plexrl_controller.store.port import Account, Changes, LiveState

R = TypeVar("R", Job, Model, Call, Session, Worker)
MAX_REMEMBERED_DEMANDS = 4096


class Ledger:
    """Live records and their indexes."""

    def __init__(self) -> None:
        self.jobs: dict[JobId, Job] = {}
        self.models: dict[ModelId, Model] = {}
        self.calls: dict[CallId, Call] = {}
        self.sessions: dict[SessionId, Session] = {}
        """Those that are open."""
        self.sessions_of_model: dict[ModelId, dict[SessionId, None]] = {}
        self.session_facts: dict[SessionId, SessionFacts] = {}
        self.workers: dict[WorkerId, Worker] = {}
        self.checkpoints: dict[CheckpointId, Checkpoint] = {}
        self.snapshots_of_model: dict[ModelId, dict[int, Snapshot]] = {}
        self.logs: dict[ModelId, ReplayLog] = {}
        self.tokens: dict[TokenId, Token] = {}
        self.token_by_hash: dict[str, TokenId] = {}
        self.requests: dict[tuple[str, RequestId], Request] = {}
        self.call_by_request: dict[tuple[JobId, RequestId], tuple[str, CallId]] = {}
        self.calls_of_job: dict[JobId, OrderedDict[CallId, None]] = {}
        self.calls_of_model: dict[ModelId, ModelCalls] = {}
        self.pulls_of_model: dict[ModelId, dict[CallId, int]] = {}
        """Calls that are not terminal and take a model's rollout weights elsewhere, with the version that is wanted."""
        self.models_of_job: dict[JobId, dict[ModelId, None]] = {}
        self.models_of_worker: dict[WorkerId, dict[ModelId, None]] = {}
        self.calls_on_worker: dict[WorkerId, dict[CallId, None]] = {}
        self.groups: dict[WorkerId, GroupState] = {}
        self.facts: dict[JobId, JobFacts] = {}
        self.accounts: dict[JobId, Account] = {}
        self.residency: dict[ModelId, tuple[model_pb2.ComponentResidency, ...]] = {}
        self.ready_since: dict[CallId, float] = {}
        self.progress: dict[CallId, tuple[int, int]] = {}
        self.ran_s: dict[CallId, float] = {}
        """How long calls that yielded have run so far."""
        self.run_orders: dict[CallId, int] = {}
        """Of generates, the last order to run each: what is said under an older one was said before it."""
        self.setbacks: dict[CallId, str] = {}
        """Why the last attempt of a call did not begin, where that does not count against it."""
        self.specs: dict[CallId, types_pb2.CallSpec] = {}
        self._accepting: dict[ModelId, asyncio.Lock] = {}
        self.arriving: dict[ModelId, int] = {}
        """Calls of a model that are being accepted one after the other, each behind the write of its arguments."""
        self.deploying: dict[ModelId, int] = {}
        """Models whose deploy order is out, with the incarnation that got it."""
        self.tenant_accounts = Accounts()
        """Device seconds against quotas, over all groups."""
        self.demands: OrderedDict[tuple[Tenant, str], Demand] = OrderedDict()
        """What ended jobs asked of their groups, by tenant and name."""
        self.host_images: dict[ModelId, HostImage] = {}
        self.unreadable: set[str] = set()
        """Checkpoints that were found damaged or gone when a state was to be restored from them."""
        self.recoveries: dict[ModelId, Recovery] = {}
        """Models whose state is being rebuilt on the worker that they are on."""
        self.misfits: dict[ModelId, tuple[WorkerId, int]] = {}
        """Models that cannot be restored on their worker in this life of it: another must be found."""
        self.deaths_in_replay: dict[ModelId, int] = {}
        self.snapshotting: dict[ModelId, SnapshotOfModel] = {}

    def restore(self, state: LiveState, now: float) -> None:
        """Takes over what a store holds; leases start anew."""
        for job in state.jobs:
            self._put(job)
            self.facts[job.job_id] = JobFacts(lease_end=now + job.lease_s)
        for worker in state.workers:
            self._put(worker)
            self.groups[worker.worker_id].last_sync = now
        for session in state.sessions:
            self._put(session)
            self.session_facts[session.session_id].last_use = now
        for records in (
            state.models, state.calls, state.logged_calls, state.checkpoints, state.snapshots, state.tokens
        ):  # fmt: skip
            for record in records:
                self._put(record)
        for request in state.requests:
            self.requests[request.scope, request.request_id] = request
        for tombstone in state.tombstones:
            key = (tombstone.job_id, tombstone.request_id)
            self.call_by_request[key] = (tombstone.request_hash, tombstone.call_id)
        for account in state.accounts:
            self.accounts[account.job_id] = account

    def job(self, job_id: JobId) -> Job:
        """A live job. Raises NotFound."""
        return _find(self.jobs, job_id, "job")

    def model(self, model_id: ModelId) -> Model:
        """A live model. Raises NotFound."""
        return _find(self.models, model_id, "model")

    def call(self, call_id: CallId) -> Call:
        """A live or unacknowledged call. Raises NotFound."""
        return _find(self.calls, call_id, "call")

    def worker(self, worker_id: WorkerId) -> Worker:
        """A worker. Raises NotFound."""
        return _find(self.workers, worker_id, "worker")

    def session_of(self, call: Call) -> Session | None:
        """The open session that a call runs in; None where it runs alone."""
        return self.sessions.get(call.session_id) if call.session_id is not None else None

    def open_sessions(self, *model_ids: ModelId) -> list[Session]:
        """The open sessions of some models."""
        if not self.sessions:
            return []
        return [self.sessions[s] for model_id in model_ids for s in self.sessions_of_model.get(model_id, ())]

    def live_calls(self, model_id: ModelId) -> list[Call]:
        """A model's calls that are not terminal."""
        index = self.calls_of_model.get(model_id, ModelCalls())
        return [self.calls[c] for c in (*index.sequenced.values(), *index.generates)]

    def waiting_for_version(self, model_id: ModelId, least: int) -> list[Call]:
        """Pending calls that need a version of the model from `least` on: its generates, and loads of it elsewhere."""
        index = self.calls_of_model.get(model_id, ModelCalls())
        needed = {**index.generates, **self.pulls_of_model.get(model_id, {})}
        waiting = [self.calls[call_id] for call_id, version in needed.items() if version >= least]
        return [call for call in waiting if call.state is CallState.PENDING]

    def log(self, model_id: ModelId) -> ReplayLog:
        """A model's calls that can be executed again."""
        log = self.logs.get(model_id)
        if log is None:
            log = self.logs[model_id] = ReplayLog()
        return log

    def accepting(self, model_id: ModelId) -> asyncio.Lock:
        """Held while a call of the model is being accepted."""
        return self._accepting.setdefault(model_id, asyncio.Lock())

    def in_flight(self, worker_id: WorkerId) -> list[Call]:
        """The calls that a worker is to execute, those that yielded left out."""
        on_worker = (self.calls[call_id] for call_id in self.calls_on_worker[worker_id])
        return [call for call in on_worker if call.state in calls.IN_FLIGHT]

    def account(self, job_id: JobId) -> Account:
        """Device seconds of a job so far."""
        return self.accounts.get(job_id, Account(job_id))

    def pending_version(self, model: Model) -> int:
        """The newest version that is made, or submitted and not behind a call that failed."""
        index = self.calls_of_model.get(model.model_id, ModelCalls())
        end = model.failed_sequence or model.last_sequence + 1
        newest = model.weights_version
        for sequence, call_id in index.sequenced.items():
            if newest < sequence < end and self.calls[call_id].kind.makes_version:
                newest = sequence
        return newest

    def forget_call(self, call: Call) -> None:
        """Drops an acknowledged call; its request id stays known while the job lives."""
        self.calls.pop(call.call_id, None)
        self.calls_of_job.get(call.job_id, OrderedDict()).pop(call.call_id, None)

    def forget_job(self, job_id: JobId) -> None:
        """Drops a terminal job and all that memory keeps for it, but for what it asked of its group."""
        job = self.jobs.get(job_id)
        for call_id in list(self.calls_of_job.pop(job_id, ())):
            self.calls.pop(call_id, None)
        for model_id in list(self.models_of_job.pop(job_id, ())):
            self.models.pop(model_id, None)
            self.calls_of_model.pop(model_id, None)
            for index in (
                self.residency, self._accepting, self.snapshots_of_model, self.logs, self.host_images, self.recoveries,
                self.misfits, self.deaths_in_replay, self.snapshotting,
            ):  # fmt: skip
                index.pop(model_id, None)
        for key in [k for k in self.call_by_request if k[0] == job_id]:
            del self.call_by_request[key]
        for by_job in (self.jobs, self.facts, self.accounts):
            by_job.pop(job_id, None)
        if job is not None:
            self._remember_demand(job)
        self.tenant_accounts.leave(job_id)
        for group in self.groups.values():
            group.estimates.forget(job_id)
            group.accounts.leave(job_id)
            group.served_at.pop(job_id, None)
            group.last_calls.pop(job_id, None)

    def _remember_demand(self, job: Job) -> None:
        """A job of the same tenant and name is likely to ask for the same."""
        demands = [d for group in self.groups.values() if (d := group.estimates.demand(job.job_id)) is not None]
        if demands:
            self.demands[job.tenant, job.name] = max(demands, key=lambda d: d.busy_s)
            self.demands.move_to_end((job.tenant, job.name))
        while len(self.demands) > MAX_REMEMBERED_DEMANDS:
            self.demands.popitem(last=False)

    def _put(self, record: Record) -> None:
        match record:
            case Call():
                self._put_call(record)
            case Job():
                self.jobs[record.job_id] = record
                self.calls_of_job.setdefault(record.job_id, OrderedDict())
                self.models_of_job.setdefault(record.job_id, {})
            case Model():
                self._put_model(record)
            case Session():
                self._put_session(record)
            case Worker():
                self.workers[record.worker_id] = record
                self.groups.setdefault(record.worker_id, GroupState())
                self.models_of_worker.setdefault(record.worker_id, {})
                self.calls_on_worker.setdefault(record.worker_id, {})
            case Checkpoint():
                self.checkpoints[record.checkpoint_id] = record
            case Snapshot():
                self.snapshots_of_model.setdefault(record.model_id, {})[record.slot] = record
            case Token():
                self.tokens[record.token_id] = record
                self.token_by_hash[record.token_sha256] = record.token_id

    def _put_session(self, session: Session) -> None:
        of_model = self.sessions_of_model.setdefault(session.model_id, {})
        if session.state in sessions.TERMINAL:
            for index in (self.sessions, self.session_facts, of_model):
                index.pop(session.session_id, None)
            if not of_model:
                del self.sessions_of_model[session.model_id]
        else:
            self.sessions[session.session_id] = session
            of_model[session.session_id] = None
            self.session_facts.setdefault(session.session_id, SessionFacts(last_use=session.create_time))

    def _put_model(self, model: Model) -> None:
        before = self.models.get(model.model_id)
        if before is not None and before.worker_id is not None and before.worker_id != model.worker_id:
            self.models_of_worker[before.worker_id].pop(model.model_id, None)
        self.models[model.model_id] = model
        self.models_of_job.setdefault(model.job_id, {})[model.model_id] = None
        self.calls_of_model.setdefault(model.model_id, ModelCalls())
        if model.worker_id is not None:
            on_worker = self.models_of_worker.setdefault(model.worker_id, {})
            if model.state in models.TERMINAL:
                on_worker.pop(model.model_id, None)
            else:
                on_worker[model.model_id] = None

    def _put_call(self, call: Call) -> None:
        if call.acknowledged:
            self.forget_call(call)
        else:
            self.calls[call.call_id] = call
            of_job = self.calls_of_job.get(call.job_id)
            if of_job is None:
                of_job = self.calls_of_job[call.job_id] = OrderedDict()
            of_job[call.call_id] = None
        if call.kind in REPLAYED and call.state is CallState.SUCCEEDED:
            self.log(call.model_id).put(call)
        if call.state is CallState.PENDING:
            self.ran_s.pop(call.call_id, None)
        self.call_by_request[call.job_id, call.request_id] = (call.request_hash, call.call_id)
        index = self.calls_of_model.get(call.model_id)
        if index is None:
            index = self.calls_of_model[call.model_id] = ModelCalls()
        live = call.state not in calls.TERMINAL
        if call.source_model_id is not None:
            self._put_pull(call, call.source_model_id, live=live)
        if call.kind.sequenced:
            if live:
                index.sequenced[call.sequence] = call.call_id
            elif index.sequenced.get(call.sequence) == call.call_id:
                del index.sequenced[call.sequence]
        elif live:
            index.generates[call.call_id] = call.weights_version
            if call.state is CallState.PENDING:
                index.begun.pop(call.call_id, None)
                index.pending_generates[call.call_id] = None
            else:
                index.begun[call.call_id] = None
                index.pending_generates.pop(call.call_id, None)
            if call.state is CallState.YIELDED:
                # What has begun ends first: its KV is kept meanwhile.
                index.pending_generates[call.call_id] = None
                for begun in reversed(index.begun):
                    if begun in index.pending_generates:
                        index.pending_generates.move_to_end(begun, last=False)
        else:
            for place in (index.generates, index.begun, index.pending_generates):
                place.pop(call.call_id, None)
        if call.session_id is not None and (session := self.session_facts.get(call.session_id)) is not None:
            (session.live.add if live else session.live.discard)(call.call_id)
            (session.in_flight.add if call.state in calls.IN_FLIGHT else session.in_flight.discard)(call.call_id)
        if call.worker_id is not None:
            on_worker = self.calls_on_worker.get(call.worker_id)
            if on_worker is None:
                on_worker = self.calls_on_worker[call.worker_id] = {}
            if call.state in calls.ON_WORKER:
                on_worker[call.call_id] = None
            else:
                on_worker.pop(call.call_id, None)
        if not live:
            for volatile in (
                *(self.ready_since, self.progress, self.ran_s),
                *(self.run_orders, self.setbacks, self.specs),
            ):
                volatile.pop(call.call_id, None)

    def _put_pull(self, call: Call, source_id: ModelId, *, live: bool) -> None:
        pulls = self.pulls_of_model.setdefault(source_id, {})
        if live:
            pulls[call.call_id] = call.weights_version
        else:
            pulls.pop(call.call_id, None)
        if not pulls:
            del self.pulls_of_model[source_id]


class Batch:
    """Changes made together: in memory at once, and `changes()` for the store. `effects` wait for the commit."""

    def __init__(self, ledger: Ledger, now: float) -> None:
        self.ledger = ledger
        self.now = now
        self.effects: list[tuple[Effect, Record]] = []
        self._inserts: dict[Key, Record] = {}
        self._updates: list[Record] = []
        self._events: list[Event] = []
        self._intervals: list[Interval] = []
        self._requests: list[Request] = []
        self.unkept: list[tuple[Tenant, Payload]] = []
        """Payloads that nothing refers to once this is durable."""

    def insert(self, record: Record) -> None:
        """Adds a new record."""
        self.ledger._put(record)
        self._inserts[record_key(record)] = record
        if (machine := MACHINES.get(type(record).__name__)) is not None:
            self._events.append(machine.created(record, self.now))

    def transition(self, record: R, event: Enum, **changes: Any) -> R:
        """Applies an event of the record's machine. Raises StaleTransition."""
        machine: Machine[R, Any, Any] = MACHINES[type(record).__name__]
        applied = machine.apply(record, event, self.now, **changes)
        self._write(applied.record)
        self._events.append(applied.event)
        self.effects.extend((effect, applied.record) for effect in applied.effects)
        return applied.record

    def update(self, record: R | Checkpoint | Snapshot | Token, **changes: Any) -> None:
        """Changes data beside the state."""
        self._write(changed(record, revision=record.revision + 1, **changes))

    def drop_arguments(self, call: Call) -> None:
        """Gives up the arguments of a call that will not be executed again."""
        if call.spec is not None:
            self.unkept.append((call.tenant, call.spec))
            self.update(call, spec=None)

    def note(self, event: Event) -> None:
        """Adds an event that is no transition."""
        self._events.append(event)

    def interval(self, interval: Interval) -> None:
        """Charges device time to a job."""
        self._intervals.append(interval)
        job_id, seconds = interval.job_id, (interval.end_unix_ns - interval.start_unix_ns) / 1e9
        spent = Account(job_id)
        match interval.kind:
            case IntervalKind.BUSY:
                spent = Account(job_id, busy_s=seconds)
            case IntervalKind.SWAP_IN | IntervalKind.SWAP_OUT:
                spent = Account(job_id, swap_s=seconds, swaps=1)
            case IntervalKind.HOLD:
                spent = Account(job_id, hold_s=seconds)
        known = self.ledger.accounts.get(job_id)
        self.ledger.accounts[job_id] = spent if known is None else known + spent

    def request(self, request: Request) -> None:
        """Remembers a request's key and outcome."""
        self.ledger.requests[request.scope, request.request_id] = request
        self._requests.append(request)

    def take(self, *wanted: Effect) -> list[tuple[Effect, Record]]:
        """Removes and returns the effects of the given kinds."""
        taken = [e for e in self.effects if e[0] in wanted]
        self.effects = [e for e in self.effects if e[0] not in wanted]
        return taken

    def changed_calls(self) -> list[Call]:
        """Calls that this batch accepts or of which there is something to tell, each as it last told of it."""
        accepted = [record for record in self._inserts.values() if isinstance(record, Call)]
        return accepted + [r for effect, r in self.effects if effect is Effect.DELIVER and isinstance(r, Call)]

    def changes(self) -> Changes:
        """Everything for the store."""
        return Changes(
            inserts=tuple(self._inserts.values()),
            updates=tuple(self._updates),
            events=tuple(self._events),
            intervals=tuple(self._intervals),
            requests=tuple(self._requests),
        )

    def _write(self, record: Record) -> None:
        self.ledger._put(record)
        self._updates.append(record)


MACHINES: dict[str, Machine[Any, Any, Any]] = {
    "Job": jobs.MACHINE,
    "Model": models.MACHINE,
    "Call": calls.MACHINE,
    "Session": sessions.MACHINE,
    "Worker": workers.MACHINE,
}


K = TypeVar("K", bound=str)
V = TypeVar("V")


def _find(table: dict[K, V], key: K, kind: str) -> V:
    found = table.get(key)
    if found is None:
        raise NotFound(f"no live {kind} {key!r}")
    return found


def live_jobs(ledger: Ledger) -> Iterable[Job]:
    """Jobs that are not terminal."""
    return [job for job in ledger.jobs.values() if job.state not in jobs.TERMINAL]
