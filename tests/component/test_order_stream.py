"""The controller's end of an order stream against a real daemon: which worker it opens to, and that it keeps trying."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from plexrl.v1 import worker_pb2
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
