"""Conversions between the wire's messages and Python values; shared by client, controller and worker.

Knows the generated messages and numpy, nothing of gRPC channels or servers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from google.protobuf import duration_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from numpy.typing import NDArray

from plexrl.v1 import types_pb2 as t

ERROR_DOMAIN = "plexrl"
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
CHUNK_BYTES = 1024 * 1024
# Both ends of every channel take the same options, so that a message one side may send the other may receive.
CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # A server takes pings on a quiet connection for an attack unless it expects them as often as they come.
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    # Unless told otherwise gRPC tries a lost peer again after up to two minutes: leases are shorter than that.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 2_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)
# A server that is not told otherwise ends a connection whose idle peer pings as often as the options above say.
SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    *CHANNEL_OPTIONS,
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
)

_DTYPES = {t.DTYPE_INT32: np.dtype("<i4"), t.DTYPE_FLOAT32: np.dtype("<f4")}
_WIRE_DTYPES = {"int32": t.DTYPE_INT32, "float32": t.DTYPE_FLOAT32}

MAX_AXES = 8
"""Of a tensor. The extents of more would multiply to numbers that take long to work out, and longer to print."""
_FEW = 16
"""So many numbers are looked at sooner one by one than as an array."""

Int32Array = NDArray[np.int32]
Float32Array = NDArray[np.float32]


class WireError(ValueError):
    """A message that cannot be what its schema says: wrong dtype, shape or byte count."""


@dataclass(frozen=True)
class ErrorInfo:
    """What a `google.rpc.Status` says: canonical code, stable reason, sentence, and when to retry."""

    code: int
    reason: str
    message: str
    metadata: Mapping[str, str] = field(default_factory=dict)
    retry_after_s: float | None = None


def tensor(array: Sequence[int] | Sequence[float] | NDArray[np.generic], dtype: str) -> t.Tensor:
    """Packs an array as a Tensor of dtype "int32" or "float32", little-endian, row-major."""
    message = t.Tensor()
    put_tensor(message, array, dtype)
    return message


def put_tensor(message: t.Tensor, array: Sequence[int] | Sequence[float] | NDArray[np.generic], dtype: str) -> None:
    """Packs an array into an empty Tensor: within a larger message, that saves a copy."""
    message.dtype = wire_dtype = _WIRE_DTYPES[dtype]
    packed = np.asarray(integers(array) if dtype == "int32" else array, dtype=_DTYPES[wire_dtype])
    message.shape.extend(packed.shape)
    message.data = packed.tobytes()


def integers(values: Sequence[int] | Sequence[float] | NDArray[np.generic]) -> Int32Array:
    """Values as int32. Raises WireError for what is no int32: numpy would cut fractions off and wrap large numbers."""
    found = np.asarray(values)
    if found.dtype == np.int32:
        return found
    if found.size and found.dtype.kind not in "iu":
        raise WireError(f"want whole numbers, these are {found.dtype}")
    if found.size and (found.min() < -(2**31) or found.max() >= 2**31):
        raise WireError(f"want int32 numbers, these are from {found.min()} to {found.max()}")
    return found.astype(np.int32)


def array(message: t.Tensor, dtype: str, *, name: str = "tensor") -> NDArray[np.generic]:
    """Unpacks a Tensor, read-only and without a copy.

    Raises WireError when dtype, shape or byte count disagree; `name` says which field in the message.
    """
    want = _WIRE_DTYPES[dtype]
    if message.dtype != want:
        stated = t.Dtype.Name(message.dtype) if message.dtype in t.Dtype.values() else str(message.dtype)
        raise WireError(f"{name}: dtype is {stated}, want {t.Dtype.Name(want)}")
    if len(message.shape) > MAX_AXES:
        raise WireError(f"{name}: has {len(message.shape)} axes, the limit is {MAX_AXES}")
    shape = tuple(message.shape)
    if any(extent < 0 for extent in shape):
        raise WireError(f"{name}: shape {list(shape)} has a negative extent")
    numpy_dtype = _DTYPES[want]
    count = 1
    for extent in shape:
        count *= extent
    if count * numpy_dtype.itemsize != len(message.data):
        raise WireError(
            f"{name}: shape {list(shape)} needs {count * numpy_dtype.itemsize} bytes, data has {len(message.data)}"
        )
    try:
        return np.frombuffer(message.data, dtype=numpy_dtype).reshape(shape)
    except ValueError as error:
        # Beside an extent of 0 the others can be of any size.
        raise WireError(f"{name}: shape {list(shape)} is not possible: {error}") from error


def int32s(message: t.Tensor, *, name: str = "tensor") -> Int32Array:
    """A one-dimensional int32 Tensor as an array."""
    return _vector(message, "int32", name).astype(np.int32, copy=False)


def float32s(message: t.Tensor, *, name: str = "tensor") -> Float32Array:
    """A one-dimensional float32 Tensor as an array."""
    return _vector(message, "float32", name).astype(np.float32, copy=False)


def _vector(message: t.Tensor, dtype: str, name: str) -> NDArray[np.generic]:
    data = message.data
    if message.dtype == _WIRE_DTYPES[dtype] and message.shape == [len(data) >> 2] and not len(data) & 3:
        return np.frombuffer(data, _DTYPES[_WIRE_DTYPES[dtype]])
    values = array(message, dtype, name=name)
    if values.ndim != 1:
        raise WireError(f"{name}: has {values.ndim} axes, want 1")
    return values


def token_batch(sequences: Sequence[Sequence[int] | Int32Array]) -> t.TokenBatch:
    """Packs token sequences into a ragged batch."""
    message = t.TokenBatch()
    put_token_batch(message, sequences)
    return message


def put_token_batch(message: t.TokenBatch, sequences: Sequence[Sequence[int] | Int32Array]) -> None:
    """Packs token sequences into an empty ragged batch."""
    lengths = [len(sequence) for sequence in sequences]
    parts = [integers(sequence) for sequence in sequences]
    flat = parts[0] if len(parts) == 1 else np.concatenate(parts) if parts else np.zeros(0, np.int32)
    put_tensor(message.token_ids, flat, "int32")
    put_tensor(message.lengths, lengths, "int32")


def batch_arrays(message: t.TokenBatch, *, name: str = "batch", min_length: int = 1) -> tuple[Int32Array, Int32Array]:
    """Unpacks a ragged batch into (token_ids int32 [N], lengths int32 [B]).

    Raises WireError when a length is below `min_length` or the lengths do not add up to N.
    """
    token_ids = int32s(message.token_ids, name=f"{name}.token_ids")
    lengths = int32s(message.lengths, name=f"{name}.lengths")
    few = lengths.tolist() if lengths.size <= _FEW else None
    least = min(few, default=min_length) if few is not None else int(lengths.min())
    if least < min_length:
        raise WireError(f"{name}.lengths: the least is {least}, want at least {min_length}")
    total = sum(few) if few is not None else int(lengths.sum(dtype=np.int64))
    if total != token_ids.size:
        raise WireError(f"{name}: lengths add up to {total}, token_ids has {token_ids.size}")
    return token_ids, lengths


def split(values: NDArray[np.generic], lengths: Int32Array) -> list[NDArray[np.generic]]:
    """Cuts a flat array into views, one per sequence."""
    return np.split(values, np.cumsum(lengths)[:-1]) if lengths.size else []


def kind_of(spec: t.CallSpec) -> int:
    """The CallKind's number of a spec; WireError when no function is set."""
    function = spec.WhichOneof("function")
    if function is None:
        raise WireError("spec.function: not set, want one of the functions of CallSpec")
    return int(t.CallKind.Value(f"CALL_KIND_{function.upper()}"))


def error_status(info: ErrorInfo) -> status_pb2.Status:
    """Writes an error as google.rpc.Status with ErrorInfo and, where waiting helps, RetryInfo."""
    status = status_pb2.Status(code=info.code, message=info.message)
    status.details.add().Pack(
        error_details_pb2.ErrorInfo(reason=info.reason, domain=ERROR_DOMAIN, metadata=dict(info.metadata))
    )
    if info.retry_after_s is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(info.retry_after_s * 1e9))
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    return status


def error_info(status: status_pb2.Status) -> ErrorInfo | None:
    """Reads a google.rpc.Status; None when it is OK. A status without ErrorInfo gets its code's name as reason."""
    if status.code == code_pb2.OK:
        return None
    reason, metadata, retry_after_s = code_pb2.Code.Name(status.code), {}, None
    for detail in status.details:
        info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
        if detail.Unpack(info):
            reason, metadata = info.reason, dict(info.metadata)
        elif detail.Unpack(retry):
            retry_after_s = retry.retry_delay.ToNanoseconds() / 1e9
    return ErrorInfo(status.code, reason, status.message, metadata, retry_after_s)
