"""Where the replays of a recovering model stand, for the cycle and for people. Pure functions of the ledger."""

from itertools import takewhile

from plexrl_controller.dispatch.ledger import Ledger
from plexrl_controller.dispatch.pulls import may_be_ordered
from plexrl_controller.domain.ids import CallId, ModelId
from plexrl_controller.domain.records import Call, Model
from plexrl_controller.scheduling.views import ReadyCall


def ready_replays(ledger: Ledger, model: Model, limit: int) -> tuple[ReadyCall, ...]:
    """Calls to execute again that the worker may be given now, in order."""
    recovery = ledger.recoveries.get(model.model_id)
    if recovery is None:
        return ()
    due = list(takewhile(lambda replay: may_be_ordered(ledger, replay.call), recovery.due[:limit]))
    return tuple(
        ReadyCall(r.call.call_id, model.model_id, r.call.kind, recovery.started, after_sequence=r.after) for r in due
    )


def replayed_call(ledger: Ledger, model_id: ModelId, call_id: CallId) -> Call | None:
    """The record of a call that the model's recovery executes again."""
    recovery = ledger.recoveries.get(model_id)
    replays = recovery.replays or () if recovery is not None else ()
    return next((replay.call for replay in replays if replay.call.call_id == call_id), None)


def replays_in_flight(ledger: Ledger, model: Model) -> int:
    """Replays that the model's worker has been given and not answered for."""
    recovery = ledger.recoveries.get(model.model_id)
    return len(recovery.in_flight) if recovery is not None else 0


def progress(ledger: Ledger, model: Model) -> str:
    """How far a recovery is, in a few words; empty when there is nothing to say."""
    recovery = ledger.recoveries.get(model.model_id)
    if recovery is None or recovery.replays is None:
        return ""
    left_s = ledger.log(model.model_id).busy_s_after(
        recovery.replays[recovery.position - 1].call.sequence if recovery.position else recovery.point.sequence
    )
    return f"{recovery.position} of {len(recovery.replays)} calls executed again, about {left_s:.1f} s left"
