"""Why a job with ready calls waits, with the numbers: the decision's own rules, in the order in which they apply."""

from dataclasses import dataclass

from plexrl_controller.domain.ids import JobId
from plexrl_controller.scheduling.next_slice import hold_until, slice_s, waiting_since, would_choose
from plexrl_controller.scheduling.policy import Order, Policy
from plexrl_controller.scheduling.views import GroupView, JobView


@dataclass(frozen=True, slots=True)
class WaitReason:
    """What stands before a waiting job."""

    blocker: JobId | None
    """The job that has the group, or gets it first; None when no job does."""
    text: str
    """What that job does and for how long, as the end of a sentence that begins with its name."""


def why_waiting(view: GroupView, job_id: JobId, now: float, policy: Policy) -> WaitReason:
    """What the group does instead of serving `job_id`, or that it is served next."""
    job = view.job(job_id)
    if view.lost_ranks:
        return WaitReason(None, f"{view.lost_ranks} of the gang's {view.world_size} ranks are missing")
    if not view.available:
        return WaitReason(None, "the group is not available")
    if job is None or not job.ready:
        return WaitReason(None, "it has no ready call")
    waiting = [other for other in view.jobs if other.job_id != view.serving and other.ready]
    place = f"{len(waiting)} job(s) wait, this one for {now - waiting_since(job):.1f} s"
    starves_s = waiting_since(job) + policy.starvation_bound_s - now
    bound = f"it comes before all others in {starves_s:.0f} s" if starves_s > 0 else "it starves and is served in turn"
    serving = view.job(view.serving) if view.serving is not None else None
    if serving is not None and serving.job_id != job_id:
        spent_s, length_s = now - view.slice_start, slice_s(serving, policy)
        if view.in_flight:
            text = f"runs {view.in_flight} call(s), {spent_s:.1f} s into a slice of {length_s:.1f} s; {place}; {bound}"
            return WaitReason(serving.job_id, text)
        if serving.ready and spent_s < length_s:
            return WaitReason(serving.job_id, f"is {spent_s:.1f} s into a slice of {length_s:.1f} s; {place}; {bound}")
        if not serving.ready and spent_s < length_s and (left_s := hold_until(serving, now, policy) - now) > 0:
            text = f"stalls, and the group is held for it for {left_s:.2f} s more ({policy.hold.value})"
            return WaitReason(serving.job_id, f"{text}; {place}; {bound}")
    first = would_choose(view, now, policy)
    if first is not None and first.job_id != job_id:
        return WaitReason(first.job_id, f"goes first by {_measure(first, job, now, policy)}; {place}; {bound}")
    return WaitReason(None, f"it is served next; {place}")


def _measure(first: JobView, job: JobView, now: float, policy: Policy) -> str:
    """The numbers that put `first` before `job`."""
    if now - waiting_since(first) >= policy.starvation_bound_s:
        return f"starvation, having waited {now - waiting_since(first):.1f} s"
    if job.over_quota and not first.over_quota:
        return "quota: this job's tenant has used up its device seconds"
    match policy.order:
        case Order.LAS:
            return f"las: it has had {first.attained_s:.1f} s by weight, this job {job.attained_s:.1f} s"
        case Order.FIFO:
            waits = now - waiting_since(first)
            return f"fifo: it has waited {waits:.1f} s"
        case Order.HRRS:
            waits = now - waiting_since(first)
            return f"hrrs: it has waited {waits:.1f} s for shorter work"
