"""Workers: registration, leases, and what a worker's stream brings when it opens."""

from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from plexrl.v1 import model_pb2, registry_pb2, types_pb2, worker_pb2
from plexrl_controller.dispatch import limits
from plexrl_controller.dispatch.cascade import lose_model_state
from plexrl_controller.dispatch.core import Core
from plexrl_controller.dispatch.ledger import Batch
from plexrl_controller.dispatch.models import choose_worker
from plexrl_controller.dispatch.pulls import concerned, weight_source
from plexrl_controller.dispatch.replay_log import Source
from plexrl_controller.dispatch.reports import note_lost_state, note_residency
from plexrl_controller.dispatch.restore import restore_points
from plexrl_controller.dispatch.snapshots import order_due
from plexrl_controller.domain.errors import ControllerError, FailedPrecondition
from plexrl_controller.domain.ids import CallId, ModelId, WorkerId
from plexrl_controller.domain.records import Model, Worker
from plexrl_controller.domain.states import CallKind, CallState, ModelState, WorkerState
from plexrl_controller.lifecycle import calls as call_lifecycle
from plexrl_controller.lifecycle.models import ModelEvent
from plexrl_controller.lifecycle.workers import WorkerEvent

_log = structlog.get_logger("plexrl.controller")


@dataclass(frozen=True, slots=True)
class Announcement:
    """A validated registration."""

    name: str
    address: str
    labels: dict[str, str]
    capabilities: registry_pb2.WorkerCapabilities
    life_nonce: int
    version: str


async def register(core: Core, announcement: Announcement) -> Worker:
    """Registers a life of a worker: the same life again is the same incarnation, another voids the older."""
    known = next((w for w in core.ledger.workers.values() if w.name == announcement.name), None)
    same_life = known is not None and known.life_nonce == announcement.life_nonce
    if known is not None and same_life and known.state is not WorkerState.LOST:
        core.ledger.groups[known.worker_id].last_sync = core.clock.now()
        core.transport.open(known)
        return known
    if known is not None and _runs_elsewhere(core, known, announcement):
        raise FailedPrecondition(
            f"worker {known.name} runs at {known.address}: give the one at {announcement.address} another --name, "
            "or stop that one if this one replaces it",
            reason="WORKER_NAME_TAKEN",
        )
    batch = core.batch()
    fields = {
        "address": announcement.address,
        "life_nonce": announcement.life_nonce,
        "capabilities": announcement.capabilities.SerializeToString(deterministic=True),
        "labels": announcement.labels,
        "version": announcement.version,
    }
    if known is None:
        worker = Worker(
            worker_id=WorkerId(core.new_id()),
            name=announcement.name,
            state=WorkerState.JOINING,
            incarnation=1,
            **fields,  # type: ignore[arg-type]
        )
        batch.insert(worker)
    else:
        core.transport.close(known.worker_id)
        group = core.ledger.groups[known.worker_id]
        group.connected, group.trouble, group.stopping = False, "", False
        worker = batch.transition(known, WorkerEvent.REGISTER, incarnation=known.incarnation + 1, **fields)
    core.ledger.groups[worker.worker_id].last_sync = batch.now
    await core.commit(batch)
    _log.info("worker_registered", worker=worker.worker_id, name=worker.name, incarnation=worker.incarnation)
    core.transport.open(worker)
    return worker


def _runs_elsewhere(core: Core, known: Worker, announcement: Announcement) -> bool:
    """Whether two daemons on different machines have one name: each would end the other's life, and again.

    On one machine a new life may well come before the lease of the one before has run out.
    """
    hosts = known.address.rpartition(":")[0], announcement.address.rpartition(":")[0]
    alive = known.state is not WorkerState.LOST and core.clock.now() < lease_end(core, known)
    return alive and hosts[0] != hosts[1] and core.ledger.groups[known.worker_id].connected


async def synchronize(core: Core, request: registry_pb2.SynchronizeRequest) -> Worker:
    """Renews a worker's lease. Raises FailedPrecondition for an older life or after the lease was lost."""
    worker = core.ledger.workers.get(WorkerId(request.worker_id))
    if worker is None or worker.incarnation != request.worker_incarnation or worker.state is WorkerState.LOST:
        raise FailedPrecondition(
            f"worker {request.worker_id} incarnation {request.worker_incarnation} is not the present "
            "one; register again",
            reason="STALE_INCARNATION",
        )
    group = core.ledger.groups[worker.worker_id]
    group.last_sync = core.clock.now()
    group.resident_bytes = request.resident_bytes
    if request.stopping and not group.stopping:
        _log.info("worker_stopping", worker=worker.worker_id, name=worker.name)
        group.stopping = True
        await order_due(core)
    held = {ModelId(status.model_id) for status in request.deployments}
    gone = [
        model
        for model_id in core.ledger.models_of_worker[worker.worker_id]
        if (model := core.ledger.models[model_id]).state is ModelState.DELETING and model_id not in held
    ]
    if gone:
        batch = core.batch()
        for model in gone:
            batch.transition(model, ModelEvent.DROPPED)
        await core.commit(batch)
    return worker


async def stream_opened(core: Core, worker_id: WorkerId, incarnation: int, status: worker_pb2.WorkerStatus) -> None:
    """Takes over what the worker holds and sends again every order whose end is not known."""
    worker = core.ledger.workers.get(worker_id)
    if worker is None or worker.incarnation != incarnation or worker.state is WorkerState.LOST:
        return
    ledger, group = core.ledger, core.ledger.groups[worker_id]
    batch = core.batch()
    if worker.state is WorkerState.JOINING:
        worker = batch.transition(worker, WorkerEvent.OPEN_STREAM)
        if worker.cordoned:
            worker = batch.transition(worker, WorkerEvent.CORDON)
    await core.commit(batch)
    for model_id in ledger.models_of_worker[worker_id]:
        # What was under way is ordered again, once: from here on the group's turns order what is due.
        for volatile in (ledger.deploying, ledger.recoveries, ledger.snapshotting):
            volatile.pop(model_id, None)
    group.last_sync = core.clock.now()
    group.on_device.clear()
    group.swaps.clear()
    group.status_revision = status.revision
    group.prefetched = None
    group.yielding.clear()
    group.revoked_at = None
    group.chunk_start = core.clock.now()
    lost = core.batch()
    for deployment in status.deployments:
        note_residency(core, worker_id, deployment)
        note_lost_state(core, lost, worker_id, deployment)
    _note_older_states(core, lost, worker_id, status)
    await core.commit(lost)
    # Only now: what a turn dispatched meanwhile would be sent again below, before it is durable.
    group.connected = True
    for model_id in ledger.models_of_worker[worker_id]:
        if ledger.models[model_id].state is ModelState.DELETING:
            core.drop(ledger.models[model_id])
    await _send_again(core, worker_id)
    _stop_unwanted(core, worker_id, incarnation, status.attempts)
    for waiting in (worker_id, *concerned(ledger, *ledger.models_of_worker[worker_id])):
        core.wake(waiting)


def _note_older_states(core: Core, batch: Batch, worker_id: WorkerId, status: worker_pb2.WorkerStatus) -> None:
    """A worker that has no state of a model, or an older one than is durable here, was told to rebuild it by a
    controller that died before it could write so.
    """
    held = {ModelId(deployment.model_id): deployment for deployment in status.deployments}
    for model_id in list(core.ledger.models_of_worker[worker_id]):
        model = core.ledger.models[model_id]
        stands_at = held[model_id].applied_sequence if model_id in held else -1
        if model.state is ModelState.PLACED and stands_at < model.applied_sequence:
            where = f"sequence {stands_at}" if model_id in held else "nothing"
            lose_model_state(batch, model, f"its worker has {where} of it, it stood at {model.applied_sequence}")


def _stop_unwanted(
    core: Core, worker_id: WorkerId, incarnation: int, attempts: Sequence[registry_pb2.CallAttempt]
) -> None:
    """Generates may begin before they are durable: what an earlier leader took with it would hold the device.

    A call that is still to be dispatched begins anew. What is executed again for its effect is left alone.
    """
    ledger = core.ledger
    logged = {
        call.call_id for m in ledger.models_of_worker[worker_id] if m in ledger.logs for call in ledger.logs[m].after(0)
    }
    orders: list[worker_pb2.Order] = []
    for attempt in attempts:
        call = ledger.calls.get(CallId(attempt.call_id))
        if attempt.call_id in logged:
            continue
        if call is None or call.attempt != attempt.attempt or call.state not in call_lifecycle.ON_WORKER:
            orders.append(core.orders.stop(attempt, incarnation))
        elif call.state is CallState.YIELDED:
            orders.append(core.orders.give_way(call))
    if orders:
        _log.info("unwanted_calls_stopped", worker=worker_id, calls=len(orders))
        core.transport.send(worker_id, orders)


async def _send_again(core: Core, worker_id: WorkerId) -> None:
    """Orders of calls that the worker has or should have; it recognises the ones it knows by call and attempt."""
    ledger = core.ledger
    calls = [ledger.calls[c] for c in ledger.calls_on_worker[worker_id]]
    orders: list[worker_pb2.Order] = []
    for call in sorted(calls, key=lambda c: (c.sequence, c.create_time)):
        if call.state is CallState.YIELDED:
            # It goes on when its turn comes. Whether the worker still has what it sampled changes nothing but time.
            continue
        earlier = [s for s in ledger.calls_of_model[call.model_id].sequenced if s < call.sequence]
        after = max(earlier, default=ledger.models[call.model_id].applied_sequence) if call.sequence else 0
        concurrent = ledger.session_of(call) is not None
        spec, weights = await core.spec(call), weight_source(ledger, call)
        orders.append(core.orders.run(call, spec, after, concurrent=concurrent, weights=weights))
        if call.kind is CallKind.GENERATE:
            ledger.run_orders[call.call_id] = orders[-1].order_id
        if call.state is CallState.CANCELLING:
            # Its end may have been reported into the broken stream: an abort alone would not bring that report back.
            orders.append(core.orders.abort(call))
        ledger.groups[worker_id].serving = call.job_id
    if orders:
        _log.info("orders_sent_again", worker=worker_id, orders=len(orders))
        core.transport.send(worker_id, orders)


async def replace_models_of_lost_workers(core: Core) -> None:
    """Gives models that must be rebuilt and whose worker is lost to another worker that fits."""
    ledger = core.ledger
    homeless = [
        model
        for model in ledger.models.values()
        if model.state in (ModelState.CREATING, ModelState.RECOVERING)
        and (model.worker_id is None or _must_move(core, model, ledger.workers[model.worker_id]))
    ]
    for model in homeless:
        try:
            worker_id = choose_worker(
                core,
                model_pb2.ModelBase.FromString(model.base),
                types_pb2.Affinity.FromString(model.affinity),
                model_pb2.ModelSettings.FromString(model.settings),
                model.state_bytes,
                lambda worker, model=model: _can_rebuild(core, model, worker),  # type: ignore[misc]
            )
        except ControllerError as error:
            _log.info("model_waits_for_worker", model=model.model_id, reason=error.reason, detail=error.message)
            continue
        batch = core.batch()
        for volatile in (ledger.deploying, ledger.recoveries, ledger.misfits):
            volatile.pop(model.model_id, None)
        batch.update(model, worker_id=worker_id, worker_incarnation=ledger.workers[worker_id].incarnation)
        await core.commit(batch)
        core.wake(worker_id)


def _must_move(core: Core, model: Model, worker: Worker) -> bool:
    """Whether the model's worker will not rebuild it: it is lost, or has said that it cannot."""
    misfit = core.ledger.misfits.get(model.model_id) == (worker.worker_id, worker.incarnation)
    return worker.state is WorkerState.LOST or misfit


def _can_rebuild(core: Core, model: Model, worker: Worker) -> bool:
    """Whether a worker can go on with a model's state bit for bit: alike, and with the same directory of copies."""
    if model.worker_id is None or model.state is not ModelState.RECOVERING:
        return True
    points = restore_points(core.ledger, model, on_disk=True)
    if not points or core.ledger.misfits.get(model.model_id) == (worker.worker_id, worker.incarnation):
        return not points
    then = registry_pb2.WorkerCapabilities.FromString(core.ledger.workers[model.worker_id].capabilities)
    here = registry_pb2.WorkerCapabilities.FromString(worker.capabilities)
    alike = (then.machine_type, then.threads) == (here.machine_type, here.threads)
    shares = then.checkpoint_store_id == here.checkpoint_store_id
    return alike and (shares or points[0].source is Source.BASE)


def lease_end(core: Core, worker: Worker) -> float:
    """When the worker is lost unless it synchronizes."""
    return core.ledger.groups[worker.worker_id].last_sync + limits.WORKER_LEASE_S
