"""Jobs: creating, leases, finishing; each mutation once, whoever resends it."""

from dataclasses import dataclass, field

from plexrl_controller.dispatch import limits
from plexrl_controller.dispatch.core import Core
from plexrl_controller.dispatch.facts import JobFacts
from plexrl_controller.dispatch.ledger import Batch, live_jobs
from plexrl_controller.domain.errors import AlreadyExists, FailedPrecondition, NotFound, ResourceExhausted
from plexrl_controller.domain.ids import JobId, RequestId, Tenant
from plexrl_controller.domain.records import Job, Request
from plexrl_controller.domain.states import JobState
from plexrl_controller.lifecycle import jobs as job_lifecycle
from plexrl_controller.lifecycle.jobs import JobEvent


@dataclass(frozen=True, slots=True)
class Key:
    """An idempotency key with the hash of its request's content."""

    scope: str
    request_id: RequestId
    request_hash: str


@dataclass(frozen=True, slots=True)
class JobSpec:
    """A validated request for a job."""

    tenant: Tenant
    name: str
    lease_s: float
    weight: float = 1.0
    slowdown_target: float = 1.3
    labels: dict[str, str] = field(default_factory=dict)


def done_before(core: Core, key: Key) -> str | None:
    """The resource that an earlier request with this key made. Raises AlreadyExists when its content was another."""
    known = core.ledger.requests.get((key.scope, key.request_id))
    if known is None:
        return None
    check_same_content(key, known.request_hash)
    return known.resource_id


def check_same_content(key: Key, request_hash: str) -> None:
    """Raises AlreadyExists when a key's earlier request had other content."""
    if request_hash != key.request_hash:
        raise AlreadyExists(
            f"request_id {key.request_id!r} was used for other content; use a fresh id", reason="REQUEST_ID_REUSED"
        )


def remember(batch: Batch, key: Key, resource_id: str) -> None:
    """Makes the outcome of a request part of the batch that performs it."""
    batch.request(Request(key.scope, key.request_id, key.request_hash, resource_id, batch.now))


async def create_job(core: Core, key: Key, spec: JobSpec) -> Job:
    """Creates a job and starts its lease."""
    if (job_id := done_before(core, key)) is not None:
        await core.commit(core.batch())
        job = core.ledger.jobs.get(JobId(job_id)) or await core.store.get_job(JobId(job_id))
        if job is None:
            raise NotFound(f"job {job_id} of this request id is gone")
        return job
    mine = [job for job in live_jobs(core.ledger) if job.tenant == spec.tenant]
    if any(job.name == spec.name for job in mine):
        raise AlreadyExists(
            f"a live job is named {spec.name!r}: attach to it, finish it, or choose another name",
            reason="JOB_NAME_TAKEN",
        )
    if len(mine) >= limits.MAX_LIVE_JOBS_PER_TENANT:
        raise ResourceExhausted(f"tenant {spec.tenant} has {len(mine)} live jobs, which is the limit; finish some")
    batch = core.batch()
    job = Job(
        job_id=JobId(core.new_id()),
        tenant=spec.tenant,
        name=spec.name,
        state=JobState.ACTIVE,
        create_time=batch.now,
        lease_s=spec.lease_s,
        weight=spec.weight,
        slowdown_target=spec.slowdown_target,
        labels=spec.labels,
    )
    batch.insert(job)
    core.ledger.facts[job.job_id] = JobFacts(lease_end=batch.now + spec.lease_s)
    remember(batch, key, job.job_id)
    await core.commit(batch)
    return job


def heartbeat(core: Core, job: Job, idle_s: float | None) -> float:
    """Renews a lease and takes the idle hint; returns the lease's end. In memory only: it must never wait for calls."""
    if job.state in job_lifecycle.TERMINAL or job.state is JobState.FINISHING:
        raise FailedPrecondition(f"job {job.name} is {job.state.name}. {job.message}".strip(), reason="JOB_NOT_ACTIVE")
    facts, now = core.ledger.facts[job.job_id], core.clock.now()
    facts.lease_end = now + job.lease_s
    if idle_s is not None:
        hint_idle(core, job, idle_s)
    return facts.lease_end


def hint_idle(core: Core, job: Job, idle_s: float) -> None:
    """The job says that it asks nothing for a while."""
    core.ledger.facts[job.job_id].idle_until = core.clock.now() + idle_s
    for model_id in core.ledger.models_of_job.get(job.job_id, ()):
        if (worker_id := core.ledger.models[model_id].worker_id) is not None:
            core.wake(worker_id)


async def finish_job(core: Core, job: Job) -> Job:
    """Ends a job; ending it again changes nothing."""
    if job.state in (JobState.ACTIVE, JobState.PAUSED):
        batch = core.batch()
        batch.transition(job, JobEvent.FINISH)
        await core.commit(batch)
    return core.ledger.jobs.get(job.job_id, job)


async def put_client_state(core: Core, key: Key, job: Job, state: bytes) -> None:
    """Replaces the client's blob. The same request again, though another came in between, changes nothing.

    Keys are remembered in memory, the last MAX_REMEMBERED_PUTS of a job: a client puts one after the other, and what a
    connection delivers late does not outlive the controller that the connection was to.
    """
    known = core.ledger.facts[job.job_id].client_state_keys
    if (content := known.get(key.request_id)) is not None:
        check_same_content(key, content)
        await core.commit(core.batch())
        return
    if len(state) > limits.MAX_CLIENT_STATE_BYTES:
        raise ResourceExhausted(f"client state has {len(state)} bytes; the limit is {limits.MAX_CLIENT_STATE_BYTES}")
    batch = core.batch()
    batch.update(job, client_state=state)
    known[key.request_id] = key.request_hash
    if len(known) > limits.MAX_REMEMBERED_PUTS:
        del known[next(iter(known))]
    await core.commit(batch)
