"""Runs the controllers: notes which of their objects a change concerns, and lets each look at them until all is quiet.

Controllers take no time of their own; what takes time in a cluster is the business of `latency`.
"""

import functools
from collections import OrderedDict
from collections.abc import Iterable
from typing import Protocol

from plexrl.waiting.cluster.clock import Timer, VirtualClock
from plexrl.waiting.cluster.resources import ResourceType
from plexrl.waiting.cluster.store import Change, Key, Store

ROUNDS_LIMIT = 5_000_000


class Controller(Protocol):
    """Brings one kind of object closer to what is asked for."""

    def concerns(self, kind: ResourceType, change: Change) -> Iterable[Key]:
        """The keys to look at after a change."""
        ...

    def reconcile(self, key: Key) -> float | None:
        """Looks at one object; returns after how many seconds to look again, if time alone will change something."""
        ...


class Manager:
    """A queue of controllers and keys; each pair is in it once at most."""

    def __init__(self, store: Store, clock: VirtualClock, controllers: Iterable[Controller]) -> None:
        self._clock = clock
        self._controllers = tuple(controllers)
        self._queue: OrderedDict[tuple[int, Key], None] = OrderedDict()
        self._timers: dict[tuple[int, Key], Timer] = {}
        store.listen(self._on_change)

    @property
    def is_quiet(self) -> bool:
        return not self._queue

    def settle(self) -> None:
        """Works until nothing is left to do at this moment. Raises RuntimeError if that never happens."""
        for _ in range(ROUNDS_LIMIT):
            if not self._queue:
                return
            entry, _ = self._queue.popitem(last=False)
            index, key = entry
            if (timer := self._timers.pop(entry, None)) is not None:
                timer.cancel()
            again_s = self._controllers[index].reconcile(key)
            if again_s is not None:
                wake = functools.partial(self._wake, entry)
                self._timers[entry] = self._clock.call_at(self._clock.now_s + again_s, wake)
        raise RuntimeError(f"controllers have not come to rest after {ROUNDS_LIMIT} rounds")

    def _on_change(self, kind: ResourceType, change: Change) -> None:
        for index, controller in enumerate(self._controllers):
            for key in controller.concerns(kind, change):
                self._queue[(index, key)] = None

    def _wake(self, entry: tuple[int, Key]) -> None:
        self._timers.pop(entry, None)
        self._queue[entry] = None
