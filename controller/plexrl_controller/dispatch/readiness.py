"""Which calls of a model may run now, and why the others may not. Pure functions of the ledger.

The rules of program order and of versions live here and nowhere else; the cycle and ExplainCall both ask here.
"""

from dataclasses import dataclass

from plexrl_controller.dispatch.capabilities import capabilities_of
from plexrl_controller.dispatch.facts import ModelCalls
from plexrl_controller.dispatch.ledger import Ledger
from plexrl_controller.dispatch.pulls import may_be_ordered, older_pulls, waits_for
from plexrl_controller.dispatch.replays import progress, ready_replays
from plexrl_controller.domain.ids import CallId, SessionId
from plexrl_controller.domain.records import Call, Model, Session
from plexrl_controller.domain.states import CallKind, CallReason, CallState, JobState, ModelState
from plexrl_controller.lifecycle import calls as call_lifecycle
from plexrl_controller.scheduling.views import ReadyCall

MOST_PASSED_OVER = 256
"""Calls of full sessions, behind which others are looked for that may run now. They become fewer with every end."""
READY_LIMIT = 64
"""Most ready calls of one model that a view carries: a group's window is not larger."""


@dataclass(frozen=True, slots=True)
class Blocked:
    """Why a pending call may not run, with the calls that must finish first."""

    reason: CallReason
    explanation: str
    blocking: tuple[CallId, ...] = ()


def ready_calls(ledger: Ledger, model: Model, now: float) -> tuple[ReadyCall, ...]:
    """The model's calls that may be dispatched now, in order, at most READY_LIMIT."""
    job = ledger.jobs.get(model.job_id)
    if model.state is ModelState.RECOVERING:
        return ready_replays(ledger, model, READY_LIMIT)
    if model.state is not ModelState.PLACED or job is None or job.state is JobState.PAUSED:
        return ()
    index = ledger.calls_of_model[model.model_id]
    found = [*_ready_sequenced(ledger, model, index, now), *_ready_generates(ledger, model, index, now)]
    return tuple(found[:READY_LIMIT])


def _ready_sequenced(ledger: Ledger, model: Model, index: ModelCalls, now: float) -> list[ReadyCall]:
    expected_s: dict[CallKind, float | None] = {}
    found: list[ReadyCall] = []
    number, after = model.due_sequence, model.applied_sequence
    while len(found) < READY_LIMIT and (call_id := index.sequenced.get(number)) is not None:
        call = ledger.calls[call_id]
        if number == model.failed_sequence:
            break
        if call.state is CallState.PENDING:
            if call.kind.makes_version and _draining(ledger, call, index):
                break
            if not may_be_ordered(ledger, call):
                break
            since = ledger.ready_since.setdefault(call_id, now)
            if call.kind not in expected_s:
                expected_s[call.kind] = _expected_s(ledger, model, call.kind)
            found.append(ReadyCall(call_id, model.model_id, call.kind, since, after, expected_s[call.kind]))
        elif call.state is CallState.CANCELLING:
            break
        if call.kind.makes_version:
            break
        number, after = number + 1, number
    return found


def _ready_generates(ledger: Ledger, model: Model, index: ModelCalls, now: float) -> list[ReadyCall]:
    expected_s = _expected_s(ledger, model, CallKind.GENERATE)
    found: list[ReadyCall] = []
    rooms: dict[SessionId, int] = {}
    shared = _shared_room(ledger, model) if model.model_id in ledger.sessions_of_model else 0
    passed_over = 0
    for call_id in index.pending_generates:
        if len(found) >= READY_LIMIT or passed_over >= MOST_PASSED_OVER:
            break
        call = ledger.calls[call_id]
        if call.weights_version == model.weights_version:
            session = ledger.session_of(call)
            if session is not None:
                room = rooms.get(session.session_id)
                room = _own_room(ledger, session) if room is None else room
                if min(room, shared) <= 0:
                    rooms[session.session_id] = room
                    passed_over += 1
                    continue
                rooms[session.session_id], shared = room - 1, shared - 1
            concurrent = session is not None
            since = ledger.ready_since.setdefault(call_id, now)
            ran_s = ledger.ran_s.get(call_id, 0.0)
            left_s = max(0.0, expected_s - ran_s) if expected_s is not None else None
            found.append(ReadyCall(call_id, model.model_id, CallKind.GENERATE, since, 0, left_s, concurrent))
    return found


def session_room(ledger: Ledger, model: Model, session: Session) -> int:
    """How many more of a session's calls its worker may be given now."""
    return min(_own_room(ledger, session), _shared_room(ledger, model))


def _own_room(ledger: Ledger, session: Session) -> int:
    return session.max_concurrent - len(ledger.session_facts[session.session_id].in_flight)


def _shared_room(ledger: Ledger, model: Model) -> int:
    """What the worker runs together is shared by all sessions of the model."""
    sharing = ledger.open_sessions(model.model_id)
    running = sum(len(ledger.session_facts[each.session_id].in_flight) for each in sharing)
    return _offered(ledger, model) - running


def _offered(ledger: Ledger, model: Model) -> int:
    """How many generates the model's worker runs together."""
    worker = ledger.workers.get(model.worker_id) if model.worker_id is not None else None
    return max(1, capabilities_of(worker).max_concurrent_generates) if worker is not None else 1


def _expected_s(ledger: Ledger, model: Model, kind: CallKind) -> float | None:
    """Estimated service of the model's calls of one kind."""
    group = ledger.groups.get(model.worker_id) if model.worker_id is not None else None
    return group.estimates.expected_s(model.job_id, kind) if group is not None else None


def _draining(ledger: Ledger, sync: Call, index: ModelCalls) -> list[CallId]:
    """What needs older versions, and a version-making call must wait for: generates, and loads of them elsewhere."""
    older = [call_id for call_id, version in index.generates.items() if version < sync.sequence]
    return older + older_pulls(ledger, sync.model_id, sync.sequence)


def blocked(ledger: Ledger, call: Call) -> Blocked | None:
    """Why a pending call may not run as far as its own job is concerned; None when it may, or is not pending."""
    if call.state is not CallState.PENDING:
        return None
    model = ledger.models.get(call.model_id)
    if model is None:
        return None
    if model.state is not ModelState.PLACED:
        text = f"model {model.name} is {model.state.name}. {model.message}".strip()
        if done := progress(ledger, model):
            text = f"{text}: {done}"
        return Blocked(CallReason.MODEL_NOT_READY, text)
    index = ledger.calls_of_model[model.model_id]
    if not call.kind.sequenced:
        if call.weights_version == model.weights_version:
            return _session_full(ledger, call, model)
        return Blocked(
            CallReason.VERSION_NOT_READY,
            f"it needs weights version {call.weights_version}; the worker has {model.weights_version}",
            tuple(c for s, c in index.sequenced.items() if s <= call.weights_version)[:16],
        )
    earlier = sorted(s for s in index.sequenced if s < call.sequence)
    expected = call.sequence - model.due_sequence
    if len(earlier) < expected:
        present = set(earlier)
        missing = next(s for s in range(model.due_sequence, call.sequence) if s not in present)
        return Blocked(CallReason.SEQUENCE_GAP, f"sequence number {missing} has not been submitted")
    if earlier and any(ledger.calls[index.sequenced[s]].state is CallState.PENDING for s in earlier):
        blocking = tuple(index.sequenced[s] for s in earlier)
        return Blocked(
            CallReason.PREDECESSOR_UNFINISHED,
            f"{len(earlier)} earlier call(s) of its sequence run first",
            blocking[:16],
        )
    if call.kind.makes_version and (waiting := _draining(ledger, call, index)):
        return Blocked(
            CallReason.DRAINING_GENERATES,
            f"{len(waiting)} generate or load call(s) at older versions finish first",
            tuple(waiting[:16]),
        )
    if not may_be_ordered(ledger, call):
        return Blocked(CallReason.VERSION_NOT_READY, *waits_for(ledger, call))
    return None


def _session_full(ledger: Ledger, call: Call, model: Model) -> Blocked | None:
    session = ledger.session_of(call)
    if session is None or session_room(ledger, model, session) > 0:
        return None
    running = tuple(ledger.session_facts[session.session_id].in_flight)
    text = (
        f"{len(running)} calls of its session are with the engine; the session may have {session.max_concurrent}, and "
        f"its worker runs {_offered(ledger, model)} together"
    )
    return Blocked(CallReason.SESSION_FULL, text, running[:16])


def is_live(call: Call) -> bool:
    """Whether a call can still change."""
    return call.state not in call_lifecycle.TERMINAL
