"""Replica sets: as many pods as asked for."""

from collections.abc import Iterable

from plexrl.waiting.cluster.api.errors import ApiError
from plexrl.waiting.cluster.controllers.events import EventRecorder
from plexrl.waiting.cluster.controllers.pods import (
    PodCounts,
    available_in_s,
    deletion_rank,
    is_active,
    pod_from_template,
)
from plexrl.waiting.cluster.objects import (
    Object,
    controller_of,
    is_deleting,
    name_of,
    namespace_of,
    uid_of,
    where,
)
from plexrl.waiting.cluster.registry import Deletion, Registry
from plexrl.waiting.cluster.resources import PODS, REPLICA_SETS, ResourceType
from plexrl.waiting.cluster.store import Change, ChangeKind, Key


class ReplicaSetController:
    """Creates and deletes pods; counts them by owner as they change, so that a look costs nothing while all is well."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._events = EventRecorder(registry, "replicaset-controller")
        self._counts: dict[str, PodCounts] = {}

    def concerns(self, kind: ResourceType, change: Change) -> Iterable[Key]:
        item = change.item
        if kind is REPLICA_SETS:
            if change.kind is ChangeKind.DELETED:
                self._forget(uid_of(item))
            return [(namespace_of(item), name_of(item))]
        if kind is not PODS:
            return []
        found = []
        for pod, sign in ((change.previous, -1), (None if change.kind is ChangeKind.DELETED else item, 1)):
            owner = None if pod is None else controller_of(pod)
            if pod is not None and owner is not None and owner["kind"] == "ReplicaSet":
                self._counts.setdefault(owner["uid"], PodCounts()).add(pod, sign)
                if sign < 0 and change.kind is ChangeKind.DELETED:
                    key = (namespace_of(pod), owner["name"])
                    if self._registry.is_gone(REPLICA_SETS, key):
                        self._forget(owner["uid"])
                found.append((namespace_of(pod), owner["name"]))
        return dict.fromkeys(found)

    def reconcile(self, key: Key) -> float | None:
        replica_set = self._registry.store.get(REPLICA_SETS, key)
        if replica_set is None:
            return None
        counts = self._counts.setdefault(uid_of(replica_set), PodCounts())
        if not is_deleting(replica_set):
            missing = replica_set["spec"].get("replicas", 1) - counts.active
            if missing > 0:
                self._create(replica_set, missing)
            elif missing < 0:
                self._delete(replica_set, -missing)
        return self._update_status(replica_set, counts)

    def _forget(self, uid: str) -> None:
        """Drops the counts of a replica set that is gone, once its last pod is."""
        counts = self._counts.get(uid)
        if counts is not None and counts.active == 0 and counts.terminating == 0:
            del self._counts[uid]

    def _pods(self, replica_set: Object) -> list[Object]:
        return [pod for kind, pod in self._registry.store.owned_by(uid_of(replica_set)) if kind is PODS]

    def _create(self, replica_set: Object, count: int) -> None:
        template, prefix = replica_set["spec"]["template"], f"{name_of(replica_set)}-"
        wanted = pod_from_template(replica_set, template, prefix)
        for _ in range(count):
            try:
                pod = self._registry.create(PODS, namespace_of(replica_set), wanted)
            except ApiError as error:
                # A namespace that ends, or a template that no pod may have: said once, tried again at the next change.
                self._events.record(replica_set, "FailedCreate", f"Error creating: {error.message}", "Warning")
                return
            self._events.record(replica_set, "SuccessfulCreate", f"Created pod: {name_of(pod)}")

    def _delete(self, replica_set: Object, count: int) -> None:
        candidates = sorted(where(self._pods(replica_set), is_active), key=deletion_rank)
        for pod in candidates[:count]:
            self._registry.delete(PODS, namespace_of(pod), name_of(pod), Deletion())
            self._events.record(replica_set, "SuccessfulDelete", f"Deleted pod: {name_of(pod)}")

    def _update_status(self, replica_set: Object, counts: PodCounts) -> float | None:
        min_ready_s = replica_set["spec"].get("minReadySeconds") or 0
        available, again_s = counts.ready, None
        if min_ready_s and counts.ready:
            times = [
                available_in_s(pod, min_ready_s, self._registry.clock)
                for pod in where(self._pods(replica_set), is_active)
            ]
            available = sum(1 for time_s in times if time_s == 0)
            again_s = min((time_s for time_s in times if time_s), default=None)
        status = {"replicas": counts.active, "observedGeneration": replica_set["metadata"]["generation"]}
        if counts.active:
            status["fullyLabeledReplicas"] = counts.active
        if counts.ready:
            status["readyReplicas"] = counts.ready
        if available:
            status["availableReplicas"] = available
        if counts.terminating:
            status["terminatingReplicas"] = counts.terminating
        self._registry.update_status(REPLICA_SETS, replica_set, status)
        return again_s
