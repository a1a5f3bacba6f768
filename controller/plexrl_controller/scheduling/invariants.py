"""What must hold of every decision before it is committed; one that breaks it is rejected, logged and counted.

Written from the rules alone, without the code that decides, so that a mistake there cannot hide here.
"""

from plexrl_controller.domain.ids import JobId, ModelId
from plexrl_controller.scheduling.plan import Hold, Plan, Prefetch, Serve, WriteBack, Yield
from plexrl_controller.scheduling.views import GroupView, ModelView


def violations(view: GroupView, plan: Plan) -> tuple[str, ...]:
    """The numbered invariants that `plan` breaks in `view`; empty when it may be executed."""
    action = plan.action
    broken: list[str] = []
    if isinstance(action, Serve):
        broken += _serve(view, action)
    elif isinstance(action, Yield):
        running = view.job(action.job_id)
        if not view.can_yield or running is None or not running.in_flight:
            broken.append("I11: only calls in flight yield, on a group that can park them")
    elif isinstance(action, Hold) and view.in_flight:
        broken.append("I12: a group with calls in flight is not held")
    if plan.background:
        broken += _background(view, plan)
    return tuple(broken)


def _serve(view: GroupView, action: Serve) -> list[str]:
    broken = []
    models = {m.model_id: m for job in view.jobs for m in job.models}
    resident = {m.model_id for m in models.values() if m.on_device or m.moving}
    if not view.available:
        broken.append("I1: the group is not available")
    if view.lost_ranks:
        broken.append(f"I10: gang: {view.lost_ranks} of {view.world_size} ranks are missing; all run a call, or none")
    if not action.calls:
        broken.append("I2: a slice has at least one call")
    ready = {call.call_id for job in view.jobs if job.job_id == action.job_id for m in job.models for call in m.ready}
    if any(call.call_id not in ready for call in action.calls):
        broken.append("I3: affinity: every call is ready, of the served job, and its model is on this group")
    in_flight = view.in_flight
    if in_flight and action.job_id != view.serving:
        broken.append("I4: one job at a time: calls of another job are in flight")
    if any(model_id not in resident for model_id in action.evict):
        broken.append("I5: only resident models are evicted")
    after = {m for m in resident if models[m].on_device and m not in action.evict}
    if action.load is not None:
        if action.load not in models or models[action.load].on_device:
            broken.append("I6: only a parked model of this group is loaded")
        else:
            after.add(action.load)
    broken += _budget(view, models, (resident - set(action.evict)) | after, action.forget_kv)
    if any(call.model_id not in after for call in action.calls):
        broken.append("I8: the models of all calls are resident once the swap is done")
    if in_flight and (action.load is not None or action.evict or action.forget_kv):
        broken.append("I9: no swap while calls are in flight")
    return broken


def _background(view: GroupView, plan: Plan) -> list[str]:
    broken = []
    models = {m.model_id: m for job in view.jobs for m in job.models}
    owner = {m.model_id: job.job_id for job in view.jobs for m in job.models}
    action = plan.action
    evicted: set[ModelId] = set(action.evict) if isinstance(action, Serve) else set()
    loaded = {action.load} - {None} if isinstance(action, Serve) else set()
    forgotten = action.forget_kv if isinstance(action, Serve) else ()
    present: JobId | None = action.job_id if isinstance(action, Serve) else view.serving
    after = ({m.model_id for m in models.values() if m.on_device or m.moving} - evicted) | loaded
    if not view.background_moves or isinstance(action, Yield) or any(m.moving for m in models.values()):
        broken.append("I13: background moves need a group that does them, and one set of them at a time")
    for move in plan.background:
        match move:
            case Prefetch(model_id=model_id, drop=drop):
                if any(m not in after or models[m].dirty_bytes or owner[m] == present for m in drop):
                    broken.append("I14: a prefetch drops only clean resident copies of jobs that are not being served")
                if model_id not in models or model_id in after:
                    broken.append("I15: only a parked model of this group is prefetched")
                else:
                    after = (after - set(drop)) | {model_id}
            case WriteBack(model_id=model_id):
                if model_id not in after or not models[model_id].dirty_bytes or models[model_id].changing:
                    broken.append("I16: only changed state at rest on the device is written back")
    known = {m for m in after if m in models}
    return broken + _budget(view, models, known, forgotten)


def _budget(
    view: GroupView, models: dict[ModelId, ModelView], resident: set[ModelId], forgotten: tuple[ModelId, ...]
) -> list[str]:
    parked = sum(m.parked_bytes for m in models.values() if m.model_id not in forgotten)
    taken = sum(models[m].state_bytes for m in resident) + parked
    if taken > view.device_state_bytes:
        return [f"I7: device budget: {taken} of {view.device_state_bytes} bytes"]
    return []
