"""Brings a database to the schema of this version: `await upgrade(url)`. Needs no configuration file.

Two starters do not race: the whole migration is one transaction under an advisory lock.
"""

from plexrl_migrations.run import SchemaMismatch, current, downgrade, head, pending_differences, require_head, upgrade

__all__ = ["SchemaMismatch", "current", "downgrade", "head", "pending_differences", "require_head", "upgrade"]
