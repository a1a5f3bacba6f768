"""The statements of the hot path: one per table and commit, whatever the number of rows.

`INSERT … SELECT … FROM unnest($1::calls[])` and `UPDATE … FROM unnest($1::calls[], …)`, built once from the row codecs.
The rows of a table are one argument, an array of its row type: a driver looks at every element of an array before it
encodes it, and rows are fewer than values. The number of rows that an update changed is its guard: a row whose stored
revision differs is not changed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from typing import Any

from plexrl_controller.domain.records import Call, Payload
from plexrl_controller.store.batch import FIXED_FIELDS, Update
from plexrl_controller.store.rows import Columns, FieldCodec, RowCodec, row_tuples

WRITER_SETTINGS = (
    "SET enable_seqscan = off; SET enable_hashjoin = off; SET enable_mergejoin = off; "
    "SET plan_cache_mode = force_generic_plan"
)
"""A prepared plan outlives the empty table that it was made for: updates must always go by key."""

ACQUIRE_TERM = """
INSERT INTO leader (singleton, term, holder, commit_id) VALUES (true, 1, $1, '')
ON CONFLICT (singleton) DO UPDATE SET term = leader.term + 1, holder = excluded.holder, commit_id = ''
RETURNING term
"""

FENCE = "UPDATE leader SET commit_id = $2 WHERE term = $1 AND (commit_id <> $2 OR $2 = '')"
"""Holds the leader row until the commit ends, so that nobody takes a term in between."""

SHOW_FENCE = "SELECT term, commit_id FROM leader"

_KEEP_OR_DROP = "CASE WHEN u.{hash} IS NULL THEN NULL ELSE t.{column} END"
"""A spec is never sent again: its bytes stay where they are until it is dropped."""


TABLE_COLUMNS = """
SELECT attrelid::regclass::text, array_agg(attname::text ORDER BY attnum) FROM pg_attribute
WHERE attrelid = ANY ($1::text[]::regclass[]) AND attnum > 0 AND NOT attisdropped GROUP BY attrelid
"""
"""Of the tables named, the columns in the order of their row types."""


def insert_statement(codec: RowCodec[Any], first: int = 1, condition: str = "") -> str:
    """Argument: the rows. `condition` is another table that must have a row."""
    names = [column.name for column in codec.columns]
    return (
        f"INSERT INTO {codec.table.name} ({', '.join(names)}) SELECT {', '.join(f'u.{name}' for name in names)} "  # noqa: S608
        f"FROM {condition}unnest(${first}::{codec.table.name}[]) AS u"
    )


@dataclass(frozen=True)
class UpdateStatement:
    """A guarded update of one table."""

    table: str
    key: str
    changes: tuple[str, ...]
    sent: tuple[FieldCodec, ...]

    @classmethod
    def of(cls, codec: RowCodec[Any]) -> "UpdateStatement":
        """Arguments: the rows, of which only the columns of `sent` are set, and their base revisions."""
        key = codec.table.primary_key.columns[0].name
        sent = tuple(_sent(codec, key))
        names = [name for field in sent for name in field.columns if name != key]
        changes = [f"{name} = u.{name}" for name in names]
        if codec.record is Call:
            changes += [
                f"{name} = {_KEEP_OR_DROP.format(hash='spec_sha256', column=name)}"
                for name in ("spec_sha256", "spec_size_bytes", "spec_inline")
            ]
            changes.remove("spec_sha256 = u.spec_sha256")
        return cls(codec.table.name, key, tuple(changes), sent)

    @property
    def sql(self) -> str:
        """The statement alone."""
        return self.text(first=1)

    def text(self, first: int, condition: str = "") -> str:
        """The statement with its arguments numbered from `first`; `condition` is another table that must have a row."""
        return (
            f"UPDATE {self.table} AS t SET {', '.join(self.changes)} "  # noqa: S608
            f"FROM {condition}unnest(${first}::{self.table}[], ${first + 1}::bigint[]) AS u "
            # The second array's column is named for the function.
            f"WHERE t.{self.key} = u.{self.key} AND t.revision = u.unnest"
        )

    def arguments(self, updates: Sequence[Update], order: Sequence[str]) -> list[list[Any]]:
        """The arguments of the update; `order` is that of the table's columns."""
        return [
            row_tuples(self.sent, [update.record for update in updates], order),
            [update.base_revision for update in updates],
        ]


def _sent(codec: RowCodec[Any], key: str) -> list[FieldCodec]:
    """The key, every field that may change, and of a call's spec only its hash."""
    fixed = FIXED_FIELDS[codec.record]
    fields = [field for field in codec.fields if field.field == key]
    for field in codec.fields:
        if codec.record is Call and field.field == "spec":
            fields.append(FieldCodec("spec", ("spec_sha256",), _hashes, field.decode))
        elif field.field not in fixed:
            fields.append(field)
    return fields


def _hashes(records: Sequence[Any]) -> Columns:
    specs: list[Payload | None] = list(map(attrgetter("spec"), records))
    return [[None if spec is None else spec.sha256 for spec in specs]]


@dataclass(frozen=True, slots=True)
class Part:
    """One table's share of a commit, within its statement. `sql` and `guard` number their arguments."""

    name: str
    sql: Callable[[int], str]
    """Its text, given the number of its first argument; does nothing unless the fence holds."""
    argument_count: int
    guard: Callable[[int], str] | None = None
    """What must be true after it."""


def update_part(statement: UpdateStatement) -> Part:
    """A guarded update within a commit's statement."""
    name = f"{statement.table}_changed"
    return Part(
        name,
        lambda first: f"{statement.text(first, 'fence, ')} RETURNING 1",
        2,
        guard=lambda first: f"(SELECT count(*) FROM {name}) = cardinality(${first + 1}::bigint[])",  # noqa: S608
    )


def insert_part(codec: RowCodec[Any]) -> Part:
    """An insert within a commit's statement. Calls take one argument more: the models that they name."""
    return Part(
        f"{codec.table.name}_added",
        lambda first: insert_statement(codec, first, "fence, "),
        1 + (codec.record is Call),
        guard=(lambda first: _have_models(first + 1)) if codec.record is Call else None,
    )


def insert_part_arguments(codec: RowCodec[Any], records: Sequence[Any], order: Sequence[str]) -> list[Any]:
    """The arguments of `insert_part`; `order` is that of the table's columns."""
    inserted = row_tuples(codec.fields, records, order)
    return [inserted, list({record.model_id for record in records})] if codec.record is Call else [inserted]


def _have_models(argument: int) -> str:
    return (
        f"NOT EXISTS (SELECT FROM unnest(${argument}::text[]) AS named (model_id) WHERE NOT EXISTS "  # noqa: S608
        "(SELECT FROM models AS m WHERE m.model_id = named.model_id))"
    )


HAVE_MODELS = f"SELECT {_have_models(1)}"
"""Whether all models named are there: what a foreign key would check for each call."""


@cache
def commit_statement(parts: tuple[Part, ...]) -> str:
    """A whole commit in one statement and so in one round trip: fence, writes and guards. Arguments: the fence's two,
    then those of the parts in order.

    Returns whether the fence held. Ends with GUARD_FAILED, and nothing written, when a guard does not hold.
    """
    number = 3
    tables = [f"fence AS ({FENCE} RETURNING 1)"]
    guards = ["true"]
    for part in parts:
        tables.append(f"{part.name} AS ({part.sql(number)})")
        if part.guard is not None:
            guards.append(part.guard(number))
        number += part.argument_count
    held = "EXISTS (SELECT FROM fence)"
    # A division by nought is the one way for a plain statement to fail by its own judgement.
    return (
        f"WITH {', '.join(tables)} SELECT {held} AND "
        f"1 / (CASE WHEN NOT {held} OR ({' AND '.join(guards)}) THEN 1 ELSE 0 END) = 1"
    )


GUARD_FAILED = "22012"
"""SQLSTATE of `commit_statement` when a guard failed: division_by_zero."""
