"""When a model is copied to disk by itself, where the copy goes, and what it makes needless.

A snapshot is due when executing again what came after the newest copy would take too long, or when the arguments kept
for that take too much room. Each model has a few places for snapshots and overwrites the oldest: neither the disk nor
the database grows with time.
"""

import uuid

from plexrl import wire
from plexrl.v1 import worker_pb2
from plexrl_controller.dispatch.core import Core, log
from plexrl_controller.dispatch.ledger import Batch
from plexrl_controller.dispatch.replay_log import SnapshotOfModel
from plexrl_controller.dispatch.restore import cover, restore_points
from plexrl_controller.domain.ids import ModelId, SnapshotId, WorkerId
from plexrl_controller.domain.records import Model, Snapshot
from plexrl_controller.domain.states import ModelState

FIRST_BACKOFF_S = 5.0
MAX_BACKOFF_S = 300.0


def is_due(core: Core, model: Model) -> bool:
    """Whether the model should be copied now, as far as its state alone tells."""
    policy, index = core.recovery_policy, core.ledger.log(model.model_id)
    points = restore_points(core.ledger, model, on_disk=True)
    if not points:
        return model.applied_sequence > 0
    newest = points[0].sequence
    if not index.after(newest):
        return False
    if model.worker_id is not None and core.ledger.groups[model.worker_id].stopping:
        return True
    return (
        index.busy_s_after(newest) >= policy.replay_s
        or index.bytes_after(newest) >= policy.log_bytes // 2
        or len(index.after(newest)) >= policy.log_calls
    )


async def order_due(core: Core) -> None:
    """Orders every snapshot that is due and can be written now."""
    for model in list(core.ledger.models.values()):
        if model.state is ModelState.PLACED and _can_be_written(core, model) and is_due(core, model):
            await order(core, model)


async def order(core: Core, model: Model) -> None:
    """Orders a snapshot of a model that is placed, over the oldest one."""
    assert model.worker_id is not None
    worker = core.ledger.workers[model.worker_id]
    state = core.ledger.snapshotting.setdefault(model.model_id, SnapshotOfModel())
    state.worker_id, state.incarnation = worker.worker_id, worker.incarnation
    batch = core.batch()
    snapshot = _place(core, batch, model)
    # That the place no longer holds what it held is durable before anything there is overwritten.
    await core.commit(batch)
    core.transport.send(worker.worker_id, [core.orders.snapshot(snapshot, worker.incarnation)])


def snapshot_ended(core: Core, batch: Batch, ordered: Snapshot, finished: worker_pb2.OrderFinished) -> None:
    """Takes over how the writing of a snapshot ended."""
    ledger, now = core.ledger, batch.now
    state = ledger.snapshotting.setdefault(ordered.model_id, SnapshotOfModel())
    state.worker_id = None
    model = ledger.models.get(ordered.model_id)
    snapshot = ledger.snapshots_of_model.get(ordered.model_id, {}).get(ordered.slot)
    if model is None or snapshot is None or snapshot.revision != ordered.revision:
        return
    if (error := wire.error_info(finished.error)) is not None:
        state.failures += 1
        state.failure = f"{error.reason}: {error.message}"
        state.not_before = now + min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2 ** (state.failures - 1))
        log.warning("snapshot_failed", model=model.model_id, failures=state.failures, detail=state.failure)
        return
    written = finished.snapshot
    state.failures, state.failure, state.not_before = 0, "", 0.0
    batch.update(
        snapshot,
        committed=True,
        sequence=written.sequence,
        step=written.step,
        weights_version=written.weights_version,
        size_bytes=written.size_bytes,
        manifest_sha256=written.manifest_sha256,
        create_time=now,
    )
    cover(batch, model, core.recovery_policy.log_bytes)
    log.info(
        "snapshot_recorded", model=model.model_id, sequence=written.sequence, bytes=written.size_bytes,
        device_s=round(written.device_s, 4), write_s=round(written.write_s, 3), log=len(ledger.log(model.model_id)),
    )  # fmt: skip


def may_stop(core: Core, worker_id: WorkerId) -> bool:
    """Whether a worker that was asked to stop has run its calls and saved its models, as far as it can."""
    ledger = core.ledger
    if not ledger.groups[worker_id].stopping or ledger.in_flight(worker_id):
        return False
    under_way = [
        model_id
        for model_id in ledger.models_of_worker[worker_id]
        if (state := ledger.snapshotting.get(model_id)) is not None and state.worker_id == worker_id
    ]
    return not under_way and not being_saved(core, worker_id)


def being_saved(core: Core, worker_id: WorkerId) -> list[ModelId]:
    """Models of a worker that is stopping whose newest state is not on disk, and may be soon."""
    return [
        model_id
        for model_id in core.ledger.models_of_worker[worker_id]
        if (model := core.ledger.models[model_id]).state is ModelState.PLACED
        and ((state := core.ledger.snapshotting.get(model_id)) is None or not state.failures)
        and is_due(core, model)
    ]


def _can_be_written(core: Core, model: Model) -> bool:
    if model.worker_id is None or not core.ledger.groups[model.worker_id].connected:
        return False
    state = core.ledger.snapshotting.get(model.model_id)
    if state is None:
        return True
    incarnation = core.ledger.workers[model.worker_id].incarnation
    under_way = (state.worker_id, state.incarnation) == (model.worker_id, incarnation)
    return not under_way and state.not_before <= core.clock.now()


def _place(core: Core, batch: Batch, model: Model) -> Snapshot:
    """The place that is overwritten next: an empty one, else that of the oldest snapshot."""
    present = core.ledger.snapshots_of_model.get(model.model_id, {})
    places = range(core.recovery_policy.snapshots_kept + 1)
    slot = min(places, key=lambda s: (present[s].committed, present[s].sequence) if s in present else (False, -1))
    if slot in present:
        batch.update(present[slot], committed=False)
        return core.ledger.snapshots_of_model[model.model_id][slot]
    snapshot = Snapshot(
        snapshot_id=SnapshotId(uuid.uuid5(uuid.NAMESPACE_OID, f"plexrl {model.model_id} {slot}").hex),
        model_id=model.model_id,
        job_id=model.job_id,
        tenant=model.tenant,
        slot=slot,
    )
    batch.insert(snapshot)
    return snapshot
