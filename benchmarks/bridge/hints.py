"""What jobs say of their sleeps: the truth, nothing, or something wrong. Deterministic: chance comes from a seed."""

import random
from collections.abc import Callable, Mapping
from types import MappingProxyType

Say = Callable[[float], float | None]
"""From the seconds that a job will be idle to what it says; None says nothing."""

LONG_S, SHORT_S = 60.0, 0.01


def _opposite(round_trip_s: float) -> Say:
    return lambda seconds: LONG_S if seconds < round_trip_s else SHORT_S


def _random(seed: int) -> Say:
    draws = random.Random(seed)
    return lambda seconds: seconds * 10.0 ** draws.uniform(-2.0, 2.0)


def _often_missing(seed: int) -> Say:
    draws = random.Random(seed)
    return lambda seconds: seconds if draws.random() < 0.5 else None


HINTS: Mapping[str, Callable[[int, float], Say]] = MappingProxyType(
    {
        "off": lambda seed, round_trip_s: lambda seconds: None,
        "on": lambda seed, round_trip_s: lambda seconds: seconds,
        "x0.1": lambda seed, round_trip_s: lambda seconds: 0.1 * seconds,
        "x10": lambda seed, round_trip_s: lambda seconds: 10.0 * seconds,
        "half missing": lambda seed, round_trip_s: _often_missing(seed),
        "random": lambda seed, round_trip_s: _random(seed),
        "opposite": lambda seed, round_trip_s: _opposite(round_trip_s),
    }
)
"""By name: from a seed and the seconds of a round-trip swap. `random` is off by up to a hundred times either way;
`opposite` says a minute when it is back sooner than a swap takes, and nearly nothing otherwise."""
