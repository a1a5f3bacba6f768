"""Seconds, as callers give them, on the wire. Said at once what is wrong with them: much of this is sent by a thread of
its own, where nobody would hear.
"""

import math

from google.protobuf.duration_pb2 import Duration

from plexrl import errors

MOST_S = 10 * 365 * 86400.0


def checked(seconds: float, name: str) -> float:
    """The same seconds. Raises InvalidArgument unless they are a finite number from 0 to ten years."""
    if not (math.isfinite(seconds) and 0.0 <= seconds <= MOST_S):
        raise errors.InvalidArgument(f"{name}: {seconds} seconds, want a number from 0 to {MOST_S:.0f}")
    return seconds


def put(duration: Duration, seconds: float, name: str) -> None:
    """Writes seconds into a message's field. Raises InvalidArgument."""
    duration.FromNanoseconds(int(checked(seconds, name) * 1e9))
