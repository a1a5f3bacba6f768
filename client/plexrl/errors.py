"""What can go wrong, as one family of exceptions, and the one table from the wire's reasons to its members.

Knows `google.rpc.Status` and gRPC's own exception; knows nothing of channels, jobs or calls.
"""

from collections.abc import Mapping

import grpc
from google.protobuf.message import DecodeError
from google.rpc import code_pb2, status_pb2

from plexrl.wire import ErrorInfo, error_info

_STATUS_TRAILER = "grpc-status-details-bin"


class PlexRLError(Exception):
    """Root of everything that this package raises on purpose; the message says what to do.

    `reason` is stable and made for programs, e.g. "REQUEST_ID_REUSED". `retry_after_s` is set where waiting helps.
    """

    default_reason = "UNKNOWN"

    def __init__(
        self,
        message: str,
        *,
        reason: str | None = None,
        metadata: Mapping[str, str] | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.reason = reason or self.default_reason
        self.metadata = dict(metadata or {})
        self.retry_after_s = retry_after_s


class InvalidArgument(PlexRLError):
    """Arguments that cannot be honoured; the message names the field and its limit."""

    default_reason = "INVALID_ARGUMENT"


class Unsupported(PlexRLError):
    """A setting or function that this server does not offer."""

    default_reason = "UNSUPPORTED"


class Unauthenticated(PlexRLError):
    """No token, or one that the server does not know."""

    default_reason = "UNAUTHENTICATED"


class PermissionDenied(PlexRLError):
    """A token whose role may not do this."""

    default_reason = "PERMISSION_DENIED"


class NotFound(PlexRLError):
    """No such job, model, call or checkpoint among those of this tenant."""

    default_reason = "NOT_FOUND"


class AlreadyExists(PlexRLError):
    """A name or sequence number that is in use: attach to its owner, or choose another."""

    default_reason = "ALREADY_EXISTS"


class RequestIdReused(AlreadyExists):
    """A request_id that was used for other content."""

    default_reason = "REQUEST_ID_REUSED"


class Unavailable(PlexRLError):
    """The service could not be reached within the retry bound. What was accepted goes on: attach to the job later."""

    default_reason = "UNAVAILABLE"


class ResourceExhausted(PlexRLError):
    """A bound was reached; the message names it. Take results, wait, or send less."""

    default_reason = "RESOURCE_EXHAUSTED"


class FailedPrecondition(PlexRLError):
    """The state does not allow this; the message says what must come first."""

    default_reason = "FAILED_PRECONDITION"


class PredecessorFailed(FailedPrecondition):
    """An earlier call of the model's sequence did not succeed: decide, then `model.resume()`."""

    default_reason = "PREDECESSOR_FAILED"


class StateLost(FailedPrecondition):
    """The model's training state is gone: `model.load_checkpoint(...)` brings one back."""

    default_reason = "STATE_LOST"


class NoFeasibleWorker(FailedPrecondition):
    """No registered worker can hold the model or carries its labels."""

    default_reason = "NO_FEASIBLE_WORKER"


class JobEnded(FailedPrecondition):
    """The job has ended: its client finished it, or its lease ran out. Checkpoints stay."""

    default_reason = "JOB_ENDED"


class ModelEnded(FailedPrecondition):
    """The model was deleted or could not be built."""

    default_reason = "MODEL_NOT_ACTIVE"


class SessionEnded(FailedPrecondition):
    """The session takes no more calls: it was closed, or nothing was asked of it for its idle limit. Open another."""

    default_reason = "SESSION_NOT_OPEN"


class CallFailed(PlexRLError):
    """An accepted call that did not succeed."""

    default_reason = "ENGINE_ERROR"


class EngineError(CallFailed):
    """The engine failed; the arguments do not explain it."""


class OutOfMemory(CallFailed):
    """The engine ran out of device memory: smaller batches, or activation checkpointing."""

    default_reason = "OUT_OF_MEMORY"


class NonFinite(CallFailed):
    """Numbers that are not finite; nothing was applied."""

    default_reason = "NON_FINITE"


class VersionGone(CallFailed):
    """The weights version that was asked for is no longer kept, or was replaced."""

    default_reason = "VERSION_GONE"


class CallCancelled(CallFailed):
    """The call was ended on request."""

    default_reason = "CANCELLED_BY_CLIENT"


class CallExpired(CallFailed):
    """The call's own deadline (`timeout_s`) passed before it finished."""

    default_reason = "DEADLINE_EXCEEDED"


class DataLoss(PlexRLError):
    """Bytes that do not match their hash; nothing of them was used."""

    default_reason = "DATA_LOSS"


class ConfigurationError(PlexRLError):
    """Nothing to connect to, or no safe way to: endpoint, token or TLS settings."""

    default_reason = "CONFIGURATION"


# The one table: reason on the wire → exception. Reasons that are not listed fall back to their canonical code below.
BY_REASON: Mapping[str, type[PlexRLError]] = {
    "INVALID_ARGUMENT": InvalidArgument,
    "UNSUPPORTED": Unsupported,
    "REQUEST_ID_REUSED": RequestIdReused,
    "SEQUENCE_TAKEN": AlreadyExists,
    "JOB_NAME_TAKEN": AlreadyExists,
    "MODEL_NAME_TAKEN": AlreadyExists,
    "SEQUENCE_TOO_FAR": ResourceExhausted,
    "TOO_MANY_CALLS": ResourceExhausted,
    "PREDECESSOR_FAILED": PredecessorFailed,
    "STATE_LOST": StateLost,
    "NO_FEASIBLE_WORKER": NoFeasibleWorker,
    "AFFINITY_UNSATISFIABLE": NoFeasibleWorker,
    "JOB_NOT_ACTIVE": JobEnded,
    "JOB_ENDED": JobEnded,
    "MODEL_NOT_ACTIVE": ModelEnded,
    "MODEL_DELETED": ModelEnded,
    "SESSION_NOT_OPEN": SessionEnded,
    "ENGINE_ERROR": EngineError,
    "ATTEMPTS_EXHAUSTED": EngineError,
    "OUT_OF_MEMORY": OutOfMemory,
    "NON_FINITE": NonFinite,
    "VERSION_GONE": VersionGone,
    "VERSION_REPLACED": VersionGone,
    "CANCELLED_BY_CLIENT": CallCancelled,
    "DEADLINE_EXCEEDED": CallExpired,
    "CHECKPOINT_CORRUPT": DataLoss,
}

_BY_CODE: Mapping[int, type[PlexRLError]] = {
    code_pb2.INVALID_ARGUMENT: InvalidArgument,
    code_pb2.OUT_OF_RANGE: InvalidArgument,
    code_pb2.UNIMPLEMENTED: Unsupported,
    code_pb2.UNAUTHENTICATED: Unauthenticated,
    code_pb2.PERMISSION_DENIED: PermissionDenied,
    code_pb2.NOT_FOUND: NotFound,
    code_pb2.ALREADY_EXISTS: AlreadyExists,
    code_pb2.RESOURCE_EXHAUSTED: ResourceExhausted,
    code_pb2.FAILED_PRECONDITION: FailedPrecondition,
    code_pb2.DATA_LOSS: DataLoss,
    code_pb2.CANCELLED: Unavailable,
    code_pb2.ABORTED: Unavailable,
    code_pb2.DEADLINE_EXCEEDED: Unavailable,
    code_pb2.UNAVAILABLE: Unavailable,
}

# What to do, where the server's sentence does not know the client's side of it.
_ADVICE: Mapping[type[PlexRLError], str] = {
    Unauthenticated: "set PLEXRL_TOKEN or PLEXRL_TOKEN_FILE, or pass token= to plexrl.connect",
    PermissionDenied: "use a token of a role that may, or ask an operator for one",
}
_UNREACHED = "check the endpoint and that the controller runs (`plexrl up` starts one here)"


def from_info(info: ErrorInfo) -> PlexRLError:
    """The exception that an error on the wire stands for."""
    # A CallReason's DEADLINE_EXCEEDED comes with ErrorInfo and means the call; the bare code means one rpc.
    kind = BY_REASON.get(info.reason) or _BY_CODE.get(info.code) or PlexRLError
    message = info.message or f"the server answered {info.reason} without a message"
    advice = _ADVICE.get(kind)
    if advice and advice not in message:
        message = f"{message} ({advice})"
    return kind(message, reason=info.reason, metadata=info.metadata, retry_after_s=info.retry_after_s)


def from_status(status: status_pb2.Status) -> PlexRLError:
    """The exception for a call's error or a rejection; a status that says OK is an error of the server's."""
    info = error_info(status)
    if info is None:
        return PlexRLError("the server reported a failure without saying which; `plexrl explain CALL` may tell")
    return from_info(info)


def from_rpc(error: grpc.RpcError) -> PlexRLError:
    """The exception for a failed rpc: its status details where the server sent them, else its code and text."""
    if not isinstance(error, grpc.Call):
        return Unavailable(str(error) or type(error).__name__)
    for key, value in error.trailing_metadata() or ():
        if key == _STATUS_TRAILER and isinstance(value, bytes):
            try:
                info = error_info(status_pb2.Status.FromString(value))
            except DecodeError:
                break
            if info is not None:
                return from_info(info)
    code: int = error.code().value[0]
    name = code_pb2.Code.Name(code)
    kind = _BY_CODE.get(code, PlexRLError)
    text = error.details() or name
    if kind is Unavailable:
        # The transport made it: what a controller refuses for now comes with an ErrorInfo.
        return Unavailable(f"{text} ({_UNREACHED})", reason="UNAVAILABLE")
    return from_info(ErrorInfo(code, name, text))
