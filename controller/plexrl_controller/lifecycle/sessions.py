"""The life of a session: open until its client closes it, nobody uses it, or its model goes.

Whether its calls may run just now is no state of it: that changes with whose turn it is (`dispatch/sessions`).
"""

from enum import Enum, auto
from operator import attrgetter

from plexrl_controller.domain.records import Session
from plexrl_controller.domain.states import SessionState as S
from plexrl_controller.lifecycle.machine import Effect, Machine, row


class SessionEvent(Enum):
    """What can happen to a session."""

    CLOSE = auto()
    EXPIRE = auto()


TERMINAL = frozenset({S.CLOSED, S.EXPIRED})

MACHINE: Machine[Session, S, SessionEvent] = Machine(
    name="session",
    states=S,
    initial=S.OPEN,
    terminal=TERMINAL,
    record_id=attrgetter("session_id"),
    transitions=(
        row(
            SessionEvent.CLOSE,
            [S.OPEN],
            S.CLOSED,
            Effect.DELIVER,
            Effect.WAKE_GROUP,
            note="by its client, or with its model; what is left of its calls goes on as calls outside a session",
        ),
        row(SessionEvent.EXPIRE, [S.OPEN], S.EXPIRED, Effect.DELIVER, Effect.WAKE_GROUP, note="nobody used it"),
    ),
)
