"""A lock whose holder can see that others wait: whoever could hold it for long looks, and lets go."""

import asyncio
from typing import Literal


class WantedLock(asyncio.Lock):
    """A lock that tells whether anybody waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self._waiting = 0

    async def acquire(self) -> Literal[True]:
        self._waiting += 1
        try:
            return await super().acquire()
        finally:
            self._waiting -= 1

    @property
    def wanted(self) -> bool:
        """Whether somebody waits."""
        return self._waiting > 0
