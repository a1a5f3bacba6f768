"""What must hold of every decision before it is committed; one that breaks it is rejected, logged and counted."""

from plexrl_controller.scheduling.next_slice import Decision, Serve
from plexrl_controller.scheduling.views import GroupView


def violations(view: GroupView, decision: Decision) -> tuple[str, ...]:
    """The numbered invariants that `decision` breaks in `view`; empty when it may be executed."""
    if not isinstance(decision, Serve):
        return ()
    broken = []
    models = {m.model_id: (job, m) for job in view.jobs for m in job.models}
    resident = {m.model_id: m.state_bytes for job in view.jobs for m in job.models if m.on_device}
    if not view.available:
        broken.append("I1: the group is not available")
    if not decision.calls:
        broken.append("I2: a slice has at least one call")
    ready = {call.call_id for job in view.jobs if job.job_id == decision.job_id for call in job.ready}
    if any(call.call_id not in ready for call in decision.calls):
        broken.append("I3: affinity: every call is ready, of the served job, and its model is on this group")
    if view.in_flight and decision.job_id != view.serving:
        broken.append("I4: one job at a time: calls of another job are in flight")
    if any(model_id not in resident for model_id in decision.evict):
        broken.append("I5: only resident models are evicted")
    after = {k: v for k, v in resident.items() if k not in decision.evict}
    if decision.load is not None:
        if decision.load not in models or decision.load in resident:
            broken.append("I6: only a parked model of this group is loaded")
        else:
            after[decision.load] = models[decision.load][1].state_bytes
    if sum(after.values()) > view.device_state_bytes:
        broken.append(f"I7: device budget: {sum(after.values())} of {view.device_state_bytes} bytes")
    if any(call.model_id not in after for call in decision.calls):
        broken.append("I8: the models of all calls are resident once the swap is done")
    if view.in_flight and (decision.load is not None or decision.evict):
        broken.append("I9: no swap while calls are in flight")
    return tuple(broken)
