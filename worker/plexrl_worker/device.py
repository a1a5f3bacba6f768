"""Who has the device: one engine child at a time. Handing it over releases the other child's KV cache and weight slot.

The lock orders everything that touches the device; whoever calls `grant` holds it.
"""

import contextlib

from plexrl_worker.engine.client import EngineProcess
from plexrl_worker.engine.errors import EngineDied
from plexrl_worker.engine.port import DeviceRelease
from plexrl_worker.wanted_lock import WantedLock


class Device:
    """The one device of this worker."""

    def __init__(self) -> None:
        self.lock = WantedLock()
        self._holder: EngineProcess | None = None

    @property
    def holder(self) -> EngineProcess | None:
        """The child that has the device; None when none has, or the one that had it is dead."""
        return self._holder if self._holder is not None and self._holder.death is None else None

    async def grant(self, process: EngineProcess) -> DeviceRelease | None:
        """Takes the device from the child that has it, whose models must all be parked, and gives it to `process`.

        Returns what the former one gave up, None when there was none.

        Raises EngineError kinds of either child; the device is then free.
        """
        holder = self.holder
        if holder is process:
            return None
        self._holder, released = None, None
        if holder is not None:
            # A child that has died holds nothing.
            with contextlib.suppress(EngineDied):
                released = await holder.release_device()
        await process.acquire_device()
        self._holder = process
        return released
