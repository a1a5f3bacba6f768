"""States on their way into spare device memory, ahead of their swap, while the device works for another model.

One at a time is under way per model; whoever wants to move the model waits for it here first.
"""

import asyncio
from collections.abc import Awaitable, Callable

from plexrl_worker.deployment import Deployment
from plexrl_worker.engine import errors as engine_errors
from plexrl_worker.engine.client import EngineProcess
from plexrl_worker.errors import of_engine
from plexrl_worker.residency import Residency

Attach = Callable[[Deployment, EngineProcess], Awaitable[None]]


class Preloads:
    """The preloads of a worker, and their place in the device's budget."""

    def __init__(self, residency: Residency) -> None:
        self._residency = residency
        self._running: dict[str, asyncio.Future[None]] = {}

    async def run(self, deployment: Deployment, process: EngineProcess, attach: Attach) -> None:
        """Brings a parked state, held in host memory, into device memory that is free; the state stays parked.

        Raises OverBudget when there is too little, and what `of_engine` makes of the engine's errors.
        """
        model_id = deployment.model_id
        if model_id in self._running or self._residency.preloaded(model_id) or deployment.parked is None:
            return
        self._residency.check_preload(model_id)
        done = self._running[model_id] = asyncio.get_running_loop().create_future()
        self._residency.set_preloaded(model_id, preloaded=True)
        arrived = False
        try:
            await attach(deployment, process)
            await process.preload(model_id, deployment.parked)
            arrived = deployment.attached is process
        except engine_errors.EngineError as error:
            raise of_engine(error) from error
        finally:
            self._residency.set_preloaded(model_id, preloaded=arrived)
            del self._running[model_id]
            done.set_result(None)

    async def settle(self, model_id: str) -> None:
        """Waits until no preload of a model is under way."""
        if (running := self._running.get(model_id)) is not None:
            await running
