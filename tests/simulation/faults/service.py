"""What a client of the simulation sees of the world: rpcs that may get lost, streams that break."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Protocol

from plexrl.v1 import call_pb2
from plexrl_controller.domain.ids import Tenant
from tests.simulation.faults.truth import Truth


class Service(Protocol):
    """What a client sees of the world."""

    truth: Truth

    async def ask(self, who: str, tenant: Tenant, service: str, method: str, request: Any, limit_s: float) -> Any:
        """One rpc, which may get lost either way: raises Unavailable then."""
        ...

    def connect(
        self, who: str, tenant: Tenant, requests: AsyncIterator[call_pb2.ConnectRequest], frames: "asyncio.Queue[Any]"
    ) -> "asyncio.Task[None]":
        """A stream whose frames go to the queue; None when it broke, the error when it was refused."""
        ...

    def watch(self, who: str, tenant: Tenant, call_id: str, frames: "asyncio.Queue[Any]") -> "asyncio.Task[None]":
        """WatchCall, in the same way."""
        ...

    def note(self, who: str, *what: object) -> None:
        """For the history."""
        ...

    def blame(self, what: str) -> None:
        """A violation."""
        ...


class JobOver(Exception):
    """The job has ended under its client."""
