"""How an rpc of the worker ends that does not end well: every exception, and bytes that are no message, as a status.

Knows errors and handlers, nothing of what the services do.
"""

from __future__ import annotations  # grpc.RpcMethodHandler is generic to type checkers only

from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn

import grpc
import structlog
from google.protobuf.message import DecodeError
from grpc import aio

from plexrl import wire
from plexrl_worker.errors import GRPC_CODES, EngineFailed, InvalidOrder, WorkerError, to_status

_log = structlog.get_logger(__name__)

_OURS_PREFIX = "/plexrl.v1."
_STATUS_DETAILS_KEY = "grpc-status-details-bin"


class ErrorInterceptor(aio.ServerInterceptor):
    """Maps what the handlers of our own services raise; health, reflection and channelz are left alone."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """The handler, with every exception mapped."""
        handler = await continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith(_OURS_PREFIX):
            return handler
        return _mapping(handler, handler_call_details.method)


class _NoMessage:
    """Stands for bytes that are not what the rpc takes; gRPC itself would answer UNKNOWN or INTERNAL."""


def _mapping(handler: Any, method: str) -> grpc.RpcMethodHandler[Any, Any]:
    inner = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
    behavior: Any
    if handler.response_streaming:

        async def stream(request: Any, context: Any) -> Any:
            try:
                async for response in inner(_read(request), context):
                    yield response
            except (aio.AbortError, GeneratorExit):
                raise
            except Exception as error:  # noqa: BLE001 - here every exception ends
                await _abort(context, error, method)

        behavior = stream
    else:

        async def unary(request: Any, context: Any) -> Any:
            try:
                return await inner(_read(request), context)
            except aio.AbortError:
                raise
            except Exception as error:  # noqa: BLE001 - here every exception ends
                await _abort(context, error, method)

        behavior = unary
    make: Any = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[bool(handler.request_streaming), bool(handler.response_streaming)]
    rebuilt: grpc.RpcMethodHandler[Any, Any] = make(
        behavior, _tolerant(handler.request_deserializer), handler.response_serializer
    )
    return rebuilt


async def _abort(context: Any, error: Exception, method: str) -> NoReturn:
    """Ends the rpc with the error's status, ErrorInfo included."""
    match error:
        case WorkerError():
            failure = error
        case wire.WireError():
            failure = InvalidOrder(str(error))
        case _:
            _log.error("rpc_failed", method=method, exc_info=error)
            failure = EngineFailed(f"a fault of the worker: {error!r}")
    status = to_status(failure)
    details = ((_STATUS_DETAILS_KEY, status.SerializeToString()),)
    await context.abort(GRPC_CODES[failure.code], status.message, details)
    raise AssertionError("abort returns never")


def _tolerant(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def read(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError:
            return _NoMessage()

    return read


def _read(request: Any) -> Any:
    """The request, or a stream of them. Raises InvalidOrder for what is none."""
    if isinstance(request, _NoMessage):
        raise InvalidOrder("these bytes are no message of this rpc's type: use the stubs of plexrl.v1")
    return _read_all(request) if isinstance(request, AsyncIterable) else request


async def _read_all(requests: AsyncIterable[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        yield _read(request)
