"""The life of a worker: a missed lease loses it, and only a new incarnation brings it back."""

from enum import Enum, auto

from plexrl_controller.domain.records import Worker
from plexrl_controller.domain.states import WorkerState as S
from plexrl_controller.lifecycle.machine import Effect, Machine, row


class WorkerEvent(Enum):
    """What can happen to a worker."""

    OPEN_STREAM = auto()
    REGISTER = auto()
    CORDON = auto()
    UNCORDON = auto()
    DRAIN = auto()
    EMPTY = auto()
    LOSE = auto()


MACHINE: Machine[Worker, S, WorkerEvent] = Machine(
    name="worker",
    states=S,
    initial=S.JOINING,
    terminal=frozenset(),
    record_id=lambda worker: worker.worker_id,
    transitions=(
        row(WorkerEvent.OPEN_STREAM, [S.JOINING], S.READY, Effect.WAKE_GROUP),
        row(WorkerEvent.REGISTER, list(S), S.JOINING, Effect.REASSIGN, note="a new incarnation; the old one is void"),
        row(WorkerEvent.CORDON, [S.READY], S.CORDONED),
        row(WorkerEvent.UNCORDON, [S.CORDONED], S.READY, Effect.WAKE_GROUP),
        row(WorkerEvent.DRAIN, [S.READY, S.CORDONED], S.DRAINING, Effect.WAKE_GROUP),
        row(WorkerEvent.EMPTY, [S.DRAINING], S.DRAINED),
        row(
            WorkerEvent.LOSE,
            [S.JOINING, S.READY, S.CORDONED, S.DRAINING, S.DRAINED],
            S.LOST,
            Effect.REASSIGN,
        ),
    ),
)
