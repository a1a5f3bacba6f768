"""What only a real database can suffer: cut connections, blocked commits, odd text, rows that others changed."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import asyncpg
import pytest
from sqlalchemy import make_url, text
from sqlalchemy.ext.asyncio import create_async_engine

from plexrl_controller.domain.errors import LeadershipLost, Unavailable
from plexrl_controller.domain.ids import CallId, JobId
from plexrl_controller.domain.records import Payload
from plexrl_controller.domain.states import CallState
from plexrl_controller.store import rows
from plexrl_controller.store.port import Changes
from plexrl_controller.store.postgres import PostgresStore
from plexrl_controller.store.writer import GroupWriter
from tests.store.proxy import Cut, CuttingProxy
from tests.store.records import make_call, make_event, make_interval, make_job, make_model, make_request, make_worker


@pytest.fixture
async def proxy(database_url: str, tmp_path: Path) -> AsyncIterator[CuttingProxy]:
    async with CuttingProxy(database_url, tmp_path) as proxy:
        yield proxy


@pytest.fixture
async def cut_store(proxy: CuttingProxy) -> AsyncIterator[PostgresStore]:
    """A store whose connections go through the proxy."""
    store = PostgresStore(proxy.url)
    yield store
    await store.close()


async def run_sql(url: str, sql: str) -> None:
    engine = create_async_engine(url)
    try:
        async with engine.begin() as connection:
            await connection.execute(text(sql))
    finally:
        await engine.dispose()


CHANGES = Changes(
    inserts=(make_call(2),),
    updates=(make_call(revision=2, state=CallState.DISPATCHED),),
    events=(make_event("call-1"),),
    intervals=(make_interval(10),),
    requests=(make_request(),),
    commit_id="commit-1",
)


@pytest.mark.parametrize("cut", Cut)
async def test_an_uncertain_commit_is_repeated_without_harm(
    cut_store: PostgresStore, proxy: CuttingProxy, cut: Cut
) -> None:
    """G01, G20: whether or not the COMMIT arrived, everything is there once in the end."""
    term = await cut_store.acquire_term("leader")
    await cut_store.commit(term, Changes(inserts=(make_job(), make_model(), make_call())))
    proxy.cut_next = cut
    with pytest.raises(Unavailable):
        await cut_store.commit(term, CHANGES)
    happened = await cut_store.get_call(CallId("call-2")) is not None
    assert happened is (cut is Cut.AFTER_COMMIT)
    await cut_store.commit(term, CHANGES)
    assert (await cut_store.load()).calls == (CHANGES.updates[0], CHANGES.inserts[0])
    assert await cut_store.events("call-1") == CHANGES.events
    assert [batch async for batch in cut_store.intervals(None, None, 0)] == [CHANGES.intervals]


@pytest.mark.parametrize("cut", Cut)
async def test_the_writer_gets_through_cut_connections(cut_store: PostgresStore, proxy: CuttingProxy, cut: Cut) -> None:
    writer = GroupWriter(cut_store, await cut_store.acquire_term("leader"))
    await writer.commit(Changes(inserts=(make_worker(),)))
    for revision in range(2, 6):
        proxy.cut_next = cut
        await writer.commit(Changes(updates=(make_worker(revision=revision),), events=(make_event("worker-1"),)))
    await writer.close()
    assert proxy.cuts == writer.counters.retries == 4
    assert (await cut_store.load()).workers == (make_worker(revision=5),)
    assert len(await cut_store.events("worker-1")) == 4


async def test_another_leader_between_cut_and_repetition_is_noticed(
    cut_store: PostgresStore, proxy: CuttingProxy, database_url: str
) -> None:
    term = await cut_store.acquire_term("leader")
    proxy.cut_next = Cut.AFTER_COMMIT
    changes = Changes(inserts=(make_worker(),), commit_id="commit-1")
    with pytest.raises(Unavailable):
        await cut_store.commit(term, changes)
    other = PostgresStore(database_url)
    await other.acquire_term("another")
    await other.close()
    with pytest.raises(LeadershipLost):
        await cut_store.commit(term, changes)


async def test_a_terminated_backend_is_unavailable_once(postgres_store: PostgresStore, database_url: str) -> None:
    term = await postgres_store.acquire_term("leader")
    await postgres_store.load()
    name = make_url(database_url).database
    await run_sql(
        database_url,
        f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}' AND pid <> pg_backend_pid()",
    )
    with pytest.raises(Unavailable):
        await postgres_store.commit(term, Changes(inserts=(make_worker(),), commit_id="commit-1"))
    await postgres_store.commit(term, Changes(inserts=(make_worker(),), commit_id="commit-1"))
    assert (await postgres_store.load()).workers == (make_worker(),)


async def test_no_server_is_unavailable(tmp_path: Path) -> None:
    store = PostgresStore(f"postgresql+asyncpg://plexrl@/plexrl?host={tmp_path}&port=5432")
    for attempt in (store.acquire_term("leader"), store.load(), store.get_job(JobId("job-1"))):
        with pytest.raises(Unavailable):
            await attempt
    await store.close()


class LockedRows:
    """Holds the rows of `workers` locked until `release`."""

    def __init__(self, database_url: str) -> None:
        self._url = make_url(database_url)

    async def __aenter__(self) -> "LockedRows":
        self._holder = await self._connect()
        self._observer = await self._connect()
        self._transaction = self._holder.transaction()
        await self._transaction.start()
        await self._holder.execute("SELECT 1 FROM workers FOR UPDATE")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._holder.close()
        await self._observer.close()

    async def waiting(self, sessions: int) -> None:
        """Returns when that many sessions of the database wait for a lock."""
        async with asyncio.timeout(20):
            while await self._observer.fetchval(WAITING, self._url.database) < sessions:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def release(self) -> None:
        await self._transaction.rollback()

    async def _connect(self) -> "asyncpg.Connection[asyncpg.Record]":
        return await asyncpg.connect(host=self._url.query["host"], user="plexrl", database=self._url.database)


WAITING = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = $1"


async def test_a_new_term_waits_for_the_commit_under_way(postgres_store: PostgresStore, database_url: str) -> None:
    """No older leader can write after a newer one has read."""
    term = await postgres_store.acquire_term("leader")
    await postgres_store.commit(term, Changes(inserts=(make_worker(),)))
    other = PostgresStore(database_url)
    async with LockedRows(database_url) as rows_of_workers:
        commit = asyncio.create_task(postgres_store.commit(term, Changes(updates=(make_worker(revision=2),))))
        await rows_of_workers.waiting(1)
        takeover = asyncio.create_task(other.acquire_term("another"))
        await rows_of_workers.waiting(2)
        assert not takeover.done()
        await rows_of_workers.release()
        await commit
        assert await takeover == term + 1
    assert (await other.load()).workers == (make_worker(revision=2),)
    await other.close()


async def test_a_cancelled_commit_leaves_the_store_usable(postgres_store: PostgresStore, database_url: str) -> None:
    term = await postgres_store.acquire_term("leader")
    await postgres_store.commit(term, Changes(inserts=(make_worker(),)))
    async with LockedRows(database_url) as rows_of_workers:
        commit = asyncio.create_task(postgres_store.commit(term, Changes(updates=(make_worker(revision=2),))))
        await rows_of_workers.waiting(1)
        commit.cancel()
        await asyncio.wait([commit])
        await rows_of_workers.release()
    await postgres_store.commit(term, Changes(updates=(make_worker(revision=2, name="again"),)))
    assert (await postgres_store.load()).workers == (make_worker(revision=2, name="again"),)


async def test_a_message_with_nul_is_kept_readable(postgres_store: PostgresStore) -> None:
    term = await postgres_store.acquire_term("leader")
    job = make_job(message="a\0b", labels={"k\0": "\\u0000 and \0"})
    await postgres_store.commit(term, Changes(inserts=(job,)))
    stored = await postgres_store.get_job(job.job_id)
    assert stored is not None
    assert (stored.message, stored.labels) == ("a\ufffdb", {"k\ufffd": "\\u0000 and \ufffd"})


async def test_an_unknown_state_cannot_be_stored(postgres_store: PostgresStore, database_url: str) -> None:
    term = await postgres_store.acquire_term("leader")
    await postgres_store.commit(term, Changes(inserts=(make_job(), make_model(), make_call())))
    for table in ("jobs", "models", "calls"):
        with pytest.raises(Exception, match=f"{table}_state_check"):
            await run_sql(database_url, f"UPDATE {table} SET state = 'LIMBO'")


async def test_a_transition_does_not_write_the_spec_again(postgres_store: PostgresStore, database_url: str) -> None:
    """G05: a call of 64 KiB goes through its states without moving those bytes."""
    term = await postgres_store.acquire_term("leader")
    spec = Payload("ab" * 32, 60_000, bytes(range(256)) * 234)
    await postgres_store.commit(term, Changes(inserts=(make_job(), make_model(), make_call(spec=spec))))
    engine = create_async_engine(database_url)
    async with engine.connect() as connection:
        before = (await connection.execute(text("SELECT pg_current_wal_insert_lsn() - '0/0'"))).scalar_one()
        for revision in range(2, 12):
            await postgres_store.commit(term, Changes(updates=(make_call(spec=spec, revision=revision),)))
        after = (await connection.execute(text("SELECT pg_current_wal_insert_lsn() - '0/0'"))).scalar_one()
    await engine.dispose()
    assert after - before < 10 * 60_000 / 2


def test_every_column_belongs_to_a_field() -> None:
    derived = {"live", "cancelling", "interval_id", "event_id"}
    for codec in (*rows.RECORDS, rows.INTERVAL, rows.EVENT, rows.REQUEST):
        assert {column.name for column in codec.columns} == set(codec.table.c.keys()) - derived
