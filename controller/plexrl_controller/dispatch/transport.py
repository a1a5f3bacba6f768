"""How orders reach workers and reports come back, as a port: gRPC live, in memory in simulation."""

from collections.abc import Sequence
from typing import Protocol

from plexrl.v1 import worker_pb2
from plexrl_controller.domain.ids import WorkerId
from plexrl_controller.domain.records import Worker


class ReportHandler(Protocol):
    """What a transport tells the dispatcher."""

    async def stream_opened(self, worker_id: WorkerId, incarnation: int, status: worker_pb2.WorkerStatus) -> None:
        """Orders can be sent; `status` is what the worker holds now."""
        ...

    async def reports_came(self, worker_id: WorkerId, incarnation: int, reports: Sequence[worker_pb2.Report]) -> None:
        """Reports, in order."""
        ...

    def stream_closed(self, worker_id: WorkerId, incarnation: int, why: str = "") -> None:
        """Orders cannot be sent until the stream opens again, or for the first time; the transport keeps trying."""
        ...


class Transport(Protocol):
    """Order streams to workers."""

    def open(self, worker: Worker) -> None:
        """Connects to this life of a worker, replacing an earlier life's connection, and keeps connecting."""
        ...

    def close(self, worker_id: WorkerId) -> None:
        """Stops connecting."""
        ...

    def send(self, worker_id: WorkerId, orders: Sequence[worker_pb2.Order]) -> None:
        """Queues orders on the open stream; drops them when it is not open: they are sent again when it opens."""
        ...

    async def shutdown(self) -> None:
        """Closes everything."""
        ...
