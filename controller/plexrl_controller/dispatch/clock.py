"""Time as a port: the live clock here, a virtual one in simulation."""

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds of Unix time."""

    def now(self) -> float:
        """The present."""
        ...


class WallClock:
    """The machine's clock."""

    def now(self) -> float:
        """The present, from `time.time`."""
        return time.time()
