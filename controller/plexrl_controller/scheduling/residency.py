"""Which states are on the device: what leaves so that a model fits, and what moves in the background. Pure."""

from plexrl_controller.domain.ids import ModelId
from plexrl_controller.scheduling.plan import Action, Prefetch, Serve, WriteBack, Yield
from plexrl_controller.scheduling.policy import Policy
from plexrl_controller.scheduling.views import GroupView, JobView, ModelView


def used_bytes(view: GroupView) -> int:
    """Bytes of each rank's device that states and parked KV take now."""
    return sum([m.occupies_bytes for job in view.jobs for m in job.models])


def make_room(view: GroupView, incoming: ModelView) -> tuple[tuple[ModelId, ...], tuple[ModelId, ...]]:
    """Models whose state must leave, and models whose parked KV must go too, so that `incoming` fits the device.

    States of idle jobs leave before those of waiting ones, clean ones before dirty ones, and then the least recently
    used. Parked KV goes only when every other state has left: it costs a recomputation.
    """
    if incoming.on_device:
        return (), ()
    excess = used_bytes(view) - view.device_state_bytes
    excess += 0 if incoming.moving else incoming.state_bytes
    if excess <= 0:
        return (), ()
    evict: list[ModelId] = []
    for _, _, _, model_id, model in sorted(
        (_waits(job), m.dirty_bytes > 0, m.last_used, m.model_id, m)
        for job in view.jobs
        for m in job.models
        if (m.on_device or m.moving) and m.model_id != incoming.model_id
    ):
        evict.append(model_id)
        excess -= model.state_bytes
        if excess <= 0:
            return tuple(evict), ()
    forget: list[ModelId] = []
    for model in sorted(
        (m for job in view.jobs for m in job.models if m.parked_bytes),
        key=lambda m: (m.model_id == incoming.model_id, m.last_used, m.model_id),
    ):
        forget.append(model.model_id)
        excess -= model.parked_bytes
        if excess <= 0:
            break
    return tuple(evict), tuple(forget)


def background(
    view: GroupView, action: Action, upcoming: JobView | None, policy: Policy
) -> tuple[Prefetch | WriteBack, ...]:
    """Moves beside the action: the next job's model in, changed state out. One of each at a time."""
    if not view.background_moves or len(view.jobs) < 2 or isinstance(action, Yield):
        return ()
    if any(m.moving for job in view.jobs for m in job.models):
        return ()
    prefetch = _prefetch(view, action, upcoming) if upcoming is not None else None
    written = _write_back(view, action) if policy.write_back else None
    return tuple([move for move in (prefetch, written) if move is not None])


def _prefetch(view: GroupView, action: Action, job: JobView) -> Prefetch | None:
    """The model that `job` will need, if it fits beside what the action needs."""
    model = min(job.models, key=_next_use)
    if model.on_device:
        return None
    load, evict, forget = _changes(action)
    if model.model_id == load:
        return None
    present = action.job_id if isinstance(action, Serve) else view.serving
    room = view.device_state_bytes
    droppable: list[tuple[float, ModelId, int]] = []
    for other in view.jobs:
        for m in other.models:
            room -= 0 if m.model_id in forget else m.parked_bytes
            if m.model_id == load or ((m.on_device or m.moving) and m.model_id not in evict):
                room -= m.state_bytes
                if (
                    m.on_device
                    and not m.dirty_bytes
                    and other.job_id not in (present, job.job_id)
                    and not _waits(other)
                ):
                    droppable.append((m.last_used, m.model_id, m.state_bytes))
    drop: list[ModelId] = []
    for _, model_id, state_bytes in sorted(droppable):
        if room >= model.state_bytes:
            break
        drop.append(model_id)
        room += state_bytes
    return Prefetch(model.model_id, tuple(drop)) if room >= model.state_bytes else None


def _write_back(view: GroupView, action: Action) -> WriteBack | None:
    """The dirty state that is likely to leave next, while nothing changes it; none when all models fit together."""
    if sum([m.state_bytes for job in view.jobs for m in job.models]) <= view.device_state_bytes:
        return None
    _, evict, _ = _changes(action)
    starting = {c.model_id for c in action.calls if c.kind.sequenced} if isinstance(action, Serve) else frozenset()
    stable = [
        (m.last_used, m.model_id)
        for job in view.jobs
        for m in job.models
        if m.on_device and m.dirty_bytes and not m.changing and m.model_id not in evict and m.model_id not in starting
    ]
    return WriteBack(min(stable)[1]) if stable else None


def _changes(action: Action) -> tuple[ModelId | None, tuple[ModelId, ...], tuple[ModelId, ...]]:
    if isinstance(action, Serve):
        return action.load, action.evict, action.forget_kv
    return None, (), ()


def _next_use(model: ModelView) -> tuple[bool, float, ModelId]:
    """Models with ready calls first, oldest first; of the others the one used last."""
    return not model.ready, model.ready[0].ready_since if model.ready else -model.last_used, model.model_id


def _waits(job: JobView) -> bool:
    return any(m.ready for m in job.models)
