"""Tensors from outside: whatever a message says, it is unpacked or refused by name."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plexrl import wire
from plexrl.v1 import types_pb2 as t

EXTENTS = st.one_of(st.integers(-2, 5), st.sampled_from([2**31, 2**40, 2**62]))


@given(
    dtype=st.integers(-1, 2**31 - 1) | st.sampled_from([0, 1, 2]),
    shape=st.lists(EXTENTS, max_size=70),
    data=st.binary(max_size=64),
)
def test_any_tensor_is_unpacked_or_refused(dtype: int, shape: list[int], data: bytes) -> None:
    message = t.Tensor(dtype=dtype, shape=shape, data=data)  # type: ignore[arg-type]
    with contextlib.suppress(wire.WireError):
        assert wire.array(message, "int32").shape == tuple(shape)


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (t.Tensor(dtype=99, shape=[1], data=b"1234"), "dtype is 99"),  # type: ignore[arg-type]
        (t.Tensor(dtype=t.DTYPE_INT32, shape=[0, 2**62, 2**62]), "not possible"),
        (t.Tensor(dtype=t.DTYPE_INT32, shape=[0] * 70), "70 axes"),
        (t.Tensor(dtype=t.DTYPE_INT32, shape=[2**62] * 2000), "2000 axes"),
        (t.Tensor(dtype=t.DTYPE_INT32, shape=[2], data=b"1234"), "needs 8 bytes"),
    ],
)
def test_what_is_refused_says_why(message: t.Tensor, says: str) -> None:
    with pytest.raises(wire.WireError, match=says):
        wire.array(message, "int32")
