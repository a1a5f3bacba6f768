"""A call on its way: how it is told of, followed and stopped. Knows nothing of what calls do."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from plexrl.v1 import worker_pb2 as w
from plexrl_worker.engine.call import EngineCall, ProgressListener
from plexrl_worker.errors import Cancelled
from plexrl_worker.journal import Journal

T = TypeVar("T")

TOLD_AFTER_S = 0.05
"""A call that has run for so long is reported as started."""


def execution_name(order: w.RunCallOrder) -> str:
    """What a call's execution is called in its engine while it is parked."""
    return f"{order.call.call_id}/{order.call.attempt}"


@dataclass
class Execution:
    """A call on its way: how it is stopped, and what it did. It begins once it has the device and passed its checks."""

    order: w.RunCallOrder
    on_begin: Callable[[], None]
    on_progress: ProgressListener
    journal: Journal = field(default_factory=Journal)
    begun: bool = False
    aborted: bool = False
    running: EngineCall[Any] | None = None
    _working: asyncio.Task[Any] | None = None
    _telling: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """It begins. Only of one that goes on for a moment is that told: a short one tells its end alone."""
        self.begun = True
        self._telling = asyncio.get_running_loop().call_later(TOLD_AFTER_S, self.on_begin)

    def end(self) -> None:
        """It ended, or will not begin any more."""
        if self._telling is not None:
            self._telling.cancel()

    def abort(self) -> None:
        """Stops it at its next step, or before it begins. It may still finish if it was about to."""
        self.aborted = True
        if self.running is not None:
            self.running.abort()
        if self._working is not None:
            self._working.cancel()

    def give_way(self) -> bool:
        """Has it stop at its next step; False where nothing of it is with the engine, so that it need not."""
        if self.running is None:
            return False
        self.running.give_way()
        return True

    async def follow(self, call: EngineCall[T]) -> T:
        """Awaits an engine's call, as the one that is stopped and that progress is heard from."""
        call.on_progress = self.on_progress
        self.running = call
        if self.aborted:
            call.abort()
        try:
            return await call
        finally:
            self.running = None

    async def unless_aborted(self, work: Coroutine[Any, Any, T]) -> T:
        """Awaits what no engine does. Raises Cancelled when this is aborted first, and `work` has ended then."""
        working: asyncio.Task[T] = asyncio.create_task(work)
        self._working = working
        if self.aborted:
            working.cancel()
        try:
            return await working
        except asyncio.CancelledError:
            waiter = asyncio.current_task()
            if waiter is not None and waiter.cancelling():
                raise
            raise Cancelled("the call was stopped") from None
        finally:
            self._working = None
