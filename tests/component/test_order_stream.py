"""The controller's end of an order stream against a real daemon: which worker it opens to, and that it keeps trying."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest

from plexrl.v1 import worker_pb2, worker_pb2_grpc
from plexrl_controller.dispatch.grpc_transport import GrpcTransport
from plexrl_controller.domain.errors import DataLoss
from plexrl_controller.domain.ids import WorkerId
from plexrl_controller.domain.records import Worker
from plexrl_controller.domain.states import WorkerState
from tests.support.worker_daemon import TOKEN, cluster


@dataclass
class Heard:
    """A ReportHandler that remembers openings, and fails as often as it is told to."""

    failures: int = 0
    opened: list[WorkerId] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def stream_opened(self, worker_id: WorkerId, incarnation: int, status: worker_pb2.WorkerStatus) -> None:
        self.opened.append(worker_id)
        if len(self.opened) <= self.failures:
            raise DataLoss("the arguments of a call are gone")
        self.changed.set()

    async def reports_came(
        self, worker_id: WorkerId, incarnation: int, reports: Sequence[worker_pb2.Report]
    ) -> None: ...

    def stream_closed(self, worker_id: WorkerId, incarnation: int, why: str = "") -> None: ...


def record(worker_id: str, address: str, incarnation: int) -> Worker:
    return Worker(WorkerId(worker_id), "w0", WorkerState.READY, address, incarnation, 1, b"")


async def test_g19_another_worker_at_a_reused_address_gets_no_orders(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        transport, heard = GrpcTransport(9, TOKEN), Heard()
        transport.handler = heard
        transport.open(record("worker-gone", c.daemon.server.address, c.registry.incarnation))
        await asyncio.sleep(0.5)
        assert heard.opened == []
        transport.open(record("worker-1", c.daemon.server.address, c.registry.incarnation))
        await asyncio.wait_for(heard.changed.wait(), 10)
        assert heard.opened == ["worker-1"]
        await transport.shutdown()


@pytest.mark.parametrize("failures", [1, 3])
async def test_a_link_that_fails_is_tried_again(tmp_path: Path, failures: int) -> None:
    async with cluster(tmp_path) as c:
        transport, heard = GrpcTransport(9, TOKEN), Heard(failures)
        transport.handler = heard
        transport.open(record("worker-1", c.daemon.server.address, c.registry.incarnation))
        await asyncio.wait_for(heard.changed.wait(), 20)
        assert len(heard.opened) == failures + 1
        await transport.shutdown()


class EndsAtFirst(worker_pb2_grpc.WorkerServiceServicer):
    """A worker whose first streams end by themselves: they are refused, they end, or they break once they are open."""

    def __init__(self, how: str, times: int) -> None:
        self._how = how
        self._times = times
        self.opened = 0
        self.orders: list[int] = []

    async def Execute(
        self, request_iterator: AsyncIterator[worker_pb2.ExecuteRequest], context: Any
    ) -> AsyncIterator[worker_pb2.ExecuteResponse]:
        self.opened += 1
        if self.opened <= self._times:
            if self._how == "are refused":
                await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "not registered yet")
            yield worker_pb2.ExecuteResponse()
            if self._how == "break":
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the connection broke")
            return
        yield worker_pb2.ExecuteResponse()
        async for frame in request_iterator:
            self.orders += [order.order_id for order in frame.orders]

    async def GetStatus(self, request: worker_pb2.GetStatusRequest, context: Any) -> worker_pb2.WorkerStatus:
        return worker_pb2.WorkerStatus(worker_id="worker-1", worker_incarnation=1)


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("how", ["are refused", "end", "break"])
async def test_every_order_goes_out_on_the_stream_that_is_open(how: str, times: int) -> None:
    """A deploy order that went to a stream that had ended was never sent again: its model waited for ever."""
    worker, server = EndsAtFirst(how, times), grpc.aio.server()  # type: ignore[abstract]
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(worker, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    transport = GrpcTransport(9, TOKEN)
    transport.handler = Heard()
    transport.open(record("worker-1", f"127.0.0.1:{port}", 1))
    try:
        async with asyncio.timeout(20):
            while worker.opened <= times or transport.channel(WorkerId("worker-1")) is None:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            for number in range(1, 9):
                transport.send(WorkerId("worker-1"), [worker_pb2.Order(order_id=number)])
                await asyncio.sleep(0.01)
            while 8 not in worker.orders:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert worker.orders == list(range(1, 9))
    finally:
        await transport.shutdown()
        await server.stop(None)
