"""Errors of the worker, and the one table from them to `google.rpc.Status`.

An error's `reason` is stable and goes over the wire; its message says what was wrong, the limit, and what to do.
"""

from collections.abc import Mapping

import grpc
from google.rpc import code_pb2, status_pb2

from plexrl import wire
from plexrl_worker.engine import errors as engine

MAX_MESSAGE_CHARACTERS = 600


class WorkerError(Exception):
    """Root of the worker's errors: a canonical code, a stable reason, a plain sentence and its numbers."""

    code: int = code_pb2.INTERNAL
    reason: str = "ENGINE_ERROR"

    def __init__(self, message: str, *, metadata: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.metadata = dict(metadata or {})


class SettingsError(WorkerError):
    """A setting of the daemon cannot be honoured; raised before anything is started."""

    code = code_pb2.INVALID_ARGUMENT
    reason = "INVALID_SETTING"


class InvalidOrder(WorkerError):
    """An order's arguments cannot be what the schema says."""

    code = code_pb2.INVALID_ARGUMENT
    reason = "INVALID_ARGUMENT"


class Unsupported(WorkerError):
    """Something that the wire reserves and this worker does not offer."""

    code = code_pb2.UNIMPLEMENTED
    reason = "UNSUPPORTED"


class StaleTerm(WorkerError):
    """An order or stream of a controller that is no longer the leader."""

    code = code_pb2.FAILED_PRECONDITION
    reason = "STALE_TERM"


class StaleIncarnation(WorkerError):
    """An order or stream for another life of this worker."""

    code = code_pb2.FAILED_PRECONDITION
    reason = "STALE_INCARNATION"


class StaleAttempt(WorkerError):
    """A newer attempt of the call is known."""

    code = code_pb2.FAILED_PRECONDITION
    reason = "STALE_ATTEMPT"


class NotRegistered(WorkerError):
    """The worker has no identity yet."""

    code = code_pb2.UNAVAILABLE
    reason = "WORKER_UNAVAILABLE"


class ShuttingDown(WorkerError):
    """The daemon is stopping and takes no orders."""

    code = code_pb2.UNAVAILABLE
    reason = "SHUTTING_DOWN"


class TooManyOrders(WorkerError):
    """The order queue is full."""

    code = code_pb2.RESOURCE_EXHAUSTED
    reason = "TOO_MANY_ORDERS"


class NotDeployed(WorkerError):
    """The model is not on this worker."""

    code = code_pb2.FAILED_PRECONDITION
    reason = "NOT_DEPLOYED"


class NotResident(WorkerError):
    """The model is here, but its state is not on the device."""

    code = code_pb2.FAILED_PRECONDITION
    reason = "NOT_RESIDENT"


class SequenceMismatch(WorkerError):
    """A sequenced call that does not follow the last one applied; nothing was applied."""

    code = code_pb2.FAILED_PRECONDITION
    reason = "SEQUENCE_MISMATCH"


class VersionGone(WorkerError):
    """A version of the rollout weights is asked for that is not the present one."""

    code = code_pb2.FAILED_PRECONDITION
    reason = "VERSION_GONE"


class SourceNotDeployed(NotDeployed):
    """What another worker asks for is not on this one."""

    code = code_pb2.NOT_FOUND


class SourceStateLost(WorkerError):
    """The state whose rollout weights another worker asks for is gone."""

    code = code_pb2.FAILED_PRECONDITION
    reason = "STATE_LOST"


class SourceBusy(WorkerError):
    """The rollout weights that another worker asks for cannot be read now; soon they can."""

    code = code_pb2.UNAVAILABLE
    reason = "SOURCE_BUSY"


class PullRefused(WorkerError):
    """Another worker does not give rollout weights, and will not however often it is asked."""

    code = code_pb2.FAILED_PRECONDITION
    reason = "PULL_REFUSED"


class PullFailed(WorkerError):
    """Another worker's rollout weights could not be had."""

    code = code_pb2.UNAVAILABLE
    reason = "PULL_FAILED"


class OverBudget(WorkerError):
    """A tier would hold more bytes than it may."""

    code = code_pb2.RESOURCE_EXHAUSTED
    reason = "OVER_BUDGET"


class OutOfMemory(WorkerError):
    """The engine ran out of device memory; the call changed nothing."""

    code = code_pb2.RESOURCE_EXHAUSTED
    reason = "OUT_OF_MEMORY"


class StateLost(WorkerError):
    """The newest copy of the model's training state is gone."""

    code = code_pb2.DATA_LOSS
    reason = "STATE_LOST"


class HostStateCorrupt(StateLost):
    """A parked state does not match its checksum."""

    reason = "HOST_STATE_CORRUPT"


class CheckpointCorrupt(WorkerError):
    """A checkpoint cannot be read as it was written."""

    code = code_pb2.DATA_LOSS
    reason = "CHECKPOINT_CORRUPT"


class ConditionsDiffer(WorkerError):
    """A state was made under conditions that this worker does not have: it would not be the same here."""

    code = code_pb2.FAILED_PRECONDITION
    reason = "CONDITIONS_DIFFER"


class CheckpointNotFound(WorkerError):
    """No committed checkpoint has this id here."""

    code = code_pb2.NOT_FOUND
    reason = "CHECKPOINT_NOT_FOUND"


class StorageFailed(WorkerError):
    """The checkpoint or state directory could not be written."""

    code = code_pb2.RESOURCE_EXHAUSTED
    reason = "STORAGE_FAILED"


class NonFinite(WorkerError):
    """Numbers that are not finite; nothing was applied."""

    code = code_pb2.INVALID_ARGUMENT
    reason = "NON_FINITE"


class Cancelled(WorkerError):
    """The call was stopped by an abort order; nothing was applied. Who wanted that, and why, the controller knows."""

    code = code_pb2.CANCELLED
    reason = "CANCELLED"


class EngineFailed(WorkerError):
    """An error inside the engine that the arguments do not explain; the engine lives on."""

    code = code_pb2.INTERNAL
    reason = "ENGINE_ERROR"


class EngineDied(WorkerError):
    """The engine child ended while it was needed. A new attempt starts a new child."""

    code = code_pb2.UNAVAILABLE
    reason = "ENGINE_DIED"


class EngineHung(EngineDied):
    """The engine child made no progress for too long and was killed."""

    reason = "ENGINE_HUNG"


class NoTokenizer(WorkerError):
    """The model's base came without a tokenizer."""

    code = code_pb2.FAILED_PRECONDITION
    reason = "NO_TOKENIZER"


class PayloadUnavailable(WorkerError):
    """A file of an uploaded bundle could not be fetched from the controller."""

    code = code_pb2.UNAVAILABLE
    reason = "PAYLOAD_UNAVAILABLE"


def to_status(error: WorkerError) -> status_pb2.Status:
    """The error as it stands in a report. A message may quote what was sent: it is cut to fit a trailer, twice."""
    cut = len(error.message) > MAX_MESSAGE_CHARACTERS
    message = f"{error.message[:MAX_MESSAGE_CHARACTERS]}..." if cut else error.message
    return wire.error_status(
        wire.ErrorInfo(code=error.code, reason=error.reason, message=message, metadata=error.metadata)
    )


# What an engine says, in the worker's words. Kinds that only a mistake of the daemon's could cause are not listed: they
# become EngineFailed with the engine's sentence.
_OF_ENGINE: Mapping[type[engine.EngineError], type[WorkerError]] = {
    engine.InvalidArgument: InvalidOrder,
    engine.Unsupported: Unsupported,
    engine.NonFinite: NonFinite,
    engine.OutOfMemory: OutOfMemory,
    engine.Aborted: Cancelled,
    engine.NotResident: NotResident,
    engine.VersionMismatch: VersionGone,
    engine.ParkedStateCorrupt: HostStateCorrupt,
    engine.CheckpointCorrupt: CheckpointCorrupt,
    engine.CheckpointMismatch: InvalidOrder,
    engine.EngineHung: EngineHung,
    engine.EngineDied: EngineDied,
}


def of_engine(error: engine.EngineError) -> WorkerError:
    """The worker's error for an engine's."""
    return _OF_ENGINE.get(type(error), EngineFailed)(str(error))


GRPC_CODES: Mapping[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}
