"""What is measured of the jobs while they run becomes what scheduling knows of them: estimates and accounts.

Volatile: a new leader begins with nothing known, places by memory and holds by the plain ski-rental rule until it has
seen enough. Decides nothing.
"""

from plexrl_controller.dispatch.facts import JobFacts, LastCall
from plexrl_controller.dispatch.ledger import Ledger
from plexrl_controller.domain.ids import JobId, WorkerId
from plexrl_controller.domain.records import Call, Interval, Job
from plexrl_controller.domain.states import IntervalKind
from plexrl_controller.scheduling.views import Demand


def learn_interval(ledger: Ledger, interval: Interval, now: float, *, whole: bool = True) -> None:
    """Device time was spent on a job: on its work, on moving its state, or on waiting for it.

    whole: with it the call has run to its end; a part of one, which then yielded, says nothing of a call's length.
    """
    job, group = ledger.jobs.get(interval.job_id), ledger.groups.get(interval.worker_id)
    if job is None or group is None:
        return
    seconds = (interval.end_unix_ns - interval.start_unix_ns) / 1e9
    for accounts in (group.accounts, ledger.tenant_accounts):
        accounts.join(job.job_id, job.tenant, job.weight)
        accounts.charge(job.job_id, seconds, now)
    match interval.kind:
        case IntervalKind.BUSY if interval.call_kind is not None and whole:
            earlier_s = ledger.ran_s.pop(interval.call_id, 0.0) if interval.call_id is not None else 0.0
            group.estimates.service(job.job_id, interval.call_kind, earlier_s + seconds)
        case IntervalKind.SWAP_IN | IntervalKind.SWAP_OUT:
            group.estimates.swap(job.job_id, seconds)
        case _:
            pass


def learn_return(ledger: Ledger, worker_id: WorkerId, job_id: JobId, ready_since: float) -> None:
    """A job of which nothing ran is served again: it had stalled since its last call, if it had nothing to run."""
    facts, group = ledger.facts.get(job_id), ledger.groups[worker_id]
    last = group.last_calls.get(job_id)
    if facts is None or last is None:
        return
    # A hint is the job's: of a stall in which it ran elsewhere it says nothing.
    hinted_s = _hinted_s(facts) if facts.last_finish == last.finish else None
    group.estimates.stall(job_id, last.kind, max(0.0, ready_since - last.finish), hinted_s)


def learn_finish(ledger: Ledger, call: Call, now: float) -> None:
    """A call finished or yielded."""
    if (facts := ledger.facts.get(call.job_id)) is None:
        return
    facts.last_finish = now
    if call.worker_id is not None:
        ledger.groups[call.worker_id].last_calls[call.job_id] = LastCall(now, call.kind)


def learn_iteration(ledger: Ledger, worker_id: WorkerId, job_id: JobId) -> None:
    """A job has synced its weights: what was measured since its last sync is one iteration."""
    ledger.groups[worker_id].estimates.iteration(job_id)


def known_demand(ledger: Ledger, job: Job) -> Demand | None:
    """What a new job will ask of its group: as an earlier one of its name did. Of its later models nothing is known."""
    return ledger.demands.get((job.tenant, job.name)) if not ledger.models_of_job.get(job.job_id) else None


def corrected_hint(facts: JobFacts, factor: float) -> float | None:
    """Until when the job is likely idle, as it said itself, corrected by what its hints were worth so far; None once a
    call of its has finished since.
    """
    if facts.last_finish <= 0.0:
        return facts.idle_until
    hinted_s = _hinted_s(facts)
    return None if hinted_s is None else facts.last_finish + hinted_s * factor


def _hinted_s(facts: JobFacts) -> float | None:
    """How long the job said it would stay away after its last call."""
    if facts.idle_until is None or facts.idle_until <= facts.last_finish or facts.last_finish <= 0.0:
        return None
    return facts.idle_until - facts.last_finish
