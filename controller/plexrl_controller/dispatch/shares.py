"""What each of the calls that run together has had of the device since it began, or last went on.

At each moment all that run have the same share of it. Volatile; what earlier stretches took is measured by the worker.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from plexrl_controller.domain.ids import CallId


@dataclass
class DeviceShares:
    """Of one worker. `note` is told whenever the set may have changed."""

    _each_s: float = 0.0
    """What a call has had that has run all the time."""
    _at: float = 0.0
    _joined: dict[CallId, float] = field(default_factory=dict)
    """What `_each_s` was when each began."""

    def note(self, running: Iterable[CallId], now: float) -> None:
        """Until now ran what ran when this was last told; these do from now on."""
        if self._joined:
            self._each_s += max(0.0, now - self._at) / len(self._joined)
        self._at = now
        self._joined = {call_id: self._joined.get(call_id, self._each_s) for call_id in running}

    def had_s(self, call_id: CallId, now: float) -> float:
        """Seconds of the device that one of them has had."""
        if (joined := self._joined.get(call_id)) is None:
            return 0.0
        return self._each_s - joined + max(0.0, now - self._at) / len(self._joined)
