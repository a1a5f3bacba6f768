"""The array statements of the hot path: one statement per table and commit, whatever the number of rows.

`INSERT … SELECT … FROM unnest(…)` and `UPDATE … FROM unnest(…)`, built once from the row codecs; each argument is one
column. The number of rows that an update changed is its guard: a row whose stored revision differs is not changed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Column
from sqlalchemy.dialects import postgresql
from sqlalchemy.dialects.postgresql import JSONB

from plexrl_controller.domain.records import Call, Payload
from plexrl_controller.store.batch import FIXED_FIELDS, Update
from plexrl_controller.store.rows import FieldCodec, RowCodec, columnar

WRITER_SETTINGS = "SET enable_seqscan = off; SET enable_hashjoin = off; SET enable_mergejoin = off"
"""A prepared plan outlives the empty table that it was made for: updates must always go by key."""

ACQUIRE_TERM = """
INSERT INTO leader (singleton, term, holder, commit_id) VALUES (true, 1, $1, '')
ON CONFLICT (singleton) DO UPDATE SET term = leader.term + 1, holder = excluded.holder, commit_id = ''
RETURNING term
"""

FENCE = "UPDATE leader SET commit_id = $2 WHERE term = $1 AND (commit_id <> $2 OR $2 = '')"
"""Holds the leader row until the commit ends, so that nobody takes a term in between."""

SHOW_FENCE = "SELECT term, commit_id FROM leader"

_DIALECT = postgresql.dialect()  # type: ignore[no-untyped-call]
_KEEP_OR_DROP = "CASE WHEN u.{hash} IS NULL THEN NULL ELSE t.{column} END"
"""A spec is never sent again: its bytes stay where they are until it is dropped."""


def insert_statement(codec: RowCodec[Any]) -> str:
    """Arguments: one array per column of the codec."""
    columns = codec.columns
    names = ", ".join(column.name for column in columns)
    return (
        f"INSERT INTO {codec.table.name} ({names}) SELECT {', '.join(_value(column) for column in columns)} "  # noqa: S608
        f"FROM {_unnest(columns, first=1)}"
    )


def insert_arguments(codec: RowCodec[Any], records: Sequence[Any]) -> list[list[Any]]:
    """The arguments of the insert."""
    return columnar(codec.fields, records)


@dataclass(frozen=True)
class UpdateStatement:
    """A guarded update of one table."""

    sql: str
    sent: tuple[FieldCodec, ...]

    @classmethod
    def of(cls, codec: RowCodec[Any]) -> "UpdateStatement":
        """Arguments: base revisions, then one array per sent column, the id first."""
        key = codec.table.primary_key.columns[0]
        sent = tuple(_sent(codec, key.name))
        columns = [codec.table.c[name] for field in sent for name in field.columns]
        changes = [f"{column.name} = {_value(column)}" for column in columns if column is not key]
        if codec.record is Call:
            changes += [
                f"{name} = {_KEEP_OR_DROP.format(hash='spec_sha256', column=name)}"
                for name in ("spec_sha256", "spec_size_bytes", "spec_inline")
            ]
            changes.remove("spec_sha256 = u.spec_sha256")
        sql = (
            f"UPDATE {codec.table.name} AS t SET {', '.join(changes)} "  # noqa: S608
            f"FROM {_unnest([*columns], first=2, base_revision=True)} "
            f"WHERE t.{key.name} = u.{key.name} AND t.revision = u.base_revision"
        )
        return cls(sql, sent)

    def arguments(self, updates: Sequence[Update]) -> list[list[Any]]:
        """The arguments of the update."""
        return [
            [update.base_revision for update in updates],
            *columnar(self.sent, [update.record for update in updates]),
        ]


def _sent(codec: RowCodec[Any], key: str) -> list[FieldCodec]:
    """The key, every field that may change, and of a call's spec only its hash."""
    fixed = FIXED_FIELDS[codec.record]
    fields = [field for field in codec.fields if field.field == key]
    for field in codec.fields:
        if codec.record is Call and field.field == "spec":
            fields.append(FieldCodec("spec", ("spec_sha256",), _encode_hash, field.decode))
        elif field.field not in fixed:
            fields.append(field)
    return fields


def _encode_hash(payload: Payload | None) -> tuple[str | None]:
    return (None if payload is None else payload.sha256,)


def _value(column: Column[Any]) -> str:
    return f"u.{column.name}::jsonb" if isinstance(column.type, JSONB) else f"u.{column.name}"


def _unnest(columns: Sequence[Column[Any]], first: int, *, base_revision: bool = False) -> str:
    arguments = [f"${first + index}::{_array_type(column)}" for index, column in enumerate(columns)]
    names = [column.name for column in columns]
    if base_revision:
        arguments.insert(0, "$1::bigint[]")
        names.insert(0, "base_revision")
    return f"unnest({', '.join(arguments)}) AS u ({', '.join(names)})"


def _array_type(column: Column[Any]) -> str:
    return "text[]" if isinstance(column.type, JSONB) else f"{column.type.compile(dialect=_DIALECT).lower()}[]"
