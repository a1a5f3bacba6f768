"""The OpenAPI v3 documents: schemas with descriptions and merge keys, and the paths with their parameters.

Clients read them to explain fields, to compute patches, and to find out that the server validates fields itself.
"""

import functools
import hashlib
from typing import Any

import msgspec

from plexrl.waiting.cluster.api.discovery import VERSION
from plexrl.waiting.cluster.api.schema import Schema, schema_of
from plexrl.waiting.cluster.objects import Object
from plexrl.waiting.cluster.resources import GROUP_VERSIONS, RESOURCE_TYPES, ResourceType

_PATCH_TYPES = (
    "application/apply-patch+yaml",
    "application/json-patch+json",
    "application/merge-patch+json",
    "application/strategic-merge-patch+json",
)
_SCALARS: dict[str, Object] = {
    "string": {"type": "string"},
    "integer": {"type": "integer", "format": "int64"},
    "number": {"type": "number", "format": "double"},
    "boolean": {"type": "boolean"},
    "time": {"type": "string", "format": "date-time"},
    "quantity": {"oneOf": [{"type": "string"}, {"type": "number"}]},
    "int-or-string": {"oneOf": [{"type": "integer"}, {"type": "string"}], "format": "int-or-string"},
    "any": {"type": "object"},
}


@functools.cache
def index() -> Object:
    """/openapi/v3: where each group's document is; the hash changes when the document does."""
    paths = {}
    for group, version in GROUP_VERSIONS:
        place = f"apis/{group}/{version}" if group else f"api/{version}"
        digest = hashlib.sha256(msgspec.json.encode(document(group, version))).hexdigest()
        paths[place] = {"serverRelativeURL": f"/openapi/v3/{place}?hash={digest[:32].upper()}"}
    return {"paths": paths}


@functools.cache
def document(group: str, version: str) -> Object:
    """One group's document. Raises KeyError for a group and version that is not served."""
    kinds = [kind for kind in RESOURCE_TYPES if (kind.group, kind.version) == (group, version)]
    if not kinds:
        raise KeyError((group, version))
    schemas: Object = {}
    for kind in kinds:
        _collect(schema_of(kind.model), schemas, kind)
    for name in ("autoscaling_v1.Scale",):
        _collect(schema_of(name), schemas, None)
    paths: Object = {}
    for kind in kinds:
        paths |= _paths(kind)
    return {
        "openapi": "3.0.0",
        "info": {"title": "Kubernetes", "version": VERSION["gitVersion"]},
        "paths": paths,
        "components": {"schemas": schemas},
    }


def component_name(schema: Schema) -> str:
    """The name that Kubernetes gives a model, e.g. "io.k8s.api.apps.v1.Deployment"."""
    package, _, version = schema.module.rpartition("_")
    root = "io.k8s.apimachinery.pkg.apis" if package == "meta" else "io.k8s.api"
    return f"{root}.{package}.{version}.{schema.model}"


def _collect(schema: Schema, schemas: Object, kind: ResourceType | None) -> None:
    name = component_name(schema)
    if name in schemas:
        return
    entry: Object = {"type": "object"}
    schemas[name] = entry
    if schema.description:
        entry["description"] = schema.description
    properties: Object = {}
    for field in schema.fields.values():
        properties[field.name] = _described(_property(field.schema, schemas), field.description)
    if properties:
        entry["properties"] = properties
    required = [field.name for field in schema.fields.values() if field.required]
    if required:
        entry["required"] = required
    if schema.atomic:
        entry["x-kubernetes-map-type"] = "atomic"
    if kind is not None:
        entry["x-kubernetes-group-version-kind"] = [_group_version_kind(kind)]


def _described(shape: Object, description: str) -> Object:
    # A reference may not have neighbours, so it is wrapped to carry a description.
    if "$ref" in shape:
        shape = {"allOf": [shape], "default": {}}
    return {"description": description, **shape} if description else shape


def _property(schema: Schema, schemas: Object) -> Object:
    match schema.kind:
        case "object":
            _collect(schema, schemas, None)
            return {"$ref": f"#/components/schemas/{component_name(schema)}"}
        case "list":
            items = _property(schema.items or Schema("any"), schemas)
            shape: Object = {"type": "array", "items": {"allOf": [items], "default": {}} if "$ref" in items else items}
            if schema.merge_keys:
                shape["x-kubernetes-list-type"] = "map"
                shape["x-kubernetes-list-map-keys"] = list(schema.merge_keys)
                shape["x-kubernetes-patch-merge-key"] = schema.merge_keys[0]
                shape["x-kubernetes-patch-strategy"] = "merge,retainKeys" if schema.retain_keys else "merge"
            elif schema.is_set:
                shape["x-kubernetes-list-type"] = "set"
                shape["x-kubernetes-patch-strategy"] = "merge"
            else:
                shape["x-kubernetes-list-type"] = "atomic"
            return shape
        case "map":
            return {"type": "object", "additionalProperties": _property(schema.items or Schema("any"), schemas)}
        case kind:
            return dict(_SCALARS[kind])


def _group_version_kind(kind: ResourceType) -> Object:
    return {"group": kind.group, "version": kind.version, "kind": kind.kind}


def _paths(kind: ResourceType) -> Object:
    root = f"/apis/{kind.group}/{kind.version}" if kind.group else f"/api/{kind.version}"
    nested = f"{root}/namespaces/{{namespace}}/{kind.plural}" if kind.namespaced else f"{root}/{kind.plural}"
    reference = {"$ref": f"#/components/schemas/{component_name(schema_of(kind.model))}"}
    write = [_parameter(name) for name in ("dryRun", "fieldManager", "fieldValidation")]
    read = [_parameter(name) for name in ("labelSelector", "fieldSelector", "resourceVersion", "limit", "continue")]
    place = [_parameter("namespace", "path")] if kind.namespaced else []
    paths: Object = {
        nested: {
            "get": _operation(kind, "list", {}, [*place, *read, _parameter("watch")]),
            "post": _operation(kind, "post", reference, [*place, *write]),
        },
        f"{nested}/{{name}}": {
            "get": _operation(kind, "get", reference, place),
            "put": _operation(kind, "put", reference, [*place, *write]),
            "patch": _operation(kind, "patch", reference, [*place, *write, _parameter("force")]),
            "delete": _operation(kind, "delete", {}, [*place, _parameter("gracePeriodSeconds")]),
        },
    }
    if kind.namespaced:
        paths[f"{root}/{kind.plural}"] = {"get": _operation(kind, "list", {}, read)}
    return paths


def _operation(kind: ResourceType, action: str, reference: Any, parameters: list[Object]) -> Object:
    content = {"application/json": {"schema": reference or {"type": "object"}}}
    operation: Object = {
        "operationId": f"{action}{kind.group.partition('.')[0].title() or 'Core'}{kind.version.title()}{kind.kind}",
        "parameters": parameters,
        "responses": {"200": {"description": "OK", "content": content}},
        "x-kubernetes-action": action,
        "x-kubernetes-group-version-kind": _group_version_kind(kind),
    }
    if action == "patch":
        body = {media_type: {"schema": {"type": "object"}} for media_type in _PATCH_TYPES}
        operation["requestBody"] = {"content": body, "required": True}
    elif action in ("post", "put"):
        operation["requestBody"] = {"content": {"*/*": {"schema": reference}}, "required": True}
    return operation


def _parameter(name: str, place: str = "query") -> Object:
    required = {"required": True} if place == "path" else {}
    return {"name": name, "in": place, "schema": {"type": "string"}, **required}
