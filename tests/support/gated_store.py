"""A memory store whose commits wait for the test."""

import asyncio

from plexrl_controller.store.memory import MemoryStore
from plexrl_controller.store.port import Changes


class GatedStore(MemoryStore):
    """Commits only while the gate is open."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.gate.set()

    async def commit(self, term: int, changes: Changes) -> None:
        """As the memory store, once the gate is open."""
        await self.gate.wait()
        await super().commit(term, changes)
