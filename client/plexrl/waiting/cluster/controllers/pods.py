"""What controllers ask of pods: are they active, ready, available; which goes first; and one made from a template."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from plexrl.waiting.cluster.clock import VirtualClock
from plexrl.waiting.cluster.objects import Object, condition, is_deleting, look_up, name_of, owner_reference


def is_active(pod: Mapping[str, Any]) -> bool:
    """Neither finished nor on its way out."""
    return not is_deleting(pod) and look_up(pod, "status", "phase") not in ("Succeeded", "Failed")


def is_ready(pod: Mapping[str, Any]) -> bool:
    found = condition(pod, "Ready")
    return found is not None and found["status"] == "True"


def available_in_s(pod: Object, min_ready_s: int, clock: VirtualClock) -> float | None:
    """After how many seconds a pod counts as available: 0 if it does now, None if only a change can make it so."""
    found = condition(pod, "Ready")
    if found is None or found["status"] != "True":
        return None
    if min_ready_s == 0:
        return 0.0
    return max(0.0, min_ready_s - clock.seconds_since(found["lastTransitionTime"]))


def deletion_rank(pod: Object) -> tuple[bool, int, bool, float, str, str]:
    """Pods in the order in which a scale-down takes them: unplaced, unstarted, unready, cheap, young ones first."""
    phase = look_up(pod, "status", "phase", default="Unknown")
    annotations = pod["metadata"].get("annotations") or {}
    cost = annotations.get("controller.kubernetes.io/pod-deletion-cost", "0")
    try:
        cost_number = float(cost)
    except ValueError:
        cost_number = 0.0
    return (
        bool(pod["spec"].get("nodeName")),
        {"Pending": 0, "Unknown": 1}.get(phase, 2),
        is_ready(pod),
        cost_number,
        _descending(pod["metadata"]["creationTimestamp"]),
        name_of(pod),
    )


def _descending(timestamp: str) -> str:
    """Timestamps that sort the other way round."""
    return "".join(chr(255 - ord(character)) for character in timestamp)


def pod_from_template(owner: Object, template: Object, prefix: str) -> Object:
    """A pod that is to be created for an owner."""
    metadata = template.get("metadata") or {}
    kept = {name: metadata[name] for name in ("annotations", "finalizers", "labels") if metadata.get(name)}
    return {
        "metadata": {**kept, "generateName": prefix, "ownerReferences": [owner_reference(owner)]},
        "spec": template["spec"],
    }


@dataclass
class PodCounts:
    """Pods of one owner that are active, and how many of these are ready; kept up to date change by change."""

    active: int = 0
    ready: int = 0
    terminating: int = 0

    def add(self, pod: Object, sign: int) -> None:
        if is_active(pod):
            self.active += sign
            self.ready += sign * is_ready(pod)
        elif look_up(pod, "status", "phase") not in ("Succeeded", "Failed"):
            self.terminating += sign
