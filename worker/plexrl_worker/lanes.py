"""A bounded first-in-first-out queue for one reader, who may look at what comes next."""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from plexrl_worker.errors import TooManyOrders

T = TypeVar("T")


class Lane(Generic[T]):
    """Orders that run one after the other."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._items: deque[T] = deque()
        self._changed = asyncio.Event()
        self.on_put: Callable[[], None] | None = None
        """Told when an order was added: for the reader that has one in hand and takes more as they come."""

    def put(self, item: T) -> None:
        """Adds an order at the end. Raises TooManyOrders."""
        if len(self._items) >= self._limit:
            raise TooManyOrders(f"{self._limit} orders are queued, the limit: wait for reports")
        self._items.append(item)
        self._changed.set()
        if self.on_put is not None:
            self.on_put()

    async def get(self) -> T:
        """Waits for the next order and takes it."""
        while not self._items:
            self._changed.clear()
            await self._changed.wait()
        return self._items.popleft()

    def take_if(self, wanted: Callable[[T], bool]) -> T | None:
        """Takes the next order if there is one and it is wanted."""
        return self._items.popleft() if self._items and wanted(self._items[0]) else None

    def drain(self) -> list[T]:
        """Takes all that is queued."""
        items, self._items = list(self._items), deque()
        return items
