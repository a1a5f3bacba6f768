"""Bodies into objects: parsed, checked against the schema, and rid of what the schema does not know.

What is unknown is refused, warned of or dropped, as the client asks with `fieldValidation`.
"""

import re
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import msgspec
import yaml

from plexrl.waiting.cluster.api.errors import bad_request, unsupported_media_type
from plexrl.waiting.cluster.api.protobuf import MEDIA_TYPE as PROTOBUF
from plexrl.waiting.cluster.api.protobuf import decode_protobuf
from plexrl.waiting.cluster.api.schema import Schema, schema_of
from plexrl.waiting.cluster.objects import Object
from plexrl.waiting.cluster.quantities import parse_quantity
from plexrl.waiting.cluster.resources import BY_KIND, ResourceType

JSON = "application/json"
YAML = "application/yaml"
DEPTH_LIMIT = 64
_MODELS = {names: kind.model for names, kind in BY_KIND.items()}
WARNINGS_LIMIT = 20

_TIME = re.compile(r"^\d{4}-\d\d-\d\d[Tt]\d\d:\d\d:\d\d(\.\d+)?([Zz]|[+-]\d\d:\d\d)$")
_TYPE_NAMES = {
    str: "a string",
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    list: "a list",
    dict: "an object",
}
_INTEGERS = (-(2**63), 2**63 - 1)


class FieldValidation(Enum):
    """What happens to fields that the schema does not know."""

    IGNORE = "Ignore"
    WARN = "Warn"
    STRICT = "Strict"


@dataclass
class Decoded:
    item: Object
    warnings: list[str] = field(default_factory=list)


def parse_body(body: bytes, content_type: str) -> Any:
    """The JSON value in a body. Raises ApiError: 400 for what does not parse, 415 for other media types."""
    media_type = content_type.partition(";")[0].strip().lower()
    if media_type == PROTOBUF:
        return decode_protobuf(body, _MODELS) if body else None
    if media_type not in ("", JSON, YAML) and not media_type.endswith(("+json", "+yaml")):
        raise unsupported_media_type((JSON, YAML, PROTOBUF))
    if not body.strip():
        return None
    try:
        if body.lstrip()[:1] in (b"{", b"[") or not media_type.endswith("yaml"):
            return msgspec.json.decode(body)
        return _plain(yaml.safe_load(body), 0)
    except (msgspec.DecodeError, yaml.YAMLError, RecursionError, UnicodeDecodeError) as error:
        reason = str(error) if isinstance(error, msgspec.DecodeError) else type(error).__name__
        raise bad_request(f"the body does not parse: {reason}") from error


def _plain(value: Any, depth: int) -> Any:
    """YAML values as JSON ones: timestamps become text, keys become text."""
    if depth > DEPTH_LIMIT:
        raise bad_request(f"the body is nested deeper than the limit of {DEPTH_LIMIT}")
    if isinstance(value, dict):
        return {str(key): _plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item, depth + 1) for item in value]
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


def decode(kind: ResourceType, value: Any, validation: FieldValidation, model: str = "") -> Decoded:
    """An object of a kind. Raises ApiError (400) for wrong types, and for unknown fields in strict validation."""
    if not isinstance(value, dict):
        raise bad_request(f"the body is not an object: want a {kind.kind}")
    check_type_meta(value, kind.api_version, kind.kind)
    return decode_as(model or kind.model, kind.kind, kind.version, value, validation)


def check_type_meta(value: Object, api_version: str, kind: str) -> None:
    """Raises ApiError (400) when a body says that it is something else than the path does."""
    given = (value.get("apiVersion") or api_version, value.get("kind") or kind)
    if given != (api_version, kind):
        raise bad_request(f"the body is {given[0]}, Kind={given[1]}, and this path takes {api_version}, Kind={kind}")


def decode_as(model: str, kind: str, version: str, value: Object, validation: FieldValidation) -> Decoded:
    """As `decode`, for a schema by its name."""
    walk = _Walk()
    item = walk.value(schema_of(model), value, "", 0)
    if walk.wrong:
        raise bad_request(f'{kind} in version "{version}" cannot be handled as a {kind}: {walk.wrong[0]}')
    if walk.unknown and validation is FieldValidation.STRICT:
        raise bad_request(f"strict decoding error: {', '.join(walk.unknown[:WARNINGS_LIMIT])}")
    warnings = walk.unknown[:WARNINGS_LIMIT] if validation is FieldValidation.WARN else []
    return Decoded(item, warnings)


class _Walk:
    """One pass over a value: what it is without unknown fields, and what was wrong with it."""

    def __init__(self) -> None:
        self.unknown: list[str] = []
        self.wrong: list[str] = []

    def value(self, schema: Schema, value: Any, path: str, depth: int) -> Any:
        if depth > DEPTH_LIMIT:
            self.wrong.append(f"{path[:80]}: nested deeper than the limit of {DEPTH_LIMIT}")
            return None
        match schema.kind:
            case "object":
                return self._object(schema, value, path, depth)
            case "list":
                if not isinstance(value, list) or schema.items is None:
                    return self._mismatch(path, "a list", value)
                return [
                    self.value(schema.items, item, f"{path}[{index}]", depth + 1) for index, item in enumerate(value)
                ]
            case "map":
                if not isinstance(value, dict) or schema.items is None:
                    return self._mismatch(path, "an object", value)
                return {key: self.value(schema.items, item, f"{path}.{key}", depth + 1) for key, item in value.items()}
            case _:
                return self._scalar(schema.kind, value, path)

    def _object(self, schema: Schema, value: Any, path: str, depth: int) -> Any:
        if not isinstance(value, dict):
            return self._mismatch(path, "an object", value)
        fields = schema.fields
        item: Object = {}
        for key, entry in value.items():
            below = f"{path}.{key}" if path else key
            known = fields.get(key)
            if known is None:
                self.unknown.append(f'unknown field "{below}"')
            elif entry is not None:
                item[key] = self.value(known.schema, entry, below, depth + 1)
        return item

    def _scalar(self, kind: str, value: Any, path: str) -> Any:
        match kind:
            case "string" if not isinstance(value, str):
                return self._mismatch(path, "a string", value)
            case "boolean" if not isinstance(value, bool):
                return self._mismatch(path, "true or false", value)
            case "integer":
                whole = isinstance(value, float) and value.is_integer()
                number = int(value) if whole else value
                if isinstance(number, bool) or not isinstance(number, int):
                    return self._mismatch(path, "an integer", value)
                if not _INTEGERS[0] <= number <= _INTEGERS[1]:
                    self.wrong.append(f"{path}: {number} does not fit in 64 bits")
                return number
            case "number" if isinstance(value, bool) or not isinstance(value, (int, float)):
                return self._mismatch(path, "a number", value)
            case "int-or-string" if isinstance(value, bool) or not isinstance(value, (int, str)):
                return self._mismatch(path, "an integer or a string", value)
            case "time" if not isinstance(value, str) or not _TIME.match(value):
                return self._mismatch(path, "a time such as 2026-01-01T00:00:00Z", value)
            case "quantity":
                try:
                    parse_quantity(value)
                except ValueError as error:
                    self.wrong.append(f"{path}: {error}")
                return str(value)
            case _:
                return value

    def _mismatch(self, path: str, wanted: str, value: Any) -> None:
        self.wrong.append(f"{path or 'body'}: want {wanted}, not {_TYPE_NAMES.get(type(value), 'null')}")
