"""The daemon's gRPC server: services, health, reflection and channelz behind one token."""

from __future__ import annotations  # grpc.RpcMethodHandler is generic to type checkers only

import hmac
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from grpc import aio
from grpc_channelz.v1 import channelz, channelz_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from plexrl import wire
from plexrl.v1 import worker_pb2, worker_pb2_grpc
from plexrl_worker.channel import AUTHORIZATION, bearer, server_credentials
from plexrl_worker.errors import SettingsError
from plexrl_worker.rpc_errors import ErrorInterceptor
from plexrl_worker.service import WeightService, WorkerService
from plexrl_worker.settings import WorkerSettings

_OPEN_METHODS_PREFIX = "/grpc.health.v1.Health/"
_SERVICES = (
    worker_pb2.DESCRIPTOR.services_by_name["WorkerService"].full_name,
    worker_pb2.DESCRIPTOR.services_by_name["WeightService"].full_name,
    health_pb2.DESCRIPTOR.services_by_name["Health"].full_name,
    channelz_pb2.DESCRIPTOR.services_by_name["Channelz"].full_name,
    reflection.SERVICE_NAME,
)


class TokenInterceptor(aio.ServerInterceptor):
    """Refuses every rpc without the worker token; health alone is open, for probes."""

    def __init__(self, token: str) -> None:
        self._expected = bearer(token).encode()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Lets the rpc through, or answers UNAUTHENTICATED in its place."""
        if handler_call_details.method.startswith(_OPEN_METHODS_PREFIX):
            return await continuation(handler_call_details)
        given = dict(handler_call_details.invocation_metadata or ()).get(AUTHORIZATION, "")
        if hmac.compare_digest(given.encode() if isinstance(given, str) else given, self._expected):
            return await continuation(handler_call_details)
        return _refusing_as(await continuation(handler_call_details))


def _refusing_as(handler: grpc.RpcMethodHandler[Any, Any] | None) -> grpc.RpcMethodHandler[Any, Any]:
    """A handler of the same shape that only refuses; of an unknown method too, so that names are not told either."""
    message = "want metadata `authorization: Bearer TOKEN` with this cluster's worker token"

    async def refuse(_: Any, context: aio.ServicerContext[Any, Any]) -> Any:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, message)

    async def refuse_stream(_: Any, context: aio.ServicerContext[Any, Any]) -> Any:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, message)
        yield

    match (handler is not None and handler.request_streaming, handler is not None and handler.response_streaming):
        case (False, False):
            return grpc.unary_unary_rpc_method_handler(refuse)
        case (True, False):
            return grpc.stream_unary_rpc_method_handler(refuse)
        case (False, True):
            return grpc.unary_stream_rpc_method_handler(refuse_stream)
        case _:
            return grpc.stream_stream_rpc_method_handler(refuse_stream)


class WorkerServer:
    """The server and the address that the controller calls."""

    def __init__(self, settings: WorkerSettings, service: WorkerService, weights: WeightService) -> None:
        self.health = health.aio.HealthServicer()
        interceptors = (TokenInterceptor(settings.token), ErrorInterceptor())
        # With SO_REUSEPORT a second daemon on a taken port would get every other connection of the first.
        options = (*wire.SERVER_OPTIONS, ("grpc.so_reuseport", 0))
        self._server = aio.server(interceptors=interceptors, options=options)
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(service, self._server)
        worker_pb2_grpc.add_WeightServiceServicer_to_server(weights, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self._server)
        channelz.add_channelz_servicer(self._server)
        reflection.enable_server_reflection(_SERVICES, self._server)
        try:
            if settings.tls is None:
                port = self._server.add_insecure_port(settings.listen)
            else:
                port = self._server.add_secure_port(settings.listen, server_credentials(settings.tls))
        except RuntimeError as error:
            raise SettingsError(
                f"--listen {settings.listen}: cannot be bound: the port is taken, or the address is not this machine's"
            ) from error
        self.address = settings.advertise or f"{settings.listen.rpartition(':')[0]}:{port}"

    async def start(self) -> None:
        """Begins to serve."""
        await self._server.start()

    async def set_serving(self, serving: bool) -> None:
        """What health says of the whole and of WorkerService."""
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", _SERVICES[0]):
            await self.health.set(name, status)

    async def stop(self, grace_s: float) -> None:
        """Refuses new rpcs, and ends what runs after `grace_s`."""
        await self._server.stop(grace_s)
