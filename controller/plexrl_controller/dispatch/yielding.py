"""Calls in flight are asked to give way, and nothing else is decided until they have, or a chunk has passed.

A worker may let a call go on to its end all the same: it is then asked again after another chunk. What becomes of a
call that yields is in `docs/adr/0012-parked-calls.md`.
"""

from plexrl_controller.dispatch.core import Core
from plexrl_controller.domain.errors import ControllerError
from plexrl_controller.domain.ids import WorkerId
from plexrl_controller.domain.states import CallKind, CallState


def ask_to_yield(core: Core, worker_id: WorkerId) -> None:
    """Asks every call in flight that can to stop at its next step; orders of the group wait for them."""
    group = core.ledger.groups[worker_id]
    asked = [
        call
        for call in core.ledger.in_flight(worker_id)
        if call.kind is CallKind.GENERATE and call.state is not CallState.CANCELLING
    ]
    group.chunk_start = core.clock.now()
    group.yielding = {call.call_id: None for call in asked}
    orders = [core.orders.give_way(call) for call in asked]
    # Behind the orders to run them, which leave once they are durable: a worker says of a call that it does not know
    # that it has yielded, and would then run it for as long as it takes.
    group.held_orders += 1

    def tell(error: ControllerError | None) -> None:
        group.held_orders -= 1
        if error is None:
            core.transport.send(worker_id, orders)

    core.queue(core.batch(), tell)


def yields_s(core: Core, worker_id: WorkerId, now: float) -> float | None:
    """How long calls that were asked have left to yield; None when none is, or was, being waited for."""
    group = core.ledger.groups[worker_id]
    if not group.yielding:
        return None
    left_s = group.chunk_start + core.policy.chunk_s - now
    if left_s <= 0.0:
        group.yielding.clear()
        return None
    return left_s
