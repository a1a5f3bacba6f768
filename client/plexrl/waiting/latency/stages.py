"""The latency engine: what takes time, and what is done when that time is over.

It plays the scheduler, the nodes' agents, the volume provisioner and the node autoscaler of a cluster. It does no I/O
and has no clock: watch events go in with the time at which they were seen, calls of the API come out when they are due.
`local` runs it on a simulated cluster in virtual time, `remote` over HTTP on any cluster.
"""

import functools
import heapq
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, TypeAlias

from plexrl.waiting.cluster.objects import (
    Object,
    annotations_of,
    is_deleting,
    look_up,
    name_of,
    namespace_of,
    uid_of,
)
from plexrl.waiting.cluster.resources import CLAIMS, NODES, PODS, ResourceType
from plexrl.waiting.latency import statuses
from plexrl.waiting.latency.draws import OVERRIDE_PREFIX, Draws, override_s
from plexrl.waiting.latency.placement import Nodes, nodes_needed, room_of
from plexrl.waiting.latency.presets import MaybeLaw, Preset

WATCHED = (NODES, CLAIMS, PODS)
RETRY_S = 1.0
HEARTBEAT_S = 10.0
BACK_OFF_S = 10.0
BACK_OFF_LIMIT_S = 300.0
EXIT_CODE = OVERRIDE_PREFIX + "exit-code"

STRATEGIC = "application/strategic-merge-patch+json"
_SCHEDULER = "default-scheduler"
_KUBELET = "kubelet"


@dataclass(frozen=True)
class Call:
    """One request that the engine wants made. `on_refusal` runs when the server refuses it; others are let be."""

    method: str
    path: str
    value: Any = None
    content_type: str = "application/json"
    on_refusal: Callable[[], None] | None = field(default=None, compare=False)


class Stage(Enum):
    """Where a pod is on its way."""

    NEW = auto()
    SCHEDULING = auto()
    UNSCHEDULABLE = auto()
    BOUND = auto()
    PULLING = auto()
    STARTING = auto()
    STARTED = auto()
    READY = auto()
    BACKING_OFF = auto()
    STOPPING = auto()
    ENDED = auto()


Action: TypeAlias = Callable[[float, str], list[Call]]


@dataclass
class _Pod:
    pod: Object
    stage: Stage = Stage.NEW
    # Timers of an earlier stage carry an older number and are void.
    turn: int = 0
    restarts: int = 0
    ends_s: float = math.inf


@dataclass(order=True)
class _Timer:
    due_s: float
    order: int
    action: Action = field(compare=False)


class Role(Enum):
    """What the engine plays."""

    CLUSTER = auto()
    """Scheduler, volumes, new nodes, and every node: nobody else is there."""
    NODES = auto()
    """The simulated nodes alone; scheduling and everything else is the business of a real cluster."""


class StageEngine:
    """Latencies for one cluster in one episode."""

    def __init__(self, preset: Preset, *, seed: int = 0, episode: int = 0, role: Role = Role.CLUSTER) -> None:
        self.preset = preset
        self._draws = Draws(seed, episode)
        self._role = role
        self._timers: list[_Timer] = []
        self._order = 0
        self._pods: dict[str, _Pod] = {}
        self._nodes = Nodes()
        self._waiting: dict[str, None] = {}
        self._claims: dict[tuple[str, str], str] = {}
        self._provisioning: set[str] = set()
        self._images: dict[tuple[str, str], float] = {}
        self._coming = 0
        self._node_number = 0
        self._retry_is_set = False

    def begin(self, now: str) -> list[Call]:
        """The nodes that are there from the start."""
        calls: list[Call] = []
        for _ in range(self.preset.pool.count):
            name = self._next_node_name()
            calls += self._node_calls(name, now)
            if self._role is Role.NODES:
                # A node that is not heard of counts as lost.
                self._at(HEARTBEAT_S, functools.partial(self._beat, name))
        return calls

    def next_due_s(self) -> float | None:
        return self._timers[0].due_s if self._timers else None

    def step(self, now_s: float, now: str) -> list[Call] | None:
        """The calls of the first thing that is due; None if nothing is."""
        if not self._timers or self._timers[0].due_s > now_s:
            return None
        return heapq.heappop(self._timers).action(now_s, now)

    def observe(self, kind: ResourceType, event: str, item: Object, now_s: float) -> None:
        """Takes in a watch event: ADDED, MODIFIED or DELETED."""
        if kind is PODS:
            if event == "DELETED":
                self._forget(uid_of(item), now_s)
            else:
                self._see_pod(item, now_s)
        elif kind is NODES:
            self._see_node(event, item, now_s)
        elif kind is CLAIMS and self._role is Role.CLUSTER:
            self._see_claim(event, item, now_s)

    # --- pods ---

    def _see_pod(self, pod: Object, now_s: float) -> None:
        uid, node = uid_of(pod), pod["spec"].get("nodeName")
        state = self._pods.setdefault(uid, _Pod(pod))
        state.pod = pod
        if look_up(pod, "status", "phase") in ("Succeeded", "Failed"):
            self._release(uid, now_s)
            state.stage, state.turn = Stage.ENDED, state.turn + 1
            return
        if node:
            self._waiting.pop(uid, None)
            self._nodes.put(pod, node)
            if not self._is_ours(node):
                return
        if is_deleting(pod):
            if node and state.stage is not Stage.STOPPING:
                grace_s = float(pod["metadata"].get("deletionGracePeriodSeconds", 0))
                self._enter(state, Stage.STOPPING, now_s + min(grace_s, self._draw(state, "stop")), self._stop)
            return
        if state.stage is Stage.NEW and not node:
            if self._role is Role.CLUSTER:
                self._enter(state, Stage.SCHEDULING, now_s + self._draw(state, "schedule"), self._schedule)
        elif node and state.stage in (Stage.NEW, Stage.SCHEDULING, Stage.UNSCHEDULABLE):
            self._take_over(state, now_s)

    def _take_over(self, state: _Pod, now_s: float) -> None:
        """A pod that has just come to its node, or one that was there before this engine was."""
        running = look_up(state.pod, "status", "containerStatuses", 0, "state", "running")
        if running is None:
            self._enter(state, Stage.BOUND, now_s, self._arrive)
            return
        state.restarts = look_up(state.pod, "status", "containerStatuses", 0, "restartCount", default=0)
        self._started(state, now_s)

    def _schedule(self, state: _Pod, now_s: float, now: str) -> list[Call]:
        pod, uid = state.pod, uid_of(state.pod)
        unbound = [name for name in _claim_names(pod) if self._claims.get((namespace_of(pod), name)) != "Bound"]
        node = None if unbound else self._nodes.choose(pod)
        if node is None:
            why = "pod has unbound immediate PersistentVolumeClaims." if unbound else self._nodes.why_not(pod)
            return self._reject(state, why, now_s, now)
        self._waiting.pop(uid, None)
        self._nodes.put(pod, node)
        target = {"apiVersion": "v1", "kind": "Node", "name": node}
        metadata = {"name": name_of(pod), "namespace": namespace_of(pod)}
        binding = {"apiVersion": "v1", "kind": "Binding", "metadata": metadata, "target": target}
        message = f"Successfully assigned {namespace_of(pod)}/{name_of(pod)} to {node}"
        return [
            Call("POST", f"{_path(pod)}/binding", binding, on_refusal=lambda: self._forget_place(uid)),
            _event(pod, "Scheduled", message, now, _SCHEDULER),
        ]

    def _reject(self, state: _Pod, why: str, now_s: float, now: str) -> list[Call]:
        before = look_up(state.pod, "status", "conditions", default=[])
        said = any(entry["type"] == "PodScheduled" and entry.get("message") == why for entry in before)
        state.stage, state.turn = Stage.UNSCHEDULABLE, state.turn + 1
        self._waiting[uid_of(state.pod)] = None
        self._order_nodes(now_s)
        if said:
            return []
        event = _event(state.pod, "FailedScheduling", why, now, _SCHEDULER, "Warning")
        return [_status_call(state.pod, statuses.unschedulable(state.pod, why, now)), event]

    def _arrive(self, state: _Pod, now_s: float, now: str) -> list[Call]:
        """On its node: images first."""
        pod, node = state.pod, state.pod["spec"]["nodeName"]
        asked_s = override_s(annotations_of(pod), "pull")
        due_s, calls = now_s, list[Call]()
        for image in dict.fromkeys(container["image"] for container in pod["spec"]["containers"]):
            if asked_s is not None:
                there_s = now_s + asked_s
            else:
                law = self.preset.pull
                there_s = self._images.get((node, image), math.inf)
                if there_s == math.inf:
                    there_s = now_s + self._draws.latency_s(law, "pull", node, image, name_of(pod))
                    self._images[(node, image)] = there_s
            if there_s > now_s:
                calls.append(_event(pod, "Pulling", f'Pulling image "{image}"', now, _KUBELET))
            due_s = max(due_s, there_s)
        host_ip = statuses.node_ip(node)
        if due_s == math.inf:
            why = "Back-off pulling image"
            calls.append(_event(pod, "Failed", "Failed to pull image: not found", now, _KUBELET, "Warning"))
            calls.append(_status_call(pod, statuses.creating(pod, now, host_ip, "ImagePullBackOff", why)))
        else:
            calls.append(_status_call(pod, statuses.creating(pod, now, host_ip)))
        self._enter(state, Stage.PULLING, due_s, self._pulled)
        return calls

    def _pulled(self, state: _Pod, now_s: float, now: str) -> list[Call]:
        self._enter(state, Stage.STARTING, now_s + self._draw(state, "start"), self._start)
        images = ", ".join(f'"{container["image"]}"' for container in state.pod["spec"]["containers"])
        return [_event(state.pod, "Pulled", f"Container image {images} present on machine", now, _KUBELET)]

    def _start(self, state: _Pod, now_s: float, now: str) -> list[Call]:
        pod = state.pod
        self._started(state, now_s)
        status = statuses.running(pod, now, statuses.pod_ip(pod), ready=False, restarts=state.restarts)
        return [_status_call(pod, status), _event(pod, "Started", "Started container(s)", now, _KUBELET)]

    def _started(self, state: _Pod, now_s: float) -> None:
        """Sets what comes next for containers that run: ready, or the end if that is earlier."""
        ends = state.pod["spec"]["restartPolicy"] != "Always" or EXIT_CODE in annotations_of(state.pod)
        state.ends_s = now_s + self._draw(state, "run") if ends else math.inf
        delays = (
            look_up(container, "readinessProbe", "initialDelaySeconds", default=0)
            for container in state.pod["spec"]["containers"]
        )
        ready_s = now_s + max(self._draw(state, "probe"), max(delays, default=0))
        if state.ends_s <= ready_s:
            self._enter(state, Stage.STARTED, state.ends_s, self._end)
        else:
            self._enter(state, Stage.STARTED, ready_s, self._ready)

    def _ready(self, state: _Pod, now_s: float, now: str) -> list[Call]:
        pod = state.pod
        self._enter(state, Stage.READY, state.ends_s, self._end)
        status = statuses.running(pod, now, statuses.pod_ip(pod), ready=True, restarts=state.restarts)
        return [_status_call(pod, status)]

    def _end(self, state: _Pod, now_s: float, now: str) -> list[Call]:
        pod, exit_code = state.pod, _exit_code(state.pod)
        policy = pod["spec"]["restartPolicy"]
        if policy == "Never" or (policy == "OnFailure" and exit_code == 0):
            state.stage, state.turn = Stage.ENDED, state.turn + 1
            return [_status_call(pod, statuses.finished(pod, now, exit_code, state.restarts))]
        pause_s = min(BACK_OFF_LIMIT_S, BACK_OFF_S * 2.0 ** min(state.restarts, 30))
        state.restarts += 1
        self._enter(state, Stage.BACKING_OFF, now_s + pause_s, self._start)
        message = "Back-off restarting failed container"
        return [
            _status_call(pod, statuses.crashed(pod, now, exit_code, state.restarts, pause_s)),
            _event(pod, "BackOff", message, now, _KUBELET, "Warning"),
        ]

    def _stop(self, state: _Pod, now_s: float, now: str) -> list[Call]:
        options = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "gracePeriodSeconds": 0,
            "preconditions": {"uid": uid_of(state.pod)},
        }
        return [
            _event(state.pod, "Killing", "Stopping container(s)", now, _KUBELET),
            Call("DELETE", _path(state.pod), options),
        ]

    def _forget(self, uid: str, now_s: float) -> None:
        self._pods.pop(uid, None)
        self._waiting.pop(uid, None)
        self._release(uid, now_s)

    def _forget_place(self, uid: str) -> None:
        """A binding was refused: the pod has gone, or somebody else has placed it."""
        self._nodes.take(uid)

    def _release(self, uid: str, now_s: float) -> None:
        if self._nodes.take(uid):
            self._retry_soon(now_s)

    # --- nodes, claims and those who wait for them ---

    def _see_node(self, event: str, node: Object, now_s: float) -> None:
        name = name_of(node)
        if event == "DELETED":
            self._nodes.remove_node(name)
            for key in [key for key in self._images if key[0] == name]:
                del self._images[key]
            return
        is_new = name not in self._nodes
        self._nodes.set_node(node)
        if is_new:
            for state in self._pods.values():
                if state.pod["spec"].get("nodeName") == name and state.stage is not Stage.ENDED:
                    self._see_pod(state.pod, now_s)
        self._retry_soon(now_s)

    def _see_claim(self, event: str, claim: Object, now_s: float) -> None:
        key, uid = (namespace_of(claim), name_of(claim)), uid_of(claim)
        if event == "DELETED":
            self._claims.pop(key, None)
            self._provisioning.discard(uid)
            return
        phase = look_up(claim, "status", "phase", default="Pending")
        if self._claims.get(key) != phase:
            self._claims[key] = phase
            self._retry_soon(now_s)
        if phase == "Pending" and not claim["spec"].get("volumeName") and uid not in self._provisioning:
            self._provisioning.add(uid)
            asked_s = override_s(annotations_of(claim), "volume")
            law_s = self._draws.latency_s(self.preset.volume, "volume", *key) if asked_s is None else asked_s
            self._at(now_s + law_s, lambda _, now: self._volume_calls(claim, now))

    def _volume_calls(self, claim: Object, now: str) -> list[Call]:
        if uid_of(claim) not in self._provisioning:
            return []
        self._provisioning.discard(uid_of(claim))
        message = f"Successfully provisioned volume pvc-{uid_of(claim)}"
        return [
            Call("POST", "/api/v1/persistentvolumes", statuses.volume(claim)),
            _event(claim, "ProvisioningSucceeded", message, now, "volume-provisioner"),
        ]

    def _retry_soon(self, now_s: float) -> None:
        """Room may have come: those who wait are looked at again, all at once and not at every change."""
        if self._waiting and not self._retry_is_set:
            self._retry_is_set = True
            self._at(now_s + RETRY_S, self._retry)

    def _retry(self, now_s: float, now: str) -> list[Call]:
        self._retry_is_set = False
        calls: list[Call] = []
        for uid in list(self._waiting):
            state = self._pods.get(uid)
            if state is not None:
                calls += self._schedule(state, now_s, now)
        return calls

    def _order_nodes(self, now_s: float) -> None:
        """Orders as many new nodes as those who wait would fill, less those that are coming."""
        pool = self.preset.pool
        short = pool.limit - len(self._nodes) - self._coming
        if short <= 0:
            return
        room = room_of({"cpu": pool.cpu, "memory": pool.memory, "pods": str(pool.pods)})
        pods = [self._pods[uid].pod for uid in self._waiting if uid in self._pods]
        helped = (pod for pod in pods if not pod["spec"].get("nodeSelector"))
        for _ in range(min(short, nodes_needed(helped, room) - self._coming)):
            self._coming += 1
            name = self._next_node_name()
            due_s = now_s + self._draws.latency_s(self.preset.node, "node", name)
            self._at(due_s, functools.partial(self._arrived, name))

    def _arrived(self, name: str, now_s: float, now: str) -> list[Call]:
        self._coming -= 1
        return self._node_calls(name, now)

    def _node_calls(self, name: str, now: str) -> list[Call]:
        pool = self.preset.pool
        shape = (name, pool.cpu, pool.memory, pool.pods)
        status = statuses.node_status(*shape, now)
        return [
            Call("POST", "/api/v1/nodes", statuses.node(name)),
            Call("PATCH", f"/api/v1/nodes/{name}/status", status, STRATEGIC),
        ]

    def _beat(self, name: str, now_s: float, now: str) -> list[Call]:
        if name not in self._nodes:
            return []
        self._at(now_s + HEARTBEAT_S, functools.partial(self._beat, name))
        return self._node_calls(name, now)[1:]

    def _is_ours(self, node: str) -> bool:
        return self._role is Role.CLUSTER or self._nodes.is_simulated(node)

    def _next_node_name(self) -> str:
        self._node_number += 1
        return f"{self.preset.pool.name}-{self._node_number}"

    # --- time ---

    def _draw(self, state: _Pod, stage: str) -> float:
        asked_s = override_s(annotations_of(state.pod), stage)
        if asked_s is not None:
            return asked_s
        law: MaybeLaw = getattr(self.preset, stage)
        return self._draws.latency_s(law, stage, namespace_of(state.pod), name_of(state.pod), state.restarts)

    def _enter(self, state: _Pod, stage: Stage, due_s: float, action: Callable[[_Pod, float, str], list[Call]]) -> None:
        """Puts a pod in a stage that ends at a time with an action, unless the pod leaves the stage before."""
        state.stage = stage
        state.turn += 1
        turn = state.turn

        def act(now_s: float, now: str) -> list[Call]:
            return action(state, now_s, now) if state.turn == turn and uid_of(state.pod) in self._pods else []

        self._at(due_s, act)

    def _at(self, due_s: float, action: Action) -> None:
        if due_s < math.inf:
            self._order += 1
            heapq.heappush(self._timers, _Timer(due_s, self._order, action))


def _path(item: Object) -> str:
    return f"/api/v1/namespaces/{namespace_of(item)}/pods/{name_of(item)}"


def _status_call(pod: Object, patch: Object) -> Call:
    return Call("PATCH", f"{_path(pod)}/status", patch, STRATEGIC)


def _event(about: Object, reason: str, message: str, now: str, component: str, kind: str = "Normal") -> Call:
    namespace = namespace_of(about) or "default"
    value = statuses.event(about, reason, message, now, component, kind)
    return Call("POST", f"/api/v1/namespaces/{namespace}/events", value)


def _claim_names(pod: Object) -> Iterable[str]:
    for volume in pod["spec"].get("volumes") or ():
        claim = look_up(volume, "persistentVolumeClaim", "claimName")
        if claim is not None:
            yield claim


def _exit_code(pod: Object) -> int:
    text = annotations_of(pod).get(EXIT_CODE, "0")
    return int(text) if text.isdecimal() and len(text) <= 3 else 0
