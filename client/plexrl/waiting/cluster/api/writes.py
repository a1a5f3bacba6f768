"""The writing half of the API: create, update, the five patches, delete, and the subresources that are acted on.

Knows requests and the registry; what a write means for an object is the registry's business.
"""

from typing import Any, TypeAlias

from plexrl.waiting.cluster.api.apply import apply, own_changes
from plexrl.waiting.cluster.api.decoding import check_type_meta, decode, decode_as, parse_body
from plexrl.waiting.cluster.api.errors import (
    ApiError,
    bad_request,
    conflict,
    method_not_allowed,
    success,
    unsupported_media_type,
)
from plexrl.waiting.cluster.api.patches import json_patch, merge_patch, strategic_merge_patch
from plexrl.waiting.cluster.api.requests import ApiRequest, Options, Target
from plexrl.waiting.cluster.api.schema import schema_of
from plexrl.waiting.cluster.api.selectors import selector_test, selector_text
from plexrl.waiting.cluster.api.validation import validate_scale, warnings_of
from plexrl.waiting.cluster.objects import (
    Object,
    is_deleting,
    look_up,
    name_of,
    namespace_of,
    uid_of,
    with_condition,
    with_value,
)
from plexrl.waiting.cluster.registry import Deletion, Registry
from plexrl.waiting.cluster.resources import EVENTS, NAMESPACES, PODS

JSON_PATCH = "application/json-patch+json"
MERGE_PATCH = "application/merge-patch+json"
STRATEGIC_MERGE_PATCH = "application/strategic-merge-patch+json"
APPLY_PATCH = "application/apply-patch+yaml"
PATCH_TYPES = (JSON_PATCH, MERGE_PATCH, STRATEGIC_MERGE_PATCH, APPLY_PATCH)
_PROPAGATIONS = ("Background", "Foreground", "Orphan")

Written: TypeAlias = tuple[Object, int, tuple[str, ...]]
"""Body, HTTP status and warnings."""


class Writes:
    """Writing requests on a registry."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def handle(self, request: ApiRequest, target: Target, options: Options) -> Written:
        """Raises ApiError for whatever is refused."""
        value = request.value
        patch_type = request.content_type.partition(";")[0].strip()
        if request.method == "PATCH" and patch_type not in PATCH_TYPES:
            raise unsupported_media_type(PATCH_TYPES)
        if value is None:
            value = parse_body(request.body, request.content_type)
        if request.method == "PATCH" and value is None:
            raise bad_request("a patch needs a body")
        match request.method, target.subresource:
            case "POST", "" if not target.name:
                return self._create(target, value, options)
            case "POST", "binding":
                return self._bind(target, value, options)
            case "POST", "eviction":
                return self._evict(target, value, options)
            case "PUT", "finalize":
                return self._finalize(target, value)
            case "PUT" | "PATCH", "scale":
                return self._scale(target, value, options, patch_type)
            case "PUT", "" | "status" if target.name:
                return self._replace(target, value, options)
            case "PATCH", "" | "status" if target.name:
                return self._patch(target, value, options, patch_type)
            case "DELETE", "" if target.name:
                return self._delete(target, _deletion(value, options))
            case "DELETE", "":
                return self._delete_collection(target, value, options)
            case _:
                raise method_not_allowed()

    def _create(self, target: Target, value: Any, options: Options) -> Written:
        decoded = decode(target.kind, value, options.field_validation)
        item, now = decoded.item, self._registry.clock.timestamp()
        item.setdefault("metadata", {})
        if not isinstance(item["metadata"], dict):
            raise bad_request("metadata: want an object")
        head = {"apiVersion": target.kind.api_version, "kind": target.kind.kind}
        owned = item = {**head, **item}
        if target.kind is not EVENTS:
            owned = own_changes(schema_of(target.kind.model), None, item, options.field_manager, now)
        created = self._registry.create(target.kind, target.namespace, owned, dry_run=options.dry_run)
        return created, 201, (*decoded.warnings, *warnings_of(target.kind, created))

    def _replace(self, target: Target, value: Any, options: Options) -> Written:
        decoded = decode(target.kind, value, options.field_validation)
        if "metadata" not in decoded.item:
            raise bad_request(f"metadata.name: the body must name the object, {target.name!r}")
        return self._updated(target, lambda current: decoded.item, options, decoded.warnings)

    def _patch(self, target: Target, value: Any, options: Options, patch_type: str) -> Written:
        if patch_type == APPLY_PATCH:
            return self._apply(target, value, options)
        warnings: list[str] = []

        def patched(current: Object) -> Object:
            item = _patched(target.kind.model, current, value, patch_type)
            # Parts that the patch has left alone were decoded when they came.
            same = {key: part for key, part in item.items() if part is current.get(key)}
            changed = {key: part for key, part in item.items() if key not in same}
            decoded = decode(target.kind, changed, options.field_validation)
            warnings.extend(decoded.warnings)
            return same | decoded.item

        return self._updated(target, patched, options, warnings)

    def _updated(self, target: Target, mutation: Any, options: Options, warnings: list[str]) -> Written:
        schema, now = schema_of(target.kind.model), self._registry.clock.timestamp()

        def owned(current: Object) -> Object:
            changed: Object = mutation(current)
            if target.subresource == "status":
                return changed
            head = {"apiVersion": target.kind.api_version, "kind": target.kind.kind}
            if "managedFields" not in changed.get("metadata", {}) and "managedFields" in current["metadata"]:
                entries = current["metadata"]["managedFields"]
                changed = with_value(changed, ("metadata", "managedFields"), entries)
            return own_changes(schema, current, {**changed, **head}, options.field_manager, now)

        updated = self._registry.update(
            target.kind,
            target.namespace,
            target.name,
            owned,
            subresource=target.subresource,
            dry_run=options.dry_run,
        )
        return updated, 200, (*warnings, *warnings_of(target.kind, updated))

    def _apply(self, target: Target, value: Any, options: Options) -> Written:
        """Server-side apply; it creates what is not there."""
        kind, now = target.kind, self._registry.clock.timestamp()
        decoded = decode(kind, value, options.field_validation)
        applied = decoded.item
        if not isinstance(value.get("apiVersion"), str) or not isinstance(value.get("kind"), str):
            raise bad_request("an applied object says its apiVersion and kind")
        if look_up(applied, "metadata", "managedFields"):
            raise bad_request("metadata.managedFields must be nil")
        if look_up(applied, "metadata", "name", default=target.name) != target.name:
            raise bad_request(f"metadata.name: the body must name the object, {target.name!r}")
        schema = schema_of(kind.model)
        live = self._registry.store.get(kind, (target.namespace, target.name))
        if live is None:
            if target.subresource:
                self._registry.get(kind, target.namespace, target.name)
            bare: Object = {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": {"name": target.name}}
            item = apply(schema, bare, applied, options.field_manager, options.force, now)
            created = self._registry.create(kind, target.namespace, item, dry_run=options.dry_run)
            return created, 201, (*decoded.warnings, *warnings_of(kind, created))
        if target.subresource:
            merge = {"status": applied.get("status") or {}}
            return self._updated(target, lambda current: merge_patch(current, merge), options, decoded.warnings)
        updated = self._registry.update(
            kind,
            target.namespace,
            target.name,
            lambda current: apply(schema, current, applied, options.field_manager, options.force, now),
            dry_run=options.dry_run,
        )
        return updated, 200, (*decoded.warnings, *warnings_of(kind, updated))

    def _scale(self, target: Target, value: Any, options: Options, patch_type: str) -> Written:
        item = self._registry.get(target.kind, target.namespace, target.name)
        current = scale_of(item)
        if patch_type == APPLY_PATCH:
            raise unsupported_media_type(PATCH_TYPES[:-1])
        if patch_type in PATCH_TYPES:
            value = _patched("autoscaling_v1.Scale", current, value, patch_type)
        if not isinstance(value, dict):
            raise bad_request("the body is not an object: want a Scale")
        check_type_meta(value, "autoscaling/v1", "Scale")
        scale = decode_as("autoscaling_v1.Scale", "Scale", "v1", value, options.field_validation).item
        if causes := validate_scale(scale):
            details = {"name": target.name, "group": "autoscaling", "kind": "Scale"}
            listed = [cause.to_json() for cause in causes]
            message = f'Scale.autoscaling "{target.name}" is invalid: {causes[0].field}: {causes[0].message}'
            raise ApiError(422, "Invalid", message, {**details, "causes": listed})
        version = look_up(scale, "metadata", "resourceVersion")
        if version not in (None, "", item["metadata"]["resourceVersion"]):
            why = "the object has been modified; please apply your changes to the latest version and try again"
            raise conflict(target.kind, target.name, why)
        replicas = look_up(scale, "spec", "replicas", default=0)
        plain = Target(target.kind, target.namespace, target.name)
        updated, _, _ = self._updated(
            plain, lambda found: with_value(found, ("spec", "replicas"), replicas), options, []
        )
        return scale_of(updated), 200, ()

    def _bind(self, target: Target, value: Any, options: Options) -> Written:
        """Puts a pod on a node, as schedulers do."""
        node = look_up(value, "target", "name")
        if not isinstance(node, str) or not node:
            raise bad_request("target.name: a binding names a node")
        now = self._registry.clock.timestamp()

        def bound(pod: Object) -> Object:
            if is_deleting(pod):
                raise conflict(PODS, name_of(pod), f"pod {name_of(pod)} is being deleted, cannot be assigned to a host")
            if pod["spec"].get("nodeName"):
                raise conflict(
                    PODS, name_of(pod), f'pod {name_of(pod)} is already assigned to node "{pod["spec"]["nodeName"]}"'
                )
            return with_value(pod, ("spec", "nodeName"), node)

        def scheduled(pod: Object) -> Object:
            conditions = with_condition(
                look_up(pod, "status", "conditions", default=[]), {"type": "PodScheduled", "status": "True"}, now
            )
            return with_value(pod, ("status", "conditions"), conditions)

        place = (PODS, target.namespace, target.name)
        self._registry.update(*place, bound, dry_run=options.dry_run, internal=True)
        if not options.dry_run:
            self._registry.update(*place, scheduled, subresource="status", internal=True)
        return _success(), 201, ()

    def _evict(self, target: Target, value: Any, options: Options) -> Written:
        given = value if isinstance(value, dict) else {}
        deletion = _deletion(given.get("deleteOptions"), options)
        self._registry.delete(target.kind, target.namespace, target.name, deletion)
        return _success(), 201, ()

    def _finalize(self, target: Target, value: Any) -> Written:
        """Sets a namespace's finalizers; without any, one that is being deleted goes."""
        finalizers = look_up(value, "spec", "finalizers", default=[])
        updated = self._registry.update(
            NAMESPACES,
            "",
            target.name,
            lambda current: with_value(current, ("spec", "finalizers"), finalizers or None),
            internal=True,
        )
        return updated, 200, ()

    def _delete(self, target: Target, deletion: Deletion) -> Written:
        item, gone = self._registry.delete(target.kind, target.namespace, target.name, deletion)
        if gone and target.kind is not PODS:
            return success(target.kind, target.name, uid_of(item)), 200, ()
        return item, 200, ()

    def _delete_collection(self, target: Target, value: Any, options: Options) -> Written:
        deletion = _deletion(value, options)
        test = selector_test(options.label_selector, options.field_selector, target.kind)
        deleted = []
        for item in self._registry.store.items(target.kind, target.namespace):
            if test is None or test(item):
                found, _ = self._registry.delete(target.kind, namespace_of(item), name_of(item), deletion)
                deleted.append(found)
        head = {"kind": f"{target.kind.kind}List", "apiVersion": target.kind.api_version}
        return {**head, "metadata": {"resourceVersion": str(self._registry.store.revision)}, "items": deleted}, 200, ()


def scale_of(item: Object) -> Object:
    """The Scale of a workload."""
    metadata = {
        key: value
        for key, value in item["metadata"].items()
        if key in ("name", "namespace", "uid", "resourceVersion", "creationTimestamp")
    }
    return {
        "kind": "Scale",
        "apiVersion": "autoscaling/v1",
        "metadata": metadata,
        "spec": {"replicas": item["spec"].get("replicas", 1)},
        "status": {
            "replicas": look_up(item, "status", "replicas", default=0),
            "selector": selector_text(item["spec"].get("selector") or {}),
        },
    }


def _patched(model: str, current: Object, patch: Any, patch_type: str) -> Object:
    if patch_type == JSON_PATCH:
        return json_patch(current, patch)
    if not isinstance(patch, dict):
        raise bad_request("the patch is not an object")
    if patch_type == MERGE_PATCH:
        merged: Object = merge_patch(current, patch)
        return merged
    return strategic_merge_patch(schema_of(model), current, patch)


def _deletion(value: Any, options: Options) -> Deletion:
    """Delete options from the body, or else from the query. Raises ApiError (400)."""
    given = value if isinstance(value, dict) else {}
    if given.get("kind") not in (None, "DeleteOptions"):
        raise bad_request(f"the body of a deletion is DeleteOptions, not {given['kind']}")
    grace = given.get("gracePeriodSeconds", options.delete.get("gracePeriodSeconds"))
    propagation = given.get("propagationPolicy") or options.delete.get("propagationPolicy") or "Background"
    if given.get("orphanDependents") and "propagationPolicy" not in given:
        propagation = "Orphan"
    if propagation not in _PROPAGATIONS:
        raise bad_request(
            f'propagationPolicy: Unsupported value: "{propagation}": want Background, Foreground or Orphan'
        )
    if grace is not None and (isinstance(grace, bool) or not str(grace).isdecimal()):
        raise bad_request(f"gracePeriodSeconds: want a whole number from 0 on, not {grace}")
    preconditions = given.get("preconditions") or {}
    return Deletion(
        grace_s=None if grace is None else int(grace),
        propagation=propagation,
        uid=preconditions.get("uid") or "",
        resource_version=preconditions.get("resourceVersion") or "",
        dry_run=options.dry_run or given.get("dryRun") == ["All"],
    )


def _success() -> Object:
    return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": 201}
