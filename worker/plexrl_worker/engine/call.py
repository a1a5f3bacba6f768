"""One function that an engine child was asked for, as the daemon awaits it. Knows nothing of sockets and frames."""

import asyncio
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from plexrl.v1 import engine_pb2 as e
from plexrl_worker.engine.errors import EngineError, error_of

if TYPE_CHECKING:
    from plexrl_worker.engine.client import EngineProcess

T = TypeVar("T")

ProgressListener = Callable[[int, int], None]


class EngineCall(Generic[T]):
    """One function that the child runs or has queued. Await it: the outcome, or an EngineError kind."""

    def __init__(self, process: "EngineProcess", request_id: int, unpack: Callable[[e.EngineResponse], T]) -> None:
        self.request_id = request_id
        self.done_units = 0
        self.total_units = 0
        self.start_unix_ns = 0
        """When it began to run in the child; 0 until it has ended."""
        self.end_unix_ns = 0
        self.generator_steps = 0
        """Of a generate that has ended: steps of the engine's generator so far."""
        self.on_progress: ProgressListener | None = None
        self.on_end: Callable[[], None] | None = None
        self.process = process
        self._unpack = unpack
        self._response: e.EngineResponse | None = None
        self._error: EngineError | None = None
        # Made for whoever has to wait: most outcomes of a burst are here before anybody asks for them.
        self._ended: asyncio.Future[None] | None = None

    def __await__(self) -> Generator[Any, None, T]:
        """Waits for the outcome. Cancelling the waiter does not abort the function."""
        if not self.done():
            if self._ended is None:
                self._ended = asyncio.get_running_loop().create_future()
            yield from asyncio.shield(self._ended).__await__()
        return self.result()

    def done(self) -> bool:
        """Whether the outcome is known."""
        return self._response is not None or self._error is not None

    def result(self) -> T:
        """The outcome of a call that is done. Raises the EngineError that it ended with."""
        if self._error is not None:
            raise self._error
        assert self._response is not None
        return self._unpack(self._response)

    def abort(self) -> None:
        """Asks the child to end it at its next step with Aborted; it may still succeed if it was about to."""
        if not self.done():
            self.process.send(e.EngineRequest(abort_request_id=self.request_id))

    def give_way(self) -> None:
        """Asks the child to park it at its next step with Yielded; it may still go on to its end."""
        if not self.done():
            self.process.send(e.EngineRequest(yield_request_id=self.request_id))

    def advance(self, progress: e.EngineProgress) -> None:
        """It is so far."""
        self.done_units, self.total_units = progress.done, progress.total
        if self.on_progress is not None:
            # On its own: what a listener raises must not keep others from hearing what has come with this.
            asyncio.get_running_loop().call_soon(self.on_progress, progress.done, progress.total)

    def finish(self, response: e.EngineResponse) -> None:
        """The child said how it ended."""
        if self.done():
            return
        self.start_unix_ns, self.end_unix_ns = response.start_unix_ns, response.end_unix_ns
        self.generator_steps = response.generator_steps
        if response.HasField("failure"):
            self.fail(error_of(response.failure.reason, response.failure.message))
        else:
            self._response = response
            self._wake()

    def fail(self, error: EngineError) -> None:
        """It ends with this error, unless it has ended."""
        if not self.done():
            self._error = error
            self._wake()

    def _wake(self) -> None:
        if self.on_end is not None:
            self.on_end()
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)
