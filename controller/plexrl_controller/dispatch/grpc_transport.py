"""Order streams over gRPC: one connection per worker life, kept open, several orders and reports to a frame."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import grpc
import structlog

from plexrl.v1 import worker_pb2, worker_pb2_grpc
from plexrl.wire import CHANNEL_OPTIONS, MAX_MESSAGE_BYTES
from plexrl_controller.dispatch.transport import ReportHandler
from plexrl_controller.domain.errors import ControllerError, LeadershipLost, Unavailable
from plexrl_controller.domain.ids import WorkerId
from plexrl_controller.domain.records import Worker

_log = structlog.get_logger("plexrl.controller")

MAX_FRAME_ORDERS = 256
MAX_FRAME_BYTES = MAX_MESSAGE_BYTES // 2
MAX_QUEUED_FRAMES = 64
RECONNECT_S = (0.05, 1.0)


@dataclass
class _Outgoing:
    """Orders that wait to go out on one stream. gRPC goes on asking for them after a stream has ended by itself: with a
    queue for all streams of a worker it would take what the next one is to carry.
    """

    orders: deque[worker_pb2.Order] = field(default_factory=deque)
    queued: asyncio.Event = field(default_factory=asyncio.Event)
    closed: bool = False

    def put(self, orders: Sequence[worker_pb2.Order]) -> None:
        self.orders.extend(orders)
        self.queued.set()

    def close(self) -> None:
        """What waits is dropped, and whoever asks for more is told that there is none."""
        self.closed = True
        self.orders.clear()
        self.queued.set()


@dataclass
class _Link:
    """One worker's connection. `outgoing` is of the stream that is open, None while none is."""

    worker: Worker
    task: asyncio.Task[None] | None = None
    outgoing: _Outgoing | None = None
    channel: grpc.aio.Channel | None = None


class GrpcTransport:
    """Implements Transport. `handler` is set before the first `open`."""

    def __init__(self, term: int, worker_token: str, credentials: grpc.ChannelCredentials | None = None) -> None:
        self.handler: ReportHandler | None = None
        self._term = term
        self._metadata = (("authorization", f"Bearer {worker_token}"),)
        self._credentials = credentials
        self._links: dict[WorkerId, _Link] = {}

    def open(self, worker: Worker) -> None:
        """Connects to this life of a worker and keeps connecting."""
        link = self._links.get(worker.worker_id)
        if link is not None and link.worker.incarnation == worker.incarnation and link.worker.address == worker.address:
            return
        self.close(worker.worker_id)
        link = _Link(worker)
        self._links[worker.worker_id] = link
        link.task = asyncio.create_task(self._keep_connected(link), name=f"link-{worker.name}")

    def close(self, worker_id: WorkerId) -> None:
        """Stops connecting."""
        link = self._links.pop(worker_id, None)
        if link is not None and link.task is not None:
            link.task.cancel()

    def send(self, worker_id: WorkerId, orders: Sequence[worker_pb2.Order]) -> None:
        """Queues orders on an open stream."""
        link = self._links.get(worker_id)
        if link is not None and link.outgoing is not None:
            link.outgoing.put(orders)

    def channel(self, worker_id: WorkerId) -> grpc.aio.Channel | None:
        """The open connection to a worker, for its unary rpcs."""
        link = self._links.get(worker_id)
        return link.channel if link is not None and link.outgoing is not None else None

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Credentials for calls on `channel`."""
        return self._metadata

    async def shutdown(self) -> None:
        """Closes everything."""
        tasks = [link.task for link in self._links.values() if link.task is not None]
        for worker_id in list(self._links):
            self.close(worker_id)
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _keep_connected(self, link: _Link) -> None:
        delay_s = RECONNECT_S[0]
        told = ""
        while True:
            why = f"{link.worker.address}: the connection was closed"
            try:
                async with self._dial(link.worker.address) as channel:
                    link.channel = channel
                    with closing(_Outgoing()) as outgoing:
                        await self._serve(link, channel, outgoing)
                delay_s = RECONNECT_S[0]
            except grpc.aio.AioRpcError as error:
                why = f"{link.worker.address}: {error.code().name}: {error.details()}"
                # Once for each cause and outage: it is tried again every second.
                log = _log.warning if link.outgoing is not None or why != told else _log.debug
                log("worker_stream_broken", worker=link.worker.worker_id, name=link.worker.name, detail=why)
                told = why
                delay_s = min(2 * delay_s, RECONNECT_S[1])
            except LeadershipLost:
                return
            except ControllerError as error:
                why = f"{link.worker.address}: {error.reason}: {error.message}"
                # Another try may fare better, and the worker must not be lost for the want of one.
                _log.error(
                    "worker_link_failed", worker=link.worker.worker_id, reason=error.reason, detail=error.message
                )
                delay_s = min(2 * delay_s, RECONNECT_S[1])
            finally:
                link.outgoing, link.channel = None, None
                if self.handler is not None:
                    self.handler.stream_closed(link.worker.worker_id, link.worker.incarnation, why)
            await asyncio.sleep(delay_s)

    def _dial(self, address: str) -> grpc.aio.Channel:
        if self._credentials is not None:
            return grpc.aio.secure_channel(address, self._credentials, options=list(CHANNEL_OPTIONS))
        return grpc.aio.insecure_channel(address, options=list(CHANNEL_OPTIONS))

    async def _serve(self, link: _Link, channel: grpc.aio.Channel, outgoing: _Outgoing) -> None:
        handler = self.handler
        if handler is None:
            raise RuntimeError("GrpcTransport.handler is not set")
        worker_id, incarnation = link.worker.worker_id, link.worker.incarnation
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        stream = stub.Execute(self._frames(incarnation, outgoing), metadata=self._metadata)
        await stream.initial_metadata()
        status = await stub.GetStatus(worker_pb2.GetStatusRequest(), metadata=self._metadata, timeout=10)
        if status.worker_id != worker_id:
            # Incarnations count per worker: at an address that was used before, another worker can have the same.
            raise Unavailable(
                f"{link.worker.address} is worker {status.worker_id or '(not registered)'} now", reason="ANOTHER_WORKER"
            )
        link.outgoing = outgoing
        await handler.stream_opened(worker_id, incarnation, status)
        frames: asyncio.Queue[worker_pb2.ExecuteResponse | None] = asyncio.Queue(MAX_QUEUED_FRAMES)
        reader = asyncio.create_task(_read(aiter(stream), frames))
        try:
            ended = False
            while not ended:
                # Everything that came while the last reports were being committed goes into one commit.
                came = [await frames.get()]
                while not frames.empty():
                    came.append(frames.get_nowait())
                ended = came[-1] is None
                if reports := [report for frame in came if frame is not None for report in frame.reports]:
                    await handler.reports_came(worker_id, incarnation, reports)
            await reader
        finally:
            reader.cancel()
            stream.cancel()

    async def _frames(self, incarnation: int, outgoing: _Outgoing) -> AsyncIterator[worker_pb2.ExecuteRequest]:
        yield worker_pb2.ExecuteRequest(leader_term=self._term, worker_incarnation=incarnation)
        while not outgoing.closed:
            await outgoing.queued.wait()
            outgoing.queued.clear()
            while outgoing.orders:
                frame = worker_pb2.ExecuteRequest(leader_term=self._term, worker_incarnation=incarnation)
                size = 0
                while outgoing.orders and len(frame.orders) < MAX_FRAME_ORDERS and size < MAX_FRAME_BYTES:
                    order = outgoing.orders.popleft()
                    # Measuring costs as much as writing; what is alone need not be measured.
                    size += order.ByteSize() if outgoing.orders else 0
                    frame.orders.append(order)
                yield frame


async def _read(stream: AsyncIterator[worker_pb2.ExecuteResponse], frames: "asyncio.Queue[Any]") -> None:
    """Moves frames from a stream into a bounded queue; None ends it, also when the stream breaks."""
    try:
        async for frame in stream:
            await frames.put(frame)
    finally:
        await frames.put(None)
