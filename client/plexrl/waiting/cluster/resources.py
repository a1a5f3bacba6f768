"""The kinds of object that the cluster serves, and how each is named, nested and shown in discovery.

Knows names; knows nothing of requests, storage or behaviour.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

VERBS = ("create", "delete", "deletecollection", "get", "list", "patch", "update", "watch")


@dataclass(frozen=True)
class Subresource:
    """A part of an object with its own path, and the kind that travels there."""

    name: str
    kind: str
    verbs: tuple[str, ...]
    group: str = ""
    version: str = ""


STATUS_VERBS = ("get", "patch", "update")


@dataclass(frozen=True, eq=False)
class ResourceType:
    """One kind. `model` names its schema in `lightkube.models`, e.g. "apps_v1.Deployment"."""

    group: str
    version: str
    plural: str
    singular: str
    kind: str
    namespaced: bool
    model: str
    short_names: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()
    subresources: tuple[Subresource, ...] = ()

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def qualified(self) -> str:
        """As error messages name it: "pods", "deployments.apps"."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

    def subresource(self, name: str) -> Subresource | None:
        return next((entry for entry in self.subresources if entry.name == name), None)


def _status(kind: str) -> Subresource:
    return Subresource("status", kind, STATUS_VERBS)


_SCALE = Subresource("scale", "Scale", STATUS_VERBS, "autoscaling", "v1")

NAMESPACES = ResourceType(
    "",
    "v1",
    "namespaces",
    "namespace",
    "Namespace",
    False,
    "core_v1.Namespace",
    ("ns",),
    (),
    (_status("Namespace"), Subresource("finalize", "Namespace", ("update",))),
)
NODES = ResourceType("", "v1", "nodes", "node", "Node", False, "core_v1.Node", ("no",), (), (_status("Node"),))
PODS = ResourceType(
    "",
    "v1",
    "pods",
    "pod",
    "Pod",
    True,
    "core_v1.Pod",
    ("po",),
    ("all",),
    (
        _status("Pod"),
        Subresource("binding", "Binding", ("create",)),
        Subresource("eviction", "Eviction", ("create",), "policy", "v1"),
    ),
)
CLAIMS = ResourceType(
    "",
    "v1",
    "persistentvolumeclaims",
    "persistentvolumeclaim",
    "PersistentVolumeClaim",
    True,
    "core_v1.PersistentVolumeClaim",
    ("pvc",),
    (),
    (_status("PersistentVolumeClaim"),),
)
VOLUMES = ResourceType(
    "",
    "v1",
    "persistentvolumes",
    "persistentvolume",
    "PersistentVolume",
    False,
    "core_v1.PersistentVolume",
    ("pv",),
    (),
    (_status("PersistentVolume"),),
)
EVENTS = ResourceType("", "v1", "events", "event", "Event", True, "core_v1.Event", ("ev",))
CONFIG_MAPS = ResourceType("", "v1", "configmaps", "configmap", "ConfigMap", True, "core_v1.ConfigMap", ("cm",))
DEPLOYMENTS = ResourceType(
    "apps",
    "v1",
    "deployments",
    "deployment",
    "Deployment",
    True,
    "apps_v1.Deployment",
    ("deploy",),
    ("all",),
    (_SCALE, _status("Deployment")),
)
REPLICA_SETS = ResourceType(
    "apps",
    "v1",
    "replicasets",
    "replicaset",
    "ReplicaSet",
    True,
    "apps_v1.ReplicaSet",
    ("rs",),
    ("all",),
    (_SCALE, _status("ReplicaSet")),
)
JOBS = ResourceType("batch", "v1", "jobs", "job", "Job", True, "batch_v1.Job", (), ("all",), (_status("Job"),))

RESOURCE_TYPES = (
    CONFIG_MAPS,
    EVENTS,
    NAMESPACES,
    NODES,
    CLAIMS,
    VOLUMES,
    PODS,
    DEPLOYMENTS,
    REPLICA_SETS,
    JOBS,
)
GROUP_VERSIONS = tuple(dict.fromkeys((kind.group, kind.version) for kind in RESOURCE_TYPES))
BY_PLURAL: Mapping[tuple[str, str, str], ResourceType] = MappingProxyType(
    {(kind.group, kind.version, kind.plural): kind for kind in RESOURCE_TYPES}
)
BY_KIND: Mapping[tuple[str, str], ResourceType] = MappingProxyType(
    {(kind.api_version, kind.kind): kind for kind in RESOURCE_TYPES}
)
