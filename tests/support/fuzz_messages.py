"""Messages for fuzzing, made from descriptors: valid ones with some fields replaced by what no client should send.

Knows descriptors and hypothesis, nothing of services.
"""

from collections.abc import Sequence
from typing import Any

from google.protobuf import message_factory
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import strategies as st

TEXTS = [
    "",
    "a",
    "../../etc/passwd",
    "\x00",
    "ü" * 65,
    "x" * 100_000,
    "none",
    "0" * 32,
    "0" * 64,
    "a b",
    "-",
    "{}",
    "[1",
    "[" * 100_000,
]
INTEGERS = [0, 1, 2, 3, 7, 63, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1, -1, -(2**31), -(2**63)]
FLOATS = [0.0, 1.0, -1.0, 0.5, 1e-300, 1e300, float("nan"), float("inf"), float("-inf")]
BYTES = [b"", b"\x00", b"\x00" * 3, b"\x01\x00\x00\x00", b"\x00\x00\xc0\x7f", b"\x00" * 4096, b"\xff" * 16]
_RANGES = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}


def new(descriptor: Any) -> Message:
    """An empty message of a type."""
    return message_factory.GetMessageClass(descriptor)()


@st.composite
def mutated(draw: st.DrawFn, good: Message, ids: Sequence[str]) -> Message:
    """The good message with up to four fields, at any depth, replaced; `ids` are names that mean something."""
    message = new(good.DESCRIPTOR)
    message.CopyFrom(good)
    for _ in range(draw(st.integers(0, 4))):
        _mutate(draw, message, ids, depth=0)
    return message


@st.composite
def broken_bytes(draw: st.DrawFn, good: Message) -> bytes:
    """Bytes that are cut off, flipped, or never were a message."""
    data = good.SerializeToString()
    match draw(st.integers(0, 2)):
        case 0 if data:
            return data[: draw(st.integers(0, len(data) - 1))]
        case 1 if data:
            place = draw(st.integers(0, len(data) - 1))
            return data[:place] + bytes([draw(st.integers(0, 255))]) + data[place + 1 :]
        case _:
            return draw(st.binary(max_size=64))


def _mutate(draw: st.DrawFn, message: Message, ids: Sequence[str], depth: int) -> None:
    fields: list[Any] = list(message.DESCRIPTOR.fields)
    if not fields:
        return
    field = draw(st.sampled_from(fields))
    if field.is_repeated:
        _mutate_repeated(draw, message, field, ids, depth)
    elif field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
        inner = getattr(message, field.name)
        if depth < 6 and draw(st.booleans()):
            inner.SetInParent()
            _mutate(draw, inner, ids, depth + 1)
        elif draw(st.booleans()):
            message.ClearField(field.name)
        else:
            inner.SetInParent()
    else:
        setattr(message, field.name, _scalar(draw, field, ids))


def _mutate_repeated(draw: st.DrawFn, message: Message, field: Any, ids: Sequence[str], depth: int) -> None:
    many = draw(st.sampled_from([1, 1, 1, 2, 5, 2000]))
    values: Any = getattr(message, field.name)
    if draw(st.booleans()):
        message.ClearField(field.name)
    entry = field.message_type
    if entry is not None and entry.GetOptions().map_entry:
        key, value = entry.fields_by_name["key"], entry.fields_by_name["value"]
        for number in range(min(many, 50)):
            values[f"{_scalar(draw, key, ids)}{number or ''}"] = _scalar(draw, value, ids)
    elif entry is not None:
        for _ in range(many):
            if values and draw(st.booleans()):
                values.add().CopyFrom(values[0])
            else:
                _mutate(draw, values.add(), ids, depth + 1)
    else:
        values.extend([_scalar(draw, field, ids)] * many)


def _scalar(draw: st.DrawFn, field: Any, ids: Sequence[str]) -> Any:
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_STRING if field.type == FieldDescriptor.TYPE_BYTES:
            return draw(st.sampled_from(BYTES))
        case FieldDescriptor.CPPTYPE_STRING:
            return draw(st.sampled_from([*ids, *TEXTS]) | st.text(max_size=8))
        case FieldDescriptor.CPPTYPE_BOOL:
            return draw(st.booleans())
        case FieldDescriptor.CPPTYPE_DOUBLE | FieldDescriptor.CPPTYPE_FLOAT:
            return draw(st.sampled_from([f for f in FLOATS if abs(f) < 1e30 or f != f or abs(f) == float("inf")]))
        case FieldDescriptor.CPPTYPE_ENUM:
            return draw(st.sampled_from([0, 1, 2, 3, 5, 99, -1, 2**31 - 1]))
        case kind if kind in _RANGES:
            low, high = _RANGES[kind]
            return draw(st.sampled_from([i for i in INTEGERS if low <= i <= high]))
        case kind:
            raise AssertionError(f"{field.full_name}: no values of kind {kind}")
