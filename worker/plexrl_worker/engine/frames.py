"""Frames on the socket between daemon and child: a 4-byte little-endian length, then that many bytes; a frame's file
descriptor, if it has one, travels with the length. Blocking ends for the child; `client` has the asyncio end.
"""

import array
import socket
import struct
from collections import deque

HEADER = struct.Struct("<I")
MAX_FRAME_BYTES = 1 << 30
_READ_BYTES, _LARGE_READ_BYTES = 1 << 16, 1 << 22


class Closed(Exception):
    """The other end closed the socket."""


def header(payload: bytes) -> bytes:
    """The length of a frame. Raises ValueError beyond MAX_FRAME_BYTES."""
    if len(payload) > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {len(payload)} bytes exceeds the limit of {MAX_FRAME_BYTES}")
    return HEADER.pack(len(payload))


def payload_bytes(head: bytes | bytearray) -> int:
    """The payload's size from its header. Raises ValueError beyond MAX_FRAME_BYTES."""
    (size,) = HEADER.unpack(head)
    if size > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {size} bytes exceeds the limit of {MAX_FRAME_BYTES}")
    return int(size)


def framed(payload: bytes) -> bytes:
    """A payload behind its length."""
    return header(payload) + payload


class Reader:
    """Takes frames off a blocking socket, as many as come at a time."""

    def __init__(self, sock: socket.socket) -> None:
        self.descriptors: deque[int] = deque()
        """Those that came with the frames so far, in their order; whoever takes one owns it."""
        self._sock = sock
        self._buffer = bytearray()
        self._start = 0

    def receive(self) -> bytes:
        """The next frame. Raises Closed."""
        self._fill(HEADER.size)
        size = payload_bytes(bytes(self._buffer[self._start : self._start + HEADER.size]))
        self._start += HEADER.size
        self._fill(size)
        payload = bytes(memoryview(self._buffer)[self._start : self._start + size])
        self._start += size
        if self._start == len(self._buffer):
            self._buffer.clear()
            self._start = 0
        return payload

    def _fill(self, size: int) -> None:
        """Reads until `size` bytes are there."""
        if len(self._buffer) - self._start < size and self._start:
            del self._buffer[: self._start]
            self._start = 0
        while len(self._buffer) < self._start + size:
            wanted = max(_READ_BYTES, min(self._start + size - len(self._buffer), _LARGE_READ_BYTES))
            data, ancillary, _flags, _address = self._sock.recvmsg(wanted, socket.CMSG_LEN(4))
            if not data:
                raise Closed
            for level, kind, content in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    self.descriptors.append(array.array("i", content[:4])[0])
            self._buffer += data
