"""Frames on the socket between daemon and child: a 4-byte little-endian length, then that many bytes; a frame's file
descriptor, if it has one, travels with the length. Blocking ends for the child; `client` has the asyncio end.
"""

import array
import socket
import struct

HEADER = struct.Struct("<I")
MAX_FRAME_BYTES = 1 << 30


class Closed(Exception):
    """The other end closed the socket."""


def header(payload: bytes) -> bytes:
    """The length of a frame. Raises ValueError beyond MAX_FRAME_BYTES."""
    if len(payload) > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {len(payload)} bytes exceeds the limit of {MAX_FRAME_BYTES}")
    return HEADER.pack(len(payload))


def payload_bytes(head: bytes) -> int:
    """The payload's size from its header. Raises ValueError beyond MAX_FRAME_BYTES."""
    (size,) = HEADER.unpack(head)
    if size > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {size} bytes exceeds the limit of {MAX_FRAME_BYTES}")
    return int(size)


def send(sock: socket.socket, payload: bytes) -> None:
    """Sends a frame without a file descriptor."""
    sock.sendall(header(payload) + payload)


def receive(sock: socket.socket) -> tuple[bytes, int | None]:
    """The next frame and its file descriptor, which the caller owns. Raises Closed."""
    head, descriptor = b"", None
    while len(head) < HEADER.size:
        data, ancillary, _flags, _address = sock.recvmsg(HEADER.size - len(head), socket.CMSG_LEN(4))
        if not data:
            raise Closed
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                descriptor = array.array("i", content[:4])[0]
        head += data
    payload = bytearray(payload_bytes(head))
    view = memoryview(payload)
    while view:
        count = sock.recv_into(view)
        if not count:
            raise Closed
        view = view[count:]
    return bytes(payload), descriptor
