"""Volumes and claims: a claim is bound to the volume that was made for it, and gives it back when it goes."""

from collections.abc import Iterable

from plexrl.waiting.cluster.objects import (
    Object,
    is_deleting,
    look_up,
    name_of,
    namespace_of,
    uid_of,
    with_metadata,
    with_value,
)
from plexrl.waiting.cluster.quantities import parse_quantity
from plexrl.waiting.cluster.registry import Deletion, Registry
from plexrl.waiting.cluster.resources import CLAIMS, VOLUMES, ResourceType
from plexrl.waiting.cluster.store import Change, ChangeKind, Key

BIND_COMPLETED = "pv.kubernetes.io/bind-completed"


class VolumeController:
    """Binds claims to volumes that name them, or else to the smallest free volume that is large enough.

    Keys are of claims, or of volumes with the namespace "volume/", which no namespace is called.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def concerns(self, kind: ResourceType, change: Change) -> Iterable[Key]:
        item = change.item
        if kind is CLAIMS:
            keys = [(namespace_of(item), name_of(item))]
            if change.kind is ChangeKind.DELETED and item["spec"].get("volumeName"):
                keys.append(("volume/", item["spec"]["volumeName"]))
            return keys
        if kind is VOLUMES and change.kind is not ChangeKind.DELETED:
            keys = [("volume/", name_of(item))]
            claim = item["spec"].get("claimRef")
            return [*keys, (claim["namespace"], claim["name"])] if claim else keys
        return []

    def reconcile(self, key: Key) -> None:
        if key[0] == "volume/":
            self._look_at_volume(key[1])
            return
        claim = self._registry.store.get(CLAIMS, key)
        if claim is None or is_deleting(claim) or look_up(claim, "status", "phase") == "Bound":
            return
        volume = self._volume_for(claim)
        if volume is not None:
            self._bind(claim, volume)

    def _volume_for(self, claim: Object) -> Object | None:
        spec = claim["spec"]
        asked = parse_quantity(look_up(spec, "resources", "requests", "storage"))
        fitting = []
        for volume in self._registry.store.items(VOLUMES):
            reference = volume["spec"].get("claimRef")
            if reference is not None:
                named = (reference.get("namespace"), reference.get("name"))
                if named == (namespace_of(claim), name_of(claim)) and reference.get("uid") in (None, uid_of(claim)):
                    return volume
                continue
            size = parse_quantity(look_up(volume, "spec", "capacity", "storage", default="0"))
            modes = set(volume["spec"].get("accessModes") or ())
            same_class = volume["spec"].get("storageClassName", "") == spec.get("storageClassName", "")
            wanted = spec.get("volumeName") in (None, name_of(volume))
            if (
                size >= asked
                and same_class
                and wanted
                and modes >= set(spec["accessModes"])
                and not is_deleting(volume)
            ):
                fitting.append((size, name_of(volume), volume))
        return min(fitting, key=lambda entry: entry[:2])[2] if fitting else None

    def _bind(self, claim: Object, volume: Object) -> None:
        reference = {
            "kind": "PersistentVolumeClaim",
            "apiVersion": "v1",
            "namespace": namespace_of(claim),
            "name": name_of(claim),
            "uid": uid_of(claim),
        }
        self._registry.update(
            VOLUMES,
            "",
            name_of(volume),
            lambda item: with_value(item, ("spec", "claimRef"), reference),
            internal=True,
        )
        self._registry.update_status(VOLUMES, volume, {"phase": "Bound"})
        annotations = {**(claim["metadata"].get("annotations") or {}), BIND_COMPLETED: "yes"}
        self._registry.update(
            CLAIMS,
            namespace_of(claim),
            name_of(claim),
            lambda item: with_value(
                with_metadata(item, annotations=annotations), ("spec", "volumeName"), name_of(volume)
            ),
            internal=True,
        )
        capacity = {"storage": look_up(volume, "spec", "capacity", "storage")}
        status = {"phase": "Bound", "accessModes": volume["spec"].get("accessModes"), "capacity": capacity}
        self._registry.update_status(CLAIMS, claim, status)

    def _look_at_volume(self, name: str) -> None:
        volume = self._registry.store.get(VOLUMES, ("", name))
        if volume is None or is_deleting(volume):
            return
        reference = volume["spec"].get("claimRef")
        phase = look_up(volume, "status", "phase")
        if reference is None:
            if phase != "Available":
                self._registry.update_status(VOLUMES, volume, {"phase": "Available"})
            return
        claim = self._registry.store.get(CLAIMS, (reference["namespace"], reference["name"]))
        if phase != "Bound" or (claim is not None and uid_of(claim) == reference.get("uid")):
            return
        if volume["spec"].get("persistentVolumeReclaimPolicy") == "Delete":
            self._registry.delete(VOLUMES, "", name, Deletion())
        else:
            self._registry.update_status(VOLUMES, volume, {"phase": "Released"})
