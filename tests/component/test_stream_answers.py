"""What a client's stream answers to submits: each once, by the call's end alone where that comes within a moment."""

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from plexrl.v1 import call_pb2, types_pb2
from plexrl_controller.api import job_stream
from plexrl_controller.domain.records import Model
from tests.support import specs
from tests.support.leader import Leader, running_leader

Said = list[tuple[str, int]]
"""Messages: what each is, and the state of the call that it tells of."""


class Client:
    """The client's end of a stream: hello, then submits, then the end of its side."""

    def __init__(self, leader: Leader, model: Model) -> None:
        self._model = model
        self._requests: asyncio.Queue[call_pb2.ConnectRequest | None] = asyncio.Queue()
        self.said: Said = []
        self._send(call_pb2.ClientMessage(hello=call_pb2.ConnectHello(job_id=model.job_id)))
        self.reading = asyncio.create_task(self._read(leader))

    def submit(self, request_id: str, spec: types_pb2.CallSpec, sequence: int = 0) -> None:
        self._send(
            call_pb2.ClientMessage(
                submit=call_pb2.SubmitCallRequest(
                    request_id=request_id,
                    job_id=self._model.job_id,
                    model_id=self._model.model_id,
                    sequence=sequence,
                    spec=spec,
                )
            )
        )

    async def end(self) -> Said:
        """Closes the client's side; all that was said until the server has closed its own."""
        self._requests.put_nowait(None)
        await self.reading
        return self.said

    def _send(self, message: call_pb2.ClientMessage) -> None:
        self._requests.put_nowait(call_pb2.ConnectRequest(messages=[message]))

    async def _read(self, leader: Leader) -> None:
        async for frame in leader.calls.Connect(self._frames(), None):
            for message in frame.messages:
                kind = message.WhichOneof("message") or ""
                self.said.append((kind, 0 if kind == "rejected" else getattr(message, kind).state))

    async def _frames(self) -> AsyncIterator[call_pb2.ConnectRequest]:
        while (request := await self._requests.get()) is not None:
            yield request


async def until(leader: Leader, true: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not true():
            await leader.settle()


async def test_of_a_call_that_ends_within_a_moment_its_end_alone_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_stream, "TOLD_AFTER_S", 3600.0)
    async with running_leader() as leader:
        await leader.join()
        client = Client(leader, await leader.model(await leader.job()))
        client.submit("one", specs.generate())
        client.submit("two", specs.forward_backward(), 1)
        await leader.settle()
        await leader.work()
        await until(leader, lambda: len(client.said) == 2)
        assert await client.end() == [("updated", types_pb2.CALL_STATE_SUCCEEDED)] * 2


async def test_a_call_that_goes_on_is_told_as_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_stream, "TOLD_AFTER_S", 0.0)
    async with running_leader() as leader:
        await leader.join()
        client = Client(leader, await leader.model(await leader.job()))
        client.submit("one", specs.generate())
        await until(leader, lambda: bool(client.said))
        assert client.said[0][0] == "accepted"
        await leader.work()
        await until(leader, lambda: len(client.said) == 2)
        assert (await client.end())[1:] == [("updated", types_pb2.CALL_STATE_SUCCEEDED)]


async def test_who_ends_its_side_is_answered_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """As grpcurl does: it sends what it has, closes its side and reads to the end."""
    monkeypatch.setattr(job_stream, "TOLD_AFTER_S", 3600.0)
    async with running_leader() as leader:
        await leader.join()
        client = Client(leader, await leader.model(await leader.job()))
        client.submit("one", specs.generate())
        client.submit("bad", specs.generate(), 7)
        async with asyncio.timeout(10):
            assert {kind for kind, _ in await client.end()} == {"accepted", "rejected"}
