"""AdminService and RegistryService: operators and workers."""

import secrets
from collections.abc import AsyncIterator
from typing import Any

from plexrl.v1 import admin_pb2, admin_pb2_grpc, registry_pb2, registry_pb2_grpc
from plexrl_controller.api import messages
from plexrl_controller.api.auth import identity, token_sha256
from plexrl_controller.dispatch import limits, workers
from plexrl_controller.dispatch.core import Core
from plexrl_controller.dispatch.snapshots import may_stop
from plexrl_controller.domain.errors import AlreadyExists, FailedPrecondition, InvalidArgument, NotFound
from plexrl_controller.domain.ids import JobId, ModelId, Tenant, TokenId, WorkerId
from plexrl_controller.domain.records import Token
from plexrl_controller.domain.states import ModelState, Role, WorkerState
from plexrl_controller.lifecycle.workers import MACHINE, WorkerEvent


class AdminService(admin_pb2_grpc.AdminServiceServicer):
    """The wire's AdminService over the dispatcher's core."""

    def __init__(self, core: Core) -> None:
        self._core = core

    async def CreateToken(self, request: admin_pb2.CreateTokenRequest, context: Any) -> admin_pb2.CreateTokenResponse:
        """Creates a token and returns its text once."""
        label = messages.name_of(request.label, "label")
        if int(request.role) not in list(Role):
            raise InvalidArgument(f"role: {request.role} is no known value")
        role = Role(int(request.role))
        tenant = Tenant(messages.name_of(request.tenant, "tenant")) if request.tenant else None
        if role is Role.TENANT and tenant is None:
            raise InvalidArgument("tenant: a token of role tenant needs one")
        if role in (Role.VIEWER, Role.WORKER) and tenant is not None:
            raise InvalidArgument(f"tenant: a token of role {role.name.lower()} belongs to none")
        if any(t.label == label and not t.revoked for t in self._core.ledger.tokens.values()):
            raise AlreadyExists(f"label {label!r} is in use; choose another or revoke that token", reason="LABEL_TAKEN")
        secret = secrets.token_urlsafe(32)
        batch = self._core.batch()
        token = Token(TokenId(self._core.new_id()), token_sha256(secret), label, role, tenant)
        batch.insert(token)
        await self._core.commit(batch)
        return admin_pb2.CreateTokenResponse(token_id=token.token_id, token=secret)

    async def ListTokens(self, request: admin_pb2.ListTokensRequest, context: Any) -> admin_pb2.ListTokensResponse:
        """Lists the tokens that are not revoked."""
        valid = [token for token in self._core.ledger.tokens.values() if not token.revoked]
        return admin_pb2.ListTokensResponse(
            tokens=[
                admin_pb2.Token(
                    token_id=token.token_id,
                    label=token.label,
                    tenant=token.tenant or "",
                    role=admin_pb2.Role.ValueType(token.role),
                )
                for token in sorted(valid, key=lambda token: token.label)
            ]
        )

    async def RevokeToken(self, request: admin_pb2.RevokeTokenRequest, context: Any) -> admin_pb2.RevokeTokenResponse:
        """Revokes a token."""
        token = self._core.ledger.tokens.get(TokenId(request.token_id))
        if token is None:
            raise NotFound(f"no token {request.token_id!r}")
        if not token.revoked:
            batch = self._core.batch()
            batch.update(token, revoked=True)
            await self._core.commit(batch)
        return admin_pb2.RevokeTokenResponse()

    async def ListWorkers(self, request: admin_pb2.ListWorkersRequest, context: Any) -> admin_pb2.ListWorkersResponse:
        """Lists workers; a tenant sees only what they hold of its own."""
        who, listed = identity(), []
        for worker in sorted(self._core.ledger.workers.values(), key=lambda w: w.name):
            message = messages.worker_message(self._core, worker)
            if who.role is Role.TENANT:
                mine = [
                    d for d in message.deployments if self._core.ledger.models[ModelId(d.model_id)].tenant == who.tenant
                ]
                del message.deployments[:]
                message.deployments.extend(mine)
                serving = self._core.ledger.jobs.get(JobId(message.serving_job_id))
                if serving is None or serving.tenant != who.tenant:
                    message.serving_job_id = ""
            listed.append(message)
        return admin_pb2.ListWorkersResponse(workers=listed)

    async def CordonWorker(self, request: admin_pb2.CordonWorkerRequest, context: Any) -> admin_pb2.Worker:
        """Stops placing models on a worker."""
        return await self._move(request.worker_id, WorkerEvent.CORDON, cordoned=True)

    async def UncordonWorker(self, request: admin_pb2.UncordonWorkerRequest, context: Any) -> admin_pb2.Worker:
        """Places models on a worker again."""
        return await self._move(request.worker_id, WorkerEvent.UNCORDON, cordoned=False)

    async def ListIntervals(
        self, request: admin_pb2.ListIntervalsRequest, context: Any
    ) -> AsyncIterator[admin_pb2.ListIntervalsResponse]:
        """Streams device time, oldest first."""
        job_id = JobId(request.job_id) if request.job_id else None
        since_unix_ns = messages.nanoseconds(request, "start_time")
        async for batch in self._core.store.intervals(identity().scope, job_id, since_unix_ns):
            yield admin_pb2.ListIntervalsResponse(intervals=[messages.interval_message(i) for i in batch])

    async def _move(self, worker_id: str, event: WorkerEvent, *, cordoned: bool) -> admin_pb2.Worker:
        worker = self._core.ledger.worker(WorkerId(worker_id))
        if MACHINE.find(worker.state, event) is None:
            sources = " or ".join(sorted(s.name for s in MACHINE.sources_of(event)))
            raise FailedPrecondition(
                f"worker {worker.name} is {worker.state.name}; {event.name.lower()} needs {sources}"
            )
        batch = self._core.batch()
        batch.transition(worker, event, cordoned=cordoned)
        await self._core.commit(batch)
        return messages.worker_message(self._core, self._core.ledger.workers[worker.worker_id])


class RegistryService(registry_pb2_grpc.RegistryServiceServicer):
    """The wire's RegistryService over the dispatcher's core."""

    def __init__(self, core: Core) -> None:
        self._core = core

    async def Register(self, request: registry_pb2.RegisterRequest, context: Any) -> registry_pb2.RegisterResponse:
        """Gives a life of a worker its identity and fences."""
        if not request.address or request.life_nonce == 0:
            raise InvalidArgument("address and life_nonce are required")
        announcement = workers.Announcement(
            name=messages.name_of(request.name, "name"),
            address=request.address,
            labels=messages.labels_of(request.labels, "labels"),
            capabilities=request.capabilities,
            life_nonce=request.life_nonce & 0x7FFF_FFFF_FFFF_FFFF,
            version=request.version,
        )
        worker = await workers.register(self._core, announcement)
        return registry_pb2.RegisterResponse(
            worker_id=worker.worker_id,
            worker_incarnation=worker.incarnation,
            leader_term=self._core.term,
            sync_interval=messages.duration(limits.WORKER_SYNC_INTERVAL_S),
            lease=messages.duration(limits.WORKER_LEASE_S),
        )

    async def Synchronize(
        self, request: registry_pb2.SynchronizeRequest, context: Any
    ) -> registry_pb2.SynchronizeResponse:
        """Renews a worker's lease and says what belongs on it."""
        worker = await workers.synchronize(self._core, request)
        return registry_pb2.SynchronizeResponse(
            leader_term=self._core.term,
            directive=registry_pb2.WORKER_DIRECTIVE_STOP
            if worker.state is WorkerState.DRAINED or may_stop(self._core, worker.worker_id)
            else registry_pb2.WORKER_DIRECTIVE_SERVE,
            model_ids=[
                model_id
                for model_id in self._core.ledger.models_of_worker[worker.worker_id]
                if self._core.ledger.models[model_id].state is not ModelState.DELETING
            ],
        )
