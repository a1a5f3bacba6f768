"""The status of a deployment: counts over its replica sets, and the conditions that tell how a rollout goes."""

from collections.abc import Sequence

from plexrl.waiting.cluster.clock import VirtualClock
from plexrl.waiting.cluster.objects import Object, condition, look_up, name_of

TIMED_OUT = "ProgressDeadlineExceeded"
_COMPLETE = "NewReplicaSetAvailable"


def deployment_status(
    deployment: Object, new: Object | None, replica_sets: Sequence[Object], clock: VirtualClock
) -> Object:
    """`replica_sets` are all of the deployment, `new` the one of its present template."""
    counts = {
        "replicas": _sum(replica_sets, "replicas"),
        "updatedReplicas": _sum([new] if new else [], "replicas"),
        "readyReplicas": _sum(replica_sets, "readyReplicas"),
        "availableReplicas": _sum(replica_sets, "availableReplicas"),
        "terminatingReplicas": _sum(replica_sets, "terminatingReplicas"),
    }
    wanted = deployment["spec"]["replicas"]
    unavailable = max(0, wanted - counts["availableReplicas"], counts["replicas"] - counts["availableReplicas"])
    status: Object = {"observedGeneration": deployment["metadata"]["generation"]}
    status |= {key: value for key, value in counts.items() if value}
    if unavailable:
        status["unavailableReplicas"] = unavailable
    conditions: list[Object] = look_up(deployment, "status", "conditions", default=[])
    conditions = _set(conditions, _available(deployment, counts), clock)
    if deployment["spec"].get("progressDeadlineSeconds") is not None:
        conditions = _set(conditions, _progressing(deployment, new, counts, clock), clock)
    status["conditions"] = conditions
    return status


def progress_deadline_s(deployment: Object, clock: VirtualClock) -> float | None:
    """After how many seconds a rollout that does not move will have failed; None when nothing is to be waited for."""
    found = condition(deployment, "Progressing")
    deadline_s = deployment["spec"].get("progressDeadlineSeconds")
    if found is None or deadline_s is None or found["reason"] in (TIMED_OUT, _COMPLETE, "DeploymentPaused"):
        return None
    return float(max(1.0, deadline_s - clock.seconds_since(found["lastUpdateTime"]) + 0.001))


def _sum(replica_sets: Sequence[Object], name: str) -> int:
    return sum((item.get("status") or {}).get(name, 0) for item in replica_sets)


def _available(deployment: Object, counts: dict[str, int]) -> Object:
    wanted = deployment["spec"]["replicas"]
    rolling = deployment["spec"]["strategy"].get("rollingUpdate")
    spare = 0
    if rolling:
        value = rolling["maxUnavailable"]
        spare = value if isinstance(value, int) else int(value[:-1]) * wanted // 100
    if counts["availableReplicas"] >= wanted - spare:
        message = "Deployment has minimum availability."
        return {"type": "Available", "status": "True", "reason": "MinimumReplicasAvailable", "message": message}
    message = "Deployment does not have minimum availability."
    return {"type": "Available", "status": "False", "reason": "MinimumReplicasUnavailable", "message": message}


def _progressing(deployment: Object, new: Object | None, counts: dict[str, int], clock: VirtualClock) -> Object:
    previous = condition(deployment, "Progressing")
    if deployment["spec"].get("paused"):
        message = "Deployment is paused"
        return {"type": "Progressing", "status": "Unknown", "reason": "DeploymentPaused", "message": message}
    wanted = deployment["spec"]["replicas"]
    name = name_of(new) if new else ""
    complete = (
        counts["updatedReplicas"] == wanted and counts["replicas"] == wanted and counts["availableReplicas"] == wanted
    )
    if complete:
        message = f'ReplicaSet "{name}" has successfully progressed.'
        return {"type": "Progressing", "status": "True", "reason": _COMPLETE, "message": message}
    if previous is None or previous["reason"] == "DeploymentPaused" or _has_new_template(previous, name):
        message = f'Created new replica set "{name}"'
        return {"type": "Progressing", "status": "True", "reason": "NewReplicaSetCreated", "message": message}
    # A rollout that was through stays so when it is only scaled.
    if previous["reason"] == _COMPLETE and counts["replicas"] == counts["updatedReplicas"]:
        return previous
    if _moved(deployment, counts) or previous["reason"] == _COMPLETE:
        message = f'ReplicaSet "{name}" is progressing.'
        entry = {"type": "Progressing", "status": "True", "reason": "ReplicaSetUpdated", "message": message}
        return {**entry, "lastUpdateTime": clock.timestamp()}
    deadline_s = deployment["spec"]["progressDeadlineSeconds"]
    if previous["reason"] == TIMED_OUT or clock.seconds_since(previous["lastUpdateTime"]) >= deadline_s:
        message = f'ReplicaSet "{name}" has timed out progressing.'
        return {"type": "Progressing", "status": "False", "reason": TIMED_OUT, "message": message}
    return previous


def _has_new_template(previous: Object, name: str) -> bool:
    return bool(name) and f'"{name}"' not in previous.get("message", "")


def _moved(deployment: Object, counts: dict[str, int]) -> bool:
    """Whether the rollout is further than at the last look."""
    before = deployment.get("status") or {}
    old_before = before.get("replicas", 0) - before.get("updatedReplicas", 0)
    return bool(
        counts["updatedReplicas"] > before.get("updatedReplicas", 0)
        or counts["replicas"] - counts["updatedReplicas"] < old_before
        or counts["readyReplicas"] > before.get("readyReplicas", 0)
        or counts["availableReplicas"] > before.get("availableReplicas", 0)
    )


def _set(conditions: Sequence[Object], new: Object, clock: VirtualClock) -> list[Object]:
    """Sets a condition by type; times move only with what they are times of."""
    now = clock.timestamp()
    previous = next((entry for entry in conditions if entry["type"] == new["type"]), None)
    if previous is None:
        return [*conditions, {**new, "lastUpdateTime": now, "lastTransitionTime": now}]
    same_reason = (previous["status"], previous["reason"]) == (new["status"], new["reason"])
    updated = new.get("lastUpdateTime") or (previous["lastUpdateTime"] if same_reason else now)
    since = previous["lastTransitionTime"] if previous["status"] == new["status"] else now
    entry = {**new, "lastUpdateTime": updated, "lastTransitionTime": since}
    return [entry if old["type"] == new["type"] else old for old in conditions]
