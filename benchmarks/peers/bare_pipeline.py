"""What the parts allow: the hops of a durable call and nothing else, on the same gRPC and the same kind of Postgres.

Client → controller → commit → worker → commit → client, three processes, frames of all that came meanwhile, bytes
where we have messages. No checks, no order, no state machine, no engine process, no recovery: whatever holds a call's
promises on these parts costs more than this. A ceiling to read our figure against, not a system anybody could use.
"""

import asyncio
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import asyncpg
import grpc

from benchmarks.peers.peer import CallIterator, Peer
from plexrl_controller.embedded.postgres import EmbeddedPostgres

PROMISE = (
    "call and result are in Postgres, with fsync, before each is told; nothing is checked, ordered or recovered: the "
    "same hops and nothing else"
)
PAYLOAD = b"x" * 100
_STREAM = "/bench.Bare/Stream"
_ID_BYTES = 8
_CALL_BYTES = _ID_BYTES + len(PAYLOAD)
_INSERT = "INSERT INTO calls SELECT * FROM unnest($1::bigint[], $2::bytea[])"
_UPDATE = "UPDATE calls SET result = r FROM unnest($1::bigint[], $2::bytea[]) AS done(i, r) WHERE id = i"

Frame = bytes
"""Calls, one after the other: the id, then the payload."""


class Outbox:
    """Calls on their way into a stream: all that came while the last frame was on its way are one frame."""

    def __init__(self) -> None:
        self._calls = bytearray()
        self._came = asyncio.Event()

    def put(self, calls: bytes) -> None:
        """Adds calls."""
        self._calls += calls
        self._came.set()

    async def frames(self) -> AsyncIterator[Frame]:
        """Frames for ever."""
        while True:
            await self._came.wait()
            self._came.clear()
            frame, self._calls = bytes(self._calls), bytearray()
            yield frame


async def _serve(answer: Callable[[Frame, Outbox], Any]) -> None:
    """Serves the stream on a port of its choice, which is printed; `answer` gets each frame and where answers go."""

    async def stream(frames: AsyncIterator[Frame], context: Any) -> AsyncIterator[Frame]:
        outbox = Outbox()

        async def read() -> None:
            async for frame in frames:
                answer(frame, outbox)

        reader = asyncio.create_task(read())
        try:
            async for frame in outbox.frames():
                yield frame
        finally:
            reader.cancel()

    server = grpc.aio.server()
    handlers: dict[str, Any] = {"Stream": grpc.stream_stream_rpc_method_handler(stream)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench.Bare", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"127.0.0.1:{port}", flush=True)
    await server.wait_for_termination()


async def _worker() -> None:
    await _serve(lambda frame, outbox: outbox.put(frame))


async def _controller(worker: str, host: str) -> None:
    connection = await asyncpg.connect(host=host, user="plexrl", database="bench")
    await connection.execute("CREATE TABLE calls (id bigint PRIMARY KEY, spec bytea, result bytea)")
    to_worker = Outbox()
    back: dict[int, Outbox] = {}
    queue: list[tuple[str, Frame, Callable[[Frame], None]]] = []
    came = asyncio.Event()

    def write(sql: str, calls: Frame, then: Callable[[Frame], None]) -> None:
        queue.append((sql, calls, then))
        came.set()

    async def commit() -> None:
        while True:
            await came.wait()
            came.clear()
            taken, queue[:] = list(queue), []
            async with connection.transaction():
                for sql in (_INSERT, _UPDATE):
                    rows = [row for kind, calls, _ in taken if kind is sql for row in _rows(calls)]
                    if rows:
                        await connection.execute(sql, *(list(column) for column in zip(*rows, strict=True)))
            for _, calls, then in taken:
                then(calls)

    def submitted(frame: Frame, outbox: Outbox) -> None:
        for number, _ in _rows(frame):
            back[number] = outbox
        write(_INSERT, frame, to_worker.put)

    def done(frame: Frame) -> None:
        for start in range(0, len(frame), _CALL_BYTES):
            call = frame[start : start + _CALL_BYTES]
            back.pop(int.from_bytes(call[:_ID_BYTES], "big")).put(call)

    async def results() -> None:
        async with grpc.aio.insecure_channel(worker) as channel:
            async for frame in _call_stream(channel, to_worker.frames()):
                write(_UPDATE, frame, done)

    await asyncio.gather(commit(), results(), _serve(submitted))


def _rows(frame: Frame) -> list[tuple[int, bytes]]:
    starts = range(0, len(frame), _CALL_BYTES)
    return [
        (int.from_bytes(frame[start : start + _ID_BYTES], "big"), frame[start + _ID_BYTES : start + _CALL_BYTES])
        for start in starts
    ]


def _call_stream(channel: grpc.aio.Channel, frames: AsyncIterator[Frame]) -> AsyncIterator[Frame]:
    method: grpc.aio.StreamStreamMultiCallable[Frame, Frame] = channel.stream_stream(_STREAM)
    return aiter(method(frames))


@asynccontextmanager
async def _process(*argv: str) -> AsyncIterator[str]:
    """A process of this module; the address that it prints."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.peers.bare_pipeline", *argv), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        yield (await process.stdout.readline()).decode().strip()
    finally:
        process.terminate()
        await process.wait()


@asynccontextmanager
async def _open() -> CallIterator:
    with (
        tempfile.TemporaryDirectory(prefix="plexrl-bench-") as folder,
        EmbeddedPostgres(Path(folder) / "pg") as postgres,
    ):
        postgres.create_database("bench")
        async with (
            _process("worker") as worker,
            _process("controller", worker, str(postgres.socket_folder)) as controller,
            grpc.aio.insecure_channel(controller) as channel,
        ):
            outbox, numbers = Outbox(), count()
            waiting: dict[bytes, asyncio.Future[None]] = {}

            async def read() -> None:
                async for frame in _call_stream(channel, outbox.frames()):
                    for start in range(0, len(frame), _CALL_BYTES):
                        waiting.pop(frame[start : start + _ID_BYTES]).set_result(None)

            async def call() -> None:
                number = next(numbers).to_bytes(_ID_BYTES, "big")
                done = waiting[number] = asyncio.get_running_loop().create_future()
                outbox.put(number + PAYLOAD)
                await done

            reader = asyncio.create_task(read())
            try:
                await call()
                yield call
            finally:
                reader.cancel()


def peer() -> Peer:
    """The ceiling, in the form of a peer."""
    return Peer("the same hops, bare", PROMISE, _open)


if __name__ == "__main__":
    asyncio.run(_worker() if sys.argv[1] == "worker" else _controller(*sys.argv[2:4]))
