"""The database of the simulation: the memory store behind connections that are slow, break, and stall.

`Database` outlives every controller; each life of one has its own `Connection`, which is cut when that life is killed.
"""

import asyncio
import random
from collections.abc import Callable
from enum import Enum
from typing import Any

from plexrl_controller.domain.errors import Unavailable
from plexrl_controller.store.memory import MemoryStore
from plexrl_controller.store.port import Changes


class Moment(Enum):
    """Where in a commit something happens."""

    BEFORE = "before the commit"
    AFTER = "after the commit, before its answer"


class Database:
    """What is durable, and what will go wrong with it."""

    def __init__(self, rng: random.Random) -> None:
        self.store = MemoryStore()
        self.rng = rng
        self.stalled_until_s = 0.0
        self.failures: list[Moment] = []
        """The next commits fail here."""
        self.kill: tuple[int, Moment] | None = None
        """After so many commits the controller is killed in one."""

    def fails(self, moment: Moment) -> bool:
        """Whether the connection breaks at this moment of a commit."""
        return bool(self.failures) and self.failures[0] is moment and bool(self.failures.pop(0))

    def kills(self, moment: Moment) -> bool:
        """Whether the controller dies at this moment of a commit."""
        if self.kill != (0, moment):
            return False
        self.kill = None
        return True


class Connection:
    """The store as one life of a controller has it: commits take their time and may fail; reads are the store's own."""

    def __init__(self, database: Database, kill_controller: Callable[[], None]) -> None:
        self._database = database
        self._kill_controller = kill_controller
        self.cut = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._database.store, name)

    async def commit(self, term: int, changes: Changes) -> None:
        """As the store's, unless the connection breaks or the controller dies in it."""
        database = self._database
        if database.kill is not None:
            database.kill = max(0, database.kill[0] - 1), database.kill[1]
        await self._travel()
        if database.kills(Moment.BEFORE):
            self._kill_controller()
        if database.fails(Moment.BEFORE):
            raise Unavailable("the connection broke before the commit")
        if self.cut:
            await asyncio.Event().wait()
        await database.store.commit(term, changes)
        if database.kills(Moment.AFTER):
            self._kill_controller()
        await self._travel()
        if database.fails(Moment.AFTER):
            raise Unavailable("the connection broke after the commit")

    async def _travel(self) -> None:
        """The way to the database, or back. Whoever was killed meanwhile hears nothing."""
        loop = asyncio.get_running_loop()
        await asyncio.sleep(self._database.rng.expovariate(1 / 0.002))
        await asyncio.sleep(max(0.0, self._database.stalled_until_s - loop.time()))
        if self.cut:
            await asyncio.Event().wait()
