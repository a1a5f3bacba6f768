"""The life of a job: it ends by its client, by an error, or when nobody renews its lease."""

from enum import Enum, auto

from plexrl_controller.domain.records import Job
from plexrl_controller.domain.states import JobState as S
from plexrl_controller.lifecycle.machine import Effect, Machine, row


class JobEvent(Enum):
    """What can happen to a job."""

    PAUSE = auto()
    CONTINUE = auto()
    FINISH = auto()
    RELEASED = auto()
    FAIL = auto()
    EXPIRE = auto()


TERMINAL = frozenset({S.FINISHED, S.FAILED, S.EXPIRED})
_FREE = (Effect.CANCEL_CALLS, Effect.DROP_MODELS)

MACHINE: Machine[Job, S, JobEvent] = Machine(
    name="job",
    states=S,
    initial=S.ACTIVE,
    terminal=TERMINAL,
    record_id=lambda job: job.job_id,
    transitions=(
        row(JobEvent.PAUSE, [S.ACTIVE], S.PAUSED),
        row(JobEvent.CONTINUE, [S.PAUSED], S.ACTIVE, Effect.WAKE_GROUP),
        row(JobEvent.FINISH, [S.ACTIVE, S.PAUSED], S.FINISHING, *_FREE),
        row(JobEvent.RELEASED, [S.FINISHING], S.FINISHED, note="its calls are over and its models gone"),
        row(JobEvent.FAIL, [S.ACTIVE, S.PAUSED, S.FINISHING], S.FAILED, *_FREE),
        row(JobEvent.EXPIRE, [S.ACTIVE, S.PAUSED], S.EXPIRED, *_FREE, note="checkpoints stay"),
    ),
)
