"""What all of dispatch shares: the ledger, the writer, the payloads, and how a batch becomes durable and takes effect.

Every change goes: batch → `settle` (what follows from it) → store → effects. Nothing outward happens before the store
has it; scheduling may look at memory at once, because what it decides is written after what it saw.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence

import structlog

from plexrl.v1 import types_pb2
from plexrl_controller.dispatch.cascade import settle
from plexrl_controller.dispatch.clock import Clock
from plexrl_controller.dispatch.hub import Hub
from plexrl_controller.dispatch.identifiers import time_ordered_id
from plexrl_controller.dispatch.ledger import Batch, Ledger
from plexrl_controller.dispatch.orders import OrderBook
from plexrl_controller.dispatch.pulls import concerned
from plexrl_controller.dispatch.replay_log import RecoveryPolicy
from plexrl_controller.dispatch.transport import Transport
from plexrl_controller.dispatch.turns import Turns
from plexrl_controller.dispatch.uploads import Uploads
from plexrl_controller.domain.errors import ControllerError, DataLoss, NotFound, Unavailable
from plexrl_controller.domain.ids import CallId, SessionId, Tenant, WorkerId
from plexrl_controller.domain.records import Call, Job, Model, Payload, Record, Session, Worker
from plexrl_controller.domain.states import WorkerState
from plexrl_controller.lifecycle.machine import Effect
from plexrl_controller.lifecycle.models import ModelEvent
from plexrl_controller.payloads import inline
from plexrl_controller.payloads.port import PayloadStore
from plexrl_controller.scheduling.policy import Policy
from plexrl_controller.store.port import Store
from plexrl_controller.store.writer import GroupWriter, Then

log = structlog.get_logger("plexrl.controller")

CACHE_BYTES = 256 * 1024 * 1024


class Core:
    """The parts and the one way to change anything."""

    def __init__(
        self,
        *,
        store: Store,
        writer: GroupWriter,
        payloads: PayloadStore,
        transport: Transport,
        clock: Clock,
        term: int,
        policy: Policy,
        recovery_policy: RecoveryPolicy | None = None,
        new_id: Callable[[], str] = time_ordered_id,
    ) -> None:
        self.ledger = Ledger()
        self.hub = Hub()
        self.store = store
        self.writer = writer
        self.payloads = payloads
        self.uploads = Uploads(payloads)
        self.transport = transport
        self.clock = clock
        self.term = term
        self.policy = policy
        self.recovery_policy = recovery_policy or RecoveryPolicy()
        self.orders = OrderBook(term)
        self.new_id = new_id
        self.invariant_violations = 0
        self.replay_divergences = 0
        self.undurable: dict[CallId, int] = {}
        """Calls with transitions that are on their way to the store: not to be shown before they are there."""
        self.ending: set[SessionId] = set()
        """Sessions whose end is on its way to the store: nothing is told of them before it is there."""
        self._background: set[asyncio.Task[None]] = set()
        self.turns = Turns()
        self._bytes = _ByteCache(CACHE_BYTES)

    def batch(self) -> Batch:
        """A new batch at the present time."""
        return Batch(self.ledger, self.clock.now())

    async def commit(self, batch: Batch) -> None:
        """Makes a batch durable; its effects are released then. Raises LeadershipLost when another controller leads.

        Whoever waits here may be cancelled, as the rpc of a client that went away is: the batch takes effect all the
        same.
        """
        await asyncio.shield(self.post(batch))

    def post(self, batch: Batch) -> asyncio.Future[None]:
        """As `queue`, with a future; it need not be awaited."""
        durable: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def tell(error: ControllerError | None) -> None:
            if durable.done():
                return
            if error is None:
                durable.set_result(None)
            else:
                durable.set_exception(error)
                durable.exception()  # need not be awaited: the writer says that it has stopped

        self.queue(batch, tell)
        return durable

    def queue(self, batch: Batch, then: Then | None = None) -> None:
        """Queues a batch for the store and wakes the groups that it concerns. Once it is durable its effects are
        released and then `then` is told, in the order of queueing.
        """
        settle(batch)
        changed = batch.changed_calls()
        for call in changed:
            self.undurable[call.call_id] = call.revision
        ended = [r.session_id for effect, r in batch.effects if effect is Effect.DELIVER and isinstance(r, Session)]
        self.ending.update(ended)

        def tell(error: ControllerError | None) -> None:
            if error is None:
                self.ending.difference_update(ended)
                self._release(batch, changed)
                if batch.unkept:
                    self._unkeep_later(batch.unkept)
            if then is not None:
                then(error)

        self.writer.queue(batch.changes(), tell)
        for _, record in batch.take(Effect.WAKE_GROUP):
            for worker_id in self._workers_of(record):
                self.wake(worker_id)

    def _release(self, batch: Batch, changed: Sequence[Call]) -> None:
        """Performs the outward effects of a durable batch."""
        for call in changed:
            if self.undurable.get(call.call_id, 0) <= call.revision:
                self.undurable.pop(call.call_id, None)
        for effect, record in batch.effects:
            match effect, record:
                case Effect.DELIVER, Call():
                    self.hub.publish(record)
                case Effect.DELIVER, Session():
                    self.hub.publish_session(record)
                case Effect.SEND_ABORT, Call():
                    self._abort(record)
                case Effect.DROP_MODELS, Model():
                    self.drop(record)
                case _:
                    pass
        batch.effects.clear()

    def wake(self, worker_id: WorkerId) -> None:
        """Asks for a run of the group's cycle."""
        self.turns.wake(worker_id)

    def drop(self, model: Model) -> None:
        """Tells the model's worker to forget it; a worker that is gone has forgotten it already."""
        worker = self.ledger.workers.get(model.worker_id) if model.worker_id is not None else None
        self._expire_snapshots(model)
        if worker is None or worker.state is WorkerState.LOST:
            batch = self.batch()
            batch.transition(self.ledger.models[model.model_id], ModelEvent.DROPPED)
            self.queue(batch)
            return
        self.transport.send(worker.worker_id, [self.orders.drop(model.model_id, worker.incarnation)])

    def _expire_snapshots(self, model: Model) -> None:
        """Has the snapshots deleted that do not count any more, by any worker: they share the directory."""
        places = self.ledger.snapshots_of_model.get(model.model_id, {}).values()
        gone = [snapshot.snapshot_id for snapshot in places if not snapshot.committed]
        connected = [worker_id for worker_id, group in self.ledger.groups.items() if group.connected]
        if gone and connected:
            worker = self.ledger.workers[
                model.worker_id if model.worker_id is not None and model.worker_id in connected else connected[0]
            ]
            self.transport.send(worker.worker_id, [self.orders.expire_snapshots(gone, worker.incarnation)])

    async def keep(self, data: bytes, tenant: Tenant, *, beyond_quota: bool = False) -> Payload:
        """Makes bytes durable: inline up to 64 KiB, else in the payload store."""
        payload = await inline.keep(self.payloads, tenant, data, beyond_quota=beyond_quota)
        if payload.inline is None:
            self._bytes.put(payload.sha256, data)
        return payload

    async def fetch(self, tenant: Tenant, payload: Payload) -> bytes:
        """Reads bytes back. Raises DataLoss or NotFound when they are gone or changed."""
        if payload.inline is not None:
            return payload.inline
        cached = self._bytes.get(payload.sha256)
        if cached is None:
            cached = await inline.fetch(self.payloads, tenant, payload)
            self._bytes.put(payload.sha256, cached)
        return cached

    async def unkeep(self, tenant: Tenant, *payloads: Payload | None) -> None:
        """Gives up what `keep` stored; bytes that nobody else needs are deleted."""
        for payload in payloads:
            try:
                await inline.release(self.payloads, tenant, payload)
            except Unavailable as error:
                # Its reference is gone; the next start finds what is left of it. The others must go all the same.
                log.warning("payload_not_deleted", detail=error.message)

    def _unkeep_later(self, payloads: Sequence[tuple[Tenant, Payload]]) -> None:
        """Gives payloads up in the background; what a crash leaves is swept at the next start."""

        async def unkeep_all() -> None:
            for tenant, payload in payloads:
                await self.unkeep(tenant, payload)

        task = asyncio.get_running_loop().create_task(unkeep_all(), name="unkeep")
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def hold_payloads(self) -> None:
        """After a restart: takes the references that the loaded records stand for."""
        for call in list(self.ledger.calls.values()):
            for payload in (call.spec, call.result):
                self._hold(call.tenant, payload)
        for replay_log in self.ledger.logs.values():
            for call in replay_log.after(0):
                if call.acknowledged:
                    self._hold(call.tenant, call.spec)
        for payload in self.uploads.start(self.ledger, self.clock.now()):
            log.error("payload_missing", detail=str(payload))

    def _hold(self, tenant: Tenant, payload: Payload | None) -> None:
        try:
            inline.retain(self.payloads, tenant, payload)
        except NotFound:
            log.error("payload_missing", tenant=tenant, detail=str(payload))

    async def spec(self, call: Call) -> types_pb2.CallSpec:
        """The arguments of a call."""
        known = self.ledger.specs.get(call.call_id)
        if known is not None:
            return known
        if call.spec is None:
            raise DataLoss(f"the arguments of call {call.call_id} are gone")
        spec = types_pb2.CallSpec.FromString(await self.fetch(call.tenant, call.spec))
        self.ledger.specs[call.call_id] = spec
        return spec

    def _abort(self, call: Call) -> None:
        if call.worker_id is not None:
            self.transport.send(call.worker_id, [self.orders.abort(call)])

    def _workers_of(self, record: Record) -> list[WorkerId]:
        match record:
            case Worker():
                return [record.worker_id]
            case Model():
                own = [record.worker_id] if record.worker_id is not None else []
                return [*own, *concerned(self.ledger, record.model_id)]
            case Call() | Session():
                model_ids = [record.model_id]
                if isinstance(record, Call) and record.source_model_id is not None:
                    # What makes the next version of the source waits for this.
                    model_ids.append(record.source_model_id)
                models = [self.ledger.models[m] for m in model_ids if m in self.ledger.models]
                own = [model.worker_id for model in models if model.worker_id is not None]
                return [*own, *concerned(self.ledger, record.model_id)] if self.ledger.pulls_of_model else own
            case Job():
                return list(self.ledger.groups)
            case _:
                return []


class _ByteCache:
    """Recently used large payloads, so that what was just written is not read back."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._used_bytes = 0
        self._entries: OrderedDict[str, bytes] = OrderedDict()

    def put(self, key: str, data: bytes) -> None:
        if key in self._entries or len(data) > self._limit_bytes // 4:
            return
        self._entries[key] = data
        self._used_bytes += len(data)
        while self._used_bytes > self._limit_bytes:
            _, dropped = self._entries.popitem(last=False)
            self._used_bytes -= len(dropped)

    def get(self, key: str) -> bytes | None:
        data = self._entries.get(key)
        if data is not None:
            self._entries.move_to_end(key)
        return data
