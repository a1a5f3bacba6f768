"""The statuses that a node's agent gives a pod, stage by stage, as patches; and the objects that it makes.

Knows the shapes of the API; knows nothing of when.
"""

import hashlib
from typing import Any

from plexrl.waiting.cluster.objects import Object, condition, look_up, name_of, namespace_of, uid_of
from plexrl.waiting.latency.placement import SIMULATED

KUBELET_VERSION = "v1.37.0"


def _condition(about: Object, kind: str, holds: bool, now: str, reason: str = "", message: str = "") -> Object:
    """A condition as part of a patch: what it no longer says is taken away, and its time moves only with its status."""
    status = "True" if holds else "False"
    before = condition(about, kind)
    same = before is not None and before["status"] == status
    return {
        "type": kind,
        "status": status,
        "lastTransitionTime": before["lastTransitionTime"] if before is not None and same else now,
        "reason": reason or None,
        "message": message or None,
    }


def unschedulable(pod: Object, message: str, now: str) -> Object:
    return {"status": {"conditions": [_condition(pod, "PodScheduled", False, now, "Unschedulable", message)]}}


def creating(pod: Object, now: str, host_ip: str, reason: str = "ContainerCreating", message: str = "") -> Object:
    """On its node, nothing runs yet."""
    why = "containers with unready status: [" + " ".join(entry["name"] for entry in _containers(pod)) + "]"
    waiting = {"reason": reason, **({"message": message} if message else {})}
    return {
        "status": {
            "phase": "Pending",
            "hostIP": host_ip,
            "hostIPs": [{"ip": host_ip}],
            "startTime": look_up(pod, "status", "startTime", default=now),
            "conditions": [
                _condition(pod, "Initialized", True, now),
                _condition(pod, "ContainersReady", False, now, "ContainersNotReady", why),
                _condition(pod, "Ready", False, now, "ContainersNotReady", why),
            ],
            "containerStatuses": [_status(pod, entry, {"waiting": waiting}) for entry in _containers(pod)],
        }
    }


def running(pod: Object, now: str, pod_ip: str, ready: bool, restarts: int = 0) -> Object:
    why = "containers with unready status: [" + " ".join(entry["name"] for entry in _containers(pod)) + "]"
    reason = () if ready else ("ContainersNotReady", why)
    started = look_up(pod, "status", "containerStatuses", 0, "state", "running", "startedAt", default=now)
    return {
        "status": {
            "phase": "Running",
            "podIP": pod_ip,
            "podIPs": [{"ip": pod_ip}],
            "conditions": [
                _condition(pod, "ContainersReady", ready, now, *reason),
                _condition(pod, "Ready", ready, now, *reason),
            ],
            "containerStatuses": [
                _status(pod, entry, {"running": {"startedAt": started}}, ready=ready, started=True, restarts=restarts)
                for entry in _containers(pod)
            ],
        }
    }


def finished(pod: Object, now: str, exit_code: int, restarts: int = 0) -> Object:
    """All containers have ended, for good."""
    done = exit_code == 0
    reason = ("PodCompleted",) if done else ("PodFailed",)
    return {
        "status": {
            "phase": "Succeeded" if done else "Failed",
            "conditions": [
                _condition(pod, "ContainersReady", False, now, *reason),
                _condition(pod, "Ready", False, now, *reason),
            ],
            "containerStatuses": [
                _status(pod, entry, {"terminated": _terminated(pod, now, exit_code)}, restarts=restarts)
                for entry in _containers(pod)
            ],
        }
    }


def crashed(pod: Object, now: str, exit_code: int, restarts: int, back_off_s: float) -> Object:
    """The containers have ended and will be started again after a pause."""
    waiting = {"reason": "CrashLoopBackOff", "message": f"back-off {back_off_s:.0f}s restarting failed container"}
    last = {"terminated": _terminated(pod, now, exit_code)}
    return {
        "status": {
            "phase": "Running",
            "conditions": [
                _condition(pod, "ContainersReady", False, now, "ContainersNotReady"),
                _condition(pod, "Ready", False, now, "ContainersNotReady"),
            ],
            "containerStatuses": [
                _status(pod, entry, {"waiting": waiting}, restarts=restarts, last=last) for entry in _containers(pod)
            ],
        }
    }


def pod_ip(pod: Object) -> str:
    """An address in 10.0.0.0/8 made from the uid."""
    digest = hashlib.sha256(uid_of(pod).encode()).digest()
    return f"10.{digest[0]}.{digest[1]}.{1 + digest[2] % 254}"


def node_ip(name: str) -> str:
    digest = hashlib.sha256(name.encode()).digest()
    return f"172.16.{digest[0]}.{1 + digest[1] % 254}"


def event(about: Object, reason: str, message: str, now: str, component: str, kind: str = "Normal") -> Object:
    namespace = namespace_of(about) or "default"
    involved = {
        "apiVersion": about.get("apiVersion", "v1"),
        "kind": about.get("kind", "Pod"),
        "name": name_of(about),
        "uid": uid_of(about),
        **({"namespace": namespace_of(about)} if namespace_of(about) else {}),
    }
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"generateName": f"{name_of(about)[:40]}.", "namespace": namespace},
        "involvedObject": involved,
        "reason": reason,
        "message": message,
        "type": kind,
        "count": 1,
        "firstTimestamp": now,
        "lastTimestamp": now,
        "source": {"component": component},
        "reportingComponent": component,
        "reportingInstance": "",
    }


def node(name: str) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "labels": {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64"},
            "annotations": {SIMULATED: "true"},
        },
    }


def node_status(name: str, cpu: str, memory: str, pods: int, now: str) -> Object:
    room = {"cpu": cpu, "memory": memory, "pods": str(pods)}
    conditions = [
        (kind, holds, reason)
        for kind, holds, reason in (
            ("MemoryPressure", False, "KubeletHasSufficientMemory"),
            ("DiskPressure", False, "KubeletHasNoDiskPressure"),
            ("PIDPressure", False, "KubeletHasSufficientPID"),
            ("Ready", True, "KubeletReady"),
        )
    ]
    return {
        "status": {
            "capacity": room,
            "allocatable": room,
            "addresses": [{"type": "InternalIP", "address": node_ip(name)}, {"type": "Hostname", "address": name}],
            "conditions": [
                {**_condition({}, kind, holds, now, reason), "lastHeartbeatTime": now}
                for kind, holds, reason in conditions
            ],
            "nodeInfo": {
                "architecture": "amd64",
                "bootID": "",
                "containerRuntimeVersion": "simulated://1",
                "kernelVersion": "simulated",
                "kubeProxyVersion": "",
                "kubeletVersion": KUBELET_VERSION,
                "machineID": "",
                "operatingSystem": "linux",
                "osImage": "simulated",
                "systemUUID": "",
            },
        }
    }


def volume(claim: Object) -> Object:
    """A volume made for a claim."""
    spec = claim["spec"]
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {
            "name": f"pvc-{uid_of(claim)}",
            "annotations": {"pv.kubernetes.io/provisioned-by": "plexrl.dev/simulated"},
        },
        "spec": {
            "capacity": {"storage": look_up(spec, "resources", "requests", "storage")},
            "accessModes": spec["accessModes"],
            "persistentVolumeReclaimPolicy": "Delete",
            "storageClassName": spec.get("storageClassName", ""),
            "volumeMode": spec.get("volumeMode", "Filesystem"),
            "claimRef": {
                "apiVersion": "v1",
                "kind": "PersistentVolumeClaim",
                "namespace": namespace_of(claim),
                "name": name_of(claim),
                "uid": uid_of(claim),
            },
            "hostPath": {"path": f"/simulated/{uid_of(claim)}"},
        },
    }


def _containers(pod: Object) -> list[Object]:
    containers: list[Object] = pod["spec"]["containers"]
    return containers


def _status(
    pod: Object,
    container: Object,
    state: Object,
    *,
    ready: bool = False,
    started: bool = False,
    restarts: int = 0,
    last: Object | None = None,
) -> Object:
    digest = hashlib.sha256(container["image"].encode()).hexdigest()
    runs = "waiting" not in state
    return {
        "name": container["name"],
        "image": container["image"],
        "imageID": f"simulated@sha256:{digest}" if runs else "",
        **({"containerID": f"simulated://{uid_of(pod)}/{container['name']}/{restarts}"} if runs else {}),
        "ready": ready,
        "started": started,
        "restartCount": restarts,
        "state": state,
        "lastState": last or {},
    }


def _terminated(pod: Object, now: str, exit_code: int) -> dict[str, Any]:
    started = look_up(pod, "status", "containerStatuses", 0, "state", "running", "startedAt", default=now)
    return {
        "exitCode": exit_code,
        "reason": "Completed" if exit_code == 0 else "Error",
        "startedAt": started,
        "finishedAt": now,
    }
