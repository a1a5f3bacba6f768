"""Where a new model goes, or the reason why nowhere. Pure; called at job boundaries and after losses."""

from dataclasses import dataclass, field

from plexrl_controller.domain.ids import ModelId, WorkerId
from plexrl_controller.scheduling.views import ClusterView, WorkerView


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """What a model needs of its worker."""

    architecture: str | None = None
    """Hugging Face architecture name, where the base tells it."""
    catalogue: str | None = None
    require: dict[str, str] = field(default_factory=dict)
    colocate: frozenset[ModelId] = frozenset()
    avoid: frozenset[ModelId] = frozenset()
    state_bytes: int = 0
    """0 while unknown: the worker checks its budgets when it builds the model."""


@dataclass(frozen=True, slots=True)
class Placed:
    """The worker that was chosen."""

    worker_id: WorkerId


@dataclass(frozen=True, slots=True)
class Refused:
    """No worker fits; `temporary` says whether one may when it is back."""

    reason: str
    temporary: bool


def place(view: ClusterView, request: PlacementRequest) -> Placed | Refused:
    """Spreads: of the workers that fit, the one with the fewest bytes and models, by name on a tie."""
    if not view.workers:
        return Refused("no worker has registered; start one with `plexrl-worker` or `plexrl up`", temporary=True)
    unfit = {worker.worker_id: reason for worker in view.workers if (reason := _misfit(worker, request))}
    fitting = [worker for worker in view.workers if worker.worker_id not in unfit]
    ready = [worker for worker in fitting if worker.ready]
    if ready:
        best = min(ready, key=lambda w: (w.placed_bytes, len(w.model_ids), w.worker_id))
        return Placed(best.worker_id)
    if fitting:
        return Refused(f"{len(fitting)} worker(s) would fit but none is READY now", temporary=True)
    reasons = "; ".join(f"{worker_id}: {reason}" for worker_id, reason in sorted(unfit.items())[:4])
    return Refused(f"none of {len(view.workers)} worker(s) fits: {reasons}", temporary=False)


def _misfit(worker: WorkerView, request: PlacementRequest) -> str | None:
    """Why `worker` can never take the model as it is."""
    if request.architecture is not None and request.architecture not in worker.architectures:
        return f"offers {', '.join(sorted(worker.architectures)) or 'no architecture'}, not {request.architecture}"
    if request.catalogue is not None and request.catalogue not in worker.catalogue:
        return f"catalogue has {', '.join(sorted(worker.catalogue)) or 'no entry'}, not {request.catalogue!r}"
    for key, value in sorted(request.require.items()):
        if worker.labels.get(key) != value:
            return f"label {key}={worker.labels.get(key, '(absent)')}, want {key}={value}"
    if not request.colocate <= worker.model_ids:
        return "lacks a model to colocate with"
    if request.avoid & worker.model_ids:
        return "has a model to stay away from"
    if request.state_bytes > worker.device_state_bytes:
        return f"device holds {worker.device_state_bytes} bytes of state, the model needs {request.state_bytes}"
    if worker.placed_bytes + request.state_bytes > worker.host_state_bytes:
        return f"host tier holds {worker.host_state_bytes} bytes, {worker.placed_bytes} are taken"
    return None
