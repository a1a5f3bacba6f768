"""Requests and answers of the Kubernetes API without a transport: paths, query parameters, media types."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from plexrl.waiting.cluster.api.decoding import FieldValidation
from plexrl.waiting.cluster.api.errors import bad_request, no_such_path, not_acceptable
from plexrl.waiting.cluster.objects import Object
from plexrl.waiting.cluster.resources import BY_PLURAL, NAMESPACES, ResourceType


@dataclass(frozen=True)
class ApiRequest:
    """One request. `value` is a body that is JSON already, as an in-process client hands it over."""

    method: str
    path: str
    query: Mapping[str, str] = field(default_factory=dict)
    accept: str = ""
    content_type: str = ""
    body: bytes = b""
    value: Any = None
    user_agent: str = ""


@dataclass(frozen=True)
class ApiResponse:
    """One answer: a JSON object, or plain text for the health paths."""

    body: Object | str
    code: int = 200
    warnings: tuple[str, ...] = ()
    media_type: str = "application/json"


class Form(Enum):
    """How objects are to be shown."""

    FULL = "full"
    TABLE = "Table"
    METADATA = "PartialObjectMetadata"


@dataclass(frozen=True)
class Target:
    """What a path names: a collection, an object of it, or a part of an object."""

    kind: ResourceType
    namespace: str = ""
    name: str = ""
    subresource: str = ""


@dataclass(frozen=True)
class Options:
    """The query parameters of the API, parsed. Unknown ones are ignored, as Kubernetes does."""

    label_selector: str = ""
    field_selector: str = ""
    resource_version: str = ""
    resource_version_match: str = ""
    limit: int = 0
    continue_token: str = ""
    watch: bool = False
    timeout_s: int | None = None
    bookmarks: bool = False
    initial_events: bool | None = None
    dry_run: bool = False
    field_validation: FieldValidation = FieldValidation.WARN
    field_manager: str = ""
    force: bool = False
    include_object: str = "Metadata"
    delete: Mapping[str, str] = field(default_factory=dict)


def parse_target(path: str) -> Target:
    """Raises ApiError (404) for a path that names nothing."""
    parts = [part for part in path.split("/") if part]
    match parts:
        case ["api", version, *rest]:
            group = ""
        case ["apis", group, version, *rest]:
            pass
        case _:
            raise no_such_path()
    namespace = ""
    if len(rest) >= 3 and rest[0] == "namespaces" and NAMESPACES.subresource(rest[2]) is None:
        namespace, rest = rest[1], rest[2:]
    if not 1 <= len(rest) <= 3:
        raise no_such_path()
    plural, name, subresource = (*rest, "", "")[:3]
    kind = BY_PLURAL.get((group, version, plural))
    if kind is None or (namespace and not kind.namespaced) or (name and kind.namespaced and not namespace):
        raise no_such_path()
    if subresource and kind.subresource(subresource) is None:
        raise no_such_path()
    return Target(kind, namespace, name, subresource)


def parse_options(query: Mapping[str, str], user_agent: str) -> Options:
    """Raises ApiError (400) for values that do not parse."""
    validation = query.get("fieldValidation") or "Warn"
    if validation not in {entry.value for entry in FieldValidation}:
        raise bad_request(f'fieldValidation: Unsupported value: "{validation}": want Ignore, Warn or Strict')
    dry_run = query.get("dryRun", "")
    if dry_run not in ("", "All"):
        raise bad_request(f'dryRun: Unsupported value: "{dry_run}": want All')
    initial = query.get("sendInitialEvents", "")
    timeout_s = _number(query, "timeoutSeconds")
    manager = query.get("fieldManager") or user_agent.partition("/")[0] or "unknown"
    return Options(
        label_selector=query.get("labelSelector", ""),
        field_selector=query.get("fieldSelector", ""),
        resource_version=query.get("resourceVersion", ""),
        resource_version_match=query.get("resourceVersionMatch", ""),
        limit=_number(query, "limit") or 0,
        continue_token=query.get("continue", ""),
        watch=_flag(query.get("watch", "")),
        timeout_s=timeout_s,
        bookmarks=_flag(query.get("allowWatchBookmarks", "")),
        initial_events=_flag(initial) if initial else None,
        dry_run=bool(dry_run),
        field_validation=FieldValidation(validation),
        field_manager=manager[:128],
        force=_flag(query.get("force", "")),
        include_object=query.get("includeObject") or "Metadata",
        delete={name: query[name] for name in ("gracePeriodSeconds", "propagationPolicy") if name in query},
    )


def parse_revision(text: str) -> int:
    """Raises ApiError (400) for what is no resource version."""
    if not text.isdecimal() or len(text) > 19:
        raise bad_request(f'invalid resource version "{text[:64]}": want a number from an earlier answer')
    return int(text)


def parse_accept(accept: str) -> Form:
    """The first form that can be served, in the client's order. Raises ApiError (406) if there is none."""
    if not accept.strip():
        return Form.FULL
    for entry in accept.split(","):
        media_type, *parameters = (part.strip() for part in entry.split(";"))
        values = dict(part.split("=", 1) for part in parameters if "=" in part)
        if media_type not in ("application/json", "*/*", "application/*"):
            continue
        shown_as = values.get("as", "")
        if not shown_as:
            return Form.FULL
        if values.get("g", "meta.k8s.io") == "meta.k8s.io" and values.get("v", "v1") == "v1":
            if shown_as == "Table":
                return Form.TABLE
            if shown_as in ("PartialObjectMetadata", "PartialObjectMetadataList"):
                return Form.METADATA
    raise not_acceptable(("application/json",))


def _flag(text: str) -> bool:
    return text.lower() in ("1", "t", "true")


def _number(query: Mapping[str, str], name: str) -> int | None:
    text = query.get(name, "")
    if not text:
        return None
    if not text.isdecimal() or len(text) > 9:
        raise bad_request(f"{name}: want a whole number from 0 on, not {text[:64]!r}")
    return int(text)
