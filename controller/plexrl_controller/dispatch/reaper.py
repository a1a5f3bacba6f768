"""What time ends: job leases, worker leases, call deadlines, sessions that nobody uses. And what memory may forget."""

from google.rpc import code_pb2

from plexrl_controller.dispatch.cascade import error_of
from plexrl_controller.dispatch.core import Core, log
from plexrl_controller.dispatch.ledger import Batch, live_jobs
from plexrl_controller.dispatch.sessions import expire_unused
from plexrl_controller.dispatch.snapshots import order_due
from plexrl_controller.dispatch.workers import lease_end, replace_models_of_lost_workers
from plexrl_controller.domain.records import Call
from plexrl_controller.domain.states import CallReason, CallState, JobState, WorkerState
from plexrl_controller.lifecycle import calls as call_lifecycle
from plexrl_controller.lifecycle import jobs as job_lifecycle
from plexrl_controller.lifecycle import models as model_lifecycle
from plexrl_controller.lifecycle.calls import CallEvent
from plexrl_controller.lifecycle.jobs import JobEvent
from plexrl_controller.lifecycle.workers import WorkerEvent

FORGET_AFTER_S = 60.0
"""A terminal job stays in memory this long, so that its last reads are cheap; then the store answers."""


async def reap(core: Core) -> None:
    """One pass at the present time."""
    batch = core.batch()
    for worker in list(core.ledger.workers.values()):
        if worker.state is not WorkerState.LOST and lease_end(core, worker) < batch.now:
            log.warning("worker_lost", worker=worker.worker_id, name=worker.name, incarnation=worker.incarnation)
            core.transport.close(worker.worker_id)
            core.ledger.groups[worker.worker_id].connected = False
            batch.transition(worker, WorkerEvent.LOSE)
    for job in live_jobs(core.ledger):
        facts = core.ledger.facts[job.job_id]
        if job.state in (JobState.ACTIVE, JobState.PAUSED) and facts.lease_end < batch.now:
            log.warning("job_expired", job=job.job_id, name=job.name)
            text = f"its client did not renew the lease of {job.lease_s:g} s; resources are free, checkpoints stay"
            batch.transition(job, JobEvent.EXPIRE, message=text, end_time=batch.now)
    late = [c for c in core.ledger.calls.values() if c.state not in call_lifecycle.TERMINAL and c.deadline < batch.now]
    for call in late:
        _expire(batch, core.ledger.calls[call.call_id])
    expire_unused(core.ledger, batch)
    await core.commit(batch)
    await replace_models_of_lost_workers(core)
    await order_due(core)
    _forget(core)
    await core.uploads.reap(core.ledger, core.clock.now())


def _expire(batch: Batch, call: Call) -> None:
    """A pending call ends at once; one on a worker is stopped first: only the worker knows whether it applied."""
    message = f"its deadline passed {batch.now - call.deadline:.1f} s ago; submit it again with a longer timeout"
    error = error_of(code_pb2.DEADLINE_EXCEEDED, CallReason.DEADLINE_EXCEEDED.name, message)
    if call.state is CallState.PENDING:
        batch.transition(call, CallEvent.EXPIRE, reason=CallReason.DEADLINE_EXCEEDED, error=error, end_time=batch.now)
    elif call.state in (CallState.DISPATCHED, CallState.RUNNING, CallState.YIELDED):
        batch.transition(call, CallEvent.REQUEST_CANCEL, reason=CallReason.DEADLINE_EXCEEDED, error=error)


def _forget(core: Core) -> None:
    """Terminal jobs whose models are gone leave memory."""
    ledger, now = core.ledger, core.clock.now()
    for job in list(ledger.jobs.values()):
        if job.state not in job_lifecycle.TERMINAL or job.end_time is None or now - job.end_time < FORGET_AFTER_S:
            continue
        models = [ledger.models[m] for m in ledger.models_of_job.get(job.job_id, ())]
        if all(m.state in model_lifecycle.TERMINAL for m in models):
            ledger.forget_job(job.job_id)
