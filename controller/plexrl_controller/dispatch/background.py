"""Carries out the background moves of a plan: at most one prefetch per slice, whatever becomes of it.

A prefetch is a hint. Whether it succeeds shows in how long the swap takes; one that the worker refuses is not repeated
until the group's residency has changed.
"""

from collections.abc import Sequence

from plexrl_controller.dispatch.core import Core
from plexrl_controller.domain.ids import WorkerId
from plexrl_controller.domain.states import ModelState
from plexrl_controller.scheduling.plan import Prefetch, WriteBack


def begin_moves(core: Core, worker_id: WorkerId, moves: Sequence[Prefetch | WriteBack]) -> None:
    """Sends the moves that are not under way."""
    worker, group = core.ledger.workers[worker_id], core.ledger.groups[worker_id]
    for move in moves:
        match move:
            case Prefetch(model_id=model_id) if core.ledger.models[model_id].state is not ModelState.PLACED:
                # There is nothing parked yet that could be moved.
                pass
            case Prefetch(model_id=model_id, drop=()) if group.prefetched is None:
                group.prefetched = model_id
                core.transport.send(worker_id, [core.orders.prefetch(model_id, worker.incarnation)])
            case Prefetch():
                # Dropping a clean copy is a residency change of its own: it waits for the next swap.
                pass
            case WriteBack():
                # Workers write back what is dirty when it leaves the device; views say so by no dirty bytes.
                pass
