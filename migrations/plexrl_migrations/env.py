"""Alembic's entry: runs the chosen migrations on the connection and in the transaction that `run` opened."""

from alembic import context

from plexrl_controller.store.tables import metadata

connection = context.config.attributes["connection"]
context.configure(connection=connection, target_metadata=metadata, compare_type=True, compare_server_default=True)
with context.begin_transaction():
    context.run_migrations()
