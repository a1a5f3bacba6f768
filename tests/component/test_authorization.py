"""A request without a token, with the wrong role, or for another tenant's resource gets nothing (G23)."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from google.protobuf import message_factory
from google.protobuf.descriptor import MethodDescriptor

from plexrl.v1 import call_pb2, job_pb2, model_pb2, session_pb2
from plexrl_controller.api.auth import ROLES, token_sha256
from plexrl_controller.api.sessions import SessionService
from plexrl_controller.dispatch.grpc_transport import GrpcTransport
from plexrl_controller.domain.ids import Tenant, TokenId
from plexrl_controller.domain.records import Token
from plexrl_controller.domain.states import Role
from plexrl_controller.server import SERVICES, build_server
from tests.support import specs
from tests.support.leader import TENANT, Leader, running_leader

METHODS: list[MethodDescriptor] = [
    method for name, module in SERVICES.items() for method in module.DESCRIPTOR.services_by_name[name].methods
]
TOKENS = {
    "alpha": (Role.TENANT, TENANT),
    "beta": (Role.TENANT, Tenant("beta")),
    "viewer": (Role.VIEWER, None),
    "worker": (Role.WORKER, None),
}


@dataclass
class Served:
    """A served leader with a job, a model, a session and a call of tenant alpha."""

    leader: Leader
    channel: grpc.aio.Channel
    ids: dict[str, str]

    async def answer(self, method: MethodDescriptor, token: str | None) -> grpc.StatusCode:
        """The status of one call of an rpc, with the ids of alpha's resources wherever the request has them."""
        request = message_factory.GetMessageClass(method.input_type)()
        for field in method.input_type.fields:
            if field.name in self.ids:
                setattr(request, field.name, self.ids[field.name])
        if isinstance(request, call_pb2.ConnectRequest):
            request.messages.add().hello.job_id = self.ids["job_id"]
        if isinstance(request, call_pb2.SubmitCallRequest):
            request.spec.CopyFrom(specs.generate())
        response = message_factory.GetMessageClass(method.output_type)
        metadata = (("authorization", f"Bearer {token}"),) if token else ()
        path = f"/{method.containing_service.full_name}/{method.name}"
        kind = (
            ("stream" if method.client_streaming else "unary")
            + "_"
            + ("stream" if method.server_streaming else "unary")
        )
        call = getattr(self.channel, kind)(
            path, request_serializer=type(request).SerializeToString, response_deserializer=response.FromString
        )
        try:
            sent: Any = iter([request]) if method.client_streaming else request
            outcome = call(sent, metadata=metadata, timeout=5)
            if method.server_streaming:
                async for _ in outcome:
                    break
            else:
                await outcome
        except grpc.aio.AioRpcError as error:
            return error.code()
        return grpc.StatusCode.OK


@asynccontextmanager
async def served() -> AsyncIterator[Served]:
    async with running_leader() as leader:
        batch = leader.core.batch()
        for secret, (role, tenant) in TOKENS.items():
            batch.insert(Token(TokenId(secret), token_sha256(secret), secret, role, tenant))
        await leader.core.commit(batch)
        await leader.join()
        model = await leader.model(await leader.job())
        call = await leader.submit(model, specs.save(), 1)
        await leader.work()
        opening = session_pb2.OpenSessionRequest(request_id="opened", model_id=model.model_id)
        session = await SessionService(leader.core).OpenSession(opening, None)
        transport = GrpcTransport(1, "worker")
        server, _ = build_server(leader.core, transport)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        checkpoint = next(iter(leader.core.ledger.checkpoints))
        ids = {"job_id": model.job_id, "model_id": model.model_id, "call_id": call.call_id, "checkpoint_id": checkpoint}
        ids["session_id"] = session.session_id
        ids |= {"request_id": "request", "payload_id": "0" * 64, "name": "fresh", "sha256": "0" * 64}
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                yield Served(leader, channel, ids)
        finally:
            await server.stop(0)


def test_every_rpc_has_its_roles() -> None:
    assert {f"/{m.containing_service.full_name}/{m.name}" for m in METHODS} == set(ROLES)


async def test_without_a_known_token_nothing_answers() -> None:
    async with served() as s:
        for method in METHODS:
            assert await s.answer(method, None) is grpc.StatusCode.UNAUTHENTICATED, method.full_name
            assert await s.answer(method, "guess") is grpc.StatusCode.UNAUTHENTICATED, method.full_name


async def test_every_rpc_refuses_every_role_that_is_not_listed() -> None:
    async with served() as s:
        for method in METHODS:
            allowed = ROLES[f"/{method.containing_service.full_name}/{method.name}"]
            for token, (role, _) in TOKENS.items():
                if role not in allowed:
                    assert await s.answer(method, token) is grpc.StatusCode.PERMISSION_DENIED, (method.full_name, token)


async def test_another_tenants_resources_do_not_exist() -> None:
    """Every rpc that names a job, model, call or checkpoint: its owner reaches it, another tenant is told NOT_FOUND."""
    reached = 0
    async with served() as s:
        before = (await s.leader.core.store.load(), dict(s.leader.core.ledger.calls))
        for method in METHODS:
            names = {field.name for field in method.input_type.fields}
            named = names & {"job_id", "model_id", "call_id", "checkpoint_id", "session_id"} or method.name == "Connect"
            if not named or Role.TENANT not in ROLES[f"/{method.containing_service.full_name}/{method.name}"]:
                continue
            reached += 1
            code = await s.answer(method, "beta")
            if method.name in ("ListCalls", "ListIntervals"):  # listings answer, with nothing of another's
                assert code is grpc.StatusCode.OK
            else:
                assert code is grpc.StatusCode.NOT_FOUND, method.full_name
        assert dict(s.leader.core.ledger.calls) == before[1]
    assert reached > 15


async def test_listings_show_a_tenant_nothing_of_anothers() -> None:
    async with served() as s:
        metadata = (("authorization", "Bearer beta"),)
        from plexrl.v1 import call_pb2_grpc, job_pb2_grpc

        jobs = await job_pb2_grpc.JobServiceStub(s.channel).ListJobs(job_pb2.ListJobsRequest(), metadata=metadata)
        calls = await call_pb2_grpc.CallServiceStub(s.channel).ListCalls(
            call_pb2.ListCallsRequest(job_id=s.ids["job_id"]), metadata=metadata
        )
        assert list(jobs.jobs) == []
        assert list(calls.calls) == []


@pytest.mark.parametrize("token", ["alpha", "viewer"])
async def test_the_owner_and_a_viewer_read(token: str) -> None:
    """The tests above could not fail if nothing ever answered."""
    async with served() as s:
        get = next(m for m in METHODS if m.name == "GetModel")
        assert await s.answer(get, token) is grpc.StatusCode.OK
        assert isinstance(model_pb2.GetModelRequest(), message_factory.GetMessageClass(get.input_type))
