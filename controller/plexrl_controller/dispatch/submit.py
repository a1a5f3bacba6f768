"""Accepting, cancelling and acknowledging calls: the promises of idempotency, program order and versions.

Works on records and parsed specs; what a spec may contain is `api/validation`'s business.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from plexrl.v1 import model_pb2, types_pb2
from plexrl_controller.dispatch import limits, pulls
from plexrl_controller.dispatch.cascade import end, settle
from plexrl_controller.dispatch.core import Core
from plexrl_controller.dispatch.ledger import Batch
from plexrl_controller.dispatch.replay_log import REPLAYED, is_logged
from plexrl_controller.dispatch.sessions import not_open
from plexrl_controller.domain.errors import (
    AlreadyExists,
    ControllerError,
    FailedPrecondition,
    InvalidArgument,
    OutOfRange,
    ResourceExhausted,
)
from plexrl_controller.domain.ids import CallId, CheckpointId, ModelId, RequestId, SessionId
from plexrl_controller.domain.records import Call, Job, Model, Payload
from plexrl_controller.domain.states import CallKind, CallReason, CallState, JobState, ModelState
from plexrl_controller.lifecycle import calls as call_lifecycle
from plexrl_controller.lifecycle.models import ModelEvent
from plexrl_controller.payloads import inline

_OF_ROLLOUTS = frozenset({CallKind.GENERATE, CallKind.LOAD_CHECKPOINT})


@dataclass(frozen=True, slots=True)
class Submission:
    """A validated request to execute a function."""

    request_id: RequestId
    request_hash: str
    model: Model
    kind: CallKind
    sequence: int
    spec: types_pb2.CallSpec
    spec_bytes: bytes
    spec_sha256: str
    tags: Mapping[str, str]
    timeout_s: float
    session_id: SessionId | None = None


class Arrival:
    """A call's place among those of its model that are accepted one after the other. Taken at once, left once."""

    def __init__(self, core: Core, model_id: ModelId) -> None:
        self.model_id = model_id
        self._arriving = core.ledger.arriving
        self._arriving[model_id] = self._arriving.get(model_id, 0) + 1
        self._left = False

    def leave(self) -> None:
        """Gives the place up; again is fine."""
        if not self._left:
            self._left = True
            self._arriving[self.model_id] -= 1
            if not self._arriving[self.model_id]:
                del self._arriving[self.model_id]


async def submit(core: Core, arrival: Arrival, prepare: Callable[[], Awaitable[Submission]]) -> Call:
    """Accepts a call; when this returns, it is durable. The same request again returns the same call.

    Calls of one model are accepted in the order of their arrivals, however long it takes to `prepare` one and whatever
    its arguments' size. Raises what `prepare` raises, AlreadyExists, OutOfRange, FailedPrecondition, ResourceExhausted.
    """
    ledger = core.ledger
    try:
        await core.writer.has_room()
        if arrival.model_id not in ledger.models:
            await prepare()  # says so
        async with ledger.accepting(ledger.model(arrival.model_id).model_id):
            submission = await prepare()
            known = ledger.call_by_request.get((submission.model.job_id, submission.request_id))
            accepted = await _write_and_post(core, submission) if known is None else None
    except ControllerError:
        # One that was replaced knows nothing of what the next one did, and must not say no.
        await core.writer.confirmed()
        raise
    finally:
        arrival.leave()
    if known is not None:
        return await _known_call(core, submission, *known)
    assert accepted is not None
    call, durable = accepted
    await asyncio.shield(durable)
    return ledger.calls.get(call.call_id, call)


def may_accept_now(core: Core, submission: Submission) -> bool:
    """Whether `accept_now` applies: nothing is to be written or looked up first, and no earlier call of the model
    waits.
    """
    return (
        len(submission.spec_bytes) <= inline.INLINE_LIMIT_BYTES
        and not core.ledger.arriving.get(submission.model.model_id)
        and (submission.model.job_id, submission.request_id) not in core.ledger.call_by_request
    )


def accept_now(core: Core, batch: Batch, submission: Submission) -> Call:
    """Accepts a call as part of a batch that the caller queues before it waits for anything. Raises as `submit`."""
    payload = Payload(submission.spec_sha256, len(submission.spec_bytes), submission.spec_bytes)
    return _accept(core, batch, submission, payload)


async def _write_and_post(core: Core, submission: Submission) -> tuple[Call, asyncio.Future[None]]:
    """Writes the arguments, then accepts: from the check to the posting nothing waits."""
    payload = await core.keep(submission.spec_bytes, submission.model.tenant)
    batch = core.batch()
    try:
        call = _accept(core, batch, submission, payload)
    except ControllerError:
        await core.unkeep(submission.model.tenant, payload)
        raise
    return call, core.post(batch)


def _accept(core: Core, batch: Batch, submission: Submission, payload: Payload) -> Call:
    """Checks against the present state and puts the call into memory; what is refused has changed nothing."""
    ledger = core.ledger
    model = ledger.model(submission.model.model_id)
    _check_accepting(core, ledger.job(model.job_id), model, submission)
    source_id = pulls.source_id(submission.kind, submission.spec)
    pulled = 0 if source_id is None else pulls.version_to_pull(ledger, submission.spec.load_checkpoint.rollout)
    version = _place_in_sequence(batch, model, submission) or pulled
    call = Call(
        call_id=CallId(core.new_id()),
        request_id=submission.request_id,
        request_hash=submission.request_hash,
        job_id=model.job_id,
        model_id=model.model_id,
        tenant=model.tenant,
        kind=submission.kind,
        state=CallState.PENDING,
        sequence=submission.sequence,
        weights_version=version,
        spec=payload,
        create_time=batch.now,
        deadline=batch.now + submission.timeout_s,
        checkpoint_id=_checkpoint_id(core, submission),
        session_id=submission.session_id,
        source_model_id=source_id,
    )
    if submission.session_id is not None:
        ledger.session_facts[submission.session_id].last_use = batch.now
    if payload.inline is not None:
        ledger.specs[call.call_id] = submission.spec
    if submission.kind is CallKind.SYNC_WEIGHTS and submission.spec.sync_weights.in_flight == types_pb2.IN_FLIGHT_ABORT:
        _abort_older_generates(batch, model, submission.sequence)
    batch.insert(call)
    if batch.effects:
        settle(batch)
    if model.worker_id is not None:
        core.wake(model.worker_id)
    return call


async def cancel(core: Core, call: Call) -> Call:
    """Ends a call on request; a terminal one stays as it is."""
    batch = core.batch()
    end(batch, call, CallReason.CANCELLED_BY_CLIENT, "cancelled by CancelCall")
    await core.commit(batch)
    return core.ledger.calls.get(call.call_id, call)


def acknowledge(core: Core, job: Job, call_ids: Iterable[str]) -> list[Payload]:
    """Drops results that the client has taken; what is not terminal or not known is left alone. Queues its commit, and
    returns the payloads that may go once that is durable.
    """
    batch = core.batch()
    freed: list[Payload] = []
    for call_id in dict.fromkeys(call_ids):
        call = core.ledger.calls.get(CallId(call_id))
        if call is None or call.job_id != job.job_id or call.state not in call_lifecycle.TERMINAL:
            continue
        # The arguments of what may have to be executed again stay until a snapshot covers it.
        kept = call.spec if is_logged(call) else None
        batch.update(call, acknowledged=True, spec=kept, result=None)
        core.ledger.forget_call(call)
        gone = (call.spec if kept is None else None, call.result)
        freed += [payload for payload in gone if payload is not None and payload.inline is None]
    core.queue(batch)
    return freed


async def acknowledged(core: Core, job: Job, freed: Sequence[Payload]) -> None:
    """Waits until acknowledgements queued so far are durable, then gives up the payloads that they freed."""
    await core.commit(core.batch())
    await core.unkeep(job.tenant, *freed)


async def _known_call(core: Core, submission: Submission, request_hash: str, call_id: CallId) -> Call:
    if request_hash != submission.request_hash:
        raise AlreadyExists(
            f"request_id {submission.request_id!r} was used for other content (call {call_id}); use a fresh id",
            reason="REQUEST_ID_REUSED",
            metadata={"call_id": call_id},
        )
    call = core.ledger.calls.get(call_id) or await core.store.get_call(call_id)
    if call is None:
        raise AlreadyExists(f"call {call_id} of this request id has been dropped", reason="REQUEST_ID_REUSED")
    # The first acceptance may still be on its way to the store: say yes only after it.
    await core.commit(core.batch())
    return core.ledger.calls.get(call_id, call)


def _check_accepting(core: Core, job: Job, model: Model, submission: Submission) -> None:
    if job.state not in (JobState.ACTIVE, JobState.PAUSED):
        raise FailedPrecondition(f"job {job.name} is {job.state.name}: it takes no more calls", reason="JOB_NOT_ACTIVE")
    if model.state in (ModelState.DELETING, ModelState.DELETED, ModelState.FAILED):
        raise FailedPrecondition(
            f"model {model.name} is {model.state.name}. {model.message}".strip(), reason="MODEL_NOT_ACTIVE"
        )
    if model.state is ModelState.STATE_LOST and submission.kind is not CallKind.LOAD_CHECKPOINT:
        raise FailedPrecondition(f"model {model.name}: {model.message}", reason="STATE_LOST")
    if submission.session_id is not None:
        session = core.ledger.sessions.get(submission.session_id)
        if session is None or session.model_id != model.model_id:
            raise not_open(submission.session_id)
    if model.role == model_pb2.MODEL_ROLE_REFERENCE and submission.kind in (
        CallKind.FORWARD_BACKWARD,
        CallKind.OPTIM_STEP,
    ):
        raise InvalidArgument(f"model {model.name} is a reference: it is never trained; create it with role policy")
    if model.role == model_pb2.MODEL_ROLE_ROLLOUT and submission.kind not in _OF_ROLLOUTS:
        raise InvalidArgument(
            f"model {model.name} is of role rollout: it only generates, with weights that it loads; for "
            f"{submission.kind.name.lower()} create one of role policy"
        )
    if submission.kind is CallKind.LOAD_CHECKPOINT:
        pulls.check_load(core.ledger, model, submission.spec.load_checkpoint)
    if submission.kind in REPLAYED and (
        (kept_bytes := core.ledger.log(model.model_id).kept_bytes) >= core.recovery_policy.max_log_bytes
    ):
        state = core.ledger.snapshotting.get(model.model_id)
        raise ResourceExhausted(
            f"{kept_bytes} bytes of arguments are kept for model {model.name} because no snapshot could be written "
            f"({state.failure if state is not None and state.failure else 'one is being written'}); the limit is "
            f"{core.recovery_policy.max_log_bytes}: retry when there is room for one",
            reason="REPLAY_LOG_FULL",
            retry_after_s=5.0,
        )
    outstanding = len(core.ledger.calls_of_job.get(job.job_id, ()))
    if outstanding >= limits.MAX_OUTSTANDING_CALLS:
        raise ResourceExhausted(
            f"job {job.name} has {outstanding} calls that are not terminal or not acknowledged; the limit is "
            f"{limits.MAX_OUTSTANDING_CALLS}: take and acknowledge results first",
            reason="TOO_MANY_CALLS",
            retry_after_s=1.0,
        )
    worker = core.ledger.workers.get(model.worker_id) if model.worker_id is not None else None
    for key, value in submission.tags.items():
        if worker is not None and worker.labels.get(key) != value:
            raise FailedPrecondition(
                f"tag {key}={value}: model {model.name} is on worker {worker.name}, which has "
                f"{key}={worker.labels.get(key, '(absent)')}; put the tag into the model's affinity",
                reason="AFFINITY_UNSATISFIABLE",
            )


def _place_in_sequence(batch: Batch, model: Model, submission: Submission) -> int:
    """Checks and takes the sequence number, or resolves the version; returns the version of a generate, else 0."""
    if not submission.kind.sequenced:
        return _resolve_version(batch, model, submission)
    sequence = submission.sequence
    if submission.kind is CallKind.LOAD_CHECKPOINT and model.state is ModelState.STATE_LOST:
        if sequence <= model.last_sequence:
            raise AlreadyExists(_taken(sequence, model), reason="SEQUENCE_TAKEN")
        batch.transition(
            model,
            ModelEvent.RELOAD,
            failed_sequence=0,
            due_sequence=sequence,
            last_sequence=sequence,
            message="being rebuilt to load a checkpoint",
        )
        return 0
    if model.failed_sequence and sequence >= model.failed_sequence:
        raise FailedPrecondition(
            f"sequence {model.failed_sequence} of model {model.name} ended other than SUCCEEDED; call ResumeSequence",
            reason="PREDECESSOR_FAILED",
        )
    if submission.kind is CallKind.SAVE_CHECKPOINT:
        _check_label(batch, model, submission.spec.save_checkpoint.label)
    index = batch.ledger.calls_of_model[model.model_id]
    if sequence < model.due_sequence or sequence in index.sequenced:
        raise AlreadyExists(_taken(sequence, model), reason="SEQUENCE_TAKEN")
    if sequence >= model.due_sequence + limits.MAX_SEQUENCE_AHEAD:
        raise OutOfRange(
            f"sequence {sequence} is {sequence - model.due_sequence} ahead of {model.due_sequence}, the next due; the "
            f"limit is {limits.MAX_SEQUENCE_AHEAD}: wait for results",
            reason="SEQUENCE_TOO_FAR",
            retry_after_s=1.0,
        )
    if sequence > model.last_sequence:
        batch.update(model, last_sequence=sequence)
    return 0


def _check_label(batch: Batch, model: Model, label: str) -> None:
    ledger = batch.ledger
    saved = {c.label for c in ledger.checkpoints.values() if c.model_id == model.model_id}
    saving = {
        ledger.specs[call_id].save_checkpoint.label
        for call_id in ledger.calls_of_model[model.model_id].sequenced.values()
        if call_id in ledger.specs and ledger.calls[call_id].kind is CallKind.SAVE_CHECKPOINT
    }
    if label in saved | saving:
        raise AlreadyExists(
            f"model {model.name} has a checkpoint labelled {label!r}; choose another", reason="LABEL_TAKEN"
        )


def _taken(sequence: int, model: Model) -> str:
    return f"sequence {sequence} of model {model.name} is taken; the next free number is {model.last_sequence + 1}"


def _resolve_version(batch: Batch, model: Model, submission: Submission) -> int:
    newest = batch.ledger.pending_version(model)
    selector = submission.spec.generate.version
    match selector.WhichOneof("selector"):
        case "exact":
            if selector.exact > newest:
                raise InvalidArgument(
                    f"version {selector.exact} is not submitted; the newest of {model.name} is {newest}"
                )
            if selector.exact < newest:
                raise FailedPrecondition(
                    f"version {selector.exact} of {model.name} is replaced by {newest}; only the latest is kept",
                    reason="VERSION_GONE",
                )
        case "at_least" if selector.at_least > newest:
            raise InvalidArgument(
                f"version {selector.at_least} is not submitted; the newest of {model.name} is {newest}"
            )
        case _:
            pass
    return newest


def _abort_older_generates(batch: Batch, model: Model, sequence: int) -> None:
    """Ends what needs an older version, loads of it elsewhere among it."""
    generates = batch.ledger.calls_of_model[model.model_id].generates
    older = [call_id for call_id, version in generates.items() if version < sequence]
    for call_id in (*older, *pulls.older_pulls(batch.ledger, model.model_id, sequence)):
        call = batch.ledger.calls[call_id]
        message = f"sync_weights at sequence {sequence} replaced version {call.weights_version}"
        end(batch, call, CallReason.VERSION_REPLACED, message)


def _checkpoint_id(core: Core, submission: Submission) -> CheckpointId | None:
    if submission.kind is CallKind.SAVE_CHECKPOINT:
        return CheckpointId(core.new_id())
    if submission.kind is CallKind.LOAD_CHECKPOINT and submission.spec.load_checkpoint.checkpoint_id:
        return CheckpointId(submission.spec.load_checkpoint.checkpoint_id)
    return None
