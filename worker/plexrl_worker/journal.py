"""What one order did to the device and to models: intervals and touched models, gathered until a report takes them."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from plexrl.v1 import types_pb2 as t


@dataclass
class Journal:
    """Notes of one order. A report takes what was noted since the last one."""

    intervals: list[t.DeviceInterval] = field(default_factory=list)
    touched: set[str] = field(default_factory=set)

    @contextmanager
    def timed(self, interval: t.DeviceInterval) -> Iterator[t.DeviceInterval]:
        """Notes the device time of the block, also when it fails. The block may add to `interval`, e.g. bytes moved."""
        interval.start_unix_ns = time.time_ns()
        try:
            yield interval
        finally:
            interval.end_unix_ns = time.time_ns()
            self.intervals.append(interval)

    def touch(self, model_id: str) -> None:
        """Notes that a model's residency, version, sequence or fate changed."""
        self.touched.add(model_id)

    def take(self) -> tuple[list[t.DeviceInterval], set[str]]:
        """What was noted since the last take."""
        taken = self.intervals, self.touched
        self.intervals, self.touched = [], set()
        return taken
