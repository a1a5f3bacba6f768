"""Where a pod can go: free room, taints and selectors of nodes, and the choice among those that fit.

Knows objects of the API; knows nothing of time.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from plexrl.waiting.cluster.objects import Object, annotations_of, is_deleting, labels_of, look_up, name_of
from plexrl.waiting.cluster.quantities import parse_quantity

SIMULATED = "plexrl.dev/simulated"
_PODS = "pods"
# Resources are counted in thousandths, so that sums are exact.
_SCALE = 1000


@dataclass
class NodeState:
    """A node with what its pods have asked for."""

    node: Object
    room: dict[str, int] = field(default_factory=dict)
    used: dict[str, int] = field(default_factory=dict)
    pods: dict[str, dict[str, int]] = field(default_factory=dict)

    def fits(self, wanted: Mapping[str, int]) -> bool:
        return all(self.used.get(name, 0) + amount <= self.room.get(name, 0) for name, amount in wanted.items())

    def load(self) -> float:
        """The share in use of whatever is used most."""
        return max((self.used.get(name, 0) / size for name, size in self.room.items() if size), default=1.0)


class Nodes:
    """All nodes and the pods on them, kept up to date from watches."""

    def __init__(self) -> None:
        self._states: dict[str, NodeState] = {}
        self._place_of: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._states)

    def __contains__(self, name: str) -> bool:
        return name in self._states

    def is_simulated(self, name: str) -> bool:
        state = self._states.get(name)
        return state is not None and annotations_of(state.node).get(SIMULATED) == "true"

    def set_node(self, node: Object) -> None:
        state = self._states.setdefault(name_of(node), NodeState(node))
        state.node = node
        room = look_up(node, "status", "allocatable", default={})
        state.room = {name: _thousandths(quantity) for name, quantity in room.items()}

    def remove_node(self, name: str) -> None:
        state = self._states.pop(name, None)
        for uid in state.pods if state else ():
            self._place_of.pop(uid, None)

    def put(self, pod: Object, node_name: str) -> None:
        """Counts a pod on a node; counting it again changes nothing."""
        uid = pod["metadata"]["uid"]
        if uid in self._place_of:
            return
        state = self._states.get(node_name)
        if state is None:
            return
        wanted = requests_of(pod)
        state.pods[uid] = wanted
        self._place_of[uid] = node_name
        for name, amount in wanted.items():
            state.used[name] = state.used.get(name, 0) + amount

    def take(self, uid: str) -> bool:
        """Stops counting a pod; returns whether it was counted."""
        name = self._place_of.pop(uid, None)
        state = self._states.get(name) if name is not None else None
        if state is None:
            return False
        for resource, amount in state.pods.pop(uid).items():
            state.used[resource] -= amount
        return True

    def choose(self, pod: Object) -> str | None:
        """The node with the most room among those that fit, the first by name of equals; None if none fits."""
        wanted = requests_of(pod)
        fitting = [
            (state.load(), name)
            for name, state in self._states.items()
            if accepts(state.node, pod) and state.fits(wanted)
        ]
        return min(fitting)[1] if fitting else None

    def why_not(self, pod: Object) -> str:
        """Why no node takes a pod, in the words of the scheduler."""
        wanted, reasons = requests_of(pod), dict[str, int]()
        for state in self._states.values():
            for reason in _objections(state, pod, wanted):
                reasons[reason] = reasons.get(reason, 0) + 1
        listed = ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()))
        return f"0/{len(self._states)} nodes are available" + (f": {listed}." if listed else ".")


def accepts(node: Object, pod: Object) -> bool:
    """Whether a node is ready, open, and of the kind that a pod asks for."""
    return _is_ready(node) and not _is_closed(node) and _is_selected(node, pod) and not _repelling(node, pod)


def requests_of(pod: Object) -> dict[str, int]:
    """What a pod asks for, in thousandths, itself included as one of `pods`."""
    wanted = {_PODS: _SCALE}
    for container in pod["spec"]["containers"]:
        for name, quantity in look_up(container, "resources", "requests", default={}).items():
            wanted[name] = wanted.get(name, 0) + _thousandths(quantity)
    return wanted


def room_of(capacity: Mapping[str, str]) -> dict[str, int]:
    """A node's room, in thousandths."""
    return {name: _thousandths(quantity) for name, quantity in capacity.items()}


def nodes_needed(pods: Iterable[Object], room: Mapping[str, int]) -> int:
    """How many empty nodes of a room hold the pods that fit on one at all, packed first-fit."""
    bins: list[dict[str, int]] = []
    for pod in pods:
        wanted = requests_of(pod)
        if any(amount > room.get(name, 0) for name, amount in wanted.items()):
            continue
        for used in bins:
            if all(used.get(name, 0) + amount <= room[name] for name, amount in wanted.items()):
                break
        else:
            used = {}
            bins.append(used)
        for name, amount in wanted.items():
            used[name] = used.get(name, 0) + amount
    return len(bins)


def _thousandths(quantity: object) -> int:
    return int(parse_quantity(quantity) * _SCALE)


def _is_ready(node: Object) -> bool:
    conditions = look_up(node, "status", "conditions", default=[])
    return not is_deleting(node) and any(entry["type"] == "Ready" and entry["status"] == "True" for entry in conditions)


def _is_closed(node: Object) -> bool:
    return bool(look_up(node, "spec", "unschedulable"))


def _is_selected(node: Object, pod: Object) -> bool:
    labels = labels_of(node)
    return all(labels.get(key) == value for key, value in (pod["spec"].get("nodeSelector") or {}).items())


def _repelling(node: Object, pod: Object) -> list[Object]:
    """Taints that the pod does not tolerate."""
    tolerations = pod["spec"].get("tolerations") or []
    return [
        taint
        for taint in look_up(node, "spec", "taints", default=[])
        if taint["effect"] in ("NoSchedule", "NoExecute") and not any(_tolerates(entry, taint) for entry in tolerations)
    ]


def _tolerates(toleration: Object, taint: Object) -> bool:
    if toleration.get("effect") not in (None, "", taint["effect"]):
        return False
    key = toleration.get("key")
    if toleration.get("operator", "Equal") == "Exists":
        return key in (None, "", taint["key"])
    return bool(key == taint["key"] and toleration.get("value", "") == taint.get("value", ""))


def _objections(state: NodeState, pod: Object, wanted: Mapping[str, int]) -> list[str]:
    if not _is_ready(state.node):
        return ["node(s) were not ready"]
    if _is_closed(state.node):
        return ["node(s) were unschedulable"]
    if not _is_selected(state.node, pod):
        return ["node(s) didn't match Pod's node affinity/selector"]
    if repelling := _repelling(state.node, pod):
        return [f"node(s) had untolerated taint(s) {{{repelling[0]['key']}: {repelling[0].get('value', '')}}}"]
    short = [name for name, amount in wanted.items() if state.used.get(name, 0) + amount > state.room.get(name, 0)]
    return ["Too many pods" if name == _PODS else f"Insufficient {name}" for name in short]
