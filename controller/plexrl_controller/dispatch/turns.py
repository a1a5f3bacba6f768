"""Which groups' cycles are due. Each runs once for any number of wake-ups: when the loop comes round, or right before
the next commit, so that what it decides goes into the same commit as what woke it.
"""

import asyncio
from collections.abc import Callable

from plexrl_controller.domain.ids import WorkerId


class Turns:
    """The wake-ups of one leader. Before `start` they are kept, after `stop` they are lost."""

    def __init__(self) -> None:
        self._due: dict[WorkerId, None] = {}
        self._timers: dict[WorkerId, asyncio.TimerHandle] = {}
        self._turn: Callable[[WorkerId], None] | None = None
        self._scheduled = False
        self._stopped = False

    def start(self, turn: Callable[[WorkerId], None]) -> None:
        """Begins to run cycles: `turn` runs one group's."""
        self._turn = turn
        self._schedule()

    def stop(self) -> None:
        """Runs no cycle any more."""
        self._stopped = True
        self._due.clear()
        for timer in self._timers.values():
            timer.cancel()

    def wake(self, worker_id: WorkerId) -> None:
        """Asks for a run of the group's cycle."""
        if not self._stopped:
            self._due[worker_id] = None
            self._schedule()

    def wake_after(self, worker_id: WorkerId, delay_s: float | None) -> None:
        """Asks for a run when `delay_s` have passed, instead of at any time asked for so; None takes that back."""
        if (timer := self._timers.pop(worker_id, None)) is not None:
            timer.cancel()
        if delay_s is not None and not self._stopped:
            self._timers[worker_id] = asyncio.get_running_loop().call_later(delay_s, self.wake, worker_id)

    def run(self) -> None:
        """Runs every cycle that is due, and those that become due by it."""
        while self._due and self._turn is not None:
            worker_id = next(iter(self._due))
            del self._due[worker_id]
            self._turn(worker_id)

    def _schedule(self) -> None:
        if self._turn is not None and self._due and not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._run_scheduled)

    def _run_scheduled(self) -> None:
        self._scheduled = False
        self.run()
