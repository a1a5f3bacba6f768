"""The API server: one request in, one answer or watch out. It routes, reads and lists; writes are in `writes`.

Knows no transport: `http` puts it on a socket, and in-process clients call it directly.
"""

import base64
from typing import Any, TypeAlias

import msgspec

from plexrl.waiting.cluster.api import discovery, openapi
from plexrl.waiting.cluster.api.errors import (
    ApiError,
    bad_request,
    expired,
    method_not_allowed,
    no_such_path,
    too_large_revision,
)
from plexrl.waiting.cluster.api.requests import (
    ApiRequest,
    ApiResponse,
    Form,
    Options,
    Target,
    parse_accept,
    parse_options,
    parse_revision,
    parse_target,
)
from plexrl.waiting.cluster.api.selectors import selector_test
from plexrl.waiting.cluster.api.tables import partial_metadata, table
from plexrl.waiting.cluster.api.watch import EventEncoder, Watch
from plexrl.waiting.cluster.api.writes import Writes, scale_of
from plexrl.waiting.cluster.objects import Object, name_of, namespace_of
from plexrl.waiting.cluster.registry import Registry
from plexrl.waiting.cluster.store import Expired

Answer: TypeAlias = ApiResponse | Watch

_HEALTH_PATHS = ("/healthz", "/livez", "/readyz")


class ApiServer:
    """Requests on a registry."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._store = registry.store
        self._writes = Writes(registry)
        self._encoder = EventEncoder()

    def handle(self, request: ApiRequest) -> Answer:
        """Raises ApiError for whatever is refused."""
        path = request.path.rstrip("/")
        if request.method == "GET" and (found := self._of_server(path, request.accept)) is not None:
            return found
        options = parse_options(request.query, request.user_agent)
        form = parse_accept(request.accept)
        target = self._deprecated_watch_path(path)
        if target is not None:
            return self._watch(target, options, form)
        target = parse_target(path)
        match request.method:
            case "GET" if target.subresource:
                return self._shown(target, self._read_subresource(target), form, options)
            case "GET" if options.watch:
                return self._watch(target, options, form)
            case "GET" if target.name:
                item = self._registry.get(target.kind, target.namespace, target.name)
                return self._shown(target, item, form, options)
            case "GET":
                return ApiResponse(self._list(target, options, form))
            case "POST" | "PUT" | "PATCH" | "DELETE":
                body, code, warnings = self._writes.handle(request, target, options)
                return self._shown(target, body, form, options, code, warnings)
            case _:
                raise method_not_allowed()

    def _of_server(self, path: str, accept: str) -> ApiResponse | None:
        """What the server says of itself; None for paths of objects. Raises ApiError (404)."""
        match path.split("/")[1:]:
            case ["api" | "apis" as root] if discovery.wants_aggregated(accept):
                return ApiResponse(discovery.aggregated(root == "api"), media_type=discovery.AGGREGATED_MEDIA_TYPE)
            case ["api"]:
                return ApiResponse(discovery.core_versions())
            case ["apis"]:
                return ApiResponse(discovery.group_list())
            case ["api", version]:
                return ApiResponse(_found(discovery.resource_list("", version)))
            case ["apis", group]:
                return ApiResponse(_found(discovery.group_of(group)))
            case ["apis", group, version]:
                return ApiResponse(_found(discovery.resource_list(group, version)))
            case ["version"]:
                return ApiResponse(dict(discovery.VERSION))
            case ["openapi", "v3"]:
                return ApiResponse(openapi.index())
            case ["openapi", "v3", "api", version]:
                return ApiResponse(_document("", version))
            case ["openapi", "v3", "apis", group, version]:
                return ApiResponse(_document(group, version))
            case [] | [""]:
                paths = ["/api", "/api/v1", "/apis", *_HEALTH_PATHS, "/openapi/v3", "/version"]
                return ApiResponse({"paths": paths})
            case _:
                return ApiResponse("ok", media_type="text/plain") if path in _HEALTH_PATHS else None

    def _deprecated_watch_path(self, path: str) -> Target | None:
        """/api/v1/watch/pods is an old way to say /api/v1/pods?watch=true."""
        parts = path.split("/")
        for at in (3, 4):
            if len(parts) > at and parts[at] == "watch" and parts[1] == ("api" if at == 3 else "apis"):
                return parse_target("/".join(parts[:at] + parts[at + 1 :]))
        return None

    def _watch(self, target: Target, options: Options, form: Form) -> Watch:
        return Watch(self._store, self._registry.clock, self._encoder, target, options, form)

    def _shown(
        self,
        target: Target,
        body: Object,
        form: Form,
        options: Options,
        code: int = 200,
        warnings: tuple[str, ...] = (),
    ) -> ApiResponse:
        own = body.get("kind") == target.kind.kind
        if own and form is Form.TABLE:
            metadata = {"resourceVersion": body["metadata"].get("resourceVersion", "")}
            body = table(target.kind, [body], self._registry.clock, options.include_object, metadata)
        elif own and form is Form.METADATA:
            body = partial_metadata(body)
        return ApiResponse(body, code, warnings)

    def _read_subresource(self, target: Target) -> Object:
        part = target.kind.subresource(target.subresource)
        if part is None or "get" not in part.verbs:
            raise method_not_allowed()
        item = self._registry.get(target.kind, target.namespace, target.name)
        return scale_of(item) if target.subresource == "scale" else item

    def _list(self, target: Target, options: Options, form: Form) -> Object:
        items, metadata = self._page(target, options)
        if form is Form.TABLE:
            return table(target.kind, items, self._registry.clock, options.include_object, metadata)
        if form is Form.METADATA:
            head = {"kind": "PartialObjectMetadataList", "apiVersion": "meta.k8s.io/v1"}
            return {**head, "metadata": metadata, "items": [partial_metadata(item) for item in items]}
        head = {"kind": f"{target.kind.kind}List", "apiVersion": target.kind.api_version}
        return {**head, "metadata": metadata, "items": items}

    def _page(self, target: Target, options: Options) -> tuple[list[Object], Object]:
        """One page of a list and its metadata. All pages of a list are of the same revision."""
        after: tuple[str, str] | None = None
        if options.continue_token:
            if options.resource_version not in ("", "0"):
                raise bad_request("specifying resource version is not allowed when using continue")
            revision, after = _parse_continue(options.continue_token)
        else:
            revision = self._list_revision(options)
        try:
            items = self._store.items_at(target.kind, revision, target.namespace)
        except Expired as error:
            what = "continue parameter" if options.continue_token else "resource version"
            raise expired(f"The provided {what} is too old: {error}; list again from the start") from error
        test = selector_test(options.label_selector, options.field_selector, target.kind)
        if test is not None:
            items = [item for item in items if test(item)]
        if after is not None:
            items = [item for item in items if (namespace_of(item), name_of(item)) > after]
        metadata: Object = {"resourceVersion": str(revision)}
        if options.limit and len(items) > options.limit:
            metadata["remainingItemCount"] = len(items) - options.limit
            items = items[: options.limit]
            metadata["continue"] = _continue(revision, items[-1])
        return items, metadata

    def _list_revision(self, options: Options) -> int:
        current = self._store.revision
        if options.resource_version_match not in ("", "Exact", "NotOlderThan"):
            raise bad_request(f"resourceVersionMatch: {options.resource_version_match!r} is not Exact or NotOlderThan")
        if not options.resource_version:
            if options.resource_version_match:
                raise bad_request("resourceVersionMatch is forbidden unless resourceVersion is provided")
            return current
        asked = parse_revision(options.resource_version)
        if asked > current:
            raise too_large_revision(asked, current)
        if options.resource_version_match == "Exact":
            if asked == 0:
                raise bad_request('resourceVersionMatch "Exact" is forbidden for resourceVersion "0"')
            return asked
        return current


def _found(body: Object | None) -> Object:
    if body is None:
        raise no_such_path()
    return body


def _document(group: str, version: str) -> Object:
    try:
        return openapi.document(group, version)
    except KeyError as error:
        raise no_such_path() from error


def _continue(revision: int, last: Object) -> str:
    token = msgspec.json.encode([revision, namespace_of(last), name_of(last)])
    return base64.urlsafe_b64encode(token).decode()


def _parse_continue(token: str) -> tuple[int, tuple[str, str]]:
    try:
        value: Any = msgspec.json.decode(base64.urlsafe_b64decode(token.encode()))
        revision, namespace, name = value
    except (ValueError, TypeError, msgspec.DecodeError) as error:
        raise bad_request("continue key is not valid: use the one of the last page") from error
    if not (isinstance(revision, int) and isinstance(namespace, str) and isinstance(name, str)):
        raise bad_request("continue key is not valid: use the one of the last page")
    return revision, (namespace, name)


def error_response(error: ApiError) -> ApiResponse:
    """The answer that carries a refusal."""
    return ApiResponse(error.to_json(), error.code)
