"""The life of a session under a whole leader: opened, unused, closed, expired, and what is told of its end."""

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest

from plexrl.v1 import call_pb2, session_pb2
from plexrl_controller.api.job_stream import session_news
from plexrl_controller.api.sessions import SessionService
from plexrl_controller.dispatch import jobs, reaper
from plexrl_controller.domain.errors import (
    ControllerError,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
)
from plexrl_controller.domain.ids import SessionId, Tenant
from plexrl_controller.domain.states import CallState, Role
from plexrl_controller.store.memory import MemoryStore
from tests.support import specs
from tests.support.gated_store import GatedStore
from tests.support.leader import Leader, act_as, running_leader
from tests.support.session_calls import one_model, opened, record, runs, session, states, submitted


async def test_closed_it_takes_no_more_and_what_it_has_goes_on_alone() -> None:
    async with running_leader() as leader:
        model = await one_model(leader)
        session_id = await opened(leader, model, 2)
        calls = await submitted(leader, model, session_id, 4)
        request = session_pb2.CloseSessionRequest(request_id="close", session_id=session_id)
        for _ in range(2):
            closed = await SessionService(leader.core).CloseSession(request, None)
            assert (closed.state, closed.grant) == (session_pb2.SESSION_STATE_CLOSED, 0)
        with pytest.raises(FailedPrecondition, match="not open") as refused:
            await leader.submit(model, specs.generate(), session_id=session_id)
        assert refused.value.reason == "SESSION_NOT_OPEN"
        await leader.work()
        assert set(states(leader, calls)) == {CallState.SUCCEEDED}
        assert [run.concurrent for run in runs(leader)] == [True, True, False, False]


async def test_it_expires_when_nobody_uses_it_and_not_before() -> None:
    async with running_leader() as leader:
        model = await one_model(leader)
        session_id = await opened(leader, model)
        (call,) = await submitted(leader, model, session_id, 1)
        assert await reaped(leader, session_id, 2000.0) == session_pb2.SESSION_STATE_OPEN
        assert await reaped(leader, session_id, 1500.0) == session_pb2.SESSION_STATE_OPEN
        await leader.work()
        assert record(leader, call).state is CallState.SUCCEEDED
        assert await reaped(leader, session_id, 3590.0) == session_pb2.SESSION_STATE_OPEN
        request = session_pb2.YieldSessionRequest(session_id=session_id)
        request.idle.seconds = 5
        await SessionService(leader.core).YieldSession(request, None)
        assert await reaped(leader, session_id, 3590.0) == session_pb2.SESSION_STATE_OPEN
        assert await reaped(leader, session_id, 20.0) == session_pb2.SESSION_STATE_EXPIRED
        assert SessionId(session_id) not in leader.core.ledger.session_facts


async def reaped(leader: Leader, session_id: str, after_s: float) -> int:
    """The session's state after so long, in which job and worker renewed their leases."""
    leader.clock.time += after_s
    for facts in leader.core.ledger.facts.values():
        facts.lease_end = leader.clock.time + 60.0
    for group in leader.core.ledger.groups.values():
        group.last_sync = leader.clock.time
    await reaper.reap(leader.core)
    return (await session(leader, session_id)).state


async def test_where_there_are_too_many_the_one_that_was_unused_longest_makes_room() -> None:
    """A client that dies again and again, and opens a session each time, is not locked out by what it left."""
    async with running_leader() as leader:
        model = await one_model(leader)
        used = await opened(leader, model)
        await submitted(leader, model, used, 1)
        left: list[str] = []
        for _ in range(7):
            leader.clock.time += 10.0
            left.append(await opened(leader, model))
        leader.clock.time += 30.0
        await opened(leader, model)
        assert (await session(leader, used)).state == session_pb2.SESSION_STATE_OPEN
        states = [(await session(leader, each)).state for each in left]
        assert states == [session_pb2.SESSION_STATE_EXPIRED] + [session_pb2.SESSION_STATE_OPEN] * 6
        assert len(leader.core.ledger.open_sessions(model.model_id)) == 8


async def test_an_end_is_told_of_once_it_is_durable_and_nothing_else_meanwhile() -> None:
    store = GatedStore()
    async with running_leader(store) as leader:
        model = await one_model(leader)
        session_id = await opened(leader, model)
        told = leader.core.hub.watch_job(model.job_id)
        told.note_session(leader.core.ledger.sessions[SessionId(session_id)])
        with store.closed():
            request = session_pb2.CloseSessionRequest(request_id="close", session_id=session_id)
            closing = asyncio.create_task(SessionService(leader.core).CloseSession(request, None))
            await leader.settle()
            reading = asyncio.create_task(session(leader, session_id))
            await leader.settle()
            assert not closing.done()
            assert not reading.done()
            assert session_news(leader.core, told) == []
        for heard in (await closing, await reading, *session_news(leader.core, told)):
            assert (heard.state, heard.grant) == (session_pb2.SESSION_STATE_CLOSED, 0)


async def test_it_ends_with_its_model() -> None:
    async with running_leader() as leader:
        model = await one_model(leader)
        session_id = await opened(leader, model)
        calls = await submitted(leader, model, session_id, 6)
        job = leader.core.ledger.jobs[model.job_id]
        await jobs.finish_job(leader.core, job)
        await leader.work()
        assert set(states(leader, calls)) <= {CallState.CANCELLED, CallState.SUCCEEDED}
        assert (await session(leader, session_id)).state == session_pb2.SESSION_STATE_CLOSED


async def test_it_says_that_it_is_idle() -> None:
    async with running_leader() as leader:
        model = await one_model(leader)
        session_id = await opened(leader, model)
        request = session_pb2.YieldSessionRequest(session_id=session_id)
        with pytest.raises(InvalidArgument, match="idle"):
            await SessionService(leader.core).YieldSession(request, None)
        request.idle.seconds = 30
        await SessionService(leader.core).YieldSession(request, None)
        assert leader.core.ledger.facts[model.job_id].idle_until == leader.clock.time + 30.0


async def test_the_same_request_opens_one_session() -> None:
    async with running_leader() as leader:
        model = await one_model(leader)
        service = SessionService(leader.core)
        request = session_pb2.OpenSessionRequest(request_id="open", model_id=model.model_id)
        first = await service.OpenSession(request, None)
        assert await service.OpenSession(request, None) == first
        assert first.max_concurrent == 16
        request.max_concurrent = 3
        with pytest.raises(ControllerError) as reused:
            await service.OpenSession(request, None)
        assert reused.value.reason == "REQUEST_ID_REUSED"


async def test_what_cannot_be_honoured_is_refused() -> None:
    """G17, G23."""
    async with running_leader() as leader:
        model = await one_model(leader)
        service = SessionService(leader.core)
        wrong = session_pb2.OpenSessionRequest(request_id="a", model_id=model.model_id, max_concurrent=65)
        with pytest.raises(InvalidArgument, match="max_concurrent: 65, want 1 to 64"):
            await service.OpenSession(wrong, None)
        wrong = session_pb2.OpenSessionRequest(request_id="a", model_id=model.model_id)
        wrong.grace.seconds = 61
        with pytest.raises(InvalidArgument, match="grace"):
            await service.OpenSession(wrong, None)
        session_id = await opened(leader, model)
        second = await leader.model(await leader.job("second"))
        with pytest.raises(FailedPrecondition, match="not open"):
            await leader.submit(second, specs.generate(), session_id=session_id)
        with pytest.raises(InvalidArgument, match="only generate"):
            await leader.submit(model, specs.score(), 1, session_id=session_id)
        for _ in range(7):
            await opened(leader, model)
        with pytest.raises(ResourceExhausted, match="8 open sessions, the limit, and each was used within the last 60"):
            await opened(leader, model)
        act_as(Role.TENANT, Tenant("beta"))
        for ask in (
            lambda: session(leader, session_id),
            lambda: service.CloseSession(session_pb2.CloseSessionRequest(request_id="x", session_id=session_id), None),
            lambda: service.YieldSession(session_pb2.YieldSessionRequest(session_id=session_id), None),
            lambda: opened(leader, model),
        ):
            with pytest.raises(NotFound):
                await ask()


async def close(leader: Leader, session_id: str) -> None:
    request = session_pb2.CloseSessionRequest(request_id=f"close-{session_id}", session_id=session_id)
    await SessionService(leader.core).CloseSession(request, None)


async def told(leader: Leader, job_id: str, known: Sequence[str]) -> dict[str, "session_pb2.SessionState.ValueType"]:
    """The states that a stream tells of when it opens."""
    over = asyncio.Event()

    async def frames() -> AsyncIterator[call_pb2.ConnectRequest]:
        hello = call_pb2.ConnectHello(job_id=job_id, session_ids=known)
        yield call_pb2.ConnectRequest(messages=[call_pb2.ClientMessage(hello=hello)])
        await over.wait()

    states: dict[str, session_pb2.SessionState.ValueType] = {}

    async def hear() -> None:
        async for frame in leader.calls.Connect(frames(), None):
            states.update({message.session.session_id: message.session.state for message in frame.messages})

    hearing = asyncio.create_task(hear())
    await leader.settle()
    over.set()
    await hearing
    return states


async def test_what_has_ended_is_told_to_a_client_that_takes_it_for_open_also_by_the_next_leader() -> None:
    store = MemoryStore()
    async with running_leader(store) as leader:
        await leader.join()
        model = await leader.model(await leader.job())
        over, before, present = [await opened(leader, model) for _ in range(3)]
        await close(leader, over)
        await close(leader, before)
        assert await told(leader, model.job_id, [over, present]) == {
            over: session_pb2.SESSION_STATE_CLOSED,
            present: session_pb2.SESSION_STATE_OPEN,
        }
    async with running_leader(store) as leader:
        assert await told(leader, model.job_id, [over]) == {
            over: session_pb2.SESSION_STATE_CLOSED,
            present: session_pb2.SESSION_STATE_OPEN,
        }


async def test_a_session_of_another_job_or_of_none_is_not_told_of() -> None:
    """G23."""
    async with running_leader() as leader:
        await leader.join()
        model = await leader.model(await leader.job())
        other = await leader.model(await leader.job("other"))
        theirs = await opened(leader, other)
        await close(leader, theirs)
        assert await told(leader, model.job_id, [theirs, "no-session"]) == {}
        with pytest.raises(InvalidArgument, match="session_ids: 1025, the limit is 1024"):
            await told(leader, model.job_id, ["no-session"] * 1025)
