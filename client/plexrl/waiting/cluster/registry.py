"""Every write to the cluster: defaults, validation, generations, deletion; the rules between a request and the store.

Handlers of requests and controllers both write through it, so the same rules hold for all. Knows no HTTP.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from plexrl.waiting.cluster.api.defaults import with_defaults
from plexrl.waiting.cluster.api.errors import (
    ApiError,
    Cause,
    already_exists,
    bad_request,
    conflict,
    forbidden,
    invalid_object,
    not_found,
    required,
)
from plexrl.waiting.cluster.api.validation import validate
from plexrl.waiting.cluster.clock import VirtualClock
from plexrl.waiting.cluster.identity import Identities
from plexrl.waiting.cluster.objects import (
    Object,
    is_deleting,
    look_up,
    name_of,
    namespace_of,
    uid_of,
    with_metadata,
)
from plexrl.waiting.cluster.resources import (
    CLAIMS,
    DEPLOYMENTS,
    JOBS,
    NAMESPACES,
    NODES,
    PODS,
    REPLICA_SETS,
    VOLUMES,
    ResourceType,
)
from plexrl.waiting.cluster.store import Key, Store

Mutation: TypeAlias = Callable[[Object], Object]

FOREGROUND = "foregroundDeletion"
ORPHAN = "orphan"
GENERATED_NAME_TRIES = 8
# Kinds whose status is a part of its own: a write to the object leaves it, a write to the status changes nothing else.
_WITH_STATUS = (NAMESPACES, NODES, PODS, CLAIMS, VOLUMES, DEPLOYMENTS, REPLICA_SETS, JOBS)
_WITH_GENERATION = (DEPLOYMENTS, REPLICA_SETS, JOBS, PODS)
PERMANENT_NAMESPACES = ("default", "kube-system", "kube-public", "kube-node-lease")


@dataclass(frozen=True)
class Deletion:
    """How to delete. `propagation` is Background, Foreground or Orphan."""

    grace_s: int | None = None
    propagation: str = "Background"
    uid: str = ""
    resource_version: str = ""
    dry_run: bool = False


class Registry:
    """The cluster's objects behind the rules of the API."""

    def __init__(self, store: Store, clock: VirtualClock, identities: Identities) -> None:
        self.store = store
        self.clock = clock
        self.identities = identities

    def get(self, kind: ResourceType, namespace: str, name: str) -> Object:
        """Raises ApiError (404)."""
        item = self.store.get(kind, (namespace, name))
        if item is None:
            raise not_found(kind, name)
        return item

    def create(self, kind: ResourceType, namespace: str, item: Object, *, dry_run: bool = False) -> Object:
        """Raises ApiError: 404 no such namespace, 403 one that ends, 409 the name is taken, 422 it is not valid."""
        metadata = dict(item.get("metadata") or {})
        if metadata.get("resourceVersion"):
            raise bad_request("resourceVersion should not be set on objects to be created")
        if kind.namespaced:
            if metadata.setdefault("namespace", namespace) != namespace:
                raise _other_namespace(metadata["namespace"], namespace)
            self._check_namespace(kind, namespace, metadata.get("name") or metadata.get("generateName", ""))
        else:
            metadata.pop("namespace", None)
        if not metadata.get("name") and metadata.get("generateName"):
            metadata["name"] = self._generated_name(kind, namespace, metadata["generateName"])
        if not metadata.get("name"):
            raise invalid_object(kind, "", [_name_required()])
        metadata.update(uid=self.identities.uid(), creationTimestamp=self.clock.timestamp())
        for name in ("deletionTimestamp", "deletionGracePeriodSeconds", "selfLink", "generation"):
            metadata.pop(name, None)
        if kind in _WITH_GENERATION:
            metadata["generation"] = 1
        head = {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": metadata}
        item = {**head, **{key: value for key, value in item.items() if key not in head}}
        item = prepared(kind, with_defaults(kind, item))
        if causes := validate(kind, item):
            raise invalid_object(kind, metadata["name"], causes)
        key = (namespace_of(item), metadata["name"])
        if self.store.get(kind, key) is not None:
            raise already_exists(kind, metadata["name"])
        return item if dry_run else self.store.create(kind, item)

    def update(
        self,
        kind: ResourceType,
        namespace: str,
        name: str,
        mutation: Mutation,
        *,
        subresource: str = "",
        dry_run: bool = False,
        internal: bool = False,
    ) -> Object:
        """Replaces an object by what `mutation` makes of it; one that changes nothing writes nothing.

        Internal writes are those of the cluster's own parts, which may set what clients may not (a pod's node).
        Raises ApiError: 404, 409 for a resourceVersion or uid that is not the current one, 422.
        """
        current = self.get(kind, namespace, name)
        changed = mutation(current)
        self._check_identity(kind, current, changed)
        item = self._next_version(kind, current, changed, subresource)
        if item == current:
            return current
        if not internal and subresource != "status" and (causes := validate(kind, item, current)):
            raise invalid_object(kind, name, causes)
        if dry_run:
            return item
        if is_deleting(item) and self._may_go(kind, item):
            return self.store.remove(kind, (namespace_of(item), name))
        return self.store.replace(kind, item)

    def update_status(self, kind: ResourceType, item: Object, status: Object) -> Object:
        """Writes a status, as controllers do."""
        return self.update(
            kind,
            namespace_of(item),
            name_of(item),
            lambda current: {**current, "status": status},
            subresource="status",
            internal=True,
        )

    def delete(self, kind: ResourceType, namespace: str, name: str, deletion: Deletion) -> tuple[Object, bool]:
        """The object, and whether it is gone now; else it goes when its grace or its finalizers allow.

        Raises ApiError: 404, 409 for a precondition that does not hold.
        """
        current = self.get(kind, namespace, name)
        if deletion.uid and deletion.uid != uid_of(current):
            raise conflict(
                kind,
                name,
                f"Precondition failed: UID in precondition: {deletion.uid}, UID in object meta: {uid_of(current)}",
            )
        if deletion.resource_version not in ("", current["metadata"]["resourceVersion"]):
            raise conflict(kind, name, "Precondition failed: the resource version is not the current one")
        if kind is NAMESPACES and name in PERMANENT_NAMESPACES:
            raise forbidden(kind, name, "this namespace may not be deleted")
        item = self._marked(kind, current, deletion)
        if deletion.dry_run:
            return item, False
        if self._may_go(kind, item):
            return self.store.remove(kind, (namespace_of(item), name)), True
        return (self.store.replace(kind, item) if item != current else current), False

    def is_gone(self, kind: ResourceType, key: Key) -> bool:
        return self.store.get(kind, key) is None

    def _check_namespace(self, kind: ResourceType, namespace: str, name: str) -> None:
        found = self.store.get(NAMESPACES, ("", namespace))
        if found is None:
            raise not_found(NAMESPACES, namespace)
        if is_deleting(found):
            why = f"unable to create new content in namespace {namespace} because it is being terminated"
            raise forbidden(kind, name, why)

    def _generated_name(self, kind: ResourceType, namespace: str, prefix: str) -> str:
        key_namespace = namespace if kind.namespaced else ""
        for _ in range(GENERATED_NAME_TRIES):
            name = self.identities.generated(prefix)
            if self.store.get(kind, (key_namespace, name)) is None:
                return name
        raise already_exists(kind, prefix)

    def _check_identity(self, kind: ResourceType, current: Object, changed: Object) -> None:
        metadata, name = changed.get("metadata") or {}, name_of(current)
        if metadata.get("name", name) != name:
            raise bad_request(
                f"the name of the object ({metadata['name']}) does not match the name on the URL ({name})"
            )
        if kind.namespaced and metadata.get("namespace", namespace_of(current)) != namespace_of(current):
            raise _other_namespace(metadata["namespace"], namespace_of(current))
        version = metadata.get("resourceVersion") or current["metadata"]["resourceVersion"]
        if version != current["metadata"]["resourceVersion"]:
            why = "the object has been modified; please apply your changes to the latest version and try again"
            raise conflict(kind, name, why)
        if (metadata.get("uid") or uid_of(current)) != uid_of(current):
            raise conflict(
                kind,
                name,
                f"Precondition failed: UID in precondition: {metadata['uid']}, UID in object meta: {uid_of(current)}",
            )

    def _next_version(self, kind: ResourceType, current: Object, changed: Object, subresource: str) -> Object:
        """What of a change counts on the path that it came by."""
        old = current["metadata"]
        if subresource == "status":
            item = dict(current)
            if "status" in changed:
                item["status"] = changed["status"]
            return item
        metadata = dict(changed.get("metadata") or {})
        for name in (
            "creationTimestamp",
            "deletionGracePeriodSeconds",
            "deletionTimestamp",
            "generateName",
            "generation",
            "name",
            "namespace",
            "resourceVersion",
            "uid",
        ):
            if name in old:
                metadata[name] = old[name]
            else:
                metadata.pop(name, None)
        metadata = {key: value for key, value in metadata.items() if value not in ({}, [])}
        head = {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": metadata}
        item = {**head, **{key: value for key, value in changed.items() if key not in head}}
        if kind in _WITH_STATUS:
            item.pop("status", None)
            if "status" in current:
                item["status"] = current["status"]
        item = with_defaults(kind, item)
        if kind in _WITH_GENERATION and item.get("spec") != current.get("spec"):
            item = with_metadata(item, generation=old.get("generation", 0) + 1)
        return item

    def _marked(self, kind: ResourceType, current: Object, deletion: Deletion) -> Object:
        """The object with what a deletion writes on it: when, with how much grace, and what must happen before."""
        metadata = dict(current["metadata"])
        finalizers = [entry for entry in metadata.get("finalizers") or () if entry not in (FOREGROUND, ORPHAN)]
        if deletion.propagation == "Foreground":
            finalizers.append(FOREGROUND)
        elif deletion.propagation == "Orphan":
            finalizers.append(ORPHAN)
        if finalizers:
            metadata["finalizers"] = finalizers
        else:
            metadata.pop("finalizers", None)
        grace_s = self._grace_s(kind, current, deletion)
        if "deletionTimestamp" not in metadata or grace_s < metadata.get("deletionGracePeriodSeconds", 0):
            at = self.clock.datetime_at(self.clock.now_s + grace_s)
            metadata["deletionTimestamp"] = at.strftime("%Y-%m-%dT%H:%M:%SZ")
            metadata["deletionGracePeriodSeconds"] = grace_s
            if kind in _WITH_GENERATION and "deletionTimestamp" not in current["metadata"]:
                metadata["generation"] = metadata.get("generation", 0) + 1
        item = {**current, "metadata": metadata}
        if kind is NAMESPACES:
            item["status"] = {**(current.get("status") or {}), "phase": "Terminating"}
        return item

    def _grace_s(self, kind: ResourceType, item: Object, deletion: Deletion) -> int:
        if kind is not PODS:
            return 0
        # Nothing runs yet, or nothing any more: there is nothing to wait for.
        if not item["spec"].get("nodeName") or look_up(item, "status", "phase") in ("Succeeded", "Failed"):
            return 0
        default = item["spec"].get("terminationGracePeriodSeconds", 30)
        return max(0, int(default if deletion.grace_s is None else deletion.grace_s))

    def _may_go(self, kind: ResourceType, item: Object) -> bool:
        if item["metadata"].get("finalizers"):
            return False
        if kind is NAMESPACES and look_up(item, "spec", "finalizers"):
            return False
        return kind is not PODS or item["metadata"].get("deletionGracePeriodSeconds", 0) == 0


def prepared(kind: ResourceType, item: Object) -> Object:
    """A new object with the status that the API server itself gives."""
    if kind is PODS:
        return {**item, "status": {"phase": "Pending", "qosClass": _qos_class(item["spec"])}}
    if kind is CLAIMS:
        return {**item, "status": {"phase": "Pending"}}
    if kind is VOLUMES:
        return {**item, "status": {"phase": "Pending", **(item.get("status") or {})}}
    if kind is NAMESPACES:
        labels = {**(item["metadata"].get("labels") or {}), "kubernetes.io/metadata.name": name_of(item)}
        spec = {"finalizers": ["kubernetes"]}
        return {**with_metadata(item, labels=labels), "spec": spec, "status": {"phase": "Active"}}
    if kind is JOBS:
        return _prepared_job(item)
    # A node says of itself what it is when it registers.
    if kind in (DEPLOYMENTS, REPLICA_SETS):
        return {**item, "status": {} if kind is DEPLOYMENTS else {"replicas": 0}}
    return item


def _prepared_job(item: Object) -> Object:
    """A job's selector and labels are made of its uid, so that jobs never take each other's pods."""
    spec, uid = item["spec"], uid_of(item)
    if spec.get("manualSelector") or not isinstance(spec.get("template"), dict):
        return {**item, "status": {}}
    labels = {"batch.kubernetes.io/controller-uid": uid, "batch.kubernetes.io/job-name": name_of(item)}
    template = dict(spec["template"])
    metadata = dict(template.get("metadata") or {})
    metadata["labels"] = {**(metadata.get("labels") or {}), **labels, "controller-uid": uid, "job-name": name_of(item)}
    selector = {"matchLabels": {"batch.kubernetes.io/controller-uid": uid}}
    spec = {**spec, "selector": selector, "template": {**template, "metadata": metadata}}
    return {
        **with_metadata(item, labels={**metadata["labels"], **(item["metadata"].get("labels") or {})}),
        "spec": spec,
        "status": {},
    }


def _qos_class(spec: Object) -> str:
    containers = spec.get("containers")
    if not isinstance(containers, list):
        return "BestEffort"
    resources = [look_up(container, "resources", default={}) for container in containers]
    if not any(entry.get("requests") or entry.get("limits") for entry in resources):
        return "BestEffort"
    guaranteed = all(
        (entry.get("limits") or {}).keys() >= {"cpu", "memory"}
        and all((entry.get("requests") or {}).get(name) == entry["limits"][name] for name in ("cpu", "memory"))
        for entry in resources
    )
    return "Guaranteed" if guaranteed else "Burstable"


def _name_required() -> Cause:
    return required("metadata.name", "name or generateName is required")


def _other_namespace(given: str, wanted: str) -> ApiError:
    return bad_request(
        f"the namespace of the provided object does not match the namespace sent on the request: {given}, not {wanted}"
    )
