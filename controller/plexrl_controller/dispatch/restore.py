"""What a model's state can be rebuilt from, and how much of the log that leaves to execute again. Pure over the ledger.

Every copy of a whole state is a restore point: a snapshot, a checkpoint, the base, what a worker's host tier still
holds. The log reaches back to the second newest of those on disk, so that a damaged one costs time and nothing else.
"""

from collections.abc import Sequence

from plexrl_controller.dispatch.ledger import Batch, Ledger
from plexrl_controller.dispatch.replay_log import REPLAYED, Replay, RestorePoint, Source
from plexrl_controller.domain.records import Call, Model
from plexrl_controller.domain.states import CallKind


def restore_points(ledger: Ledger, model: Model, *, on_disk: bool = False) -> Sequence[RestorePoint]:
    """From what the present state can be rebuilt, the best first. `on_disk`: what outlives every worker."""
    found = [] if model.log_start else [RestorePoint(Source.BASE, 0, 0)]
    for call in ledger.log(model.model_id).after(0):
        if call.source_model_id is not None:
            # What it loaded is not kept: the base is built, and it is executed again.
            found.append(RestorePoint(Source.BASE, call.sequence - 1, 0))
        elif call.kind is CallKind.LOAD_CHECKPOINT:
            source = Source.CHECKPOINT if call.checkpoint_id else Source.BASE
            found.append(RestorePoint(source, call.sequence, call.sequence, call.checkpoint_id or ""))
    found += [
        RestorePoint(Source.CHECKPOINT, c.sequence, c.weights_version, c.checkpoint_id, c.manifest_sha256)
        for c in ledger.checkpoints.values()
        if c.model_id == model.model_id
    ]
    found += [
        RestorePoint(Source.SNAPSHOT, s.sequence, s.weights_version, s.snapshot_id, s.manifest_sha256)
        for s in ledger.snapshots_of_model.get(model.model_id, {}).values()
        if s.committed
    ]
    image = ledger.host_images.get(model.model_id)
    worker = ledger.workers.get(image.worker_id) if image is not None else None
    if not on_disk and image is not None and worker is not None:
        same_life = (model.worker_id, worker.incarnation) == (image.worker_id, image.incarnation)
        found += [RestorePoint(Source.HOST_IMAGE, image.sequence, image.weights_version)] if same_life else []
    # A copy above what is known to be applied has the effect of a call whose outcome nobody has heard: it would be
    # executed once more.
    usable = [
        point
        for point in found
        if model.log_start <= point.sequence <= model.applied_sequence and point.copy_id not in ledger.unreadable
    ]
    return sorted(usable, key=lambda point: (point.sequence, point.source), reverse=True)


def replays_after(ledger: Ledger, model: Model, sequence: int) -> list[Replay]:
    """What brings a state from a sequence number to the model's, in order."""
    index = ledger.calls_of_model[model.model_id]
    # A later call succeeded on top of these, so they were applied; only their outcome was never heard.
    unheard = [
        call
        for number, call_id in index.sequenced.items()
        if sequence < number < model.applied_sequence and (call := ledger.calls[call_id]).kind in REPLAYED
    ]
    logged = [call for call in ledger.log(model.model_id).after(sequence) if call.sequence <= model.applied_sequence]
    calls = sorted([*logged, *unheard], key=lambda call: call.sequence)
    replays, after = [], sequence
    for place, call in enumerate(calls, start=1):
        through = call.sequence if place < len(calls) else model.applied_sequence
        replays.append(Replay(call, after, through))
        after = through
    return replays


def cover(batch: Batch, model: Model, limit_bytes: int) -> None:
    """Releases the arguments that the copies on disk make needless; more of them when the log exceeds its budget."""
    points = restore_points(batch.ledger, model, on_disk=True)
    if not points:
        return
    log = batch.ledger.log(model.model_id)
    reaches_back = len(points) > 1 and log.bytes_after(points[1].sequence) <= limit_bytes
    start = points[1].sequence if reaches_back else points[0].sequence
    recovery = batch.ledger.recoveries.get(model.model_id)
    if recovery is not None:
        # A copy that is heard of meanwhile is newer than the one being restored, which needs all that came after it.
        start = min(start, recovery.point.sequence)
    shorten_log(batch, model, start)


def begin_log(batch: Batch, model: Model, load: Call) -> None:
    """The state is what was loaded: nothing before it will ever be executed again, but for a pull that itself."""
    start = load.sequence if load.source_model_id is None else load.sequence - 1
    recovery = batch.ledger.recoveries.get(model.model_id)
    if recovery is not None and recovery.point.sequence < start and model.log_start <= start:
        # It was heard of while an older copy was being restored, which needs all that came after it.
        return
    if model.log_start > start:
        # Given up with a lost state, the log began above it: it begins anew with this.
        batch.update(model, log_start=start)
    shorten_log(batch, batch.ledger.models[model.model_id], start)


def shorten_log(batch: Batch, model: Model, start: int) -> None:
    """Lets the log begin after `start`. A load_checkpoint at `start` stays: it is what the state is rebuilt from."""
    if start > model.log_start:
        batch.update(model, log_start=start)
    for call in batch.ledger.log(model.model_id).up_to(start):
        if call.kind is not CallKind.LOAD_CHECKPOINT or call.sequence < start:
            batch.drop_arguments(call)


def what_is_left(ledger: Ledger, model: Model) -> dict[str, str]:
    """Ids and numbers of every copy of a model whose state cannot be rebuilt, for its client to choose from."""
    checkpoints = [c for c in ledger.checkpoints.values() if c.model_id == model.model_id]
    snapshots = [s for s in ledger.snapshots_of_model.get(model.model_id, {}).values() if s.committed]
    left = {
        "checkpoints": ", ".join(f"{c.label}={c.checkpoint_id}@{c.sequence}" for c in checkpoints[-8:]),
        "snapshots": ", ".join(f"{s.snapshot_id}@{s.sequence}" for s in snapshots),
    }
    return {name: text for name, text in left.items() if text}
