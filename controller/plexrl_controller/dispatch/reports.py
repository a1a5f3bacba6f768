"""Step 6 of the cycle: what workers report is recorded under its fence, then told to whoever waits.

A report of an older attempt or an older life changes nothing.
"""

from collections.abc import Sequence

from google.rpc import code_pb2

from plexrl import wire
from plexrl.v1 import model_pb2, registry_pb2, types_pb2, worker_pb2
from plexrl_controller.dispatch.cascade import fail, give_up_state, lose_attempt, lose_model_state, requeue
from plexrl_controller.dispatch.core import Core, log
from plexrl_controller.dispatch.facts import HostImage
from plexrl_controller.dispatch.learning import learn_finish, learn_interval, learn_iteration
from plexrl_controller.dispatch.ledger import Batch
from plexrl_controller.dispatch.recovery import not_restored, replay_ended, restored
from plexrl_controller.dispatch.replay_log import REPLAYED
from plexrl_controller.dispatch.restore import begin_log, cover
from plexrl_controller.dispatch.snapshots import snapshot_ended
from plexrl_controller.domain.errors import StaleTransition
from plexrl_controller.domain.ids import CallId, JobId, ModelId, WorkerId
from plexrl_controller.domain.records import Call, Checkpoint, Interval, Model, Payload
from plexrl_controller.domain.states import CallKind, CallReason, CallState, IntervalKind, ModelState
from plexrl_controller.lifecycle import calls as call_lifecycle
from plexrl_controller.lifecycle.calls import CallEvent
from plexrl_controller.lifecycle.models import ModelEvent
from plexrl_controller.payloads import inline

# Reasons of the worker that say nothing about the call itself: another attempt may succeed.
_TRY_AGAIN = frozenset({"ENGINE_DIED", "ENGINE_HUNG", "OVER_BUDGET", "HOST_STATE_CORRUPT", "NOT_DEPLOYED"})
# The attempt never began, for a reason that the controller can mend: it does not count against the call.
_NOT_BEGUN = frozenset(
    {"NOT_RESIDENT", "SHUTTING_DOWN", "STALE_TERM", "STALE_INCARNATION", "STALE_ATTEMPT", "CANCELLED", "PULL_FAILED"}
)
# What a call hears of a state that is being rebuilt: it waits, and runs when that is done.
_STATE_IS_GONE = frozenset({"STATE_LOST", "HOST_STATE_CORRUPT", "SEQUENCE_MISMATCH", "NOT_DEPLOYED", "VERSION_GONE"})


class ReportRecorder:
    """Records reports; one instance per controller, called in order per worker."""

    def __init__(self, core: Core) -> None:
        self._core = core

    async def record(self, worker_id: WorkerId, incarnation: int, reports: Sequence[worker_pb2.Report]) -> None:
        """Records a frame of reports in one commit. Returns once it is queued: the next frame need not wait for it."""
        core, ledger = self._core, self._core.ledger
        await core.writer.has_room()
        results = [_small_result(report) for report in reports]
        for index, report in enumerate(reports):
            if results[index] is None:
                results[index] = await self._keep_large_result(report)
        worker = ledger.workers.get(worker_id)
        if worker is None or worker.incarnation != incarnation:
            log.warning("reports_stale", worker=worker_id, incarnation=incarnation)
            return
        batch = core.batch()
        for report, result in zip(reports, results, strict=True):
            for status in report.deployments:
                self._deployment(batch, worker_id, status)
            for interval in report.intervals:
                self._interval(batch, worker_id, interval, whole=report.WhichOneof("event") != "yielded")
            try:
                self._event(batch, worker_id, report, result)
            except StaleTransition as stale:
                log.info("report_stale", worker=worker_id, call=report.call.call_id, detail=stale.message)
        core.wake(worker_id)
        core.queue(batch)

    async def _keep_large_result(self, report: worker_pb2.Report) -> Payload | None:
        call = self._core.ledger.calls.get(CallId(report.call.call_id))
        replay = self._core.orders.replay_of(report.order_id, settle=False)
        if replay is not None and _has_result(report) and (call is None or call.state is CallState.SUCCEEDED):
            # Compared with the recorded result, and kept nowhere.
            return inline.inline_payload(report.finished.result.SerializeToString())
        if call is None or not _has_result(report):
            return None
        if replay is None and (call.attempt != report.call.attempt or call.state not in call_lifecycle.ON_WORKER):
            # Of an older attempt, or heard before: it changes nothing, so nothing of it is kept.
            return None
        # A quota refuses new work. What was executed is kept: to refuse it would break the worker's link for all jobs.
        return await self._core.keep(report.finished.result.SerializeToString(), call.tenant, beyond_quota=True)

    def _event(self, batch: Batch, worker_id: WorkerId, report: worker_pb2.Report, result: Payload | None) -> None:
        if self._replayed(batch, report, result):
            return
        if not report.HasField("call"):
            if report.WhichOneof("event") == "finished":
                self._order_finished(batch, worker_id, report)
            return
        call = self._core.ledger.calls.get(CallId(report.call.call_id))
        if call is None or call.attempt != report.call.attempt or call.worker_id != worker_id:
            return
        match report.WhichOneof("event"):
            case "started" if call.state is CallState.DISPATCHED:
                batch.transition(call, CallEvent.START, start_time=batch.now)
            case "progress":
                self._core.ledger.progress[call.call_id] = (report.progress.done, report.progress.total)
                self._core.hub.publish(call)
            case "yielded" if call.state in (CallState.DISPATCHED, CallState.RUNNING):
                # One that is parked says so again when it is asked again, and may have been told to go on meanwhile.
                if report.order_id >= self._core.ledger.run_orders.get(call.call_id, 0):
                    self._call_yielded(batch, call, report)
            case "finished" if call.state in call_lifecycle.ON_WORKER:
                self._call_finished(batch, call, report, result)
            case _:
                pass

    def _call_yielded(self, batch: Batch, call: Call, report: worker_pb2.Report) -> None:
        """A call gave way: it is ready again, and what remains of it is less."""
        ledger = self._core.ledger
        learn_finish(ledger, call, batch.now)
        if report.yielded.total:
            ledger.progress[call.call_id] = (report.yielded.done, report.yielded.total)
        ledger.ready_since[call.call_id] = batch.now
        ledger.ran_s[call.call_id] = ledger.ran_s.get(call.call_id, 0.0) + _busy_s(report)
        if call.worker_id is not None:
            ledger.groups[call.worker_id].yielding.pop(call.call_id, None)
        batch.transition(call, CallEvent.YIELD)

    def _replayed(self, batch: Batch, report: worker_pb2.Report, result: Payload | None) -> bool:
        """Whether the report is of a call that is executed again: that is told to nobody who watches the call."""
        ended = report.HasField("finished")
        replay = self._core.orders.replay_of(report.order_id, settle=ended)
        if replay is not None and ended:
            replay_ended(self._core, batch, replay, report.finished, result)
        return replay is not None

    def _call_finished(self, batch: Batch, call: Call, report: worker_pb2.Report, result: Payload | None) -> None:
        finished = report.finished
        if call.worker_id is not None:
            self._core.ledger.groups[call.worker_id].yielding.pop(call.call_id, None)
        learn_finish(self._core.ledger, call, batch.now)
        error = wire.error_info(finished.error)
        if error is None and result is not None:
            self._succeeded(batch, call, report, result)
            return
        if error is None:
            error = wire.ErrorInfo(code_pb2.INTERNAL, "ENGINE_ERROR", "the worker reported neither result nor error")
        log.info(
            "call_attempt_ended", call=call.call_id, attempt=call.attempt, reason=error.reason, detail=error.message
        )
        model = self._core.ledger.models[call.model_id]
        if error.reason == "CANCELLED" and call.state is CallState.CANCELLING:
            event = CallEvent.EXPIRE if call.reason is CallReason.DEADLINE_EXCEEDED else CallEvent.CANCEL
            batch.transition(call, event, end_time=batch.now)
        elif error.reason == "SEQUENCE_MISMATCH" and model.failed_sequence and model.failed_sequence != call.sequence:
            message = (
                f"sequence {model.failed_sequence} ended other than SUCCEEDED; ResumeSequence lets later calls run"
            )
            fail(batch, call, CallReason.PREDECESSOR_FAILED, message)
        elif call.source_model_id is not None and error.reason == "HOST_STATE_CORRUPT":
            # What came was not what was sent, and may be so again: it counts.
            lose_attempt(batch, call, f"{error.reason}: {error.message}")
        elif (model.state is ModelState.RECOVERING and error.reason in _STATE_IS_GONE) or self._never_began(
            call, model, error.reason
        ):
            self._core.ledger.setbacks[call.call_id] = f"{error.reason}: {error.message}"
            requeue(batch, call)
        elif error.reason in (*_TRY_AGAIN, *_NOT_BEGUN, "SEQUENCE_MISMATCH"):
            lose_attempt(batch, call, f"{error.reason}: {error.message}")
        else:
            reason = CallReason.__members__.get(error.reason, CallReason.ENGINE_ERROR)
            fail(batch, call, reason, error.message, error.code)

    def _never_began(self, call: Call, model: Model, reason: str) -> bool:
        """Whether the controller's picture of the worker was wrong, and is right now: the call is not to blame."""
        group = self._core.ledger.groups[call.worker_id] if call.worker_id is not None else None
        if group is None:
            return False
        if model.state is ModelState.RECOVERING and reason in _STATE_IS_GONE:
            return True
        match reason:
            case "NOT_RESIDENT":
                # Its engine died while idle, say. After a failed swap the same would go on for ever: that counts.
                group.on_device.discard(model.model_id)
                return not group.swap_failed
            case "SHUTTING_DOWN":
                group.connected = False
                return True
            case "SEQUENCE_MISMATCH":
                return call.sequence > model.due_sequence
            case _:
                return reason in _NOT_BEGUN

    def _succeeded(self, batch: Batch, call: Call, report: worker_pb2.Report, payload: Payload) -> None:
        ledger, result = self._core.ledger, report.finished.result
        model, facts = ledger.models[call.model_id], ledger.facts.get(call.job_id)
        if facts is not None:
            facts.calls_succeeded += 1
            facts.mid_iteration = not call.kind.makes_version
        if call.kind.makes_version and call.worker_id is not None:
            learn_iteration(ledger, call.worker_id, call.job_id)
        if call.kind.sequenced:
            self._advance(batch, model, call, result)
        batch.transition(
            call,
            CallEvent.SUCCEED,
            result=payload,
            outcome_sha256=payload.sha256 if call.kind in REPLAYED else "",
            reason=CallReason.NONE,
            error=None,
            start_time=call.start_time if call.start_time is not None else batch.now,
            end_time=batch.now,
        )
        if call.kind in REPLAYED:
            ledger.log(call.model_id).measured(call.sequence, _busy_s(report))
        model = ledger.models[call.model_id]
        if call.kind is CallKind.LOAD_CHECKPOINT:
            begin_log(batch, model, call)
        elif call.kind is CallKind.SAVE_CHECKPOINT:
            cover(batch, model, self._core.recovery_policy.log_bytes)

    def _advance(self, batch: Batch, model: Model, call: Call, result: types_pb2.CallResult) -> None:
        """Moves the model's place in its sequence, and what is known of its state.

        Never backwards: after a break of the stream, a call's outcome can be heard after that of a later one, which the
        worker applied after it. What the later one said of the state stands then.
        """
        if call.sequence < model.applied_sequence:
            if call.kind is CallKind.SAVE_CHECKPOINT:
                self._committed(batch, model, call, result.save_checkpoint.checkpoint)
            elif call.kind is CallKind.OPTIM_STEP:
                batch.update(model, step=max(model.step, result.optim_step.step))
            return
        step, version = model.step, model.weights_version
        match call.kind:
            case CallKind.OPTIM_STEP:
                step = result.optim_step.step
            case CallKind.SYNC_WEIGHTS:
                version = call.sequence
            case CallKind.LOAD_CHECKPOINT:
                version, step = call.sequence, result.load_checkpoint.step
            case CallKind.SAVE_CHECKPOINT:
                self._committed(batch, model, call, result.save_checkpoint.checkpoint)
            case _:
                pass
        batch.update(
            model,
            applied_sequence=call.sequence,
            due_sequence=max(model.due_sequence, call.sequence + 1),
            weights_version=version,
            step=step,
        )

    def _committed(self, batch: Batch, model: Model, call: Call, saved: types_pb2.Checkpoint) -> None:
        if call.checkpoint_id is None:
            raise AssertionError(f"save_checkpoint call {call.call_id} has no checkpoint id")
        batch.insert(
            Checkpoint(
                checkpoint_id=call.checkpoint_id,
                model_id=model.model_id,
                job_id=model.job_id,
                tenant=model.tenant,
                label=saved.label,
                sequence=call.sequence,
                step=model.step,
                weights_version=model.weights_version,
                size_bytes=saved.size_bytes,
                manifest_sha256=saved.manifest_sha256,
                create_time=batch.now,
            )
        )

    def _order_finished(self, batch: Batch, worker_id: WorkerId, report: worker_pb2.Report) -> None:
        """Settles deploy, drop and snapshot orders; a failed swap shows in the calls that follow it."""
        ledger = self._core.ledger
        if (snapshot := self._core.orders.snapshot_of(report.order_id)) is not None:
            snapshot_ended(self._core, batch, snapshot, report.finished)
            return
        model_id = self._core.orders.model_of(report.order_id)
        error = wire.error_info(report.finished.error)
        if report.order_id in ledger.groups[worker_id].swaps:
            swap_ended(self._core, worker_id, report.order_id, failed=error is not None)
        if model_id is None or (model := ledger.models.get(model_id)) is None:
            if error is not None:
                log.warning("order_failed", worker=worker_id, reason=error.reason, detail=error.message)
            return
        if model.state is ModelState.RECOVERING:
            recovery = ledger.recoveries.get(model_id)
            if recovery is None or recovery.order_id != report.order_id:
                # Of an order that was sent before its stream broke, or before what it restored was lost as well.
                log.info("deploy_superseded", model=model_id, order=report.order_id)
                return
        ledger.deploying.pop(model_id, None)
        if model.state is ModelState.DELETING:
            batch.transition(model, ModelEvent.DROPPED)
        elif model.state in (ModelState.CREATING, ModelState.RECOVERING):
            self._deployed(batch, model, report.finished, error)

    def _deployed(
        self, batch: Batch, model: Model, finished: worker_pb2.OrderFinished, error: wire.ErrorInfo | None
    ) -> None:
        if error is None and model.state is ModelState.RECOVERING:
            restored(self._core, batch, model, finished.deployed)
        elif error is None:
            built = finished.deployed
            batch.transition(
                model,
                ModelEvent.DEPLOYED,
                parameter_count=built.parameter_count,
                state_bytes=built.state_bytes,
                has_tokenizer=built.has_tokenizer,
                message="",
            )
        elif model.state is ModelState.RECOVERING and not_restored(self._core, batch, model, error):
            pass
        elif error.reason in _TRY_AGAIN | _NOT_BEGUN and error.reason != "OVER_BUDGET":
            log.warning("deploy_retried", model=model.model_id, reason=error.reason, detail=error.message)
        elif model.state is ModelState.RECOVERING and model.applied_sequence:
            give_up_state(batch, model, f"its worker cannot rebuild it: {error.reason}: {error.message}")
        else:
            batch.transition(model, ModelEvent.BUILD_FAILED, message=error.message)

    def _deployment(self, batch: Batch, worker_id: WorkerId, status: registry_pb2.DeploymentStatus) -> None:
        ledger = self._core.ledger
        model = ledger.models.get(ModelId(status.model_id))
        if model is None or model.worker_id != worker_id:
            return
        if 0 < status.revision <= ledger.groups[worker_id].status_revision:
            # Reported before the stream opened, and heard after what the worker said then.
            return
        note_residency(self._core, worker_id, status)
        note_lost_state(self._core, batch, worker_id, status)

    def _interval(self, batch: Batch, worker_id: WorkerId, interval: types_pb2.DeviceInterval, *, whole: bool) -> None:
        job_id = JobId(interval.job_id)
        if job_id not in self._core.ledger.jobs:
            return
        call_id = CallId(interval.call_id) if interval.call_id else None
        kind = IntervalKind(interval.kind)
        measured = Interval(
            kind=kind,
            worker_id=worker_id,
            job_id=job_id,
            model_id=ModelId(interval.model_id),
            call_id=call_id,
            call_kind=CallKind(interval.call_kind) if interval.call_kind else None,
            start_unix_ns=interval.start_unix_ns,
            end_unix_ns=interval.end_unix_ns,
            moved_bytes=interval.moved_bytes,
        )
        batch.interval(measured)
        learn_interval(self._core.ledger, measured, batch.now, whole=whole)


def note_lost_state(core: Core, batch: Batch, worker_id: WorkerId, status: registry_pb2.DeploymentStatus) -> None:
    """Begins the recovery of a model whose worker lost the newest state; it may still have a whole one of earlier on.

    A worker's new life says so as well, of what the life before parked: the recovery has begun then, and has not come
    to choose its copy.
    """
    model = core.ledger.models.get(ModelId(status.model_id))
    if model is None or not status.state_lost or model.worker_id != worker_id:
        return
    recovery = core.ledger.recoveries.get(model.model_id)
    replaying = model.state is ModelState.RECOVERING and recovery is not None and recovery.replays is not None
    begun = model.state is ModelState.RECOVERING and recovery is None
    if model.state is not ModelState.PLACED and not replaying and not begun:
        return
    core.ledger.host_images.pop(model.model_id, None)
    if status.host_image:
        incarnation = core.ledger.workers[worker_id].incarnation
        image = HostImage(worker_id, incarnation, status.host_image_sequence, status.host_image_weights_version)
        core.ledger.host_images[model.model_id] = image
    if begun:
        return
    if replaying:
        # What killed the engine may do so each time: the replay's own report counts that, and begins anew.
        return
    lose_model_state(batch, model, "its worker lost the newest copy: the engine died, or a parked one was damaged")


def _busy_s(report: worker_pb2.Report) -> float:
    """Device time that a report says its call has run."""
    busy = [
        interval
        for interval in report.intervals
        if interval.kind == types_pb2.INTERVAL_KIND_BUSY and interval.call_id == report.call.call_id
    ]
    return sum(interval.end_unix_ns - interval.start_unix_ns for interval in busy) / 1e9


def _has_result(report: worker_pb2.Report) -> bool:
    return report.HasField("finished") and report.finished.HasField("result")


def _small_result(report: worker_pb2.Report) -> Payload | None:
    """A result that its call's row will carry."""
    if not _has_result(report):
        return None
    # Measuring a message costs as much as writing it.
    content = report.finished.result.SerializeToString()
    return inline.inline_payload(content) if len(content) <= inline.INLINE_LIMIT_BYTES else None


def note_residency(core: Core, worker_id: WorkerId, status: registry_pb2.DeploymentStatus) -> None:
    """Takes over where a model's components are, as its worker says."""
    model_id = ModelId(status.model_id)
    core.ledger.residency[model_id] = tuple(_copy(component) for component in status.residency)
    group = core.ledger.groups[worker_id]
    if group.swaps:
        # It may be of before a swap that is on its way; when that has ended, what was said last is true.
        return
    if _is_on_device(core, model_id) and not status.state_lost:
        group.on_device.add(model_id)
    else:
        group.on_device.discard(model_id)


def swap_ended(core: Core, worker_id: WorkerId, order_id: int, *, failed: bool) -> None:
    """A residency change has ended, and those that were ordered before it. After the last one the device holds what the
    worker says.
    """
    group = core.ledger.groups[worker_id]
    group.swap_failed = failed
    group.swaps = {later for later in group.swaps if later > order_id}
    if not group.swaps:
        here = core.ledger.models_of_worker[worker_id]
        group.on_device = {model_id for model_id in here if _is_on_device(core, model_id)}


def _is_on_device(core: Core, model_id: ModelId) -> bool:
    """Whether a model's worker said last that all of it is there."""
    residency = core.ledger.residency.get(model_id, ())
    return bool(residency) and all(component.tier == types_pb2.TIER_DEVICE for component in residency)


def _copy(component: model_pb2.ComponentResidency) -> model_pb2.ComponentResidency:
    copied = model_pb2.ComponentResidency()
    copied.CopyFrom(component)
    return copied
