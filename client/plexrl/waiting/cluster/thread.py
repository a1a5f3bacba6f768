"""A server in a thread of its own, for programs without an event loop: scripts, notebooks, tests of clients."""

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

from plexrl.waiting.cluster.http import ClusterServer, RealTime
from plexrl.waiting.cluster.simulation import Simulation

T = TypeVar("T")
CALL_TIMEOUT_S = 300.0


class ServerThread:
    """A started server. The simulation belongs to its thread: reach it through `call` alone."""

    def __init__(self, server: ClusterServer, loop: asyncio.AbstractEventLoop) -> None:
        self._server = server
        self._loop = loop
        self.url = server.url

    def advance(self, seconds: float) -> None:
        """Lets time pass and returns when it has. Raises as `ClusterServer.advance`."""
        asyncio.run_coroutine_threadsafe(self._server.advance(seconds), self._loop).result(CALL_TIMEOUT_S)

    def call(self, function: Callable[[ClusterServer], T]) -> T:
        """What a function returns that runs in the server's thread, between two requests."""

        async def run() -> T:
            return function(self._server)

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(CALL_TIMEOUT_S)


@contextlib.contextmanager
def serve_in_thread(
    make_simulation: Callable[[], Simulation], *, real_time: RealTime | None = None
) -> Iterator[ServerThread]:
    """Serves on a free port of 127.0.0.1 within, without token or TLS."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="cluster", daemon=True)
    thread.start()

    def run(awaitable: Awaitable[T]) -> T:
        async def wait() -> T:
            return await awaitable

        return asyncio.run_coroutine_threadsafe(wait(), loop).result(CALL_TIMEOUT_S)

    async def start() -> ClusterServer:
        server = ClusterServer(make_simulation(), real_time=real_time)
        await server.start()
        return server

    try:
        server = run(start())
        try:
            yield ServerThread(server, loop)
        finally:
            run(server.stop())
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
