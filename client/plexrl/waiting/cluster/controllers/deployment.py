"""Deployments: one replica set per version of the pod template, and the way from the old ones to the new.

The steps and their order are those of Kubernetes: find or make the new replica set, scale it up as far as maxSurge lets
it, scale the old ones down as far as maxUnavailable lets them, then say in the status where the rollout stands.
"""

import hashlib
import math
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from plexrl.waiting.cluster.api.errors import ApiError
from plexrl.waiting.cluster.controllers.events import EventRecorder
from plexrl.waiting.cluster.controllers.rollout_status import deployment_status, progress_deadline_s
from plexrl.waiting.cluster.objects import (
    Object,
    annotations_of,
    controller_of,
    is_deleting,
    name_of,
    namespace_of,
    owner_reference,
    uid_of,
    where,
    with_metadata,
    with_value,
)
from plexrl.waiting.cluster.registry import Deletion, Registry
from plexrl.waiting.cluster.resources import DEPLOYMENTS, REPLICA_SETS, ResourceType
from plexrl.waiting.cluster.store import Change, Key

HASH_LABEL = "pod-template-hash"
REVISION = "deployment.kubernetes.io/revision"
DESIRED = "deployment.kubernetes.io/desired-replicas"
MAXIMUM = "deployment.kubernetes.io/max-replicas"
_NOT_COPIED = (REVISION, DESIRED, MAXIMUM, "kubectl.kubernetes.io/last-applied-configuration")
# Letters and digits without vowels or look-alikes, as names of replica sets have them.
_ALPHABET = "bcdfghjklmnpqrstvwxz2456789"
_HASH_LENGTH = 10


class DeploymentController:
    """Rolls deployments out, scales them, and keeps their history."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._events = EventRecorder(registry, "deployment-controller")

    def concerns(self, kind: ResourceType, change: Change) -> Iterable[Key]:
        if kind is DEPLOYMENTS:
            return [(namespace_of(change.item), name_of(change.item))]
        owner = controller_of(change.item) if kind is REPLICA_SETS else None
        if owner is not None and owner["kind"] == "Deployment":
            return [(namespace_of(change.item), owner["name"])]
        return []

    def reconcile(self, key: Key) -> float | None:
        deployment = self._registry.store.get(DEPLOYMENTS, key)
        if deployment is None:
            return None
        replica_sets = self._replica_sets(deployment)
        new = next((item for item in replica_sets if _is_of_template(item, deployment)), None)
        paused = bool(deployment["spec"].get("paused"))
        if not is_deleting(deployment):
            if not paused:
                try:
                    new = self._new_replica_set(deployment, new, replica_sets)
                except ApiError as error:
                    # A namespace that ends, or a name that is taken.
                    message = f"Failed to create new replica set: {error.message}"
                    self._events.record(deployment, "ReplicaSetCreateError", message, "Warning")
                    return None
                deployment = self._with_revision(deployment, new)
            old = [item for item in replica_sets if new is None or uid_of(item) != uid_of(new)]
            if self._was_rescaled(deployment, [*old, *([new] if new else [])]):
                self._scale_in_proportion(deployment, new, old)
            elif not paused and new is not None:
                self._roll(deployment, new, old)
                self._clean_up(deployment, new)
        replica_sets = self._replica_sets(deployment)
        new = next((item for item in replica_sets if _is_of_template(item, deployment)), None)
        status = deployment_status(deployment, new, replica_sets, self._registry.clock)
        deployment = self._registry.update_status(DEPLOYMENTS, deployment, status)
        return progress_deadline_s(deployment, self._registry.clock)

    def _replica_sets(self, deployment: Object) -> list[Object]:
        """Oldest first."""
        owned = [item for kind, item in self._registry.store.owned_by(uid_of(deployment)) if kind is REPLICA_SETS]
        return sorted(owned, key=lambda item: (_revision(item), name_of(item)))

    def _new_replica_set(self, deployment: Object, found: Object | None, known: Sequence[Object]) -> Object:
        newest = max((_revision(item) for item in known), default=0)
        if found is not None:
            # A template that comes back is the newest revision again.
            if _revision(found) < newest:
                return self._annotated(found, {REVISION: str(newest + 1)})
            return found
        spec = deployment["spec"]
        digest = template_hash(spec["template"])
        labels = {**((spec["template"].get("metadata") or {}).get("labels") or {}), HASH_LABEL: digest}
        template = with_value(spec["template"], ("metadata", "labels"), labels)
        selector = with_value(
            spec["selector"], ("matchLabels",), {**(spec["selector"].get("matchLabels") or {}), HASH_LABEL: digest}
        )
        old_count = sum(_replicas(item) for item in known)
        replicas = self._new_count(deployment, 0, old_count)
        copied = {key: value for key, value in annotations_of(deployment).items() if key not in _NOT_COPIED}
        surge, _ = _bounds(deployment)
        item = {
            "metadata": {
                "name": f"{name_of(deployment)}-{digest}",
                "labels": labels,
                "annotations": {
                    **copied,
                    REVISION: str(newest + 1),
                    DESIRED: str(spec["replicas"]),
                    MAXIMUM: str(spec["replicas"] + surge),
                },
                "ownerReferences": [owner_reference(deployment)],
            },
            "spec": {
                "replicas": replicas,
                "selector": selector,
                "template": template,
                **({"minReadySeconds": spec["minReadySeconds"]} if spec.get("minReadySeconds") else {}),
            },
        }
        created = self._registry.create(REPLICA_SETS, namespace_of(deployment), item)
        if replicas:
            self._say_scaled(deployment, created, 0, replicas)
        return created

    def _with_revision(self, deployment: Object, new: Object) -> Object:
        revision = annotations_of(new).get(REVISION, "1")
        if annotations_of(deployment).get(REVISION) == revision:
            return deployment
        annotations = {**annotations_of(deployment), REVISION: revision}
        return self._registry.update(
            DEPLOYMENTS,
            namespace_of(deployment),
            name_of(deployment),
            lambda item: with_metadata(item, annotations=annotations),
            internal=True,
        )

    def _was_rescaled(self, deployment: Object, replica_sets: Sequence[Object]) -> bool:
        """Whether replicas were changed since the replica sets were last scaled; a new version is a matter apart."""
        desired = str(deployment["spec"]["replicas"])
        return any(
            _replicas(item) > 0 and annotations_of(item).get(DESIRED, desired) != desired for item in replica_sets
        )

    def _scale_in_proportion(self, deployment: Object, new: Object | None, old: Sequence[Object]) -> None:
        """Spreads a new number of replicas over all versions, so that a rollout under way keeps its proportions."""
        wanted = deployment["spec"]["replicas"]
        everything = [*old, *([new] if new else [])]
        active = where(everything, lambda item: _replicas(item) > 0)
        if len(active) <= 1 or deployment["spec"]["strategy"]["type"] == "Recreate":
            target = active[0] if active else new
            if target is not None:
                self._scale(deployment, target, wanted)
            return
        surge, _ = _bounds(deployment)
        allowed = wanted + surge if wanted > 0 else 0
        total = sum(_replicas(item) for item in active)
        to_add = allowed - total
        # The largest first, and of equals the newest when growing, the oldest when shrinking.
        order = sorted(active, key=lambda item: (-_replicas(item), -_revision(item) if to_add > 0 else _revision(item)))
        left = to_add
        sizes: list[int] = []
        for item in order:
            before = _replicas(item)
            maximum = int(annotations_of(item).get(MAXIMUM, total) or total) or total
            share = round(before * allowed / maximum) - before
            share = min(max(share, 0), left) if to_add > 0 else max(min(share, 0), left)
            left -= share
            sizes.append(max(0, before + share))
        sizes[0] = max(0, sizes[0] + left)
        for item, size in zip(order, sizes, strict=True):
            self._scale(deployment, item, size)

    def _roll(self, deployment: Object, new: Object, old: Sequence[Object]) -> None:
        old_active = where(old, lambda item: _replicas(item) > 0)
        if deployment["spec"]["strategy"]["type"] == "Recreate":
            for item in old_active:
                self._scale(deployment, item, 0)
            # The new version starts when nothing of the old one runs.
            if not old_active and not any(_owned_pods_run(item) for item in old):
                self._scale(deployment, new, deployment["spec"]["replicas"])
            return
        old_count = sum(_replicas(item) for item in old)
        target = self._new_count(deployment, _replicas(new), old_count)
        if target != _replicas(new):
            self._scale(deployment, new, target)
            return
        if old_active:
            self._scale_old_down(deployment, new, old_active)

    def _scale_old_down(self, deployment: Object, new: Object, old: Sequence[Object]) -> None:
        _, unavailable = _bounds(deployment)
        least = deployment["spec"]["replicas"] - unavailable
        total = sum(_replicas(item) for item in (*old, new))
        new_unavailable = _replicas(new) - _available(new)
        budget = total - least - new_unavailable
        if budget <= 0:
            return
        sizes = {uid_of(item): _replicas(item) for item in old}
        # Replicas that are not available give nothing up when they go.
        for item in old:
            unhealthy = min(budget, sizes[uid_of(item)] - _available(item))
            if unhealthy > 0:
                sizes[uid_of(item)] -= unhealthy
                budget -= unhealthy
        surplus = sum(_available(item) for item in (*old, new)) - least
        for item in old:
            cut = min(sizes[uid_of(item)], surplus)
            if cut > 0:
                sizes[uid_of(item)] -= cut
                surplus -= cut
        for item in old:
            self._scale(deployment, item, sizes[uid_of(item)])

    def _new_count(self, deployment: Object, current: int, old_count: int) -> int:
        """How many replicas the new version may have now."""
        wanted: int = deployment["spec"]["replicas"]
        if deployment["spec"]["strategy"]["type"] == "Recreate":
            return wanted if old_count == 0 else current
        surge, _ = _bounds(deployment)
        if current > wanted:
            return wanted
        room = wanted + surge - current - old_count
        return current + max(0, min(room, wanted - current))

    def _clean_up(self, deployment: Object, new: Object) -> None:
        """Forgets versions beyond the history limit once the rollout is through."""
        old = [item for item in self._replica_sets(deployment) if uid_of(item) != uid_of(new)]
        spent = [item for item in old if not _replicas(item) and not (item.get("status") or {}).get("replicas")]
        limit = deployment["spec"].get("revisionHistoryLimit", 10)
        for item in spent[: max(0, len(spent) - limit)]:
            if not is_deleting(item):
                self._registry.delete(REPLICA_SETS, namespace_of(item), name_of(item), Deletion())

    def _scale(self, deployment: Object, replica_set: Object, replicas: int) -> None:
        surge, _ = _bounds(deployment)
        wanted = deployment["spec"]["replicas"]
        before = _replicas(replica_set)
        notes = {DESIRED: str(wanted), MAXIMUM: str(wanted + surge)}
        annotations = {**annotations_of(replica_set), **notes}
        self._registry.update(
            REPLICA_SETS,
            namespace_of(replica_set),
            name_of(replica_set),
            lambda item: with_value(with_metadata(item, annotations=annotations), ("spec", "replicas"), replicas),
            internal=True,
        )
        if replicas != before:
            self._say_scaled(deployment, replica_set, before, replicas)

    def _annotated(self, replica_set: Object, notes: dict[str, str]) -> Object:
        annotations = {**annotations_of(replica_set), **notes}
        return self._registry.update(
            REPLICA_SETS,
            namespace_of(replica_set),
            name_of(replica_set),
            lambda item: with_metadata(item, annotations=annotations),
            internal=True,
        )

    def _say_scaled(self, deployment: Object, replica_set: Object, before: int, after: int) -> None:
        way = "up" if after > before else "down"
        message = f"Scaled {way} replica set {name_of(replica_set)} from {before} to {after}"
        self._events.record(deployment, "ScalingReplicaSet", message)


def template_hash(template: Object) -> str:
    """A short name for a pod template."""
    number = int.from_bytes(hashlib.sha256(msgspec.json.encode(template, order="deterministic")).digest())
    digits = []
    for _ in range(_HASH_LENGTH):
        number, digit = divmod(number, len(_ALPHABET))
        digits.append(_ALPHABET[digit])
    return "".join(digits)


def _is_of_template(replica_set: Object, deployment: Object) -> bool:
    template = replica_set["spec"]["template"]
    labels = dict((template.get("metadata") or {}).get("labels") or {})
    labels.pop(HASH_LABEL, None)
    return bool(with_value(template, ("metadata", "labels"), labels) == deployment["spec"]["template"])


def _replicas(replica_set: Object) -> int:
    count: int = replica_set["spec"].get("replicas", 1)
    return count


def _available(replica_set: Object) -> int:
    count: int = (replica_set.get("status") or {}).get("availableReplicas", 0)
    return count


def _owned_pods_run(replica_set: Object) -> bool:
    status = replica_set.get("status") or {}
    return bool(status.get("replicas", 0) or status.get("terminatingReplicas", 0))


def _revision(replica_set: Object) -> int:
    text = annotations_of(replica_set).get(REVISION, "0")
    return int(text) if text.isdecimal() else 0


def _bounds(deployment: Object) -> tuple[int, int]:
    """How many replicas too many (rounded up) and too few (rounded down) a rolling update may have."""
    strategy, wanted = deployment["spec"]["strategy"], deployment["spec"]["replicas"]
    rolling = strategy.get("rollingUpdate")
    if strategy["type"] != "RollingUpdate" or not rolling:
        return 0, 0
    surge = _part(rolling["maxSurge"], wanted, up=True)
    unavailable = _part(rolling["maxUnavailable"], wanted, up=False)
    # Percentages may round to nothing; then one replica at a time may be missing, or nothing would move.
    return (surge, 1) if surge == 0 and unavailable == 0 else (surge, min(unavailable, wanted))


def _part(value: Any, whole: int, *, up: bool) -> int:
    if isinstance(value, int):
        return value
    part = int(value[:-1]) * whole / 100
    return math.ceil(part) if up else math.floor(part)
