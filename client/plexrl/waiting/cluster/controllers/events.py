"""Events: what happened to which object, for people. They go after an hour, as in a real cluster."""

from collections import deque

from plexrl.waiting.cluster.api.errors import ApiError
from plexrl.waiting.cluster.objects import Object, name_of, namespace_of, uid_of
from plexrl.waiting.cluster.registry import Deletion, Registry
from plexrl.waiting.cluster.resources import EVENTS, ResourceType
from plexrl.waiting.cluster.store import Change, ChangeKind, Key

EVENT_TTL_S = 3600.0
SWEEP_S = 60.0


class EventRecorder:
    """Writes events in the name of one component."""

    def __init__(self, registry: Registry, component: str) -> None:
        self._registry = registry
        self._component = component

    def record(self, about: Object, reason: str, message: str, kind: str = "Normal") -> None:
        """Says what happened to an object. In a namespace that ends, nothing is written."""
        now = self._registry.clock.timestamp()
        namespace = namespace_of(about) or "default"
        event: Object = {
            "metadata": {"generateName": f"{name_of(about)[:40]}.", "namespace": namespace},
            "involvedObject": {
                "apiVersion": about["apiVersion"],
                "kind": about["kind"],
                "name": name_of(about),
                "uid": uid_of(about),
                "resourceVersion": about["metadata"]["resourceVersion"],
                "namespace": namespace_of(about),
            },
            "reason": reason,
            "message": message,
            "type": kind,
            "count": 1,
            "firstTimestamp": now,
            "lastTimestamp": now,
            "source": {"component": self._component},
            "reportingComponent": self._component,
            "reportingInstance": "",
        }
        if not namespace_of(about):
            event["involvedObject"].pop("namespace")
        try:
            self._registry.create(EVENTS, namespace, event)
        except ApiError as error:
            if error.code not in (403, 404):
                raise


class EventExpiry:
    """Takes events away that are older than an hour."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._known: deque[tuple[float, Key]] = deque()

    def concerns(self, kind: ResourceType, change: Change) -> list[Key]:
        if kind is not EVENTS or change.kind is not ChangeKind.ADDED:
            return []
        self._known.append(
            (self._registry.clock.now_s + EVENT_TTL_S, (namespace_of(change.item), name_of(change.item)))
        )
        # One wake-up serves them all.
        return [("", "sweep")] if len(self._known) == 1 else []

    def reconcile(self, key: Key) -> float | None:
        now_s = self._registry.clock.now_s
        while self._known and self._known[0][0] <= now_s:
            _, (namespace, name) = self._known.popleft()
            if not self._registry.is_gone(EVENTS, (namespace, name)):
                self._registry.delete(EVENTS, namespace, name, Deletion())
        return max(SWEEP_S, self._known[0][0] - now_s) if self._known else None
