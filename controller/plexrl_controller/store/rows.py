"""Records as rows and back: which columns a record's fields take, derived from the fields' types.

An enum is stored by its name, a mapping as JSON, a payload in three columns; everything else as it is. Writing goes
column by column over many records: it is on the path of every call.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from functools import partial
from operator import attrgetter
from types import NoneType
from typing import Any, Generic, TypeVar, get_args, get_origin, get_type_hints

from sqlalchemy import Column, Table

from plexrl_controller.domain.records import (
    Call,
    Checkpoint,
    Event,
    Interval,
    Job,
    Model,
    Payload,
    Request,
    Session,
    Snapshot,
    Token,
    Worker,
)
from plexrl_controller.store import tables

R = TypeVar("R")
Columns = list[list[Any]]


@dataclass(frozen=True, slots=True)
class FieldCodec:
    """One field of a record and the columns that hold it."""

    field: str
    columns: tuple[str, ...]
    gather: Callable[[Sequence[Any]], Columns]
    """The field of many records, one list per column."""
    decode: Callable[..., Any]


@dataclass(frozen=True)
class RowCodec(Generic[R]):
    """A record type and its table."""

    record: type[R]
    table: Table
    fields: tuple[FieldCodec, ...]

    @property
    def columns(self) -> Sequence[Column[Any]]:
        """The table's columns that hold the record, in the order of its fields."""
        return [self.table.c[name] for codec in self.fields for name in codec.columns]

    def decode(self, row: Mapping[str, Any], absent: Iterable[str] = ()) -> R:
        """A record from a row; fields named in `absent` become None."""
        return self.record(
            **{
                codec.field: None if codec.field in absent else codec.decode(*(row[name] for name in codec.columns))
                for codec in self.fields
            }
        )


def row_tuples(codecs: Sequence[FieldCodec], records: Sequence[Any], order: Sequence[str]) -> list[tuple[Any, ...]]:
    """The records as rows with the columns of `order`; those that no codec has are None."""
    columns: dict[str, list[Any]] = {}
    for codec in codecs:
        columns.update(zip(codec.columns, codec.gather(records), strict=True))
    absent = [None] * len(records)
    return list(zip(*[columns.get(name, absent) for name in order], strict=True))


def _field_codec(name: str, hint: Any) -> FieldCodec:
    kinds = [kind for kind in get_args(hint) or (hint,) if kind is not NoneType]
    kind = hint if get_origin(hint) is not None and NoneType not in get_args(hint) else kinds[0]
    if kind is Payload:
        columns = (f"{name}_sha256", f"{name}_size_bytes", f"{name}_inline")
        return FieldCodec(name, columns, partial(_payloads, attrgetter(name)), _decode_payload)
    if get_origin(kind) is Mapping:
        return FieldCodec(name, (name,), partial(_labels, attrgetter(name)), dict)
    if isinstance(kind, type) and issubclass(kind, IntEnum):
        gather = partial(_enums, attrgetter(name)) if kind is not hint else partial(_same, attrgetter(f"{name}._name_"))
        return FieldCodec(name, (name,), gather, partial(_decode_enum, kind))
    if hint is int:  # NUMERIC, which holds unsigned 64-bit numbers, comes back as Decimal
        return FieldCodec(name, (name,), partial(_same, attrgetter(name)), int)
    if getattr(kind, "__supertype__", kind) is str:
        return FieldCodec(name, (name,), partial(_texts, attrgetter(name)), _as_it_is)
    return FieldCodec(name, (name,), partial(_same, attrgetter(name)), _as_it_is)


Get = Callable[[Any], Any]


def _as_it_is(value: Any) -> Any:
    return value


def _same(get: Get, records: Sequence[Any]) -> Columns:
    return [list(map(get, records))]


def _text(value: str | None) -> str | None:
    """Postgres text holds no NUL; a message with one is still worth keeping."""
    return value if value is None or "\0" not in value else value.replace("\0", "\ufffd")


def _texts(get: Get, records: Sequence[Any]) -> Columns:
    texts = list(map(get, records))
    # All are looked at as one: hardly any has a NUL.
    return [[_text(text) for text in texts] if "\0" in "".join(filter(None, texts)) else texts]


def _enums(get: Get, records: Sequence[Any]) -> Columns:
    return [[None if value is None else value._name_ for value in map(get, records)]]


def _decode_enum(kind: type[IntEnum], name: str | None) -> IntEnum | None:
    return None if name is None else kind[name]


def _labels(get: Get, records: Sequence[Any]) -> Columns:
    return [[json.dumps({_text(key): _text(value) for key, value in get(record).items()}) for record in records]]


def _payloads(get: Get, records: Sequence[Any]) -> Columns:
    payloads: list[Payload | None] = list(map(get, records))
    return [
        [None if payload is None else payload.sha256 for payload in payloads],
        [None if payload is None else payload.size_bytes for payload in payloads],
        [None if payload is None else payload.inline for payload in payloads],
    ]


def _decode_payload(sha256: str | None, size_bytes: int | None, inline: bytes | None) -> Payload | None:
    return None if sha256 is None or size_bytes is None else Payload(sha256, size_bytes, inline)


def _codec(record: type[R], table: Table) -> RowCodec[R]:
    hints = get_type_hints(record)
    names = [field.name for field in fields(record)]  # type: ignore[arg-type]
    return RowCodec(record, table, tuple(_field_codec(name, hints[name]) for name in names))


JOB = _codec(Job, tables.jobs)
MODEL = _codec(Model, tables.models)
CALL = _codec(Call, tables.calls)
SESSION = _codec(Session, tables.sessions)
WORKER = _codec(Worker, tables.workers)
CHECKPOINT = _codec(Checkpoint, tables.checkpoints)
SNAPSHOT = _codec(Snapshot, tables.snapshots)
TOKEN = _codec(Token, tables.tokens)
INTERVAL = _codec(Interval, tables.intervals)
EVENT = _codec(Event, tables.events)
REQUEST = _codec(Request, tables.requests)

RECORDS: tuple[RowCodec[Any], ...] = (JOB, MODEL, CALL, SESSION, WORKER, CHECKPOINT, SNAPSHOT, TOKEN)
"""In the order in which new rows may refer to each other."""
