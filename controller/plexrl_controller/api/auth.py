"""Who calls, and may they: bearer tokens, roles, one table from rpc to roles. What is not in the table is refused."""

from __future__ import annotations  # grpc.RpcMethodHandler is generic to type checkers only

import hashlib
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from plexrl_controller.api.status import abort
from plexrl_controller.dispatch.ledger import Ledger
from plexrl_controller.domain.errors import (
    ControllerError,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    Unauthenticated,
)
from plexrl_controller.domain.ids import Tenant
from plexrl_controller.domain.states import Role

R_ALL = frozenset({Role.ADMIN, Role.TENANT, Role.VIEWER})
R_WRITE = frozenset({Role.ADMIN, Role.TENANT})
R_ADMIN = frozenset({Role.ADMIN})
R_WORKER = frozenset({Role.WORKER})
ROLES: dict[str, frozenset[Role]] = {
    "/plexrl.v1.JobService/GetCapabilities": R_ALL,
    "/plexrl.v1.JobService/CreateJob": R_WRITE,
    "/plexrl.v1.JobService/AttachJob": R_WRITE,
    "/plexrl.v1.JobService/HeartbeatJob": R_WRITE,
    "/plexrl.v1.JobService/FinishJob": R_WRITE,
    "/plexrl.v1.JobService/GetJob": R_ALL,
    "/plexrl.v1.JobService/ListJobs": R_ALL,
    "/plexrl.v1.JobService/PutClientState": R_WRITE,
    "/plexrl.v1.ModelService/CreateModel": R_WRITE,
    "/plexrl.v1.ModelService/GetModel": R_ALL,
    "/plexrl.v1.ModelService/ListModels": R_ALL,
    "/plexrl.v1.ModelService/DeleteModel": R_WRITE,
    "/plexrl.v1.ModelService/ResumeSequence": R_WRITE,
    "/plexrl.v1.ModelService/Tokenize": R_WRITE,
    "/plexrl.v1.ModelService/Detokenize": R_WRITE,
    "/plexrl.v1.ModelService/ListCheckpoints": R_ALL,
    "/plexrl.v1.ModelService/ExportCheckpoint": R_WRITE,
    "/plexrl.v1.CallService/SubmitCall": R_WRITE,
    "/plexrl.v1.CallService/Connect": R_WRITE,
    "/plexrl.v1.CallService/GetCall": R_ALL,
    "/plexrl.v1.CallService/WatchCall": R_ALL,
    "/plexrl.v1.CallService/CancelCall": R_WRITE,
    "/plexrl.v1.CallService/AckCalls": R_WRITE,
    "/plexrl.v1.CallService/ListCalls": R_ALL,
    "/plexrl.v1.CallService/ExplainCall": R_ALL,
    "/plexrl.v1.SessionService/OpenSession": R_WRITE,
    "/plexrl.v1.SessionService/YieldSession": R_WRITE,
    "/plexrl.v1.SessionService/CloseSession": R_WRITE,
    "/plexrl.v1.SessionService/GetSession": R_ALL,
    "/plexrl.v1.PayloadService/PutPayload": R_WRITE,
    "/plexrl.v1.PayloadService/GetPayload": R_WRITE | R_WORKER,
    "/plexrl.v1.AdminService/CreateToken": R_ADMIN,
    "/plexrl.v1.AdminService/ListTokens": R_ADMIN,
    "/plexrl.v1.AdminService/RevokeToken": R_ADMIN,
    "/plexrl.v1.AdminService/ListWorkers": R_ALL,
    "/plexrl.v1.AdminService/CordonWorker": R_ADMIN,
    "/plexrl.v1.AdminService/UncordonWorker": R_ADMIN,
    "/plexrl.v1.AdminService/ListIntervals": R_ALL,
    "/plexrl.v1.RegistryService/Register": R_WORKER,
    "/plexrl.v1.RegistryService/Synchronize": R_WORKER,
}
_ANY_TOKEN = ("/grpc.reflection.", "/grpc.channelz.")
_OPEN = ("/grpc.health.v1.Health/",)


@dataclass(frozen=True, slots=True)
class Identity:
    """The account behind a token."""

    role: Role
    tenant: Tenant | None

    def may_see(self, tenant: Tenant) -> bool:
        """Whether a tenant's resources exist for this account."""
        return self.role in (Role.ADMIN, Role.VIEWER, Role.WORKER) or self.tenant == tenant

    @property
    def scope(self) -> Tenant | None:
        """The tenant whose resources listings are limited to; None for all."""
        return self.tenant if self.role is Role.TENANT else None

    @property
    def own_tenant(self) -> Tenant:
        """The tenant for which this account creates things. Raises PermissionDenied."""
        if self.tenant is None:
            raise PermissionDenied("this token belongs to no tenant; use one with a tenant to create jobs")
        return self.tenant


_current: ContextVar[Identity] = ContextVar("identity")


def identity() -> Identity:
    """The caller of the rpc that is being served."""
    return _current.get()


def require_visible(tenant: Tenant, kind: str, resource_id: str) -> None:
    """Another tenant's resource does not exist, as far as the caller can tell. Raises NotFound."""
    if not identity().may_see(tenant):
        raise NotFound(f"no live {kind} {resource_id!r}")


def token_sha256(token: str) -> str:
    """What the store keeps of a token."""
    return hashlib.sha256(token.encode()).hexdigest()


def authenticate(ledger: Ledger, metadata: Any) -> Identity:
    """The account of a request's bearer token. Raises Unauthenticated."""
    header = next((value for key, value in metadata or () if key == "authorization"), None)
    if not isinstance(header, str) or not header.startswith("Bearer "):
        raise Unauthenticated("send the header `authorization: Bearer TOKEN`; `plexrl up` writes a token file")
    # The hash is looked up, not the token: comparing hashes leaks nothing about other tokens.
    token_id = ledger.token_by_hash.get(token_sha256(header.removeprefix("Bearer ").strip()))
    token = ledger.tokens.get(token_id) if token_id is not None else None
    if token is None or token.revoked:
        raise Unauthenticated("this token is not known or revoked; ask an admin for another")
    return Identity(token.role, token.tenant)


class AuthInterceptor(grpc.aio.ServerInterceptor):
    """Authenticates and authorises every rpc, and turns every exception into a typed status."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Wraps the handler of one rpc."""
        method = str(handler_call_details.method)
        handler = await continuation(handler_call_details)
        if handler is None or method.startswith(_OPEN):
            return handler
        try:
            who = authenticate(self._ledger, handler_call_details.invocation_metadata)
            if not method.startswith(_ANY_TOKEN) and who.role not in ROLES.get(method, frozenset()):
                raise PermissionDenied(f"role {who.role.name.lower()} may not call {method}")
        except ControllerError as error:
            return _refusing(handler, error)
        return _serving(handler, who)


def _serving(handler: Any, who: Identity) -> grpc.RpcMethodHandler[Any, Any]:
    """The handler, run as `who`, its exceptions mapped."""
    inner = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
    if handler.response_streaming:

        async def stream(request: Any, context: Any) -> Any:
            _current.set(who)
            try:
                async for response in inner(_read(request), context):
                    yield response
            except (grpc.aio.AbortError, GeneratorExit):
                raise
            except Exception as error:  # noqa: BLE001 - the table in `status` is where every exception ends
                await abort(context, error)

        return _rebuilt(handler, stream)

    async def unary(request: Any, context: Any) -> Any:
        _current.set(who)
        try:
            return await inner(_read(request), context)
        except grpc.aio.AbortError:
            raise
        except Exception as error:  # noqa: BLE001 - the table in `status` is where every exception ends
            await abort(context, error)

    return _rebuilt(handler, unary)


def _refusing(handler: Any, error: ControllerError) -> grpc.RpcMethodHandler[Any, Any]:
    if handler.response_streaming:

        async def stream(request: Any, context: Any) -> Any:
            await abort(context, error)
            yield  # makes this a generator; never reached

        return _rebuilt(handler, stream)

    async def unary(request: Any, context: Any) -> Any:
        await abort(context, error)

    return _rebuilt(handler, unary)


def _rebuilt(handler: Any, behavior: Any) -> grpc.RpcMethodHandler[Any, Any]:
    make: Any = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[bool(handler.request_streaming), bool(handler.response_streaming)]
    deserialize = _tolerant(handler.request_deserializer)
    rebuilt: grpc.RpcMethodHandler[Any, Any] = make(behavior, deserialize, handler.response_serializer)
    return rebuilt


class _NoMessage:
    """Stands for bytes that are not what the rpc takes; gRPC itself would answer INTERNAL."""


def _tolerant(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def read(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError:
            return _NoMessage()

    return read


def _read(request: Any) -> Any:
    """The request, or a stream of them. Raises InvalidArgument for what is none."""
    if isinstance(request, _NoMessage):
        raise InvalidArgument("these bytes are no message of this rpc's type: use the stubs of plexrl.v1")
    return _read_all(request) if isinstance(request, AsyncIterable) else request


async def _read_all(requests: AsyncIterable[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        yield _read(request)
