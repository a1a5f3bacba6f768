"""A call that has been submitted: wait for it, await it, watch it, end it.

Knows one call; how calls travel is the call stream's business, which it reaches through `CallHandle`.
"""

import asyncio
import contextlib
import threading
from collections.abc import Generator, Sequence
from typing import Generic, Protocol, TypeVar, cast

from plexrl.v1 import types_pb2 as t

ResultT = TypeVar("ResultT", covariant=True)
OutcomeT = TypeVar("OutcomeT")


class CallHandle(Protocol):
    """What a future needs of the stream that carries its call."""

    @property
    def call_id(self) -> str | None:
        """The server's id; None until the call is accepted."""
        ...

    @property
    def description(self) -> str:
        """How messages name the call."""
        ...

    @property
    def state(self) -> "t.CallState.ValueType":
        """Last state heard of."""
        ...

    @property
    def progress(self) -> tuple[int, int]:
        """Units done and in all (0 if unknown), in the current attempt."""
        ...

    def wake(self, waiter: "asyncio.Future[None]") -> None:
        """Resolves `waiter`, a future of the running loop, once the outcome is here; it may have come already."""
        ...

    def delivered(self) -> None:
        """The caller has the outcome: the server may drop its copy."""
        ...

    def dropped(self) -> None:
        """Nobody can ask for the outcome any more. Called from a destructor: must not block or take locks."""
        ...

    def cancel(self) -> None:
        """Asks the server to end the call."""
        ...

    def explain(self) -> str:
        """Asks the server what the call waits for."""
        ...


class Waitable(Protocol[ResultT]):
    """An outcome that will be here at some time; `concurrent.futures.Future` is one."""

    def done(self) -> bool:
        """Whether it is here."""
        ...

    def result(self, timeout: float | None = None) -> ResultT:
        """Waits for it. Raises what it is, if that is an error, or TimeoutError."""
        ...

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Waits for it; the error that it is, or None. Raises TimeoutError."""
        ...


class Outcome(Generic[OutcomeT]):
    """A Waitable that one thread sets and others wait for. One is made for every call, so it must cost little: what
    wakes a waiting thread is made when there is one.
    """

    __slots__ = ("_arrived", "_done", "_error", "_value")

    _making = threading.Lock()

    def __init__(self) -> None:
        self._done = False
        self._value: OutcomeT | None = None
        self._error: BaseException | None = None
        self._arrived: threading.Event | None = None

    def done(self) -> bool:
        """Whether it is here."""
        return self._done

    def result(self, timeout: float | None = None) -> OutcomeT:
        """Waits for it. Raises what it is, if that is an error, or TimeoutError."""
        if (error := self.exception(timeout)) is not None:
            raise error
        return cast("OutcomeT", self._value)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Waits for it; the error that it is, or None. Raises TimeoutError."""
        if not self._done:
            with self._making:
                arrived = self._arrived = self._arrived or threading.Event()
            # It may have come before there was an event to set.
            if not (self.done() or arrived.wait(timeout) or self.done()):
                raise TimeoutError
        return self._error

    def set_result(self, value: OutcomeT) -> None:
        """It is a value."""
        self._value = value
        self._settle()

    def set_exception(self, error: BaseException) -> None:
        """It is an error."""
        self._error = error
        self._settle()

    def _settle(self) -> None:
        self._done = True
        if self._arrived is not None:
            self._arrived.set()


class CallFuture(Generic[ResultT]):
    """The outcome of a submitted call: `future.result()` in threads, `await future` in asyncio.

    The call runs on the cluster whether or not anyone waits. Dropping the future gives the result up.
    """

    def __init__(self, handle: CallHandle, outcome: Waitable[ResultT]) -> None:
        self._handle = handle
        self._outcome = outcome

    @property
    def call_id(self) -> str | None:
        """The call's id, for `plexrl explain`; None until the cluster has accepted the call."""
        return self._handle.call_id

    @property
    def state(self) -> str:
        """Last state heard of, e.g. "RUNNING"."""
        return t.CallState.Name(self._handle.state).removeprefix("CALL_STATE_")

    @property
    def progress(self) -> tuple[int, int]:
        """Units done and in all (0 if unknown): tokens of generate, micro-batches of training."""
        return self._handle.progress

    def done(self) -> bool:
        """Whether the outcome is here."""
        return self._outcome.done()

    def result(self, timeout_s: float | None = None) -> ResultT:
        """Waits for the result. Raises the call's PlexRLError, or TimeoutError while the call goes on."""
        self._wait(timeout_s)
        return self._outcome.result()

    def exception(self, timeout_s: float | None = None) -> BaseException | None:
        """Waits for the end; the exception that `result` would raise, or None. Raises TimeoutError as `result` does."""
        self._wait(timeout_s)
        return self._outcome.exception()

    def _wait(self, timeout_s: float | None) -> None:
        """Returns once the outcome is here, and says so. Raises TimeoutError."""
        try:
            self._outcome.exception(timeout_s)
        except TimeoutError:
            # One that came at the last moment counts.
            if not self._outcome.done():
                raise TimeoutError(
                    f"{self._handle.description} is {self.state} after {timeout_s} s; it goes on: wait again, "
                    "explain() it or cancel() it"
                ) from None
        self._handle.delivered()

    def cancel(self) -> None:
        """Asks the cluster to end the call; `result` then raises CallCancelled, unless the call finished first."""
        self._handle.cancel()

    def explain(self) -> str:
        """One sentence, with numbers, on what the call waits for or how it ended."""
        return self._handle.explain()

    def __await__(self) -> Generator[object, None, ResultT]:
        # Cancelling the waiting task does not cancel the call: it may be one of a sequence.
        try:
            while not self._outcome.done():
                waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                self._handle.wake(waiter)
                yield from waiter
            return self._outcome.result()
        finally:
            if self._outcome.done():
                self._handle.delivered()

    def __del__(self) -> None:
        self._handle.dropped()

    def __repr__(self) -> str:
        return f"<CallFuture {self._handle.description} {self.state}>"


def wake_together(waiters: Sequence["asyncio.Future[None]"]) -> None:
    """Resolves futures from outside their loops, with one call into each loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
    for waiter in waiters:
        by_loop.setdefault(waiter.get_loop(), []).append(waiter)
    for loop, together in by_loop.items():
        # A loop that is closed has nobody left who waits.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(_set_done, together)


def _set_done(waiters: Sequence["asyncio.Future[None]"]) -> None:
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(None)
