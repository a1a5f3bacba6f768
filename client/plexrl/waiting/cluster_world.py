"""The simulated Kubernetes cluster as a world to wait in: the same tools, made of requests to its API.

What takes how long is the cluster's: pods are scheduled, pulled, started and probed under a preset's laws, and a
rollout is over when the last of them is. So nobody knows an operation's law; `measured` estimates it by running many
episodes in which somebody only watches. Knows the cluster and its presets; knows no agents.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from plexrl.waiting.cluster.api.errors import ApiError
from plexrl.waiting.cluster.api.requests import ApiRequest, ApiResponse
from plexrl.waiting.cluster.simulation import Simulation
from plexrl.waiting.latency.local import simulate
from plexrl.waiting.laws import Histogram
from plexrl.waiting.scenarios import DEADLINE_MEANS, QUERIES_PER_MEAN, Scenario, rollout
from plexrl.waiting.schedules import Costs
from plexrl.waiting.tools import Plain, ToolError, Tools
from plexrl.waiting.world import MAX_REPLICAS, Look

DEPLOYMENTS = "/apis/apps/v1/namespaces/default/deployments"
MERGE = "application/merge-patch+json"
MEASURED_EPISODES = 100
_MEASURING_SEED = 7_000_000
_LONGEST_S = 3600.0


class ClusterWorld:
    """Deployments of the namespace `default`. See `world.Environment`."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._open: dict[tuple[str, str, str], int] = {}
        self._took_s: dict[tuple[str, str, str], float] = {}
        self.looks: list[Look] = []
        self.held_s = 0.0
        self.started_at_s: dict[tuple[str, str, str], float] = {}
        self.tools = Tools(
            "kubectl",
            {
                "apply": self.apply,
                "scale": self.scale,
                "restart": self.restart,
                "get": self.get,
                "wait": self.wait,
            },
        )
        simulation.join(self)

    @property
    def now_s(self) -> float:
        return self._simulation.now_s

    def advance_to(self, at_s: float) -> None:
        """Lets time pass in the cluster."""
        self._simulation.advance_to(at_s)

    def took_s(self, verb: str, kind: str, name: str) -> float:
        """inf until it has happened."""
        return self._took_s.get((verb, kind, name), float("inf"))

    def pump(self) -> bool:
        """Notes when a rollout is over; the simulation calls this whenever anything may have changed."""
        for request, generation in list(self._open.items()):
            found = self._api("GET", f"{DEPLOYMENTS}/{request[2]}")
            if _rolled_out(found) and found["status"]["observedGeneration"] >= generation:
                self._took_s[request] = self.now_s - self.started_at_s[request]
                del self._open[request]
        return False

    def apply(self, kind: str, name: str, replicas: int = 1) -> Plain:
        """Creates a deployment, or sets its replicas; returns at once."""
        _deployment(kind)
        try:
            self._simulation.call("GET", f"{DEPLOYMENTS}/{name}")
        except ApiError as error:
            if error.code != 404:
                raise ToolError(str(error)) from None
            made = self._call("POST", DEPLOYMENTS, _manifest(name, replicas))
            return self._began("apply", name, 0, made)
        return self._scaled("apply", name, replicas)

    def scale(self, name: str, replicas: int) -> Plain:
        """Sets a deployment's replicas; returns at once."""
        return self._scaled("scale", name, replicas)

    def restart(self, name: str) -> Plain:
        """Replaces a deployment's pods; returns at once."""
        before = self._call("GET", f"{DEPLOYMENTS}/{name}")["metadata"]["generation"]
        noted = {"kubectl.kubernetes.io/restartedAt": f"{self.now_s:.6f}"}
        change = {"spec": {"template": {"metadata": {"annotations": noted}}}}
        return self._began("restart", name, before, self._call("PATCH", f"{DEPLOYMENTS}/{name}", change))

    def get(self, kind: str, name: str) -> Plain:
        """The deployment now: ready, replicas, ready_replicas."""
        _deployment(kind)
        found = self._call("GET", f"{DEPLOYMENTS}/{name}")
        ready = _rolled_out(found)
        self.looks.append(Look(self.now_s, kind, name, ready))
        return {
            "kind": kind,
            "name": name,
            "ready": ready,
            "replicas": found["spec"]["replicas"],
            "ready_replicas": found.get("status", {}).get("readyReplicas", 0),
        }

    def wait(self, kind: str, name: str, timeout_s: float) -> Plain:
        """Blocks until the deployment is rolled out or the time is over; True if rolled out."""
        _deployment(kind)
        if not 0 < timeout_s < float("inf"):
            raise ToolError(f"timeout_s: want a positive number, not {timeout_s}")
        begin_s = self.now_s
        while not _rolled_out(self._call("GET", f"{DEPLOYMENTS}/{name}")):
            due_s = self._simulation.next_due_s()
            if due_s is None or due_s > begin_s + timeout_s:
                self.advance_to(begin_s + timeout_s)
                break
            self.advance_to(due_s)
        self.held_s += self.now_s - begin_s
        state = self.get(kind, name)
        return isinstance(state, dict) and state["ready"]

    def _scaled(self, verb: str, name: str, replicas: int) -> Plain:
        if not 0 <= replicas <= MAX_REPLICAS:
            raise ToolError(f"replicas: want 0 to {MAX_REPLICAS}, not {replicas}")
        before = self._call("GET", f"{DEPLOYMENTS}/{name}")["metadata"]["generation"]
        self._call("PATCH", f"{DEPLOYMENTS}/{name}/scale", {"spec": {"replicas": replicas}})
        return self._began(verb, name, before, self._call("GET", f"{DEPLOYMENTS}/{name}"))

    def _began(self, verb: str, name: str, before: int, found: dict[str, Any]) -> Plain:
        generation = int(found["metadata"]["generation"])
        if generation == before:
            return {"kind": "deployment", "name": name, "result": "unchanged"}
        request = (verb, "deployment", name)
        if request not in self.started_at_s:
            self.started_at_s[request] = self.now_s
            self._open[request] = generation
        return {"kind": "deployment", "name": name, "result": "changed" if before else "created"}

    def _call(self, method: str, path: str, value: Any = None) -> dict[str, Any]:
        try:
            answer: dict[str, Any] = self._simulation.call(
                method, path, value, content_type=MERGE if method == "PATCH" else ""
            )
        except ApiError as error:
            raise ToolError(str(error)) from None
        return answer

    def _api(self, method: str, path: str) -> dict[str, Any]:
        """Without settling, for use while the cluster settles; {} if it is not there."""
        try:
            answer = self._simulation.api.handle(ApiRequest(method, path))
        except ApiError:
            return {}
        return answer.body if isinstance(answer, ApiResponse) and isinstance(answer.body, dict) else {}


def _deployment(kind: str) -> None:
    if kind != "deployment":
        raise ToolError(f"kind: want deployment, not {kind!r}")


def _rolled_out(found: dict[str, Any]) -> bool:
    """What `kubectl rollout status` waits for."""
    status = found.get("status") or {}
    wanted = found.get("spec", {}).get("replicas", 1)
    return bool(
        found
        and status.get("observedGeneration", 0) >= found["metadata"]["generation"]
        and status.get("updatedReplicas", 0) == wanted
        and status.get("replicas", 0) == wanted
        and status.get("availableReplicas", 0) == wanted
    )


def _manifest(name: str, replicas: int) -> dict[str, Any]:
    labels = {"app": name}
    container = {"name": name, "image": f"registry.example/{name}:1"}
    template = {"metadata": {"labels": labels}, "spec": {"containers": [container]}}
    spec = {"replicas": replicas, "selector": {"matchLabels": labels}, "template": template}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name}, "spec": spec}


def cluster_world(preset: str, seed: int, episode: int) -> ClusterWorld:
    """An episode's cluster; the same numbers give the same history."""
    return ClusterWorld(simulate(preset, seed=seed, episode=episode))


def measured(preset: str, episodes: int | None = None) -> Scenario:
    """The scenario of `rollout` on a cluster, with each operation's law as found by watching it so many times."""
    anything = Histogram((0.0, 1.0), (1.0,))
    operations = rollout("", anything, 1.0).operations
    taken_s: dict[str, list[float]] = {operation.name: [] for operation in operations}
    for episode in range(episodes or MEASURED_EPISODES):
        world = cluster_world(preset, _MEASURING_SEED, episode)
        for operation in operations:
            world.tools.call(operation.verb, operation.arguments, {})
            world.wait(operation.kind, operation.object_name, _LONGEST_S)
            taken_s[operation.name].append(world.took_s(operation.verb, operation.kind, operation.object_name))
    means_s = {name: float(np.mean(taken)) for name, taken in taken_s.items()}
    found = tuple(
        replace(
            operation,
            law=Histogram.of_samples(taken_s[operation.name]),
            deadline_s=DEADLINE_MEANS * means_s[operation.name],
        )
        for operation in operations
    )
    return Scenario(f"cluster/{preset}", found, Costs(query=float(np.mean([*means_s.values()])) / QUERIES_PER_MEAN))
