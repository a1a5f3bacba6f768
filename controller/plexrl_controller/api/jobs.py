"""JobService: jobs, leases, and what a client needs to resume."""

import re
from collections.abc import Sequence
from typing import Any

from plexrl.v1 import job_pb2, job_pb2_grpc, registry_pb2
from plexrl.wire import MAX_MESSAGE_BYTES
from plexrl_controller.api import messages
from plexrl_controller.api.auth import identity, require_visible
from plexrl_controller.api.calls import page_size
from plexrl_controller.dispatch import jobs, limits
from plexrl_controller.dispatch.core import Core
from plexrl_controller.dispatch.ledger import live_jobs
from plexrl_controller.domain.errors import FailedPrecondition, InvalidArgument, NotFound
from plexrl_controller.domain.ids import JobId
from plexrl_controller.domain.records import Job
from plexrl_controller.domain.states import WorkerState
from plexrl_controller.lifecycle import jobs as job_lifecycle
from plexrl_controller.store.port import Page
from plexrl_controller.version import OLDEST_CLIENT, VERSION


class JobService(job_pb2_grpc.JobServiceServicer):
    """The wire's JobService over the dispatcher's core."""

    def __init__(self, core: Core) -> None:
        self._core = core

    async def GetCapabilities(self, request: job_pb2.GetCapabilitiesRequest, context: Any) -> job_pb2.Capabilities:
        """Tells versions, functions, losses and limits."""
        if request.client_version and _release(request.client_version) < OLDEST_CLIENT:
            oldest = ".".join(map(str, OLDEST_CLIENT))
            raise FailedPrecondition(
                f"client {request.client_version} is too old for server {VERSION}; install plexrl>={oldest}",
                reason="CLIENT_TOO_OLD",
            )
        workers = [
            registry_pb2.WorkerCapabilities.FromString(w.capabilities)
            for w in self._core.ledger.workers.values()
            if w.state is not WorkerState.LOST
        ]
        return job_pb2.Capabilities(
            server_version=VERSION,
            wire_packages=["plexrl.v1"],
            call_kinds=sorted({kind for w in workers for kind in w.call_kinds}),
            losses=sorted({loss for w in workers for loss in w.losses}),
            max_message_bytes=MAX_MESSAGE_BYTES,
            max_outstanding_calls=limits.MAX_OUTSTANDING_CALLS,
            max_sequence_ahead=limits.MAX_SEQUENCE_AHEAD,
            catalogue=sorted({name for w in workers for name in w.catalogue}),
        )

    async def CreateJob(self, request: job_pb2.CreateJobRequest, context: Any) -> job_pb2.Job:
        """Creates a job."""
        tenant = identity().own_tenant
        if request.weight < 0 or not request.weight < 1e6:
            raise InvalidArgument(f"weight: {request.weight:g}, want a number > 0")
        if request.slowdown_target and not 1.0 <= request.slowdown_target < 1e6:
            raise InvalidArgument(f"slowdown_target: {request.slowdown_target:g}, want a number >= 1")
        spec = jobs.JobSpec(
            tenant=tenant,
            name=messages.name_of(request.name, "name"),
            lease_s=messages.seconds(request, "lease", limits.DEFAULT_LEASE_S, limits.LEASE_RANGE_S),
            weight=request.weight or 1.0,
            slowdown_target=request.slowdown_target or 1.3,
            labels=messages.labels_of(request.labels, "labels"),
        )
        job = await jobs.create_job(self._core, key_of(f"{tenant}/CreateJob", request), spec)
        return messages.job_message(self._core, job)

    async def AttachJob(self, request: job_pb2.AttachJobRequest, context: Any) -> job_pb2.AttachJobResponse:
        """Takes a live job over."""
        job = self._find(request)
        jobs.heartbeat(self._core, job, None)
        ledger = self._core.ledger
        models = [ledger.models[m] for m in ledger.models_of_job.get(job.job_id, ())]
        calls = [ledger.calls[c] for c in ledger.calls_of_job.get(job.job_id, ())]
        # What is told here must be durable, and the newest: a client goes on from it.
        await self._core.writer.confirmed()
        return job_pb2.AttachJobResponse(
            job=messages.job_message(self._core, job),
            models=[
                job_pb2.ModelCursor(
                    model=messages.model_message(self._core, model), next_sequence=model.last_sequence + 1
                )
                for model in models
            ],
            calls=[messages.call_message(self._core, call) for call in calls],
            client_state=job.client_state,
        )

    async def HeartbeatJob(self, request: job_pb2.HeartbeatJobRequest, context: Any) -> job_pb2.HeartbeatJobResponse:
        """Renews the lease."""
        job = self._job(request.job_id)
        idle_s = messages.seconds(request, "idle_hint", 0.0, (0.0, 86_400.0)) if request.HasField("idle_hint") else None
        lease_end = jobs.heartbeat(self._core, job, idle_s)
        return job_pb2.HeartbeatJobResponse(
            state=job_pb2.JobState.ValueType(job.state), lease_end_time=messages.timestamp(lease_end)
        )

    async def FinishJob(self, request: job_pb2.FinishJobRequest, context: Any) -> job_pb2.Job:
        """Ends a job."""
        messages.request_id_of(request.request_id)
        job = await self._any_job(request.job_id)
        return messages.job_message(self._core, await jobs.finish_job(self._core, job))

    async def GetJob(self, request: job_pb2.GetJobRequest, context: Any) -> job_pb2.Job:
        """Reads one job."""
        return (await self._messages([await self._any_job(request.job_id)]))[0]

    async def ListJobs(self, request: job_pb2.ListJobsRequest, context: Any) -> job_pb2.ListJobsResponse:
        """Lists jobs, newest first."""
        page = Page(size=page_size(request.page_size), after=request.page_token or None)
        listing = await self._core.store.list_jobs(identity().scope, request.live_only, page)
        newest = [self._core.ledger.jobs.get(job.job_id, job) for job in listing.items]
        return job_pb2.ListJobsResponse(jobs=await self._messages(newest), next_page_token=listing.next or "")

    async def PutClientState(
        self, request: job_pb2.PutClientStateRequest, context: Any
    ) -> job_pb2.PutClientStateResponse:
        """Replaces the client's blob."""
        job = self._job(request.job_id)
        key = key_of(f"{job.job_id}/PutClientState", request)
        await jobs.put_client_state(self._core, key, job, request.client_state)
        return job_pb2.PutClientStateResponse()

    async def _messages(self, listed: Sequence[Job]) -> list[job_pb2.Job]:
        """Jobs with their accounts; of those that ended a while ago, or under another leader, the store has them."""
        known = {
            job.job_id: messages.job_message(self._core, job) for job in listed if job.job_id in self._core.ledger.jobs
        }
        stored = await self._core.store.accounts([job.job_id for job in listed if job.job_id not in known])
        return [
            known.get(job.job_id) or messages.job_message(self._core, job, stored.get(job.job_id)) for job in listed
        ]

    def _find(self, request: job_pb2.AttachJobRequest) -> Job:
        if request.WhichOneof("job") == "name":
            tenant = identity().own_tenant
            named = [j for j in live_jobs(self._core.ledger) if j.tenant == tenant and j.name == request.name]
            if not named:
                raise NotFound(f"no live job is named {request.name!r}")
            return named[0]
        job = self._job(request.job_id)
        if job.state in job_lifecycle.TERMINAL:
            raise NotFound(f"no live job {request.job_id!r}: it is {job.state.name}. {job.message}".strip())
        return job

    def _job(self, job_id: str) -> Job:
        job = self._core.ledger.job(JobId(job_id))
        require_visible(job.tenant, "job", job_id)
        return job

    async def _any_job(self, job_id: str) -> Job:
        job = self._core.ledger.jobs.get(JobId(job_id)) or await self._core.store.get_job(JobId(job_id))
        if job is None:
            raise NotFound(f"no job {job_id!r}")
        require_visible(job.tenant, "job", job_id)
        return job


def key_of(scope: str, request: Any) -> jobs.Key:
    """The idempotency key of a request."""
    return jobs.Key(scope, messages.request_id_of(request.request_id), messages.content_hash(request))


def _release(version: str) -> tuple[int, ...]:
    """The leading numbers of a version; a malformed one counts as the oldest."""
    numbers = []
    for part in version.split(".")[:3]:
        digits = re.match("[0-9]{1,9}", part)
        if digits is None:
            break
        numbers.append(int(digits[0]))
    return tuple(numbers)
