"""Sessions: opening, closing, expiry; and whether their calls may run now, which follows from whose turn it is.

That is told to clients when it changes and kept nowhere: a new leader finds it anew. What a session means for a call's
place is `readiness`' business, what it means for the engine the worker's (docs/adr/0013-sessions.md).
"""

from dataclasses import dataclass

from plexrl_controller.dispatch import limits
from plexrl_controller.dispatch.core import Core
from plexrl_controller.dispatch.jobs import Key, done_before, hint_idle, remember
from plexrl_controller.dispatch.ledger import Batch, Ledger
from plexrl_controller.domain.errors import FailedPrecondition, NotFound, ResourceExhausted
from plexrl_controller.domain.ids import JobId, SessionId, WorkerId
from plexrl_controller.domain.records import Model, Session
from plexrl_controller.domain.states import CallState, JobState, ModelState, SessionGrant, SessionState
from plexrl_controller.lifecycle.sessions import SessionEvent


@dataclass(frozen=True, slots=True)
class SessionSpec:
    """A validated request for a session."""

    max_concurrent: int = limits.DEFAULT_CONCURRENT
    grace_s: float = limits.DEFAULT_GRACE_S
    idle_limit_s: float = limits.DEFAULT_IDLE_LIMIT_S


async def open_session(core: Core, key: Key, model: Model, spec: SessionSpec) -> Session:
    """Opens a session of a model."""
    if (known := done_before(core, key)) is not None:
        await core.commit(core.batch())
        return await find(core, SessionId(known))
    job = core.ledger.job(model.job_id)
    if job.state not in (JobState.ACTIVE, JobState.PAUSED):
        raise FailedPrecondition(f"job {job.name} is {job.state.name}: it opens no session", reason="JOB_NOT_ACTIVE")
    if model.state in (ModelState.DELETING, ModelState.DELETED, ModelState.FAILED):
        raise FailedPrecondition(
            f"model {model.name} is {model.state.name}. {model.message}".strip(), reason="MODEL_NOT_ACTIVE"
        )
    batch = core.batch()
    _make_room(core.ledger, batch, model)
    session = Session(
        session_id=SessionId(core.new_id()),
        job_id=model.job_id,
        model_id=model.model_id,
        tenant=model.tenant,
        state=SessionState.OPEN,
        max_concurrent=spec.max_concurrent,
        grace_s=spec.grace_s,
        idle_limit_s=spec.idle_limit_s,
        create_time=batch.now,
    )
    batch.insert(session)
    remember(batch, key, session.session_id)
    await core.commit(batch)
    return session


def _make_room(ledger: Ledger, batch: Batch, model: Model) -> None:
    """Where a model has as many sessions as it may, the one that was unused longest ends: clients that died leave them.

    Raises ResourceExhausted when all are in use.
    """
    present = ledger.open_sessions(model.model_id)
    if len(present) < limits.MAX_SESSIONS_PER_MODEL:
        return
    unused = [session for session in present if not ledger.session_facts[session.session_id].live]
    longest = min(unused, key=lambda session: ledger.session_facts[session.session_id].last_use, default=None)
    if longest is None or batch.now - ledger.session_facts[longest.session_id].last_use < limits.SESSION_IN_USE_S:
        raise ResourceExhausted(
            f"model {model.name} has {len(present)} open sessions, the limit, and each was used within the last "
            f"{limits.SESSION_IN_USE_S:g} s: close one",
            reason="TOO_MANY_SESSIONS",
        )
    batch.transition(longest, SessionEvent.EXPIRE, end_time=batch.now)


async def find(core: Core, session_id: SessionId) -> Session:
    """A session, open or ended. Raises NotFound."""
    session = core.ledger.sessions.get(session_id)
    if session is None and session_id in core.ending:
        await core.commit(core.batch())
    session = session or await core.store.get_session(session_id)
    if session is None:
        raise NotFound(f"no session {session_id!r}")
    return session


async def close_session(core: Core, session: Session) -> Session:
    """Ends a session; again is fine. What is left of its calls goes on as calls outside a session do."""
    present = core.ledger.sessions.get(session.session_id)
    if present is None:
        await core.commit(core.batch())
        return await find(core, session.session_id)
    batch = core.batch()
    ended = batch.transition(present, SessionEvent.CLOSE, end_time=batch.now)
    await core.commit(batch)
    return ended


def yield_session(core: Core, session: Session, idle_s: float) -> None:
    """Its client asks nothing for a while. In memory only, as a heartbeat's hint. Raises FailedPrecondition."""
    facts = core.ledger.session_facts.get(session.session_id)
    if facts is None:
        raise not_open(session.session_id)
    facts.last_use = core.clock.now()
    hint_idle(core, core.ledger.job(session.job_id), idle_s)


def not_open(session_id: str) -> FailedPrecondition:
    """What a request in a session hears that takes none."""
    return FailedPrecondition(
        f"session {session_id[:64]!r} of this model is not open: it was closed, or expired because nothing was asked "
        "of it; open one",
        reason="SESSION_NOT_OPEN",
    )


def expire_unused(ledger: Ledger, batch: Batch) -> None:
    """Ends sessions of which nothing has been asked for their idle limit; one with live calls is in use."""
    for session in list(ledger.sessions.values()):
        facts = ledger.session_facts[session.session_id]
        if facts.live:
            facts.last_use = batch.now
        elif batch.now - facts.last_use > session.idle_limit_s:
            batch.transition(session, SessionEvent.EXPIRE, end_time=batch.now)


def grant_of(ledger: Ledger, session: Session) -> SessionGrant:
    """Whether an open session's calls may run now."""
    model = ledger.models.get(session.model_id)
    group = ledger.groups.get(model.worker_id) if model is not None and model.worker_id is not None else None
    if group is None or not group.connected or group.serving != session.job_id:
        return SessionGrant.WAITING
    return SessionGrant.GRANTED if group.revoked_at is None else SessionGrant.REVOKED


def note_shares(ledger: Ledger, worker_id: WorkerId, now: float) -> None:
    """Notes which calls of sessions run on a worker: what each has had of the device follows from it."""
    if ledger.sessions:
        running = [call for call in ledger.in_flight(worker_id) if call.state is not CallState.DISPATCHED]
        ledger.groups[worker_id].shares.note([c.call_id for c in running if ledger.session_of(c) is not None], now)


def tell_grants(core: Core, worker_id: WorkerId) -> None:
    """Tells clients whose sessions on a group may run now and could not, or the other way round."""
    ledger = core.ledger
    for session in ledger.open_sessions(*ledger.models_of_worker.get(worker_id, ())):
        facts = ledger.session_facts[session.session_id]
        if (grant := grant_of(ledger, session)) is not facts.grant:
            facts.grant = grant
            core.hub.publish_session(session)


def grace_left_s(core: Core, worker_id: WorkerId, job_id: JobId, now: float) -> float:
    """How long the calls of a job whose turn on this worker is over are let run before they yield. Its sessions here
    are revoked now.
    """
    ledger, group = core.ledger, core.ledger.groups[worker_id]
    group.revoked_at = now if group.revoked_at is None else group.revoked_at
    here = [m for m in ledger.models_of_worker.get(worker_id, ()) if ledger.models[m].job_id == job_id]
    present = ledger.open_sessions(*here)
    running = [session for session in present if ledger.session_facts[session.session_id].in_flight]
    grace_s = max((session.grace_s for session in running), default=0.0)
    return max(0.0, group.revoked_at + grace_s - now)
