"""Request bodies in the protobuf form of Kubernetes, which typed Go clients such as kubectl send.

Messages are built from the schemas and their field numbers, parsed by the protobuf library, and turned into the JSON
form that everything else here works on. Answers are always JSON, which those clients take as well.
"""

import base64
import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import msgspec
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError, Message

from plexrl.waiting.cluster.api.errors import bad_request
from plexrl.waiting.cluster.api.schema import Schema, schema_of
from plexrl.waiting.cluster.api.wire_numbers import NUMBERS
from plexrl.waiting.cluster.objects import Object

Field = descriptor_pb2.FieldDescriptorProto

MEDIA_TYPE = "application/vnd.kubernetes.protobuf"
# What each message starts with, so that it is not taken for anything else.
_MAGIC = b"k8s\x00"
_PACKAGE = "kubernetes"

# Kinds that are only sent, never stored, and where their schemas are.
_SENT_ONLY = {
    ("v1", "DeleteOptions"): "meta_v1.DeleteOptions",
    ("meta.k8s.io/v1", "DeleteOptions"): "meta_v1.DeleteOptions",
    ("apps/v1", "DeleteOptions"): "meta_v1.DeleteOptions",
    ("batch/v1", "DeleteOptions"): "meta_v1.DeleteOptions",
    ("v1", "Binding"): "core_v1.Binding",
    ("policy/v1", "Eviction"): "policy_v1.Eviction",
    ("autoscaling/v1", "Scale"): "autoscaling_v1.Scale",
}
# Messages of one value each that JSON shows as a plain value.
_PLAIN: Mapping[str, tuple[tuple[str, int, "Field.Type.ValueType"], ...]] = {
    "Time": (("seconds", 1, Field.TYPE_INT64), ("nanos", 2, Field.TYPE_INT32)),
    "Quantity": (("string", 1, Field.TYPE_STRING),),
    "IntOrString": (
        ("type", 1, Field.TYPE_INT64),
        ("intVal", 2, Field.TYPE_INT32),
        ("strVal", 3, Field.TYPE_STRING),
    ),
    "Raw": (("raw", 1, Field.TYPE_BYTES),),
    "Envelope": (
        ("typeMeta", 1, Field.TYPE_BYTES),
        ("raw", 2, Field.TYPE_BYTES),
        ("contentEncoding", 3, Field.TYPE_STRING),
        ("contentType", 4, Field.TYPE_STRING),
    ),
    "TypeMeta": (("apiVersion", 1, Field.TYPE_STRING), ("kind", 2, Field.TYPE_STRING)),
    "StringEntry": (("key", 1, Field.TYPE_STRING), ("value", 2, Field.TYPE_STRING)),
    "BytesEntry": (("key", 1, Field.TYPE_STRING), ("value", 2, Field.TYPE_BYTES)),
}
_SCALARS = {
    "string": Field.TYPE_STRING,
    "integer": Field.TYPE_INT64,
    "number": Field.TYPE_DOUBLE,
    "boolean": Field.TYPE_BOOL,
}
_MESSAGES = {"time": "Time", "quantity": "Quantity", "int-or-string": "IntOrString", "any": "Raw"}


@dataclass(frozen=True)
class _Entry:
    """A field's number; with `inner`, a message whose fields are shown one level up."""

    name: str
    number: int
    pointer: bool = False
    inner: "tuple[_Entry, ...]" = ()


def decode_protobuf(body: bytes, models: Mapping[tuple[str, str], str]) -> Object:
    """The JSON form of a body. `models` are the schemas by apiVersion and kind. Raises ApiError (400)."""
    if not body.startswith(_MAGIC):
        raise bad_request("the body is not protobuf: it does not start with the prefix k8s\\x00")
    try:
        envelope: Any = _parse("Envelope", body[len(_MAGIC) :])
        meta: Any = _parse("TypeMeta", envelope.typeMeta)
        model = models.get((meta.apiVersion, meta.kind)) or _SENT_ONLY.get((meta.apiVersion, meta.kind))
        if model is None:
            raise bad_request(f"no kind {meta.kind!r} is registered for version {meta.apiVersion!r}")
        if envelope.contentEncoding or envelope.contentType not in ("", MEDIA_TYPE):
            raise bad_request(f"the body is encoded as {envelope.contentEncoding or envelope.contentType!r}")
        message = _parse(_message_name(model), envelope.raw)
    except DecodeError as error:
        raise bad_request(f"the protobuf body does not parse: {error}") from error
    return {"apiVersion": meta.apiVersion, "kind": meta.kind, **_object(schema_of(model), model, message)}


def _parse(name: str, data: bytes) -> Message:
    return _message_class(name).FromString(data)


@functools.cache
def _message_class(name: str) -> type[Message]:
    return message_factory.GetMessageClass(_pool().FindMessageTypeByName(f"{_PACKAGE}.{name}"))


@functools.cache
def _pool() -> descriptor_pool.DescriptorPool:
    file = descriptor_pb2.FileDescriptorProto(name="kubernetes.proto", package=_PACKAGE, syntax="proto2")
    for name, fields in _PLAIN.items():
        message = file.message_type.add(name=name)
        for field_name, number, kind in fields:
            message.field.add(name=field_name, number=number, type=kind, label=Field.LABEL_OPTIONAL)
    entry = file.message_type.add(name="QuantityEntry")
    entry.field.add(name="key", number=1, type=Field.TYPE_STRING, label=Field.LABEL_OPTIONAL)
    _add_field(entry, _Entry("value", 2), Schema("quantity"))
    for model in NUMBERS:
        _add_message(file, _message_name(model), schema_of(model), _entries(model))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return pool


def _add_message(
    file: descriptor_pb2.FileDescriptorProto, name: str, schema: Schema, entries: Iterable[_Entry]
) -> None:
    message = file.message_type.add(name=name)
    for entry in entries:
        if entry.inner:
            inner_name = f"{name}_{entry.number}"
            _add_message(file, inner_name, schema, entry.inner)
            field = message.field.add(name=f"inner{entry.number}", number=entry.number)
            field.label, field.type = Field.LABEL_OPTIONAL, Field.TYPE_MESSAGE
            field.type_name = f".{_PACKAGE}.{inner_name}"
        elif (known := schema.fields.get(entry.name)) is not None:
            _add_field(message, entry, known.schema)


def _add_field(message: descriptor_pb2.DescriptorProto, entry: _Entry, schema: Schema) -> None:
    field = message.field.add(name=entry.name, number=entry.number, label=Field.LABEL_OPTIONAL)
    if schema.kind in ("list", "map") and schema.items is not None:
        field.label = Field.LABEL_REPEATED
        if schema.kind == "map":
            entry_name = "QuantityEntry" if schema.items.kind == "quantity" else "StringEntry"
            field.type, field.type_name = Field.TYPE_MESSAGE, f".{_PACKAGE}.{_map_entry(entry, entry_name)}"
            return
        schema = schema.items
    if schema.kind in _SCALARS:
        field.type = _SCALARS[schema.kind]
        return
    name = _message_name(f"{schema.module}.{schema.model}") if schema.kind == "object" else _MESSAGES[schema.kind]
    if schema.kind == "object" and f"{schema.module}.{schema.model}" not in NUMBERS:
        name = "Raw"
    field.type, field.type_name = Field.TYPE_MESSAGE, f".{_PACKAGE}.{name}"


def _map_entry(entry: _Entry, name: str) -> str:
    return "BytesEntry" if entry.name == "binaryData" else name


def _message_name(model: str) -> str:
    return model.replace(".", "_")


@functools.cache
def _entries(model: str) -> tuple[_Entry, ...]:
    words = re.findall(r"\d+\(|\)|[^\s()]+", NUMBERS[model])
    return tuple(_parsed(iter(words)))


def _parsed(words: Iterator[str]) -> Iterator[_Entry]:
    for word in words:
        if word == ")":
            return
        if word.endswith("("):
            yield _Entry("", int(word[:-1]), inner=tuple(_parsed(words)))
        else:
            name, number = word.lstrip("*").split("=")
            yield _Entry(name, int(number), word.startswith("*"))


def _object(schema: Schema, model: str, message: Message) -> Object:
    return dict(_fields(schema, _entries(model), message))


def _fields(schema: Schema, entries: Iterable[_Entry], message: Message) -> Iterator[tuple[str, Any]]:
    for entry in entries:
        if entry.inner:
            yield from _fields(schema, entry.inner, getattr(message, f"inner{entry.number}"))
            continue
        known = schema.fields.get(entry.name)
        if known is None:
            continue
        if known.schema.kind in ("list", "map") or message.HasField(entry.name):
            value = _value(known.schema, entry, getattr(message, entry.name))
            # Go writes the zero of what is no pointer, and JSON leaves it out.
            if entry.pointer or value not in (None, "", 0, False, {}, []):
                yield entry.name, value


def _value(schema: Schema, entry: _Entry, found: Any) -> Any:
    match schema.kind:
        case "list" if schema.items is not None:
            items = schema.items
            return [_value(items, entry, item) for item in found]
        case "map" if schema.items is not None:
            items = schema.items
            return {item.key: _value(items, entry, item.value) for item in found}
        case "object":
            model = f"{schema.module}.{schema.model}"
            return _object(schema, model, found) if model in NUMBERS else {}
        case "time":
            moment = datetime.fromtimestamp(found.seconds, UTC) if found.HasField("seconds") else None
            return None if moment is None else moment.strftime("%Y-%m-%dT%H:%M:%SZ")
        case "quantity":
            return found.string
        case "int-or-string":
            return found.strVal if found.type == 1 else found.intVal
        case "any":
            return _json(found.raw)
        case _:
            return base64.b64encode(found).decode() if isinstance(found, bytes) else found


def _json(raw: bytes) -> Any:
    try:
        return msgspec.json.decode(raw) if raw else {}
    except msgspec.DecodeError as error:
        raise bad_request("a free-form field of the protobuf body holds no JSON") from error
