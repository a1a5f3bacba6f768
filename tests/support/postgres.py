"""Migrated databases in the run's Postgres, each a copy of one template."""

import asyncio
from itertools import count

from sqlalchemy import make_url

from plexrl_controller.embedded.postgres import EmbeddedPostgres
from plexrl_migrations import upgrade


class MigratedDatabases:
    """Hands out databases with the present schema; about 40 ms each."""

    TEMPLATE = "plexrl_template"

    def __init__(self, cluster: EmbeddedPostgres) -> None:
        self._cluster = cluster
        self._numbers = count(1)
        asyncio.run(upgrade(cluster.create_database(self.TEMPLATE)))

    def create(self) -> str:
        """URL of a new database."""
        return self._cluster.create_database(f"test_{next(self._numbers)}", template=self.TEMPLATE)

    def create_empty(self) -> str:
        """URL of a new database without any table."""
        return self._cluster.create_database(f"test_{next(self._numbers)}")

    def drop(self, url: str) -> None:
        """Drops a database that `create` made, whoever is connected."""
        self._cluster.drop_database(str(make_url(url).database))
