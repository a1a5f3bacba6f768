"""What a transition does to other records, in the same commit: failed predecessors, ended jobs, lost workers.

Pure over the ledger: takes a batch, extends it until no effect inside the ledger is left.
"""

from collections.abc import Mapping

from google.rpc import code_pb2

from plexrl import wire
from plexrl.v1 import model_pb2
from plexrl_controller.dispatch.facts import ModelCalls
from plexrl_controller.dispatch.ledger import Batch, Ledger
from plexrl_controller.dispatch.restore import replays_after, restore_points, shorten_log, what_is_left
from plexrl_controller.domain.ids import ModelId
from plexrl_controller.domain.records import Call, Job, Model, Record, Worker
from plexrl_controller.domain.states import CallKind, CallReason, CallState, JobState, ModelState
from plexrl_controller.lifecycle import calls as call_lifecycle
from plexrl_controller.lifecycle.calls import CallEvent
from plexrl_controller.lifecycle.jobs import JobEvent
from plexrl_controller.lifecycle.machine import Effect
from plexrl_controller.lifecycle.models import ModelEvent
from plexrl_controller.lifecycle.sessions import SessionEvent

MAX_LOST_ATTEMPTS = 3
"""A call that has lost this many attempts to dying engines or workers fails."""

_INSIDE = (Effect.FAIL_SUCCESSORS, Effect.CANCEL_CALLS, Effect.DROP_MODELS, Effect.REASSIGN)


def settle(batch: Batch) -> None:
    """Expands every effect that stays inside the ledger; what is left in `batch.effects` goes outward."""
    dropped: list[tuple[Effect, Record]] = []
    while inside := batch.take(*_INSIDE):
        for effect, record in inside:
            match effect, record:
                case Effect.FAIL_SUCCESSORS, Call():
                    _fail_successors(batch, record)
                case Effect.CANCEL_CALLS, Job():
                    for model_id in list(batch.ledger.models_of_job.get(record.job_id, ())):
                        _end_calls(batch, model_id, CallReason.JOB_ENDED, f"job {record.name} is {record.state.name}")
                case Effect.CANCEL_CALLS, Model():
                    _end_calls_of_model(batch, record)
                case Effect.DROP_MODELS, Job():
                    _delete_models(batch, record)
                case Effect.DROP_MODELS, Model():
                    _give_up_copies(batch, record)
                    dropped.append((effect, record))
                case Effect.REASSIGN, Worker():
                    _reassign(batch, record)
                case _:
                    raise AssertionError(f"{effect} of {type(record).__name__} has no rule")
    batch.effects.extend(dropped)
    _release_finished_jobs(batch)


def error_of(code: int, reason: str, message: str, metadata: Mapping[str, str] | None = None) -> bytes:
    """A serialized google.rpc.Status for a call's `error`."""
    return wire.error_status(wire.ErrorInfo(code, reason, message, dict(metadata or {}))).SerializeToString()


def fail(
    batch: Batch,
    call: Call,
    reason: CallReason,
    message: str,
    code: int = code_pb2.FAILED_PRECONDITION,
    metadata: Mapping[str, str] | None = None,
) -> Call:
    """Ends a call as FAILED."""
    error = error_of(code, reason.name, message, metadata)
    return batch.transition(call, CallEvent.FAIL, reason=reason, error=error, end_time=batch.now)


def end(batch: Batch, call: Call, reason: CallReason, message: str) -> None:
    """Ends a call on request: at once while it is pending, else by asking its worker."""
    error = error_of(code_pb2.CANCELLED, reason.name, message)
    if call.state is CallState.PENDING:
        batch.transition(call, CallEvent.CANCEL, reason=reason, error=error, end_time=batch.now)
    elif call.state in (CallState.DISPATCHED, CallState.RUNNING, CallState.YIELDED):
        batch.transition(call, CallEvent.REQUEST_CANCEL, reason=reason, error=error)


def lose_attempt(batch: Batch, call: Call, message: str) -> None:
    """An execution died with its engine or worker: try again, unless it has died too often."""
    if call.state is CallState.CANCELLING:
        batch.transition(call, CallEvent.LOSE_ATTEMPT, end_time=batch.now)
    elif _is_blocked(batch, call):
        _fail_behind(batch, call)
    elif call.lost_attempts + 1 >= MAX_LOST_ATTEMPTS:
        text = f"{call.lost_attempts + 1} executions died, the last with: {message}"
        fail(batch, call, CallReason.ATTEMPTS_EXHAUSTED, text, code_pb2.ABORTED)
    elif call.state in (CallState.DISPATCHED, CallState.RUNNING, CallState.YIELDED):
        batch.transition(call, CallEvent.LOSE_ATTEMPT, lost_attempts=call.lost_attempts + 1, start_time=None)


def requeue(batch: Batch, call: Call) -> None:
    """An attempt that never began: try again, and do not hold it against the call. Its deadline still bounds it."""
    if call.state is CallState.CANCELLING:
        batch.transition(call, CallEvent.LOSE_ATTEMPT, end_time=batch.now)
    elif _is_blocked(batch, call):
        _fail_behind(batch, call)
    elif call.state in (CallState.DISPATCHED, CallState.RUNNING, CallState.YIELDED):
        batch.transition(call, CallEvent.LOSE_ATTEMPT, start_time=None)


def _is_blocked(batch: Batch, call: Call) -> bool:
    """Whether an earlier call of its sequence ended badly while this one was on its worker: it cannot run again."""
    model = batch.ledger.models[call.model_id]
    return call.kind.sequenced and 0 < model.failed_sequence < call.sequence


def _fail_behind(batch: Batch, call: Call) -> None:
    number = batch.ledger.models[call.model_id].failed_sequence
    message = f"sequence {number} ended other than SUCCEEDED; ResumeSequence lets later calls run"
    fail(batch, call, CallReason.PREDECESSOR_FAILED, message)


def lose_model_state(batch: Batch, model: Model, cause: str) -> None:
    """A worker no longer has a model's state: rebuild it from the best copy that is left, where there is one."""
    ledger = batch.ledger
    for volatile in (ledger.residency, ledger.deploying, ledger.recoveries):
        volatile.pop(model.model_id, None)
    if model.worker_id is not None and (group := ledger.groups.get(model.worker_id)):
        group.on_device.discard(model.model_id)
    if model.state is ModelState.DELETING:
        batch.transition(model, ModelEvent.DROPPED)
    if model.state not in (ModelState.PLACED, ModelState.RECOVERING):
        return
    points = restore_points(ledger, model)
    if points:
        replays = replays_after(ledger, model, points[0].sequence)
        seconds = ledger.log(model.model_id).busy_s_after(points[0].sequence)
        plan = f"{len(replays)} call(s) are executed again, about {seconds:.1f} s" if replays else "no call is lost"
        message = f"being restored from {points[0]}; {plan}, after: {cause}"
    elif loads_next(ledger, model):
        message = f"being rebuilt to load a checkpoint, after: {cause}"
    else:
        give_up_state(batch, model, cause)
        return
    batch.transition(model, ModelEvent.RECOVER, recoveries=model.recoveries + 1, message=message)
    _begin_anew(batch, model)


def _begin_anew(batch: Batch, model: Model) -> None:
    """Generates that yielded wait for no worker: they run where the model is rebuilt, which may be elsewhere."""
    for call_id in list(batch.ledger.calls_of_model.get(model.model_id, ModelCalls()).generates):
        if (call := batch.ledger.calls[call_id]).state is CallState.YIELDED:
            requeue(batch, call)


def give_up_state(batch: Batch, model: Model, cause: str) -> None:
    """Nothing brings the state back: says what is left, and gives up what was kept to rebuild it."""
    ledger = batch.ledger
    # What its worker was told to build is void: a load_checkpoint that comes has it build anew.
    for volatile in (ledger.deploying, ledger.recoveries, ledger.host_images):
        volatile.pop(model.model_id, None)
    lost = batch.transition(
        model,
        ModelEvent.LOSE_STATE,
        failed_sequence=model.due_sequence,
        message=f"the state at sequence {model.applied_sequence} was lost: {cause}. "
        f"{_way_back(model)}{_left(ledger, model)}",
    )
    shorten_log(batch, lost, lost.applied_sequence + 1)


def loads_next(ledger: Ledger, model: Model) -> bool:
    """Whether the state before the model's next call does not matter: it loads another."""
    call_id = ledger.calls_of_model[model.model_id].sequenced.get(model.due_sequence)
    return call_id is not None and ledger.calls[call_id].kind is CallKind.LOAD_CHECKPOINT


def _fail_successors(batch: Batch, call: Call) -> None:
    ledger = batch.ledger
    model = ledger.models.get(call.model_id)
    if model is None or not call.kind.sequenced or call.sequence < model.due_sequence:
        return
    if model.failed_sequence and call.sequence > model.failed_sequence:
        return
    # Given up, the log begins above what was applied: what a worker holds then was built only to load into.
    void = model.log_start > model.applied_sequence and model.state in (ModelState.PLACED, ModelState.RECOVERING)
    if void and call.sequence == model.due_sequence:
        _lose_again(batch, model, call)
        return
    batch.update(model, failed_sequence=call.sequence)
    message = (
        f"sequence {call.sequence} ended as {call.state.name} ({call.call_id}); ResumeSequence lets later calls run"
    )
    index = ledger.calls_of_model[model.model_id]
    for sequence, call_id in sorted(index.sequenced.items()):
        if sequence > call.sequence and ledger.calls[call_id].state is CallState.PENDING:
            fail(batch, ledger.calls[call_id], CallReason.PREDECESSOR_FAILED, message)
    for waiting in ledger.waiting_for_version(call.model_id, call.sequence):
        fail(batch, waiting, CallReason.PREDECESSOR_FAILED, message)


def _lose_again(batch: Batch, model: Model, load: Call) -> None:
    """The load_checkpoint that was to replace a lost state did not: what was built to load into is not served."""
    batch.transition(
        model,
        ModelEvent.LOSE_STATE,
        failed_sequence=load.sequence,
        message=f"the state was lost, and load_checkpoint at sequence {load.sequence} ended as {load.state.name}. "
        f"{_way_back(model)}",
    )


def _way_back(model: Model) -> str:
    """What its client can do about a lost state."""
    if model.role == model_pb2.MODEL_ROLE_ROLLOUT:
        return "Pull a policy's weights, or load the base, to go on"
    return "Load a checkpoint (or the base) to go on"


def _left(ledger: Ledger, model: Model) -> str:
    """Of what it could load there; rollouts load none of it."""
    if model.role == model_pb2.MODEL_ROLE_ROLLOUT:
        return ""
    left = "; ".join(f"{name}: {ids}" for name, ids in what_is_left(ledger, model).items())
    return f". {left or 'No checkpoint or snapshot is left'}"


def _end_calls_of_model(batch: Batch, model: Model) -> None:
    match model.state:
        case ModelState.STATE_LOST:
            for call in batch.ledger.live_calls(model.model_id):
                if call.state is CallState.CANCELLING:
                    batch.transition(call, CallEvent.LOSE_ATTEMPT, end_time=batch.now)
                else:
                    left = what_is_left(batch.ledger, model)
                    fail(batch, call, CallReason.STATE_LOST, model.message, code_pb2.ABORTED, left)
        case ModelState.FAILED:
            for session in batch.ledger.open_sessions(model.model_id):
                batch.transition(session, SessionEvent.CLOSE, end_time=batch.now)
            for call in batch.ledger.live_calls(model.model_id):
                fail(
                    batch, call, CallReason.MODEL_NOT_ACTIVE, f"model {model.name} could not be built: {model.message}"
                )
        case _:
            _end_calls(batch, model.model_id, CallReason.MODEL_DELETED, f"model {model.name} was deleted")


def _end_calls(batch: Batch, model_id: ModelId, reason: CallReason, message: str) -> None:
    for session in batch.ledger.open_sessions(model_id):
        batch.transition(session, SessionEvent.CLOSE, end_time=batch.now)
    index = batch.ledger.calls_of_model.get(model_id, ModelCalls())
    # Backwards, so that no successor fails for its predecessor's sake before it is ended for the true reason.
    for call_id in [*index.generates, *(c for _, c in sorted(index.sequenced.items(), reverse=True))]:
        end(batch, batch.ledger.calls[call_id], reason, message)


def _delete_models(batch: Batch, job: Job) -> None:
    for model_id in list(batch.ledger.models_of_job.get(job.job_id, ())):
        model = batch.ledger.models[model_id]
        if model.state not in (ModelState.DELETING, ModelState.DELETED, ModelState.FAILED):
            batch.transition(model, ModelEvent.DELETE, message=f"job {job.name} is {job.state.name}")


def _give_up_copies(batch: Batch, model: Model) -> None:
    """A model leaves: its log goes, and its snapshots but the newest of a job that did not end by its client's word."""
    ledger, job = batch.ledger, batch.ledger.jobs.get(model.job_id)
    shorten_log(batch, ledger.models[model.model_id], model.applied_sequence + 1)
    committed = [s for s in ledger.snapshots_of_model.get(model.model_id, {}).values() if s.committed]
    if committed and job is not None and job.state in (JobState.EXPIRED, JobState.FAILED):
        committed.remove(max(committed, key=lambda snapshot: snapshot.sequence))
    for snapshot in committed:
        batch.update(snapshot, committed=False)


def _reassign(batch: Batch, worker: Worker) -> None:
    ledger = batch.ledger
    cause = f"worker {worker.name} (incarnation {worker.incarnation}) is gone"
    group = ledger.groups[worker.worker_id]
    group.on_device.clear()
    group.swaps.clear()
    group.prefetched = None
    group.serving = None
    for model_id in list(ledger.models_of_worker.get(worker.worker_id, ())):
        lose_model_state(batch, ledger.models[model_id], cause)
    for call_id in list(ledger.calls_on_worker.get(worker.worker_id, ())):
        call = ledger.calls[call_id]
        if call.state is CallState.DISPATCHED:
            requeue(batch, call)
        elif call.state in call_lifecycle.ON_WORKER:
            lose_attempt(batch, call, cause)


def _release_finished_jobs(batch: Batch) -> None:
    ledger = batch.ledger
    for job in [j for j in ledger.jobs.values() if j.state is JobState.FINISHING]:
        model_ids = ledger.models_of_job.get(job.job_id, {})
        live = any(ledger.models[m].state not in (ModelState.DELETED, ModelState.FAILED) for m in model_ids)
        if not live and not any(ledger.live_calls(m) for m in model_ids):
            batch.transition(job, JobEvent.RELEASED, end_time=batch.now)
