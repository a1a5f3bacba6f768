"""An event loop whose time jumps to the next timer when nothing is left to do: hours pass in milliseconds, and the same
tasks always run in the same order. Knows nothing of what runs in it.
"""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

START_S = 1_000_000.0


class NothingLeft(AssertionError):
    """Every task waits and no timer is set: without the outside world nothing would ever happen again."""


class _JumpingSelector(selectors.DefaultSelector):
    """Waits by moving the clock."""

    now_s = START_S

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise NothingLeft("all tasks wait for each other")
        self.now_s += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Time is virtual; threads are refused their own pace: what would run in one runs at once."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now_s

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> "asyncio.Future[T]":  # type: ignore[override]
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - handed to whoever awaits it, as an executor does
            future.set_exception(error)
        return future


class LoopClock:
    """The loop's time behind the controller's clock port."""

    def now(self) -> float:
        """Seconds since the simulation's epoch."""
        return asyncio.get_running_loop().time()


def run(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Runs a coroutine to its end on a fresh virtual loop."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main())
