"""A whole cluster in one object: store, controllers and API on a virtual clock, and the rule by which time moves.

Time moves only when `advance` is called. On the way everything that falls due happens at its own time, one thing after
the other, and after each the controllers come to rest. So two runs with one seed and the same requests at the same
times are the same to the byte, however fast the machine and however many clients watch.
"""

import hashlib
import math
from collections.abc import Callable
from datetime import datetime
from typing import Any, Protocol, TypeAlias

import msgspec

from plexrl.waiting.cluster.api.errors import ApiError
from plexrl.waiting.cluster.api.requests import ApiRequest, ApiResponse
from plexrl.waiting.cluster.api.server import Answer, ApiServer
from plexrl.waiting.cluster.clock import EPOCH, VirtualClock
from plexrl.waiting.cluster.controllers.deployment import DeploymentController
from plexrl.waiting.cluster.controllers.events import EventExpiry
from plexrl.waiting.cluster.controllers.garbage import GarbageCollector, LostPods, NamespaceController
from plexrl.waiting.cluster.controllers.job import JobController
from plexrl.waiting.cluster.controllers.manager import Controller, Manager
from plexrl.waiting.cluster.controllers.replicaset import ReplicaSetController
from plexrl.waiting.cluster.controllers.volumes import VolumeController
from plexrl.waiting.cluster.identity import Identities
from plexrl.waiting.cluster.registry import PERMANENT_NAMESPACES, Registry
from plexrl.waiting.cluster.resources import NAMESPACES, ResourceType
from plexrl.waiting.cluster.store import HISTORY_LIMIT, Change, Store


class Client(Protocol):
    """A client in this process, such as the latency engine. It calls `Simulation.api`, which does not settle."""

    def pump(self) -> bool:
        """Does one thing that is due now; returns whether there was any."""
        ...


LogSink: TypeAlias = Callable[[bytes], Any]


class Simulation:
    """A cluster. `log` gets one JSON line per change, in order: time in seconds, what happened, and the object."""

    def __init__(
        self,
        *,
        seed: int = 0,
        epoch: datetime = EPOCH,
        history_limit: int = HISTORY_LIMIT,
        log: LogSink | None = None,
    ) -> None:
        self.seed = seed
        self.history_limit = history_limit
        self.clock = VirtualClock(epoch)
        self.store = Store(history_limit)
        self.registry = Registry(self.store, self.clock, Identities(seed))
        self.api = ApiServer(self.registry)
        self._log = log
        self._clients: list[Client] = []
        self._digest = hashlib.sha256()
        self.store.listen(self._note)
        registry = self.registry
        controllers: list[Controller] = [
            DeploymentController(registry),
            ReplicaSetController(registry),
            JobController(registry),
            VolumeController(registry),
            NamespaceController(registry),
            GarbageCollector(registry),
            LostPods(registry),
            EventExpiry(registry),
        ]
        self._manager = Manager(self.store, self.clock, controllers)
        for name in PERMANENT_NAMESPACES:
            registry.create(NAMESPACES, "", {"metadata": {"name": name}})
        self.settle()

    @property
    def now_s(self) -> float:
        """Seconds since the cluster began."""
        return self.clock.now_s

    @property
    def history_digest(self) -> str:
        """SHA-256 over the lines of the log so far: equal for equal histories."""
        return self._digest.hexdigest()

    def handle(self, request: ApiRequest) -> Answer:
        """Answers a request, then lets the controllers act on what it changed. Raises ApiError for a refusal."""
        try:
            return self.api.handle(request)
        finally:
            self.settle()

    def call(
        self, method: str, path: str, value: Any = None, *, content_type: str = "", query: dict[str, str] | None = None
    ) -> Any:
        """One request by an in-process client; returns the JSON of the answer. Raises ApiError."""
        request = ApiRequest(
            method, path, query or {}, content_type=content_type, value=value, user_agent="plexrl-waiting"
        )
        answer = self.handle(request)
        if not isinstance(answer, ApiResponse):
            raise TypeError("a watch has no single answer: use `handle`")
        return answer.body

    def settle(self) -> None:
        """Lets controllers and joined clients work until nothing is left to do at this moment."""
        self._manager.settle()
        while any(client.pump() for client in self._clients):
            self._manager.settle()

    def join(self, client: Client) -> None:
        """Lets a client in this process take part: it is asked to act whenever anything may have changed."""
        self._clients.append(client)

    def next_due_s(self) -> float | None:
        """When something happens next by itself; None if only requests can change anything."""
        return self.clock.next_due_s()

    def advance(self, seconds: float) -> None:
        """Lets time pass. Raises ValueError for what is no finite number of seconds from 0 on."""
        if not 0 <= seconds < math.inf:
            raise ValueError(f"seconds: want a finite number from 0 on, not {seconds}")
        self.advance_to(self.clock.now_s + seconds)

    def advance_to(self, at_s: float, limit: int | None = None) -> bool:
        """Lets time pass until `at_s`, or for at most `limit` happenings. Returns whether `at_s` was reached."""
        self.settle()
        happened = 0
        while (due_s := self.clock.next_due_s()) is not None and due_s <= at_s:
            if limit is not None and happened >= limit:
                return False
            self.clock.run_next()
            self.settle()
            happened += 1
        if at_s > self.clock.now_s:
            self.clock.move_to(at_s)
        return True

    def _note(self, kind: ResourceType, change: Change) -> None:
        line = msgspec.json.encode([round(self.clock.now_s, 6), change.kind.value, kind.plural, change.item]) + b"\n"
        self._digest.update(line)
        if self._log is not None:
            self._log(line)


__all__ = ["ApiError", "ApiRequest", "ApiResponse", "Simulation"]
