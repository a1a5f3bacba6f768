"""Where agents wait: what an episode needs of a world, and a light one.

The light world has objects that become ready some time after a request, and a clock that jumps. It offers code actions
the same tools as `cluster_world` does and nothing else of a cluster; benchmarks and training run on it because an
episode takes milliseconds. Knows no agents and no prices.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from plexrl.waiting.tools import Plain, ToolError, Tools

MAX_REPLICAS = 1000


@dataclass
class _Object:
    replicas: int
    ready_replicas: int
    ready_at_s: float
    generation: int = 1


@dataclass(frozen=True)
class Look:
    """One look at an object: when, at which, and whether it was ready."""

    at_s: float
    kind: str
    name: str
    ready: bool


class Environment(Protocol):
    """A world on a clock of its own, as an episode sees it."""

    tools: Tools
    looks: list[Look]
    """Every look, in order."""
    started_at_s: dict[tuple[str, str, str], float]
    """By verb, kind and name: the first request that changed something."""

    @property
    def now_s(self) -> float: ...

    @property
    def held_s(self) -> float:
        """Seconds that blocking tools held their caller."""
        ...

    def advance_to(self, at_s: float) -> None:
        """Lets time pass."""
        ...

    def took_s(self, verb: str, kind: str, name: str) -> float:
        """Seconds from the first such request until its effect was there; inf if that is not yet or never."""
        ...


class World:
    """Objects by kind and name. Requests that change nothing start nothing, as on a real cluster.

    latency: seconds (inf: never) that a request takes, by verb, kind and name; asked once per request that changes
    something.
    """

    def __init__(self, latency: Callable[[str, str, str], float]) -> None:
        self._latency = latency
        self._objects: dict[tuple[str, str], _Object] = {}
        self._took_s: dict[tuple[str, str, str], float] = {}
        self._now_s = 0.0
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

    @property
    def now_s(self) -> float:
        return self._now_s

    def advance_to(self, at_s: float) -> None:
        """Moves the clock forward; going back is refused."""
        if at_s < self.now_s:
            raise ValueError(f"at_s: the clock stands at {self.now_s} and does not go back to {at_s}")
        self._now_s = at_s

    def took_s(self, verb: str, kind: str, name: str) -> float:
        """Known from the start, unlike in a cluster."""
        return self._took_s.get((verb, kind, name), float("inf"))

    def apply(self, kind: str, name: str, replicas: int = 1) -> Plain:
        """Creates an object, or sets its replicas; returns at once."""
        if kind not in ("deployment", "job"):
            raise ToolError(f"kind: want deployment or job, not {kind!r}")
        found = self._objects.get((kind, name))
        if found is None:
            self._objects[kind, name] = _Object(self._replicas(replicas), 0, self._finishes("apply", kind, name))
            return {"kind": kind, "name": name, "result": "created"}
        if found.replicas == replicas:
            return {"kind": kind, "name": name, "result": "unchanged"}
        return self._change("apply", kind, name, replicas)

    def scale(self, name: str, replicas: int) -> Plain:
        """Sets a deployment's replicas; returns at once."""
        if self._found("deployment", name).replicas == replicas:
            return {"kind": "deployment", "name": name, "result": "unchanged"}
        return self._change("scale", "deployment", name, replicas)

    def restart(self, name: str) -> Plain:
        """Replaces a deployment's pods; returns at once."""
        return self._change("restart", "deployment", name, self._found("deployment", name).replicas)

    def get(self, kind: str, name: str) -> Plain:
        """The object now: ready, replicas, ready_replicas."""
        found = self._found(kind, name)
        ready = found.ready_at_s <= self.now_s
        if ready:
            found.ready_replicas = found.replicas
        self.looks.append(Look(self.now_s, kind, name, ready))
        return {
            "kind": kind,
            "name": name,
            "ready": ready,
            "replicas": found.replicas,
            "ready_replicas": found.ready_replicas,
        }

    def wait(self, kind: str, name: str, timeout_s: float) -> Plain:
        """Blocks until the object is ready or the time is over; True if ready."""
        if not 0 < timeout_s < float("inf"):
            raise ToolError(f"timeout_s: want a positive number, not {timeout_s}")
        until_s = min(max(self._found(kind, name).ready_at_s, self.now_s), self.now_s + timeout_s)
        self.held_s += until_s - self.now_s
        self._now_s = until_s
        state = self.get(kind, name)
        return isinstance(state, Mapping) and state["ready"]

    def _change(self, verb: str, kind: str, name: str, replicas: int) -> Plain:
        found = self._found(kind, name)
        found.replicas = self._replicas(replicas)
        found.ready_replicas = min(found.ready_replicas, found.replicas)
        found.generation += 1
        found.ready_at_s = self._finishes(verb, kind, name)
        return {"kind": kind, "name": name, "result": "changed"}

    def _finishes(self, verb: str, kind: str, name: str) -> float:
        took_s = self._latency(verb, kind, name)
        if (verb, kind, name) not in self.started_at_s:
            self.started_at_s[verb, kind, name] = self.now_s
            self._took_s[verb, kind, name] = took_s
        return self.now_s + took_s

    def _found(self, kind: str, name: str) -> _Object:
        if (kind, name) not in self._objects:
            raise ToolError(f"{kind} {name}: not found; apply creates it")
        return self._objects[kind, name]

    def _replicas(self, replicas: int) -> int:
        if not 0 <= replicas <= MAX_REPLICAS:
            raise ToolError(f"replicas: want 0 to {MAX_REPLICAS}, not {replicas}")
        return replicas
