"""What a request can fail with: the Status objects of the Kubernetes API.

Reasons, codes and the shape of `details` follow the API conventions of Kubernetes, since clients act on them.
"""

from dataclasses import dataclass

from plexrl.waiting.cluster.objects import Object
from plexrl.waiting.cluster.resources import ResourceType


@dataclass(frozen=True)
class Cause:
    """One thing wrong with one field. `reason` is e.g. "FieldValueRequired", `field` e.g. "spec.replicas"."""

    reason: str
    message: str
    field: str

    def to_json(self) -> Object:
        return {"reason": self.reason, "message": self.message, "field": self.field}


def required(field: str, why: str = "") -> Cause:
    return Cause("FieldValueRequired", "Required value" + (f": {why}" if why else ""), field)


def invalid(field: str, value: object, why: str) -> Cause:
    return Cause("FieldValueInvalid", f"Invalid value: {_shown(value)}: {why}", field)


def unsupported(field: str, value: object, supported: tuple[str, ...]) -> Cause:
    choices = ", ".join(f'"{choice}"' for choice in supported)
    return Cause("FieldValueNotSupported", f"Unsupported value: {_shown(value)}: supported values: {choices}", field)


def duplicate(field: str, value: object) -> Cause:
    return Cause("FieldValueDuplicate", f"Duplicate value: {_shown(value)}", field)


def forbidden_field(field: str, why: str) -> Cause:
    return Cause("FieldValueForbidden", f"Forbidden: {why}", field)


def _shown(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else str(value)


class ApiError(Exception):
    """A request that was refused; `to_json` is the Status object that the client gets."""

    def __init__(
        self, code: int, reason: str, message: str, details: Object | None = None, retry_after_s: int = 0
    ) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.message = message
        self.details = details or {}
        self.retry_after_s = retry_after_s

    def to_json(self) -> Object:
        details = {**self.details, "retryAfterSeconds": self.retry_after_s} if self.retry_after_s else self.details
        return {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": self.message,
            "reason": self.reason,
            **({"details": details} if details else {}),
            "code": self.code,
        }


def success(kind: ResourceType, name: str, uid: str) -> Object:
    """The Status that a deletion answers with."""
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Success",
        "details": {"name": name, **_group(kind), "kind": kind.plural, "uid": uid},
    }


def not_found(kind: ResourceType, name: str) -> ApiError:
    return ApiError(404, "NotFound", f'{kind.qualified} "{name}" not found', _details(kind, name))


def no_such_path() -> ApiError:
    return ApiError(404, "NotFound", "the server could not find the requested resource")


def already_exists(kind: ResourceType, name: str) -> ApiError:
    return ApiError(409, "AlreadyExists", f'{kind.qualified} "{name}" already exists', _details(kind, name))


def conflict(kind: ResourceType, name: str, why: str) -> ApiError:
    message = f'Operation cannot be fulfilled on {kind.qualified} "{name}": {why}'
    return ApiError(409, "Conflict", message, _details(kind, name))


def invalid_object(kind: ResourceType, name: str, causes: list[Cause]) -> ApiError:
    listed = [f"{cause.field}: {cause.message}" for cause in causes]
    shown = listed[0] if len(listed) == 1 else f"[{', '.join(listed)}]"
    qualified = f"{kind.kind}.{kind.group}" if kind.group else kind.kind
    details = {
        **({"name": name} if name else {}),
        **_group(kind),
        "kind": kind.kind,
        "causes": [cause.to_json() for cause in causes],
    }
    return ApiError(422, "Invalid", f'{qualified} "{name}" is invalid: {shown}', details)


def bad_request(message: str) -> ApiError:
    return ApiError(400, "BadRequest", message)


def forbidden(kind: ResourceType, name: str, why: str) -> ApiError:
    return ApiError(403, "Forbidden", f'{kind.qualified} "{name}" is forbidden: {why}', _details(kind, name))


def unauthorized() -> ApiError:
    return ApiError(401, "Unauthorized", "Unauthorized")


def method_not_allowed() -> ApiError:
    return ApiError(405, "MethodNotAllowed", "the server does not allow this method on the requested resource")


def not_acceptable(supported: tuple[str, ...]) -> ApiError:
    message = f"only the following media types are accepted: {', '.join(supported)}"
    return ApiError(406, "NotAcceptable", message)


def unsupported_media_type(supported: tuple[str, ...]) -> ApiError:
    message = f"the body of the request was in an unknown format - accepted media types include: {', '.join(supported)}"
    return ApiError(415, "UnsupportedMediaType", message)


def too_large(limit_bytes: int) -> ApiError:
    return ApiError(413, "RequestEntityTooLarge", f"the body is larger than the limit of {limit_bytes} bytes")


def expired(why: str) -> ApiError:
    return ApiError(410, "Expired", why)


def too_large_revision(asked: int, current: int) -> ApiError:
    details = {"causes": [{"reason": "ResourceVersionTooLarge", "message": "Too large resource version"}]}
    message = f"Too large resource version: {asked}, current: {current}"
    return ApiError(504, "Timeout", message, details, retry_after_s=1)


def _group(kind: ResourceType) -> Object:
    return {"group": kind.group} if kind.group else {}


def _details(kind: ResourceType, name: str) -> Object:
    return {"name": name, **_group(kind), "kind": kind.plural}
