"""Rebuilds a model's state: restores the best copy on its worker, then has the calls since executed again, in order.

Replays go through the group's cycle like any work of the job; their results are compared with the recorded ones and
delivered to nobody. The model is PLACED when the last has run. What copies there are is `restore`'s business.
"""

from collections.abc import Sequence

from plexrl import wire
from plexrl.v1 import worker_pb2
from plexrl_controller.dispatch.cascade import give_up_state, lose_model_state
from plexrl_controller.dispatch.core import Core, log
from plexrl_controller.dispatch.ledger import Batch
from plexrl_controller.dispatch.orders import ReplayOrder
from plexrl_controller.dispatch.pulls import weight_source
from plexrl_controller.dispatch.replay_log import Recovery, Replay, RestorePoint, Source
from plexrl_controller.dispatch.restore import replays_after, restore_points
from plexrl_controller.domain.ids import WorkerId
from plexrl_controller.domain.records import Call, Event, Model, Payload, Worker
from plexrl_controller.domain.states import CallReason, CallState
from plexrl_controller.lifecycle.calls import CallEvent
from plexrl_controller.lifecycle.models import ModelEvent
from plexrl_controller.scheduling.views import ReadyCall

MAX_RETRIES = 20
"""A recovery whose replays did not begin this often starts over from its copy."""
MAX_ENGINE_DEATHS = 5
"""Engines that may die in the replays of one model before its state is given up."""

_NOT_BEGUN = frozenset({"NOT_RESIDENT", "SHUTTING_DOWN", "CANCELLED", "TOO_MANY_ORDERS", "PULL_FAILED"})
_STALE = frozenset({"STALE_TERM", "STALE_INCARNATION", "STALE_ATTEMPT"})
_START_OVER = frozenset({"STATE_LOST", "HOST_STATE_CORRUPT", "NOT_DEPLOYED", "ENGINE_DIED", "ENGINE_HUNG"})
_COPY_IS_BAD = frozenset({"CHECKPOINT_CORRUPT", "CHECKPOINT_NOT_FOUND", "STATE_LOST"})
_NOT_ON_THIS_WORKER = frozenset({"CONDITIONS_DIFFER", "OVER_BUDGET", "UNSUPPORTED"})


def restore_order(core: Core, model: Model, worker: Worker) -> worker_pb2.Order:
    """The order that begins a recovery: restores the best copy, or for a load_checkpoint to come any state at all."""
    points = restore_points(core.ledger, model)
    base = RestorePoint(Source.BASE, model.applied_sequence, 0)
    point = points[0] if points else base
    applied = point.sequence if replays_after(core.ledger, model, point.sequence) else model.applied_sequence
    log.info(
        "restore_ordered", model=model.model_id, worker=worker.worker_id, copy=str(point), recovery=model.recoveries
    )
    order = core.orders.deploy(model, worker.incarnation, point, applied)
    core.ledger.recoveries[model.model_id] = Recovery(point, worker.incarnation, core.clock.now(), order.order_id)
    return order


def restored(core: Core, batch: Batch, model: Model, built: worker_pb2.DeployedModel) -> None:
    """The copy is on the worker: what comes after it is due, unless the worker has executed that already."""
    recovery = core.ledger.recoveries.get(model.model_id)
    if recovery is None:
        return
    recovery.stands_at = max(built.applied_sequence, recovery.point.sequence)
    recovery.replays = replays_after(core.ledger, model, recovery.stands_at)
    if recovery.replays:
        # The copy is there: it is not ordered again in this life of the worker.
        core.ledger.deploying[model.model_id] = recovery.incarnation
        log.info("replay_begins", model=model.model_id, after=recovery.stands_at, calls=len(recovery.replays))
        core.wake(_worker_of(model))
    else:
        _recovered(core, batch, model, recovery)


def not_restored(core: Core, batch: Batch, model: Model, error: wire.ErrorInfo) -> bool:
    """A copy could not be restored: the next best one is tried. False when the error says nothing about the copy."""
    recovery = core.ledger.recoveries.pop(model.model_id, None)
    if recovery is None:
        return False
    point, text = recovery.point, f"{error.reason}: {error.message}"
    if error.reason in _NOT_ON_THIS_WORKER:
        log.warning("restore_refused", model=model.model_id, worker=model.worker_id, detail=text)
        worker = core.ledger.workers[_worker_of(model)]
        core.ledger.misfits[model.model_id] = (worker.worker_id, worker.incarnation)
        # Not tried again in this life of the worker; another worker may take it.
        core.ledger.deploying[model.model_id] = worker.incarnation
        batch.update(model, message=f"cannot be restored from {point} on worker {worker.name}: {text}")
        return True
    if error.reason not in _COPY_IS_BAD or point.source is Source.BASE:
        return False
    log.error("copy_unusable", model=model.model_id, copy=str(point), detail=text)
    match point.source:
        case Source.HOST_IMAGE:
            core.ledger.host_images.pop(model.model_id, None)
        case Source.CHECKPOINT:
            core.ledger.unreadable.add(point.copy_id)
        case Source.SNAPSHOT:
            for snapshot in list(core.ledger.snapshots_of_model[model.model_id].values()):
                if snapshot.snapshot_id == point.copy_id:
                    batch.update(snapshot, committed=False)
    lose_model_state(batch, model, f"{point} cannot be used ({text})")
    return True


def replay_orders(core: Core, model: Model, calls: Sequence[ReadyCall], worker: Worker) -> list[worker_pb2.Order]:
    """Orders for replays that are due, whose arguments are in memory."""
    recovery = core.ledger.recoveries[model.model_id]
    assert recovery.replays is not None
    places = {replay.call.call_id: place for place, replay in enumerate(recovery.replays)}
    orders: list[worker_pb2.Order] = []
    for ready in calls:
        place = places[ready.call_id]
        recovery.in_flight.add(place)
        spec = core.ledger.specs.pop(ready.call_id)
        replay = recovery.replays[place]
        weights = weight_source(core.ledger, replay.call)
        orders.append(core.orders.replay(model, replay, place, spec, worker.incarnation, weights))
    return orders


def replay_ended(
    core: Core, batch: Batch, order: ReplayOrder, finished: worker_pb2.OrderFinished, result: Payload | None
) -> None:
    """Takes over how a replay ended."""
    model = core.ledger.models.get(order.model_id)
    recovery = core.ledger.recoveries.get(order.model_id)
    if model is None or recovery is None or recovery.replays is None or model.recoveries != order.recovery:
        return
    replay, error = recovery.replays[order.place], wire.error_info(finished.error)
    core.wake(_worker_of(model))
    if error is None:
        recovery.ended(order.place, done=True)
        recovery.stands_at = replay.through
        _compare(core, batch, model, recovery, replay, finished, result)
        if recovery.position >= len(recovery.replays):
            _recovered(core, batch, core.ledger.models[model.model_id], recovery)
        return
    _replay_failed(core, batch, model, recovery, order.place, error)


def _replay_failed(
    core: Core, batch: Batch, model: Model, recovery: Recovery, place: int, error: wire.ErrorInfo
) -> None:
    assert recovery.replays is not None
    replay, text = recovery.replays[place], f"{error.reason}: {error.message}"
    stands_at = int(error.metadata.get("applied_sequence", "-1"))
    log.warning("replay_not_run", model=model.model_id, sequence=replay.call.sequence, detail=text)
    if error.reason == "SEQUENCE_MISMATCH" and stands_at >= replay.through:
        # Its outcome was lost on the way, or an execution of an earlier leader's order came first.
        recovery.ended(place, done=True)
        recovery.stands_at = stands_at
        if recovery.position >= len(recovery.replays):
            _recovered(core, batch, model, recovery)
        return
    recovery.ended(place, done=False)
    group = core.ledger.groups[_worker_of(model)]
    if error.reason == "NOT_RESIDENT":
        group.on_device.discard(model.model_id)
    elif error.reason == "SHUTTING_DOWN":
        group.connected = False
    if error.reason in _START_OVER or recovery.retries > MAX_RETRIES:
        deaths = core.ledger.deaths_in_replay.get(model.model_id, 0) + (error.reason in ("ENGINE_DIED", "ENGINE_HUNG"))
        core.ledger.deaths_in_replay[model.model_id] = deaths
        if deaths >= MAX_ENGINE_DEATHS:
            give_up_state(batch, model, f"{deaths} engines died while its calls were executed again, the last: {text}")
        else:
            lose_model_state(batch, model, f"executing call {replay.call.sequence} again: {text}")
    elif error.reason not in _NOT_BEGUN | _STALE | {"SEQUENCE_MISMATCH"}:
        give_up_state(
            batch, model, f"call {replay.call.sequence} succeeded once, and failed when executed again: {text}"
        )


def _compare(
    core: Core,
    batch: Batch,
    model: Model,
    recovery: Recovery,
    replay: Replay,
    finished: worker_pb2.OrderFinished,
    result: Payload | None,
) -> None:
    """Results must be bit-equal to the recorded ones. One that nobody heard before is delivered now."""
    call = core.ledger.calls.get(replay.call.call_id, replay.call)
    if call.state is CallState.PENDING and result is not None:
        _deliver(core, batch, call, result)
        return
    if result is None or not call.outcome_sha256 or result.sha256 == call.outcome_sha256:
        return
    recovery.diverged += 1
    core.replay_divergences += 1
    log.error(
        "replay_diverged", model=model.model_id, sequence=call.sequence, kind=call.kind.name, now=_figures(finished),
        recorded_sha256=call.outcome_sha256, replayed_sha256=result.sha256,
    )  # fmt: skip
    batch.note(
        Event(
            machine="model",
            record_id=model.model_id,
            event="REPLAY_DIVERGED",
            source=model.state.name,
            target=model.state.name,
            at=batch.now,
            reason=f"sequence {call.sequence}: {_figures(finished)}",
            leader_term=core.term,
        )
    )


def _deliver(core: Core, batch: Batch, call: Call, result: Payload) -> None:
    dispatched = batch.transition(
        call,
        CallEvent.DISPATCH,
        attempt=call.attempt + 1,
        leader_term=core.term,
        worker_id=core.ledger.models[call.model_id].worker_id,
    )
    batch.transition(
        dispatched,
        CallEvent.SUCCEED,
        result=result,
        outcome_sha256=result.sha256,
        reason=CallReason.NONE,
        error=None,
        start_time=batch.now,
        end_time=batch.now,
    )


def _recovered(core: Core, batch: Batch, model: Model, recovery: Recovery) -> None:
    if recovery.stands_at < model.applied_sequence:
        # A call that changes nothing was heard of since the copy was ordered: its worker would refuse what follows it.
        where = f"stands at sequence {recovery.stands_at}, calls up to {model.applied_sequence} have run"
        lose_model_state(batch, model, f"what was restored {where}")
        return
    seconds = batch.now - recovery.started
    replayed = len(recovery.replays or ())
    log.info(
        "model_recovered", model=model.model_id, copy=str(recovery.point), replayed=replayed,
        diverged=recovery.diverged, seconds=round(seconds, 3),
    )  # fmt: skip
    for volatile in (core.ledger.recoveries, core.ledger.host_images, core.ledger.misfits):
        volatile.pop(model.model_id, None)
    core.ledger.deaths_in_replay.pop(model.model_id, None)
    message = ""
    if recovery.diverged:
        message = f"{recovery.diverged} of {replayed} calls gave another result when executed again (REPLAY_DIVERGED)"
    batch.transition(model, ModelEvent.DEPLOYED, message=message)


def _worker_of(model: Model) -> WorkerId:
    assert model.worker_id is not None
    return model.worker_id


def _figures(finished: worker_pb2.OrderFinished) -> str:
    """The telling numbers of a result."""
    result = finished.result
    match result.WhichOneof("outcome"):
        case "forward_backward":
            return f"loss {result.forward_backward.loss!r}"
        case "optim_step":
            return f"gradient norm {result.optim_step.grad_norm!r}, step {result.optim_step.step}"
        case outcome:
            return str(outcome)
