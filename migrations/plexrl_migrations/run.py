"""Alembic, run from Python on an asyncpg URL. `env.py` finds what to do in the configuration's attributes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, text
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool

from plexrl_controller.store.tables import metadata

T = TypeVar("T")

_LOCK_KEY = 0x706C657872  # "plexr": one key for every version of the schema


class SchemaMismatch(Exception):
    """The database's schema is not the one that this version works with."""


async def upgrade(url: str, revision: str = "head") -> None:
    """Migrates the database at `url` (`postgresql+asyncpg://…`) up to `revision`; does nothing when it is there.

    Raises SchemaMismatch when the database was migrated by a newer version.
    """

    def migrate(connection: Connection) -> None:
        _check_known(_current(connection))
        command.upgrade(_config(connection), revision)

    await _run_locked(url, migrate)


async def downgrade(url: str, revision: str = "base") -> None:
    """Migrates the database at `url` down to `revision`. What the older schema has no place for is lost."""
    await _run_locked(url, lambda connection: command.downgrade(_config(connection), revision))


async def current(url: str) -> str | None:
    """The revision of the database's schema; None in an empty database."""
    return await _run_locked(url, _current)


def head() -> str:
    """The revision of this version's schema."""
    revision = ScriptDirectory.from_config(_config(None)).get_current_head()
    assert revision is not None
    return revision


async def require_head(url: str) -> None:
    """Raises SchemaMismatch, which says what to do, unless the database has this version's schema."""
    found = await current(url)
    if found != head():
        _check_known(found)
        raise SchemaMismatch(
            f"the database's schema is {found or 'empty'}, this version works with {head()}: "
            "run `python -m plexrl_controller migrate`, or start a version that matches"
        )


async def pending_differences(url: str) -> list[Any]:
    """What the tables of the code have and the database has not, or the other way round (as `alembic check`)."""

    def compare(connection: Connection) -> list[Any]:
        context = MigrationContext.configure(connection, opts={"compare_type": True, "compare_server_default": True})
        return list(compare_metadata(context, metadata))

    return await _run_locked(url, compare)


def _config(connection: Connection | None) -> Config:
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent))
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    return config


def _current(connection: Connection) -> str | None:
    return MigrationContext.configure(connection).get_current_revision()


def _check_known(found: str | None) -> None:
    known = {script.revision for script in ScriptDirectory.from_config(_config(None)).walk_revisions()}
    if found is not None and found not in known:
        raise SchemaMismatch(
            f"the database's schema is {found}, which this version does not know: start the newer one that made it"
        )


async def _run_locked(url: str, work: Callable[[Connection], T]) -> T:
    engine = create_async_engine(url, poolclass=NullPool)
    try:
        async with engine.begin() as connection:
            await connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK_KEY})
            return await connection.run_sync(work)
    finally:
        await engine.dispose()
