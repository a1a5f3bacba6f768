"""What must go with others: dependents of owners that are gone, contents of namespaces that end, pods of lost nodes."""

from collections.abc import Iterable

from plexrl.waiting.cluster.objects import Object, is_deleting, name_of, namespace_of, uid_of, with_metadata, with_value
from plexrl.waiting.cluster.registry import FOREGROUND, ORPHAN, Deletion, Registry
from plexrl.waiting.cluster.resources import BY_KIND, NAMESPACES, NODES, PODS, RESOURCE_TYPES, ResourceType
from plexrl.waiting.cluster.store import Change, ChangeKind, Key

_NAMESPACED = tuple(kind for kind in RESOURCE_TYPES if kind.namespaced)


class GarbageCollector:
    """Deletes dependents in the background, waits for them in the foreground, or lets them go as orphans.

    Its keys are a uid with the plural of a kind, since an owner may be gone already.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._waiting: dict[str, tuple[ResourceType, Key]] = {}

    def concerns(self, kind: ResourceType, change: Change) -> Iterable[Key]:
        item, found = change.item, []
        finalizers = item["metadata"].get("finalizers") or ()
        if change.kind is ChangeKind.DELETED:
            self._waiting.pop(uid_of(item), None)
            found.append(("owner", uid_of(item)))
        elif is_deleting(item) and (FOREGROUND in finalizers or ORPHAN in finalizers):
            self._waiting[uid_of(item)] = (kind, (namespace_of(item), name_of(item)))
            found.append(("owner", uid_of(item)))
        for reference in item["metadata"].get("ownerReferences") or ():
            gone = change.kind is ChangeKind.DELETED
            if (gone and reference["uid"] in self._waiting) or change.kind is ChangeKind.ADDED:
                found.append(("owner", reference["uid"]))
        return found

    def reconcile(self, key: Key) -> None:
        uid = key[1]
        store = self._registry.store
        waiting = self._waiting.get(uid)
        if waiting is None:
            for kind, item in store.owned_by(uid):
                if not self._owner_lives(item, uid):
                    self._collect(kind, item, uid)
            return
        kind, (namespace, name) = waiting
        owner = store.get(kind, (namespace, name))
        if owner is None or uid_of(owner) != uid:
            return
        finalizers = owner["metadata"].get("finalizers") or []
        dependents = store.owned_by(uid)
        if ORPHAN in finalizers:
            for dependent_kind, item in dependents:
                self._without_owner(dependent_kind, item, uid)
        else:
            for dependent_kind, item in dependents:
                if not is_deleting(item):
                    deletion = Deletion(propagation="Foreground")
                    self._registry.delete(dependent_kind, namespace_of(item), name_of(item), deletion)
            if store.owned_by(uid):
                return
        left = [entry for entry in finalizers if entry not in (ORPHAN, FOREGROUND)]
        self._registry.update(
            kind, namespace, name, lambda item: with_metadata(item, finalizers=left or None), internal=True
        )

    def _owner_lives(self, item: Object, uid: str) -> bool:
        for reference in item["metadata"].get("ownerReferences") or ():
            if reference["uid"] == uid:
                kind = BY_KIND.get((reference["apiVersion"], reference["kind"]))
                if kind is None:
                    # A kind that is not served cannot be looked up: its dependents are left alone.
                    return True
                namespace = namespace_of(item) if kind.namespaced else ""
                owner = self._registry.store.get(kind, (namespace, reference["name"]))
                return owner is not None and uid_of(owner) == uid
        return False

    def _collect(self, kind: ResourceType, item: Object, uid: str) -> None:
        references = item["metadata"]["ownerReferences"]
        if len(references) > 1:
            self._without_owner(kind, item, uid)
        elif not is_deleting(item):
            self._registry.delete(kind, namespace_of(item), name_of(item), Deletion())

    def _without_owner(self, kind: ResourceType, item: Object, uid: str) -> None:
        left = [entry for entry in item["metadata"]["ownerReferences"] if entry["uid"] != uid]
        self._registry.update(
            kind,
            namespace_of(item),
            name_of(item),
            lambda current: with_metadata(current, ownerReferences=left or None),
            internal=True,
        )


class NamespaceController:
    """Empties namespaces that are being deleted, and lets them go when nothing is left."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._ending: set[str] = set()

    def concerns(self, kind: ResourceType, change: Change) -> Iterable[Key]:
        if kind is NAMESPACES:
            name = name_of(change.item)
            if change.kind is ChangeKind.DELETED:
                self._ending.discard(name)
            elif is_deleting(change.item):
                self._ending.add(name)
                return [("", name)]
            return []
        gone = change.kind is ChangeKind.DELETED and namespace_of(change.item) in self._ending
        return [("", namespace_of(change.item))] if gone else []

    def reconcile(self, key: Key) -> None:
        name = key[1]
        namespace = self._registry.store.get(NAMESPACES, key)
        if namespace is None or not is_deleting(namespace):
            return
        left = 0
        for kind in _NAMESPACED:
            for item in self._registry.store.items(kind, name):
                gone = False
                if not is_deleting(item):
                    _, gone = self._registry.delete(kind, name, name_of(item), Deletion())
                left += not gone
        if left == 0:
            self._registry.update(
                NAMESPACES, "", name, lambda item: with_value(item, ("spec", "finalizers"), None), internal=True
            )


class LostPods:
    """Takes away the pods of nodes that are gone: nobody is left to stop them in order."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def concerns(self, kind: ResourceType, change: Change) -> Iterable[Key]:
        return [("", name_of(change.item))] if kind is NODES and change.kind is ChangeKind.DELETED else []

    def reconcile(self, key: Key) -> None:
        if not self._registry.is_gone(NODES, key):
            return
        for pod in self._registry.store.items(PODS):
            if pod["spec"].get("nodeName") == key[1]:
                self._registry.delete(PODS, namespace_of(pod), name_of(pod), Deletion(grace_s=0))
