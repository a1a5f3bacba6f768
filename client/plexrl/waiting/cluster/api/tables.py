"""Tables, as `kubectl get` shows them: the server decides on columns and cells. Ages are of the cluster's clock."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

from plexrl.waiting.cluster.api.selectors import selector_text
from plexrl.waiting.cluster.clock import VirtualClock
from plexrl.waiting.cluster.objects import Object, condition, is_deleting, look_up, name_of
from plexrl.waiting.cluster.resources import (
    CLAIMS,
    CONFIG_MAPS,
    DEPLOYMENTS,
    EVENTS,
    JOBS,
    NAMESPACES,
    NODES,
    PODS,
    REPLICA_SETS,
    VOLUMES,
    ResourceType,
)

Cells: TypeAlias = list[Any]


@dataclass(frozen=True)
class Column:
    """Wide columns are shown by `-o wide` alone."""

    name: str
    kind: str = "string"
    wide: bool = False

    def to_json(self) -> Object:
        shape = {"name": self.name, "type": self.kind, "format": "", "description": self.name}
        if self.name == "Name":
            shape["format"] = "name"
        return {**shape, "priority": 1 if self.wide else 0}


def table(kind: ResourceType, items: Sequence[Object], clock: VirtualClock, include: str, metadata: Object) -> Object:
    """A Table of objects. `include` says what goes along with each row: None, Metadata or Object."""
    columns, cells = _TABLES[kind]
    return {
        "kind": "Table",
        "apiVersion": "meta.k8s.io/v1",
        "metadata": metadata,
        "columnDefinitions": [column.to_json() for column in columns],
        "rows": [{"cells": cells(item, clock), **_included(item, include)} for item in items],
    }


def partial_metadata(item: Object) -> Object:
    return {"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": item["metadata"]}


def duration(seconds: float) -> str:
    """As kubectl writes ages: 45s, 3m20s, 12m, 5h10m, 30h, 3d4h, 40d, 2y100d."""
    whole = int(seconds)
    if whole < 0:
        return "0s"
    minutes, hours, days, years = whole // 60, whole // 3600, whole // 86400, whole // (365 * 86400)
    if whole < 120:
        return f"{whole}s"
    if minutes < 10:
        return f"{minutes}m" + (f"{whole % 60}s" if whole % 60 else "")
    if minutes < 180:
        return f"{minutes}m"
    if hours < 8:
        return f"{hours}h" + (f"{minutes % 60}m" if minutes % 60 else "")
    if hours < 48:
        return f"{hours}h"
    if hours < 192:
        return f"{days}d" + (f"{hours % 24}h" if hours % 24 else "")
    if days < 2 * 365:
        return f"{days}d"
    if years < 8:
        return f"{years}y" + (f"{days % 365}d" if days % 365 else "")
    return f"{years}y"


def pod_status(pod: Object) -> str:
    """The one word for a pod's state."""
    status = pod.get("status") or {}
    shown = status.get("reason") or status.get("phase") or "Unknown"
    for entry in reversed(status.get("containerStatuses") or []):
        waiting, terminated = look_up(entry, "state", "waiting"), look_up(entry, "state", "terminated")
        if waiting and waiting.get("reason"):
            shown = waiting["reason"]
        elif terminated:
            shown = terminated.get("reason") or f"ExitCode:{terminated.get('exitCode', 0)}"
    if is_deleting(pod) and status.get("phase") not in ("Succeeded", "Failed"):
        return "Terminating"
    return str(shown)


def _included(item: Object, include: str) -> Object:
    match include:
        case "None":
            return {}
        case "Object":
            return {"object": item}
        case _:
            return {"object": partial_metadata(item)}


def _age(item: Object, clock: VirtualClock) -> str:
    return duration(clock.seconds_since(item["metadata"]["creationTimestamp"]))


def _since(timestamp: str | None, clock: VirtualClock) -> str:
    return duration(clock.seconds_since(timestamp)) if timestamp else "<unknown>"


def _containers(spec: Object) -> tuple[str, str]:
    containers = spec.get("containers") or []
    return ",".join(entry["name"] for entry in containers), ",".join(entry.get("image", "") for entry in containers)


def _pod(pod: Object, clock: VirtualClock) -> Cells:
    statuses = look_up(pod, "status", "containerStatuses", default=[])
    ready = sum(1 for entry in statuses if entry.get("ready"))
    restarts = sum(entry.get("restartCount", 0) for entry in statuses)
    return [
        name_of(pod),
        f"{ready}/{len(pod['spec']['containers'])}",
        pod_status(pod),
        str(restarts),
        _age(pod, clock),
        look_up(pod, "status", "podIP", default="<none>"),
        pod["spec"].get("nodeName") or "<none>",
        look_up(pod, "status", "nominatedNodeName", default="<none>"),
        "<none>",
    ]


def _deployment(item: Object, clock: VirtualClock) -> Cells:
    status, spec = item.get("status") or {}, item["spec"]
    return [
        name_of(item),
        f"{status.get('readyReplicas', 0)}/{spec.get('replicas', 1)}",
        status.get("updatedReplicas", 0),
        status.get("availableReplicas", 0),
        _age(item, clock),
        *_containers(spec["template"]["spec"]),
        selector_text(spec["selector"]),
    ]


def _replica_set(item: Object, clock: VirtualClock) -> Cells:
    status, spec = item.get("status") or {}, item["spec"]
    return [
        name_of(item),
        spec.get("replicas", 1),
        status.get("replicas", 0),
        status.get("readyReplicas", 0),
        _age(item, clock),
        *_containers(spec["template"]["spec"]),
        selector_text(spec["selector"]),
    ]


def _job(item: Object, clock: VirtualClock) -> Cells:
    status, spec = item.get("status") or {}, item["spec"]
    succeeded = status.get("succeeded", 0)
    if spec.get("completions") is not None:
        completions = f"{succeeded}/{spec['completions']}"
    elif spec.get("parallelism", 1) > 1:
        completions = f"{succeeded}/1 of {spec['parallelism']}"
    else:
        completions = f"{succeeded}/1"
    end = status.get("completionTime")
    took = ""
    if status.get("startTime"):
        took = duration(clock.seconds_since(status["startTime"]) - (clock.seconds_since(end) if end else 0))
    state = "Running"
    for kind, shown in (("Complete", "Complete"), ("Failed", "Failed"), ("Suspended", "Suspended")):
        found = condition(item, kind)
        if found is not None and found["status"] == "True":
            state = shown
            break
    if state == "Running" and is_deleting(item):
        state = "Terminating"
    return [
        name_of(item),
        state,
        completions,
        took,
        _age(item, clock),
        *_containers(spec["template"]["spec"]),
        selector_text(spec.get("selector") or {}),
    ]


def _node(node: Object, clock: VirtualClock) -> Cells:
    ready = condition(node, "Ready")
    state = "Unknown" if ready is None else "Ready" if ready["status"] == "True" else "NotReady"
    if node.get("spec", {}).get("unschedulable"):
        state += ",SchedulingDisabled"
    info = look_up(node, "status", "nodeInfo", default={})
    addresses = {entry["type"]: entry["address"] for entry in look_up(node, "status", "addresses", default=[])}
    prefix = "node-role.kubernetes.io/"
    roles = sorted(key.removeprefix(prefix) for key in node["metadata"].get("labels") or {} if key.startswith(prefix))
    return [
        name_of(node),
        state,
        ",".join(roles) or "<none>",
        _age(node, clock),
        info.get("kubeletVersion", ""),
        addresses.get("InternalIP", "<none>"),
        addresses.get("ExternalIP", "<none>"),
        info.get("osImage", "<unknown>"),
        info.get("kernelVersion", "<unknown>"),
        info.get("containerRuntimeVersion", "<unknown>"),
    ]


def _namespace(item: Object, clock: VirtualClock) -> Cells:
    return [name_of(item), look_up(item, "status", "phase", default=""), _age(item, clock)]


_MODES = {"ReadWriteOnce": "RWO", "ReadOnlyMany": "ROX", "ReadWriteMany": "RWX", "ReadWriteOncePod": "RWOP"}


def _modes(modes: Sequence[str] | None) -> str:
    return ",".join(_MODES.get(mode, mode) for mode in modes or ())


def _claim(item: Object, clock: VirtualClock) -> Cells:
    status, spec = item.get("status") or {}, item["spec"]
    bound = bool(spec.get("volumeName"))
    phase = "Terminating" if is_deleting(item) else status.get("phase", "")
    return [
        name_of(item),
        phase,
        spec.get("volumeName", ""),
        look_up(status, "capacity", "storage", default="") if bound else "",
        _modes(status.get("accessModes")) if bound else "",
        spec.get("storageClassName", ""),
        spec.get("volumeAttributesClassName") or "<unset>",
        _age(item, clock),
        spec.get("volumeMode", ""),
    ]


def _volume(item: Object, clock: VirtualClock) -> Cells:
    spec = item["spec"]
    claim = spec.get("claimRef") or {}
    return [
        name_of(item),
        look_up(spec, "capacity", "storage", default=""),
        _modes(spec.get("accessModes")),
        spec.get("persistentVolumeReclaimPolicy", "Retain"),
        "Terminating" if is_deleting(item) else look_up(item, "status", "phase", default=""),
        f"{claim.get('namespace')}/{claim.get('name')}" if claim else "",
        spec.get("storageClassName", ""),
        spec.get("volumeAttributesClassName") or "<unset>",
        look_up(item, "status", "reason", default=""),
        _age(item, clock),
        spec.get("volumeMode", "Filesystem"),
    ]


def _event(item: Object, clock: VirtualClock) -> Cells:
    involved = item["involvedObject"]
    return [
        _since(item.get("lastTimestamp") or item.get("eventTime"), clock),
        item.get("type", ""),
        item.get("reason", ""),
        f"{involved.get('kind', '').lower()}/{involved.get('name', '')}",
        involved.get("fieldPath", ""),
        ", ".join(filter(None, (look_up(item, "source", name) for name in ("component", "host")))),
        (item.get("message") or "").strip(),
        _since(item.get("firstTimestamp") or item.get("eventTime"), clock),
        item.get("count", 1),
        name_of(item),
    ]


def _config_map(item: Object, clock: VirtualClock) -> Cells:
    return [name_of(item), len(item.get("data") or ()) + len(item.get("binaryData") or ()), _age(item, clock)]


def _columns(text: str) -> tuple[Column, ...]:
    """Columns from "Name Ready:wide Count#": spaces in names are written as underscores, numbers end in #."""
    found = []
    for entry in text.split():
        name, _, wide = entry.partition(":")
        kind = "integer" if name.endswith("#") else "string"
        found.append(Column(name.rstrip("#").replace("_", " "), kind, bool(wide)))
    return tuple(found)


_WORKLOAD = "Age Containers:wide Images:wide Selector:wide"
_TABLES: Mapping[ResourceType, tuple[tuple[Column, ...], Callable[[Object, VirtualClock], Cells]]] = MappingProxyType(
    {
        CLAIMS: (
            _columns("Name Status Volume Capacity Access_Modes StorageClass VolumeAttributesClass Age VolumeMode:wide"),
            _claim,
        ),
        CONFIG_MAPS: (_columns("Name Data# Age"), _config_map),
        DEPLOYMENTS: (_columns(f"Name Ready Up-to-date# Available# {_WORKLOAD}"), _deployment),
        EVENTS: (
            _columns(
                "Last_Seen Type Reason Object Subobject:wide Source:wide Message First_Seen:wide Count#:wide Name:wide"
            ),
            _event,
        ),
        JOBS: (_columns(f"Name Status Completions Duration {_WORKLOAD}"), _job),
        NAMESPACES: (_columns("Name Status Age"), _namespace),
        NODES: (
            _columns(
                "Name Status Roles Age Version Internal-IP:wide External-IP:wide OS-Image:wide Kernel-Version:wide "
                "Container-Runtime:wide"
            ),
            _node,
        ),
        PODS: (
            _columns("Name Ready Status Restarts Age IP:wide Node:wide Nominated_Node:wide Readiness_Gates:wide"),
            _pod,
        ),
        REPLICA_SETS: (_columns(f"Name Desired# Current# Ready# {_WORKLOAD}"), _replica_set),
        VOLUMES: (
            _columns(
                "Name Capacity Access_Modes Reclaim_Policy Status Claim StorageClass VolumeAttributesClass Reason Age "
                "VolumeMode:wide"
            ),
            _volume,
        ),
    }
)
