"""What a call waits for, or how it ended, in one sentence with the numbers."""

from collections.abc import Sequence

from google.rpc import status_pb2

from plexrl_controller.dispatch.core import Core
from plexrl_controller.dispatch.readiness import blocked
from plexrl_controller.dispatch.views import group_view
from plexrl_controller.domain.ids import CallId
from plexrl_controller.domain.records import Call
from plexrl_controller.domain.states import CallState
from plexrl_controller.scheduling.explain import why_waiting


def explain(core: Core, call: Call, now: float) -> tuple[str, Sequence[CallId]]:
    """The sentence, and the calls that must finish first."""
    sentence, blocking = _explain(core, call, now)
    setback = core.ledger.setbacks.get(call.call_id)
    return f"{sentence}; the attempt before did not begin: {setback}" if setback else sentence, blocking


def _explain(core: Core, call: Call, now: float) -> tuple[str, Sequence[CallId]]:
    name = f"{call.kind.name.lower()} call {call.call_id[:8]}"
    match call.state:
        case CallState.PENDING:
            return _pending(core, call, name, now)
        case CallState.DISPATCHED:
            return f"{name} (attempt {call.attempt}) is queued on worker {call.worker_id}", ()
        case CallState.RUNNING | CallState.YIELDED | CallState.CANCELLING:
            done, total = core.ledger.progress.get(call.call_id, (0, 0))
            seconds = now - call.start_time if call.start_time is not None else 0.0
            of = f", {done} of {total} units done" if total else ""
            return (
                f"{name} (attempt {call.attempt}) is {call.state.name} for {seconds:.1f} s on {call.worker_id}{of}",
                (),
            )
        case CallState.SUCCEEDED:
            ran = (call.end_time or now) - (call.start_time or call.create_time)
            waited = (call.start_time or call.create_time) - call.create_time
            return f"{name} SUCCEEDED: it waited {waited:.3f} s and ran {ran:.3f} s in attempt {call.attempt}", ()
        case CallState.FAILED | CallState.CANCELLED | CallState.EXPIRED:
            message = status_pb2.Status.FromString(call.error).message if call.error is not None else "no message"
            return f"{name} {call.state.name} after {call.attempt} attempt(s), {call.reason.name}: {message}", ()


def _pending(core: Core, call: Call, name: str, now: float) -> tuple[str, Sequence[CallId]]:
    ledger = core.ledger
    waited = f"waits for {now - call.create_time:.1f} s"
    if (why := blocked(ledger, call)) is not None:
        return f"{name} {waited}: {why.reason.name}: {why.explanation}", why.blocking
    model = ledger.models.get(call.model_id)
    group = ledger.groups.get(model.worker_id) if model is not None and model.worker_id is not None else None
    if model is None or group is None:
        return f"{name} {waited}: its model has no worker", ()
    worker = ledger.workers[model.worker_id]  # type: ignore[index]
    if not group.connected:
        text = f"worker {worker.name} is {worker.state.name} and not connected"
        text += f": {group.trouble}" if group.trouble else ""
        return f"{name} {waited}: WORKER_UNAVAILABLE: {text}", ()
    view = group_view(ledger, worker.worker_id, now)
    why_not = why_waiting(view, call.job_id, now, core.policy)
    running = ledger.in_flight(worker.worker_id)
    blocking = [c.call_id for c in running if c.tenant == call.tenant][:16]
    if why_not.blocker is None:
        return f"{name} {waited}: GROUP_BUSY: on worker {worker.name} {why_not.text}", blocking
    other = ledger.jobs.get(why_not.blocker)
    owner = other.name if other is not None and other.tenant == call.tenant else "another tenant's job"
    return f"{name} {waited}: GROUP_BUSY: on worker {worker.name} {owner} {why_not.text}", blocking
