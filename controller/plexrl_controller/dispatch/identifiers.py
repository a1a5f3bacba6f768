"""New ids for records."""

import secrets
from itertools import count
from time import time_ns

_counter = count(secrets.randbits(12))


def time_ordered_id() -> str:
    """A UUID of version 7 (RFC 9562) as 32 hexadecimal digits: later ids are greater, so that what is new lies together
    in every index."""
    low = secrets.randbits(62) | 1 << 63
    return f"{time_ns() // 1_000_000:012x}7{next(_counter) & 0xFFF:03x}{low:016x}"
