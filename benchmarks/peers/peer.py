"""The form of a peer."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

Call = Callable[[], Awaitable[Any]]
Opened = Callable[[], AbstractAsyncContextManager[Call]]
CallIterator = AsyncIterator[Call]


@dataclass(frozen=True)
class Peer:
    """A system with a call that returns about 100 bytes. `open` starts it and yields the call."""

    name: str
    promise: str
    """What survives when a process or the machine dies."""
    open: Opened
