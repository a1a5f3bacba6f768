"""Exceptions to gRPC status, one table, one place. Nothing leaves the server as UNKNOWN."""

from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

import grpc
import structlog
from google.rpc import code_pb2

from plexrl import wire
from plexrl_controller.domain.errors import ControllerError, InvalidArgument, LeadershipLost, Unavailable

_log = structlog.get_logger("plexrl.controller")
MAX_MESSAGE_CHARACTERS = 600
_CODES = {code.name: code for code in grpc.StatusCode}


def normalize(error: Exception) -> ControllerError:
    """The typed error for any exception: an unexpected one is INTERNAL, logged with its traceback."""
    match error:
        case LeadershipLost():
            return Unavailable("this controller no longer leads; retry", retry_after_s=0.5)
        case ControllerError():
            return error
        case wire.WireError():
            return InvalidArgument(str(error))
        case _:
            _log.error("unexpected_error", exc_info=error)
            return ControllerError(f"unexpected {type(error).__name__}; the controller's log has the details")


def status_of(error: ControllerError) -> Any:
    """The google.rpc.Status of an error."""
    code = code_pb2.Code.Value(error.code)
    info = wire.ErrorInfo(code, error.reason, _bounded(error.message), error.metadata, error.retry_after_s)
    return wire.error_status(info)


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: Exception) -> NoReturn:
    """Ends the rpc with the error's status and details."""
    typed = normalize(error)
    context.set_trailing_metadata((("grpc-status-details-bin", status_of(typed).SerializeToString()),))
    await context.abort(_CODES[typed.code], _bounded(typed.message))
    raise AssertionError("abort returned")


def _bounded(message: str) -> str:
    """gRPC refuses trailers above 16 KiB, and a message may quote what a client sent: twice it must fit."""
    return message if len(message) <= MAX_MESSAGE_CHARACTERS else f"{message[:MAX_MESSAGE_CHARACTERS]}..."


Behavior = Callable[[Any, Any], Awaitable[Any]]
