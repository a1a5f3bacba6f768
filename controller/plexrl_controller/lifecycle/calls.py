"""The life of a call: every accepted call reaches a terminal state."""

from enum import Enum, auto
from operator import attrgetter

from plexrl_controller.domain.records import Call
from plexrl_controller.domain.states import CallState as S
from plexrl_controller.lifecycle.machine import Effect, Machine, row


class CallEvent(Enum):
    """What can happen to a call."""

    DISPATCH = auto()
    START = auto()
    YIELD = auto()
    CONTINUE = auto()
    SUCCEED = auto()
    FAIL = auto()
    LOSE_ATTEMPT = auto()
    REQUEST_CANCEL = auto()
    CANCEL = auto()
    EXPIRE = auto()


TERMINAL = frozenset({S.SUCCEEDED, S.FAILED, S.CANCELLED, S.EXPIRED})
ON_WORKER = frozenset({S.DISPATCHED, S.RUNNING, S.YIELDED, S.CANCELLING})
IN_FLIGHT = frozenset({S.DISPATCHED, S.RUNNING, S.CANCELLING})
"""The worker is to execute it: a call that yielded is there too, and waits for its turn like a pending one."""
_ENDED_BADLY = (Effect.DELIVER, Effect.FAIL_SUCCESSORS, Effect.WAKE_GROUP)

MACHINE: Machine[Call, S, CallEvent] = Machine(
    name="call",
    states=S,
    initial=S.PENDING,
    terminal=TERMINAL,
    record_id=attrgetter("call_id"),
    transitions=(
        row(CallEvent.DISPATCH, [S.PENDING], S.DISPATCHED, Effect.SEND_ORDER, note="a new attempt is committed"),
        row(CallEvent.START, [S.DISPATCHED], S.RUNNING, Effect.DELIVER),
        row(
            CallEvent.YIELD,
            [S.DISPATCHED, S.RUNNING],
            S.YIELDED,
            Effect.DELIVER,
            Effect.WAKE_GROUP,
            note="it gave way to another job; one that was given ahead need not have begun",
        ),
        row(CallEvent.CONTINUE, [S.YIELDED], S.RUNNING, Effect.DELIVER, Effect.SEND_ORDER, note="the same attempt"),
        row(
            CallEvent.SUCCEED,
            [S.DISPATCHED, S.RUNNING, S.YIELDED, S.CANCELLING],
            S.SUCCEEDED,
            Effect.DELIVER,
            Effect.WAKE_GROUP,
            note="a result that was ready before the cancel arrived counts; so does one of a call that went on, where "
            "that it had yielded was heard late",
        ),
        row(CallEvent.FAIL, [S.PENDING, S.DISPATCHED, S.RUNNING], S.FAILED, *_ENDED_BADLY),
        row(
            CallEvent.FAIL,
            [S.YIELDED],
            S.FAILED,
            *_ENDED_BADLY,
            Effect.SEND_ABORT,
            note="its worker keeps nothing of it",
        ),
        row(
            CallEvent.LOSE_ATTEMPT,
            [S.DISPATCHED, S.RUNNING, S.YIELDED],
            S.PENDING,
            Effect.WAKE_GROUP,
            note="engine or worker died; the next attempt starts over",
        ),
        row(CallEvent.REQUEST_CANCEL, [S.DISPATCHED, S.RUNNING, S.YIELDED], S.CANCELLING, Effect.SEND_ABORT),
        row(CallEvent.CANCEL, [S.PENDING, S.CANCELLING], S.CANCELLED, *_ENDED_BADLY),
        row(CallEvent.FAIL, [S.CANCELLING], S.CANCELLED, *_ENDED_BADLY, note="it was ending anyway"),
        row(CallEvent.LOSE_ATTEMPT, [S.CANCELLING], S.CANCELLED, *_ENDED_BADLY),
        row(
            CallEvent.EXPIRE,
            [S.PENDING, S.CANCELLING],
            S.EXPIRED,
            *_ENDED_BADLY,
            note="on a worker it is CANCELLING first: whether it was applied is known only from the worker",
        ),
    ),
)
