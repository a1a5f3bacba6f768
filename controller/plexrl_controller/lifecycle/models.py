"""The life of a model. Residency is data beside it, not a state of its own."""

from enum import Enum, auto

from plexrl_controller.domain.records import Model
from plexrl_controller.domain.states import ModelState as S
from plexrl_controller.lifecycle.machine import Effect, Machine, row


class ModelEvent(Enum):
    """What can happen to a model."""

    DEPLOYED = auto()
    BUILD_FAILED = auto()
    RECOVER = auto()
    LOSE_STATE = auto()
    RELOAD = auto()
    DELETE = auto()
    DROPPED = auto()


TERMINAL = frozenset({S.DELETED, S.FAILED})

MACHINE: Machine[Model, S, ModelEvent] = Machine(
    name="model",
    states=S,
    initial=S.CREATING,
    terminal=TERMINAL,
    record_id=lambda model: model.model_id,
    transitions=(
        row(ModelEvent.DEPLOYED, [S.CREATING, S.RECOVERING], S.PLACED, Effect.DELIVER, Effect.WAKE_GROUP),
        row(
            ModelEvent.BUILD_FAILED,
            [S.CREATING, S.RECOVERING],
            S.FAILED,
            Effect.DELIVER,
            Effect.CANCEL_CALLS,
            Effect.WAKE_GROUP,
        ),
        row(
            ModelEvent.RECOVER,
            [S.CREATING, S.PLACED, S.RECOVERING, S.STATE_LOST],
            S.RECOVERING,
            Effect.WAKE_GROUP,
            note="its state went with a worker or engine: a copy is restored and the calls since are executed again",
        ),
        row(
            ModelEvent.LOSE_STATE,
            [S.PLACED, S.RECOVERING],
            S.STATE_LOST,
            Effect.DELIVER,
            Effect.CANCEL_CALLS,
            Effect.WAKE_GROUP,
            note="no copy is left from which it can be rebuilt: load_checkpoint brings an earlier state back",
        ),
        row(ModelEvent.RELOAD, [S.STATE_LOST], S.RECOVERING, Effect.WAKE_GROUP, note="load_checkpoint was submitted"),
        row(
            ModelEvent.DELETE,
            [S.CREATING, S.PLACED, S.RECOVERING, S.STATE_LOST],
            S.DELETING,
            Effect.CANCEL_CALLS,
            Effect.DROP_MODELS,
            Effect.WAKE_GROUP,
        ),
        row(ModelEvent.DROPPED, [S.DELETING], S.DELETED, Effect.DELIVER, Effect.WAKE_GROUP),
    ),
)
