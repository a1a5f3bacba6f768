"""Reads and guarded updates go by an index, however many calls there are."""

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import asyncpg
import pytest
from sqlalchemy import Select, make_url
from sqlalchemy.dialects import postgresql

from plexrl_controller.domain.ids import JobId, ModelId
from plexrl_controller.store import reads, rows, statements
from plexrl_controller.store.paging import encode_cursor
from plexrl_controller.store.port import Changes, Page
from plexrl_controller.store.postgres import PostgresStore
from plexrl_controller.store.statements import UpdateStatement
from tests.store.records import TENANT, make_job, make_model

NEXT = Page(20, encode_cursor((15_000.0, "call-15000")))
SEED = """
INSERT INTO calls (call_id, request_id, request_hash, job_id, model_id, tenant, kind, state, sequence,
                   weights_version, create_time, deadline, reason, attempt, lost_attempts, leader_term,
                   worker_incarnation, acknowledged, outcome_sha256, revision)
SELECT 'call-' || n, 'request-' || n, 'hash', 'job-' || 1 + n % 40, 'model-' || 1 + n % 40,
       CASE WHEN n % 40 = 0 THEN 'acme' ELSE 'tenant-' || n % 40 END, 'GENERATE',
       CASE WHEN n > 19900 THEN 'RUNNING' ELSE 'SUCCEEDED' END, 0, 0, n, n, 'NONE', 1, 0, 1, 1, n % 3 > 0, '', 1
FROM generate_series(1, 20000) AS n;
INSERT INTO intervals (kind, worker_id, job_id, model_id, start_unix_ns, end_unix_ns, moved_bytes)
SELECT 'BUSY', 'worker-1', 'job-' || 1 + n % 40, 'model-1', n, n + 1, 0 FROM generate_series(1, 20000) AS n;
INSERT INTO events (machine, record_id, event, target, at, reason, attempt, leader_term)
SELECT 'call', 'call-' || n, 'DISPATCH', 'DISPATCHED', n, '', 1, 1 FROM generate_series(1, 20000) AS n;
"""


@pytest.fixture
async def seeded(postgres_store: PostgresStore, database_url: str) -> AsyncIterator["asyncpg.Connection[Any]"]:
    """20,000 calls of 40 jobs, of which one is live; statistics as autovacuum would have them."""
    term = await postgres_store.acquire_term("leader")
    numbers = range(1, 41)
    await postgres_store.commit(term, Changes(inserts=tuple(make_job(n) for n in numbers)))
    await postgres_store.commit(term, Changes(inserts=tuple(make_model(n, job=n) for n in numbers)))
    url = make_url(database_url)
    connection = await asyncpg.connect(host=url.query["host"], user="plexrl", database=url.database)
    await connection.execute(SEED + "UPDATE jobs SET state = 'FINISHED' WHERE job_id <> 'job-7';")
    await connection.execute("ANALYZE")
    yield connection
    await connection.close()


def scans(plan: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Node type and table of everything in a plan that reads or sorts."""
    yield plan["Node Type"], plan.get("Relation Name", "")
    for part in plan.get("Plans", ()):
        yield from scans(part)


async def plan_of(connection: "asyncpg.Connection[Any]", sql: str, *arguments: Any) -> list[tuple[str, str]]:
    explained = await connection.fetchval(f"EXPLAIN (FORMAT JSON) {sql}", *arguments)
    return list(scans(json.loads(explained)[0]["Plan"]))


def literal_sql(query: Select[Any]) -> str:
    dialect = postgresql.dialect()  # type: ignore[no-untyped-call]
    return str(query.compile(dialect=dialect, compile_kwargs={"literal_binds": True}))


BIG = {"calls", "intervals", "events"}


@pytest.mark.parametrize(
    "query",
    [
        reads.HELD_CALLS,
        reads.CANCELLING_CALLS,
        reads.TOMBSTONES,
        reads.LOGGED_CALLS,
        reads.ACCOUNTS,
        reads.SUCCEEDED,
        *reads.accounts_of([JobId("job-7"), JobId("job-9")]),
        reads.by_id(rows.CALL, "call-7"),
        reads.list_calls(None, None, Page(20)),
        reads.list_calls(None, None, NEXT),
        reads.list_calls(TENANT, None, NEXT),
        reads.list_calls(TENANT, JobId("job-1"), NEXT),
        reads.list_intervals(None, None, (19_000, 0)),
        reads.list_intervals(None, JobId("job-7"), (0, 0)),
        reads.list_events("call-7"),
        reads.list_checkpoints(ModelId("model-1")),
    ],
    ids=lambda query: literal_sql(query).replace("\n", "").partition("FROM")[2][:70],
)
async def test_no_read_scans_a_large_table(seeded: "asyncpg.Connection[Any]", query: Select[Any]) -> None:
    plan = await plan_of(seeded, literal_sql(query))
    assert not [table for node, table in plan if node == "Seq Scan" and table in BIG]


@pytest.mark.parametrize("tenant", [None, TENANT])
async def test_pages_are_read_in_order_not_sorted(seeded: "asyncpg.Connection[Any]", tenant: Any) -> None:
    plan = await plan_of(seeded, literal_sql(reads.list_calls(tenant, None, NEXT)))
    assert not [node for node, _ in plan if "Sort" in node]


@pytest.mark.parametrize("codec", rows.RECORDS, ids=lambda codec: codec.table.name)
async def test_guarded_updates_go_by_key(postgres_store: PostgresStore, database_url: str, codec: Any) -> None:
    """Even when the plan is made for an empty table and kept."""
    url = make_url(database_url)
    connection = await asyncpg.connect(host=url.query["host"], user="plexrl", database=url.database)
    await connection.execute(statements.WRITER_SETTINGS + "; SET plan_cache_mode = force_generic_plan")
    update = UpdateStatement.of(codec)
    plan = await plan_of(connection, update.sql, [], [])
    await connection.close()
    assert [node for node, table in plan if table == codec.table.name and node != "ModifyTable"] == ["Index Scan"]
