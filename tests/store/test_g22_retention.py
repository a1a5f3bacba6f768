"""G22: history goes after its time, and nothing goes that somebody may still ask for. Memory and Postgres alike."""

from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine

from plexrl_controller.dispatch import jobs as job_actions
from plexrl_controller.dispatch import reaper, retention
from plexrl_controller.dispatch.submit import acknowledge, acknowledged
from plexrl_controller.domain.ids import JobId, ModelId, RequestId
from plexrl_controller.domain.states import CallState, IntervalKind, JobState, ModelState, SessionState
from plexrl_controller.store.memory import MemoryStore
from plexrl_controller.store.port import Account, Changes, Page, Store
from tests.store.records import (
    T0,
    make_call,
    make_checkpoint,
    make_event,
    make_interval,
    make_job,
    make_model,
    make_request,
    make_session,
)
from tests.support.leader import TENANT, Leader, running_leader
from tests.support.specs import optim_step

DAY_S = 86_400.0


async def with_history(store: Store, *, ended: bool) -> None:
    """A job of day 0 with a model, a terminal call, an interval of a second, an event and request keys."""
    term = await store.acquire_term("leader")
    end: dict[str, Any] = {"state": JobState.FINISHED, "end_time": T0 + 5} if ended else {}
    model_state = ModelState.DELETED if ended else ModelState.PLACED
    await store.commit(
        term,
        Changes(
            inserts=(
                make_job(**end),
                make_model(state=model_state),
                make_call(state=CallState.SUCCEEDED, acknowledged=True),
            ),
            events=(make_event("call-1"),),
            intervals=(make_interval(T0),),
            requests=tuple(
                replace(make_request(number), resource_id=resource_id, create_time=T0)
                for number, resource_id in enumerate(("job-1", "model-1", "model-1@7"), 1)
            ),
        ),
    )


async def test_what_ended_long_ago_goes(store: Store) -> None:
    await with_history(store, ended=True)
    assert await store.prune(T0 - 1) == 0
    assert await store.prune(T0 + DAY_S) == 8
    assert await store.get_job(JobId("job-1")) is None
    assert await store.get_model(ModelId("model-1")) is None
    assert (await store.list_calls(None, None, Page())).items == ()
    assert (await store.load()).requests == ()
    assert [batch async for batch in store.intervals(None, None, 0)] == []
    assert await store.prune(T0 + DAY_S) == 0


async def test_a_live_job_loses_its_history_only(store: Store) -> None:
    await with_history(store, ended=False)
    before = await store.load()
    assert before.accounts == (Account(JobId("job-1"), busy_s=1.0, calls=1),)
    assert await store.prune(T0 + DAY_S) == 2
    assert await store.load() == before
    assert await store.events("call-1") == ()
    term = await store.acquire_term("next")
    await store.commit(term, Changes(intervals=(make_interval(T0 + 10, 2.0, IntervalKind.SWAP_IN),)))
    assert (await store.load()).accounts == (Account(JobId("job-1"), busy_s=1.0, swap_s=2.0, swaps=1, calls=1),)
    await store.prune(T0 + DAY_S)
    assert (await store.load()).accounts == (Account(JobId("job-1"), busy_s=1.0, swap_s=2.0, swaps=1, calls=1),)


async def test_sessions_go_after_their_end_even_of_a_live_job(store: Store) -> None:
    await with_history(store, ended=False)
    term = await store.acquire_term("next")
    ended = make_session(2, state=SessionState.EXPIRED, end_time=T0 + 5)
    key = replace(make_request(9), resource_id=ended.session_id, create_time=T0)
    await store.commit(term, Changes(inserts=(make_session(1), ended), requests=(key,)))
    await store.prune(T0 + 4)
    assert await store.get_session(ended.session_id) == ended
    await store.prune(T0 + DAY_S)
    assert await store.get_session(ended.session_id) is None
    present = await store.load()
    assert present.sessions == (make_session(1),)
    assert key not in present.requests


async def test_a_model_with_an_open_session_stays(store: Store) -> None:
    await with_history(store, ended=True)
    term = await store.acquire_term("next")
    await store.commit(term, Changes(inserts=(make_session(1),)))
    await store.prune(T0 + DAY_S)
    assert await store.get_model(ModelId("model-1")) is not None


async def test_what_a_checkpoint_belongs_to_stays(store: Store) -> None:
    """G16."""
    await with_history(store, ended=True)
    term = await store.acquire_term("next")
    checkpoint = make_checkpoint()
    await store.commit(term, Changes(inserts=(checkpoint,)))
    await store.prune(T0 + 1000 * DAY_S)
    assert await store.get_job(JobId("job-1")) is not None
    assert await store.get_model(ModelId("model-1")) is not None
    assert await store.get_checkpoint(checkpoint.checkpoint_id) == checkpoint


@pytest.mark.parametrize("many", [1, 5000])
async def test_more_than_a_batch_goes_too(store: Store, many: int) -> None:
    await with_history(store, ended=True)
    term = await store.acquire_term("next")
    await store.commit(term, Changes(events=tuple(make_event(f"call-{number}") for number in range(many))))
    assert await store.prune(T0 + DAY_S) == 8 + many


async def rows(store: Store, url: str | None) -> int:
    """Rows of every table."""
    if isinstance(store, MemoryStore):
        return store._rows()
    assert url is not None
    engine = create_async_engine(url)
    async with engine.connect() as connection:
        tables = await connection.execute(text("SELECT tablename FROM pg_tables WHERE schemaname = 'public'"))
        names = [row[0] for row in tables]
        counts = [(await connection.execute(text(f'SELECT count(*) FROM "{name}"'))).scalar_one() for name in names]
    await engine.dispose()
    return sum(counts)


async def one_job(leader: Leader, number: int) -> None:
    """A short run: a model, six steps, results acknowledged, finished."""
    job = await leader.job(f"run-{number}")
    model = await leader.model(job)
    for sequence in range(1, 7):
        call = await leader.submit(model, optim_step(), sequence)
        await leader.work()
        await acknowledged(leader.core, job, acknowledge(leader.core, job, [call.call_id]))
    await job_actions.finish_job(leader.core, leader.core.ledger.jobs[job.job_id])
    await leader.work()


async def test_g22_a_week_of_traffic_levels_off(store: Store, store_url: str | None) -> None:
    async with running_leader(store) as leader:
        await leader.join()
        sizes: list[int] = []
        memory: list[int] = []
        ledger = leader.core.ledger
        for day in range(7):
            for hour in range(0, 24, 6):
                await one_job(leader, 24 * day + hour)
                leader.clock.time += 6 * 3600
                for group in leader.core.ledger.groups.values():
                    group.last_sync = leader.clock.time
                await reaper.reap(leader.core)
                await retention.prune(leader.core, DAY_S)
            sizes.append(await rows(store, store_url))
            memory.append(len(ledger.requests) + len(ledger.calls) + len(ledger.jobs) + len(ledger.call_by_request))
        assert sizes[0] > 50
        assert max(sizes[2:]) <= 1.1 * sizes[1], sizes
        assert max(memory[2:]) <= memory[1], memory


async def test_a_request_key_of_a_live_job_is_never_forgotten() -> None:
    """G01: the CreateJob of a long run can be resent to the end."""
    async with running_leader() as leader:
        key = job_actions.Key("scope", RequestId("create"), "hash")
        spec = job_actions.JobSpec(TENANT, "long", 60.0)
        first = await job_actions.create_job(leader.core, key, spec)
        leader.clock.time += 100 * DAY_S
        leader.core.ledger.facts[first.job_id].lease_end = leader.clock.time + 60
        await retention.prune(leader.core, DAY_S)
        assert (await job_actions.create_job(leader.core, key, spec)).job_id == first.job_id
