"""A simulated cluster on a socket: HTTP around the API server, and the task that lets time pass in real time.

Requests wait while time passes, so none sees the middle of a step; watches go on reading.
"""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import msgspec
from aiohttp import web

from plexrl.waiting.cluster.api.errors import ApiError, bad_request, conflict, too_large, unauthorized
from plexrl.waiting.cluster.api.requests import ApiRequest, ApiResponse
from plexrl.waiting.cluster.api.server import Answer, error_response
from plexrl.waiting.cluster.api.watch import Watch
from plexrl.waiting.cluster.resources import NAMESPACES, ResourceType
from plexrl.waiting.cluster.simulation import Simulation
from plexrl.waiting.cluster.store import Change

CLOCK_PATH = "/plexrl/clock"
BODY_LIMIT_BYTES = 3 * 2**20
WATCHES_LIMIT = 5_000
BOOKMARK_S = 60.0
WATCH_TIMEOUT_S = 3600.0
EVENTS_PER_WRITE = 500
HAPPENINGS_PER_SLICE = 50
# How long a step of time waits for watches that are about to lose their place.
LAGGARDS_S = 10.0


@dataclass(frozen=True)
class RealTime:
    """Time passes by itself, `speed` times as fast as on the wall, in ticks."""

    speed: float = 1.0
    tick_s: float = 0.02

    def __post_init__(self) -> None:
        if not 0 < self.speed <= 1e6:
            raise ValueError(f"speed: want a number above 0 and up to 1000000, not {self.speed}")
        if not 0.001 <= self.tick_s <= 10:
            raise ValueError(f"tick_s: want 0.001 to 10 seconds, not {self.tick_s}")


class ClusterServer:
    """Serves one simulation. With a token, requests without it are refused."""

    def __init__(
        self,
        simulation: Simulation,
        *,
        real_time: RealTime | None = None,
        token: str = "",
        tls: ssl.SSLContext | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        self.simulation = simulation
        self.real_time = real_time
        self._token = token
        self._tls = tls
        self._host = host
        self._port = port
        self._runner: web.AppRunner | None = None
        self._passing: asyncio.Lock = asyncio.Lock()
        self._ticking: asyncio.Task[None] | None = None
        self._streams: dict[ResourceType, dict[Watch, asyncio.Event]] = {}
        self._closing = False
        simulation.store.listen(self._wake)

    @property
    def url(self) -> str:
        """Where the server listens. Raises RuntimeError before `start`."""
        if self._runner is None or not self._runner.addresses:
            raise RuntimeError("the server is not started")
        scheme = "http" if self._tls is None else "https"
        return f"{scheme}://{self._host}:{self._runner.addresses[0][1]}"

    @property
    def watches(self) -> int:
        """Watches that are open."""
        return sum(len(streams) for streams in self._streams.values())

    async def start(self) -> None:
        """Listens. Raises OSError when the port is taken."""
        app = web.Application(client_max_size=BODY_LIMIT_BYTES)
        app.router.add_route("*", "/{path:.*}", self._answer)
        # A watch ends when its client goes, and not at the next event.
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0, handler_cancellation=True)
        await self._runner.setup()
        await web.TCPSite(self._runner, self._host, self._port, ssl_context=self._tls).start()
        if self.real_time is not None:
            self._ticking = asyncio.create_task(self._let_time_pass(self.real_time))

    async def stop(self) -> None:
        """Ends all watches and closes the socket."""
        self._closing = True
        if self._ticking is not None:
            self._ticking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._ticking
        for streams in self._streams.values():
            for wake in streams.values():
                wake.set()
        if self._runner is not None:
            await self._runner.cleanup()

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator["ClusterServer"]:
        """Started within, stopped after."""
        await self.start()
        try:
            yield self
        finally:
            await self.stop()

    async def advance(self, seconds: float) -> None:
        """Lets time pass, as `Simulation.advance`. Watches keep up with it; requests wait until it is over.

        Raises RuntimeError in real time, where time passes by itself, and ValueError for no number of seconds.
        """
        if self.real_time is not None:
            raise RuntimeError("time passes by itself here: it cannot be advanced")
        if not 0 <= seconds < float("inf"):
            raise ValueError(f"seconds: want a finite number from 0 on, not {seconds}")
        async with self._passing:
            await self._advance_to(self.simulation.now_s + seconds)

    async def _advance_to(self, at_s: float) -> None:
        while not self.simulation.advance_to(at_s, limit=HAPPENINGS_PER_SLICE):
            await asyncio.sleep(0)
            await self._wait_for_laggards()

    async def _wait_for_laggards(self) -> None:
        """Gives watches time to read before the changes that they have not seen yet are dropped."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + LAGGARDS_S
        while self._is_behind() and loop.time() < until_s:  # noqa: ASYNC110 (sockets drain at their own pace)
            await asyncio.sleep(0.002)

    def _is_behind(self) -> bool:
        bound = self.simulation.history_limit // 2
        return any(watch.lag > bound for streams in self._streams.values() for watch in streams)

    async def _let_time_pass(self, real_time: RealTime) -> None:
        loop = asyncio.get_running_loop()
        began_s, began_at_s = loop.time(), self.simulation.now_s
        while True:
            await asyncio.sleep(real_time.tick_s)
            async with self._passing:
                await self._advance_to(began_at_s + (loop.time() - began_s) * real_time.speed)

    def _wake(self, kind: ResourceType, change: Change) -> None:
        for wake in self._streams.get(kind, {}).values():
            wake.set()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        try:
            self._check_token(request)
            self._check_time()
            body = await self._body(request)
            if request.path == CLOCK_PATH:
                return _json(await self._clock(request, body))
            api_request = ApiRequest(
                request.method,
                request.path,
                dict(request.query),
                accept=request.headers.get("Accept", ""),
                content_type=request.headers.get("Content-Type", ""),
                body=body,
                user_agent=request.headers.get("User-Agent", ""),
            )
            answer: Answer
            async with self._passing:
                answer = self.simulation.handle(api_request)
            if isinstance(answer, Watch):
                return await self._stream(request, answer)
            return _json(answer)
        except ApiError as error:
            response = _json(error_response(error))
            if error.retry_after_s:
                response.headers["Retry-After"] = str(error.retry_after_s)
            return response

    def _check_token(self, request: web.Request) -> None:
        if self._token and request.headers.get("Authorization") != f"Bearer {self._token}":
            raise unauthorized()

    def _check_time(self) -> None:
        """A cluster whose time has stopped by an error says so, and does not pretend that nothing happens."""
        if self._ticking is not None and self._ticking.done() and not self._closing:
            raise ApiError(500, "InternalError", f"time has stopped: {self._ticking.exception()!r}")

    async def _body(self, request: web.Request) -> bytes:
        try:
            return await request.read()
        except web.HTTPRequestEntityTooLarge as error:
            raise too_large(BODY_LIMIT_BYTES) from error

    async def _clock(self, request: web.Request, body: bytes) -> ApiResponse:
        """GET tells the time; POST {"advanceSeconds": 30} lets it pass and answers when it has."""
        if request.method == "POST":
            try:
                seconds: Any = msgspec.json.decode(body)["advanceSeconds"]
                # A client that goes away does not stop time halfway.
                await asyncio.shield(self.advance(float(seconds)))
            except RuntimeError as error:
                raise conflict(NAMESPACES, "clock", str(error)) from error
            except (msgspec.DecodeError, KeyError, TypeError, ValueError) as error:
                raise bad_request(f'want {{"advanceSeconds": a number from 0 on}}: {error}') from error
        clock, real_time = self.simulation.clock, self.real_time
        return ApiResponse(
            {
                "nowSeconds": clock.now_s,
                "timestamp": clock.micro_timestamp(),
                "nextDueSeconds": self.simulation.next_due_s(),
                "speed": 0.0 if real_time is None else real_time.speed,
            }
        )

    async def _stream(self, request: web.Request, watch: Watch) -> web.StreamResponse:
        if self.watches >= WATCHES_LIMIT:
            message = f"there are {WATCHES_LIMIT} watches already: try again later"
            raise ApiError(429, "TooManyRequests", message, retry_after_s=1)
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        streams = self._streams.setdefault(watch.target.kind, {})
        wake = streams[watch] = asyncio.Event()
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + (WATCH_TIMEOUT_S if watch.timeout_s is None else watch.timeout_s)
        bookmark_s = loop.time() + BOOKMARK_S
        try:
            await response.prepare(request)
            while not self._closing:
                wake.clear()
                if lines := watch.read(EVENTS_PER_WRITE):
                    await response.write(lines)
                    continue
                if watch.ended or loop.time() >= deadline_s:
                    break
                if watch.lag:
                    continue
                if watch.bookmarks and loop.time() >= bookmark_s:
                    bookmark_s = loop.time() + BOOKMARK_S
                    await response.write(watch.bookmark())
                until_s = min(deadline_s, bookmark_s if watch.bookmarks else deadline_s)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(wake.wait(), max(0.0, until_s - loop.time()))
            await response.write_eof()
        except ConnectionError:
            # The client has gone: nothing is left to tell it.
            pass
        finally:
            del streams[watch]
        return response


def _json(answer: ApiResponse) -> web.Response:
    if isinstance(answer.body, str):
        return web.Response(text=answer.body, status=answer.code)
    response = web.Response(body=msgspec.json.encode(answer.body), status=answer.code)
    response.headers["Content-Type"] = answer.media_type
    for warning in answer.warnings:
        text = warning.replace("\\", "\\\\").replace('"', '\\"')
        response.headers.add("Warning", f'299 - "{text}"')
    return response
