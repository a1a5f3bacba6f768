"""The migrations make what the code's tables say, can be undone, and do not race."""

import asyncio
import sys
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine

import plexrl_migrations
from plexrl_controller.store.port import Changes
from plexrl_controller.store.postgres import PostgresStore
from plexrl_controller.store.tables import metadata
from plexrl_migrations import SchemaMismatch
from tests.store.records import make_worker
from tests.support.postgres import MigratedDatabases

CATALOG = {
    "columns": """
        SELECT table_name, column_name, data_type, numeric_precision, is_nullable, column_default, is_identity,
               generation_expression
        FROM information_schema.columns WHERE table_schema = 'public'""",
    "constraints": """
        SELECT conrelid::regclass::text, conname, pg_get_constraintdef(oid)
        FROM pg_constraint WHERE connamespace = 'public'::regnamespace""",
    "indexes": "SELECT tablename, indexname, indexdef FROM pg_indexes WHERE schemaname = 'public'",
    "options": """
        SELECT relname, reloptions, obj_description(oid, 'pg_class')
        FROM pg_class WHERE relkind = 'r' AND relnamespace = 'public'::regnamespace""",
}


@pytest.fixture
def empty_url(databases: MigratedDatabases) -> str:
    return databases.create_empty()


async def catalog(url: str) -> dict[str, set[str]]:
    """Everything that Postgres knows of the schema, without alembic's own table."""
    engine = create_async_engine(url)
    async with engine.connect() as connection:
        found = {name: await connection.execute(text(sql)) for name, sql in CATALOG.items()}
        rows = {
            name: {str(tuple(row)) for row in result if "alembic_version" not in row[0]}
            for name, result in found.items()
        }
    await engine.dispose()
    return rows


# alembic says of every generated column that it cannot alter it; here nothing is altered.
@pytest.mark.filterwarnings("ignore:Computed default")
async def test_migrations_make_exactly_the_tables_of_the_code(empty_url: str, databases: MigratedDatabases) -> None:
    """States, kinds and constraints included, which `alembic check` does not compare."""
    from_tables = databases.create_empty()
    engine = create_async_engine(from_tables)
    async with engine.begin() as connection:
        await connection.run_sync(metadata.create_all)
    await engine.dispose()
    await plexrl_migrations.upgrade(empty_url)
    migrated, created = await catalog(empty_url), await catalog(from_tables)
    for name in CATALOG:
        assert migrated[name] == created[name], name
    assert await plexrl_migrations.pending_differences(empty_url) == []


async def test_up_down_and_up_again(empty_url: str) -> None:
    assert await plexrl_migrations.current(empty_url) is None
    await plexrl_migrations.upgrade(empty_url)
    first = await catalog(empty_url)
    assert await plexrl_migrations.current(empty_url) == plexrl_migrations.head()
    await plexrl_migrations.downgrade(empty_url)
    assert all(not rows for rows in (await catalog(empty_url)).values())
    assert await plexrl_migrations.current(empty_url) is None
    await plexrl_migrations.upgrade(empty_url)
    assert await catalog(empty_url) == first


async def test_starters_do_not_race(empty_url: str) -> None:
    await asyncio.gather(*(plexrl_migrations.upgrade(empty_url) for _ in range(4)))
    await plexrl_migrations.require_head(empty_url)


async def test_migrating_again_keeps_the_data(empty_url: str) -> None:
    await plexrl_migrations.upgrade(empty_url)
    store = PostgresStore(empty_url)
    await store.commit(await store.acquire_term("leader"), Changes(inserts=(make_worker(),)))
    await plexrl_migrations.upgrade(empty_url)
    assert (await store.load()).workers == (make_worker(),)
    await store.close()


async def test_a_schema_that_does_not_match_is_refused_with_what_to_do(empty_url: str) -> None:
    with pytest.raises(SchemaMismatch, match="plexrl_controller migrate"):
        await plexrl_migrations.require_head(empty_url)
    await plexrl_migrations.upgrade(empty_url)
    engine = create_async_engine(empty_url)
    async with engine.begin() as connection:
        await connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    await engine.dispose()
    with pytest.raises(SchemaMismatch, match="9999"):
        await plexrl_migrations.require_head(empty_url)
    with pytest.raises(SchemaMismatch, match="newer"):
        await plexrl_migrations.upgrade(empty_url)


async def test_no_controller_serves_on_a_schema_that_is_not_its_own(empty_url: str, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret\n")
    argv = ["serve", "--database-url", empty_url, "--worker-token-file", str(token), "--listen", "127.0.0.1:0"]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "plexrl_controller", *argv, "--payload-url", (tmp_path / "payloads").as_uri()),
        stderr=asyncio.subprocess.PIPE,
    )
    _, said = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 1
    assert said.decode().startswith("plexrl-controller: the database's schema is empty, this version works with")
