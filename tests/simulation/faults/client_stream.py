"""A client's end of the Connect stream."""

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from google.rpc import code_pb2

from plexrl import wire
from plexrl.v1 import call_pb2
from plexrl_controller.domain.errors import ControllerError, Unavailable
from tests.simulation.faults.service import JobOver
from tests.simulation.faults.truth import Request

if TYPE_CHECKING:
    from tests.simulation.faults.client import Client


class ClientStream:
    """A client's end of Connect: opened again whenever it breaks; answers and updates are told apart."""

    def __init__(self, client: "Client") -> None:
        self._client = client
        self._submits: dict[str, list[asyncio.Future[call_pb2.Call]]] = {}
        self._changed = asyncio.Event()
        self._requests: asyncio.Queue[call_pb2.ConnectRequest] = asyncio.Queue()
        self._over = False
        client.helpers.append(asyncio.ensure_future(self._keep()))

    async def submit(self, request: Request) -> call_pb2.Call:
        """The answer to a submit. Raises Unavailable when the stream breaks before it comes, JobOver."""
        if self._over:
            raise JobOver
        answer: asyncio.Future[call_pb2.Call] = asyncio.get_running_loop().create_future()
        self._submits.setdefault(request.message.request_id, []).append(answer)
        self._requests.put_nowait(call_pb2.ConnectRequest(messages=[call_pb2.ClientMessage(submit=request.message)]))
        return await answer

    async def heard(self, limit_s: float) -> None:
        """Waits for an update. Raises JobOver when the stream is refused for good."""
        if self._over:
            raise JobOver
        try:
            async with asyncio.timeout(max(limit_s, 0.0)):
                await self._changed.wait()
        except TimeoutError:
            pass
        self._changed.clear()

    async def _keep(self) -> None:
        client = self._client
        assert client.job is not None
        while True:
            frames: asyncio.Queue[Any] = asyncio.Queue()
            requests = _after_hello(client.job.job_id, self._requests)
            task = client.world.connect(client.name, client.tenant, requests, frames)
            try:
                while isinstance(frame := await frames.get(), call_pb2.ConnectResponse):
                    for message in frame.messages:
                        self._take(message)
                    self._changed.set()
                self._over = isinstance(frame, ControllerError) and frame.code in ("NOT_FOUND", "FAILED_PRECONDITION")
                self._changed.set()
            finally:
                task.cancel()
            for answers in self._submits.values():
                for answer in answers:
                    if not answer.done():
                        answer.set_exception(Unavailable("the stream broke"))
                        answer.exception()
            self._submits.clear()
            self._requests = asyncio.Queue()
            await asyncio.sleep(client.rng.expovariate(1 / 0.3))

    def _take(self, message: call_pb2.ServerMessage) -> None:
        client = self._client
        assert client.job is not None
        match message.WhichOneof("message"):
            case "accepted":
                self._answer(message.accepted.request_id, message.accepted)
            case "rejected":
                info = wire.error_info(message.rejected.error)
                assert info is not None
                error = ControllerError(info.message, reason=info.reason)
                if info.code == code_pb2.UNAVAILABLE:
                    error = Unavailable(info.message)
                elif info.code == code_pb2.INTERNAL:
                    client.world.blame(f"a submit was answered with INTERNAL: {info.message}")
                self._answer(message.rejected.request_id, error)
            case "session":
                pass
            case _:
                client.world.truth.hear(client.job, message.updated)
                # News of a call that nothing was told of say that it was accepted.
                self._answer(message.updated.request_id, message.updated)

    def _answer(self, request_id: str, answer: "call_pb2.Call | ControllerError") -> None:
        waiting = self._submits.get(request_id)
        if not waiting:
            return
        future = waiting.pop(0)
        if future.done():
            return
        if isinstance(answer, ControllerError):
            future.set_exception(answer)
        else:
            future.set_result(answer)


async def _after_hello(
    job_id: str, queue: "asyncio.Queue[call_pb2.ConnectRequest]"
) -> AsyncIterator[call_pb2.ConnectRequest]:
    hello = call_pb2.ClientMessage(hello=call_pb2.ConnectHello(job_id=job_id))
    yield call_pb2.ConnectRequest(messages=[hello])
    while True:
        yield await queue.get()
