"""Errors of an engine. Each has a stable `reason` that crosses the process boundary and, where there is one, equals the
name of a `plexrl.v1.CallReason`. Knows nothing of processes or protobuf.
"""

from typing import ClassVar


class EngineError(Exception):
    """An engine could not do what was asked; the message says what was wrong, the limit, and what to do."""

    reason: ClassVar[str] = "ENGINE_ERROR"


class InvalidArgument(EngineError):
    """The arguments cannot be honoured; nothing was changed."""

    reason = "INVALID_ARGUMENT"


class Unsupported(EngineError):
    """The architecture or setting is not offered; nothing was changed."""

    reason = "UNSUPPORTED"


class NonFinite(EngineError):
    """A loss or gradient is not finite; nothing was applied."""

    reason = "NON_FINITE"


class OutOfMemory(EngineError):
    """The device has no memory left for this; the state is as before."""

    reason = "OUT_OF_MEMORY"


class Aborted(EngineError):
    """The caller asked to stop; the state is as before."""

    reason = "ABORTED"


class Yielded(EngineError):
    """The caller asked it to give way: what it has done is kept, and goes on when it is called again."""

    reason = "YIELDED"


class UnknownDeployment(EngineError):
    """This engine does not know the deployment."""

    reason = "UNKNOWN_DEPLOYMENT"


class NotResident(EngineError):
    """The function needs components that are not on the device; swap them in first."""

    reason = "NOT_RESIDENT"


class DeviceNotHeld(EngineError):
    """The function needs the device, which this engine was told to release."""

    reason = "DEVICE_NOT_HELD"


class SlotOccupied(EngineError):
    """Another deployment's weights are in the generator; swap them out first."""

    reason = "SLOT_OCCUPIED"


class VersionMismatch(EngineError):
    """The generator holds another version of the weights than the one asked for."""

    reason = "VERSION_MISMATCH"


class ParkedStateCorrupt(EngineError):
    """A parked component does not have the checksum it was parked with; nothing of it is served."""

    reason = "PARKED_STATE_CORRUPT"


class CheckpointCorrupt(EngineError):
    """A checkpoint cannot be read as it was written; nothing was loaded."""

    reason = "CHECKPOINT_CORRUPT"


class CheckpointMismatch(EngineError):
    """A checkpoint is whole but was written for another architecture or under other conditions; nothing was loaded."""

    reason = "CHECKPOINT_MISMATCH"


class EngineDied(EngineError):
    """The engine process ended while it was needed. State that was only on its device is lost."""

    reason = "ENGINE_DIED"

    def __init__(self, message: str, exit_code: int | None = None, signal: int | None = None) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.signal = signal


class EngineHung(EngineDied):
    """The engine process made no progress for its limit and was killed."""

    reason = "ENGINE_HUNG"


_WIRE_ERRORS: dict[str, type[EngineError]] = {
    kind.reason: kind
    for kind in (
        EngineError,
        InvalidArgument,
        Unsupported,
        NonFinite,
        OutOfMemory,
        Aborted,
        Yielded,
        UnknownDeployment,
        NotResident,
        DeviceNotHeld,
        SlotOccupied,
        VersionMismatch,
        ParkedStateCorrupt,
        CheckpointCorrupt,
        CheckpointMismatch,
    )
}


def error_of(reason: str, message: str) -> EngineError:
    """The error that a reason names; an unknown reason gives a plain EngineError that quotes it."""
    kind = _WIRE_ERRORS.get(reason)
    return kind(message) if kind else EngineError(f"{reason}: {message}")
