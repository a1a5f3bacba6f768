"""Who waits for what, in a world where something has not ended."""

import asyncio
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from plexrl_controller.domain.ids import CallId, ModelId
from tests.simulation.faults.controller import ControllerLife
from tests.simulation.faults.truth import Request

if TYPE_CHECKING:
    from tests.simulation.faults.world import World


def who_waits(world: "World") -> Iterator[str]:
    """A line for each client that hangs, and for each call that it waits for."""
    life = world.leader()
    for client in world.clients:
        if world.client_tasks[client.name].done():
            continue
        yield f"client {client.name} hangs in {_waits_in(world.client_tasks[client.name])}"
        for request in client.job.requests.values() if client.job else ():
            if request.call_id and request.outcome is None:
                yield f"{request.name} hangs: {_where(life, request)}"


def _where(life: ControllerLife | None, request: Request) -> str:
    """What the controller knows of a call."""
    if life is None:
        return "there is no controller"
    ledger = life.core.ledger
    call = ledger.calls.get(CallId(request.call_id))
    model = ledger.models.get(ModelId(request.message.model_id))
    if call is None or model is None:
        return f"call {call}, model {model}"
    worker = ledger.workers.get(model.worker_id) if model.worker_id else None
    return (
        f"{call.state.name} {call.reason.name} attempt {call.attempt}, revision {call.revision}; model "
        f"{model.state.name}, due {model.due_sequence}, applied {model.applied_sequence}, failed "
        f"{model.failed_sequence}, version {model.weights_version}; worker {worker and worker.state.name}, "
        f"{worker and ledger.groups[worker.worker_id]}"
    )


def _waits_in(task: "asyncio.Task[Any]") -> str:
    """The chain of awaits of a task that goes on no more."""
    names: list[str] = []
    step: Any = task.get_coro()
    while hasattr(step, "cr_frame"):
        names.append(f"{step.cr_code.co_name}:{step.cr_frame.f_lineno}" if step.cr_frame else "ended")
        step = step.cr_await
    return " > ".join(names)
