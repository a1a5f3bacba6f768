"""The store under test: `store` runs a test on both implementations, `postgres_store` on the real one only."""

from collections.abc import AsyncIterator, Iterator

import pytest

from plexrl_controller.embedded.postgres import EmbeddedPostgres
from plexrl_controller.store.memory import MemoryStore
from plexrl_controller.store.port import Store
from plexrl_controller.store.postgres import PostgresStore
from tests.support.postgres import MigratedDatabases


@pytest.fixture(scope="session")
def databases(postgres_cluster: EmbeddedPostgres) -> MigratedDatabases:
    return MigratedDatabases(postgres_cluster)


@pytest.fixture
def database_url(databases: MigratedDatabases) -> Iterator[str]:
    url = databases.create()
    yield url
    databases.drop(url)


@pytest.fixture
async def postgres_store(database_url: str) -> AsyncIterator[PostgresStore]:
    store = PostgresStore(database_url)
    yield store
    await store.close()


@pytest.fixture(params=["memory", "postgres"])
def store_url(request: pytest.FixtureRequest) -> str | None:
    """None for the store in memory. Not async: a fixture that starts Postgres and migrates runs its own loop."""
    return None if request.param == "memory" else request.getfixturevalue("database_url")


@pytest.fixture
async def store(store_url: str | None) -> AsyncIterator[Store]:
    store = MemoryStore() if store_url is None else PostgresStore(store_url)
    yield store
    await store.close()
