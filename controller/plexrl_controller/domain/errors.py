"""Everything that can go wrong, as one family: a stable reason, a sentence that says what to do, its status code."""

from collections.abc import Mapping


class ControllerError(Exception):
    """Root of the controller's errors. `code` is the canonical gRPC status code's name."""

    code = "INTERNAL"
    reason = "INTERNAL"

    def __init__(
        self,
        message: str,
        *,
        reason: str | None = None,
        metadata: Mapping[str, str] | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        if reason is not None:
            self.reason = reason
        self.metadata = dict(metadata or {})
        self.retry_after_s = retry_after_s


class InvalidArgument(ControllerError):
    """The request can never be honoured as it is."""

    code = "INVALID_ARGUMENT"
    reason = "INVALID_ARGUMENT"


class NotFound(ControllerError):
    """No such resource, or it is another tenant's."""

    code = "NOT_FOUND"
    reason = "NOT_FOUND"


class AlreadyExists(ControllerError):
    """A key, name or number is taken."""

    code = "ALREADY_EXISTS"
    reason = "ALREADY_EXISTS"


class FailedPrecondition(ControllerError):
    """The resource is not in a state that allows the request; the message says what would."""

    code = "FAILED_PRECONDITION"
    reason = "FAILED_PRECONDITION"


class OutOfRange(ControllerError):
    """A number is too far ahead; it will be in range later."""

    code = "OUT_OF_RANGE"
    reason = "OUT_OF_RANGE"


class ResourceExhausted(ControllerError):
    """A bound is reached; the message names it."""

    code = "RESOURCE_EXHAUSTED"
    reason = "RESOURCE_EXHAUSTED"


class Unsupported(ControllerError):
    """Reserved in the wire, not offered yet."""

    code = "UNIMPLEMENTED"
    reason = "UNSUPPORTED"


class Unauthenticated(ControllerError):
    """No token, or not one that is known."""

    code = "UNAUTHENTICATED"
    reason = "UNAUTHENTICATED"


class PermissionDenied(ControllerError):
    """The token's role may not do this."""

    code = "PERMISSION_DENIED"
    reason = "PERMISSION_DENIED"


class Unavailable(ControllerError):
    """Not now: the store or the worker does not answer; retry with the same request id."""

    code = "UNAVAILABLE"
    reason = "UNAVAILABLE"


class DataLoss(ControllerError):
    """Bytes no longer match their hash."""

    code = "DATA_LOSS"
    reason = "DATA_LOSS"


class StaleTransition(ControllerError):
    """An actor tried to change a record from a state that it is no longer in: a late or duplicate report."""

    reason = "STALE_TRANSITION"


class LeadershipLost(ControllerError):
    """Another controller holds a newer term, or the store holds what this one did not write: stop and reload."""

    reason = "LEADERSHIP_LOST"
