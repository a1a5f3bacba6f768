"""A memory store whose commits wait for the test."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from plexrl_controller.store.memory import MemoryStore
from plexrl_controller.store.port import Changes


class GatedStore(MemoryStore):
    """Commits only while the gate is open."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.gate.set()

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Nothing is committed within the block."""
        self.gate.clear()
        try:
            yield
        finally:
            self.gate.set()

    async def commit(self, term: int, changes: Changes) -> None:
        """As the memory store, once the gate is open."""
        await self.gate.wait()
        await super().commit(term, changes)
