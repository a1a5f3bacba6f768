"""Which job a worker group serves next, with which calls, and what moves meanwhile. Pure; O(jobs of the group).

Order of the rules: calls in flight finish their chunk; jobs that starve are served in turn; the resident job goes on
within its quantum; the group is kept for a job whose stall is likely shorter than one move; then the order.
"""

import math
from collections.abc import Sequence

from plexrl_controller.scheduling.plan import Action, Hold, Plan, Serve, Wait, Yield
from plexrl_controller.scheduling.policy import HoldRule, Order, Policy
from plexrl_controller.scheduling.residency import background, make_room
from plexrl_controller.scheduling.views import GroupView, JobView, ModelView, ReadyCall

UNKNOWN_WORK_S = 1.0
"""What calls of which nothing is known count for at most in the response ratio: no more than those of any job beside
them, or a job that is new would wait for as many turns of the others as theirs are shorter than this.
"""


def next_slice(view: GroupView, now: float, policy: Policy) -> Plan:
    """Decides what `view`'s group does next at time `now`."""
    if view.lost_ranks:
        return Plan(Wait(f"{view.lost_ranks} of the gang's {view.world_size} ranks are missing"))
    if not view.available:
        return Plan(Wait("worker unavailable"))
    serving = view.job(view.serving) if view.serving is not None else None
    waiting = [job for job in view.jobs if job is not serving and _has_ready(job)]
    starving = [job for job in waiting if now - waiting_since(job) >= policy.starvation_bound_s]
    if view.in_flight:
        action, again_at = _running(view, serving, waiting, starving, now, policy)
    else:
        action, again_at = _free(view, serving, waiting, starving, now, policy)
    upcoming = _upcoming(view, action, serving, waiting, starving, now, policy)
    return Plan(action, background(view, action, upcoming, policy), again_at)


def waiting_since(job: JobView) -> float:
    """Since when a job with ready calls has waited: nothing of it has run since then."""
    return max(oldest(job).ready_since, job.last_finish)


def oldest(job: JobView) -> ReadyCall:
    """The ready call of a job that runs first."""
    return _model_of(job).ready[0]


def slice_s(job: JobView, policy: Policy) -> float:
    """How long a job's slice lasts while others wait: long enough to be worth its swaps."""
    return max(policy.quantum_s, job.round_trip_s / policy.max_swap_share)


def would_choose(view: GroupView, now: float, policy: Policy) -> JobView | None:
    """Who would be served if the group came free now; None when nobody waits."""
    waiting = [job for job in view.jobs if job.job_id != view.serving and _has_ready(job)]
    serving = view.job(view.serving) if view.serving is not None else None
    starving = [job for job in waiting if now - waiting_since(job) >= policy.starvation_bound_s]
    if serving is not None and not _has_ready(serving):
        serving = None
    return _choose(waiting, starving, serving, now, policy) if waiting else serving


def expected_return(job: JobView, policy: Policy) -> float | None:
    """When a job without ready calls is expected back; None while nothing is known."""
    if policy.use_hints and job.idle_until is not None and job.idle_until > job.last_finish:
        return job.idle_until
    if policy.use_learned_stalls and job.expected_stall_s is not None and job.last_finish > 0.0:
        return job.last_finish + job.expected_stall_s
    return None


def hold_until(job: JobView, now: float, policy: Policy) -> float:
    """Until when the group is kept for a job without ready calls; `now` or earlier means not at all."""
    if job.last_finish <= 0.0:
        return now
    match policy.hold:
        case HoldRule.NEVER:
            return now
        case HoldRule.ITERATION:
            return job.last_finish + policy.hold_limit_s if job.mid_iteration else now
        case HoldRule.PHASE:
            return job.last_finish + policy.hold_limit_s if job.mid_phase else now
        case HoldRule.SKI_RENTAL:
            return job.last_finish + min(_rental_s(job, now, policy), policy.hold_limit_s)


def _rental_s(job: JobView, now: float, policy: Policy) -> float:
    """How long the group is kept after a job's last call before giving it away is the better bet.

    Giving it away costs one move: the move back is the price of the job's next turn, whoever has the group before.
    """
    move_s = job.round_trip_s / 2
    if policy.use_hints and job.idle_until is not None and job.idle_until > job.last_finish:
        # The job's own statement: either nothing is gained by waiting, or it is nearly back.
        return 0.0 if job.idle_until - now > move_s else move_s / policy.trust
    if policy.use_learned_stalls and job.expected_stall_s is not None:
        return move_s * policy.trust if job.expected_stall_s > move_s else move_s / policy.trust
    return move_s


def _free(
    view: GroupView,
    serving: JobView | None,
    waiting: Sequence[JobView],
    starving: Sequence[JobView],
    now: float,
    policy: Policy,
) -> tuple[Action, float | None]:
    """No calls are in flight: whose turn is it?"""
    continues = serving is not None and _has_ready(serving)
    if serving is not None and continues:
        if not waiting or (not starving and _keeps(view, serving, now, policy)):
            return _serve(view, serving, waiting, starving, policy), None
    elif not waiting:
        return Wait("no ready call"), None
    elif serving is not None and not starving and _keeps(view, serving, now, policy):
        # Never past the moment from which somebody starves.
        starves_at = min(waiting_since(job) for job in waiting) + policy.starvation_bound_s
        until = min(hold_until(serving, now, policy), starves_at)
        if until > now:
            return Hold(serving.job_id, until), until
    chosen = _choose(waiting, starving, serving if continues else None, now, policy)
    rest = [job for job in waiting if job is not chosen]
    return _serve(view, chosen, rest, [job for job in starving if job is not chosen], policy), None


def _running(
    view: GroupView,
    serving: JobView | None,
    waiting: Sequence[JobView],
    starving: Sequence[JobView],
    now: float,
    policy: Policy,
) -> tuple[Action, float | None]:
    """Calls are in flight: yield at the end of their chunk, or add calls of the same job that need no swap."""
    again_at = None
    if serving is not None and waiting and view.can_yield and policy.chunking:
        again_at = view.chunk_start + policy.chunk_s
        if now >= again_at:
            chosen = _choose(waiting, starving, serving, now, policy)
            # Within its slice it would be served again at once: parking its calls would gain nothing.
            over = bool(starving) or not _keeps(view, serving, now, policy)
            if over and chosen is not serving and (starving or _comes_first(chosen, serving)):
                return Yield(serving.job_id, chosen.job_id), None
            slice_end = view.slice_start + slice_s(serving, policy)
            again_at = min(now + policy.chunk_s, slice_end if slice_end > now else math.inf)
    if serving is None:
        return Wait("calls in flight"), again_at
    if starving or (waiting and not _keeps(view, serving, now, policy)):
        reason = "quantum used, calls in flight" if _has_ready(serving) else "calls in flight"
        return Wait(reason, revoked=serving.job_id), again_at
    if not _has_ready(serving):
        return Wait("calls in flight"), again_at
    room = (policy.contended_window if waiting else policy.window) - view.in_flight
    room_s = policy.chunk_s - (serving.in_flight_left_s or 0.0)
    model = _model_of(serving)
    full = (room <= 0 or room_s <= 0.0) and not model.ready[0].concurrent
    if full or not model.on_device:
        return Wait("calls in flight"), again_at
    return Serve(serving.job_id, _ahead(model.ready, room, room_s, 0.0)), again_at


def _comes_first(waiting: JobView, running: JobView) -> bool:
    """Whether a waiting job is worth parking calls for at the end of their chunk.

    Taking turns helps short calls behind long ones. Between calls of equal length it would only make both late.
    """
    if waiting.over_quota != running.over_quota:
        return running.over_quota
    work_s = _work_s(waiting)
    return work_s is None or running.in_flight_left_s is None or work_s < running.in_flight_left_s


def _work_s(job: JobView) -> float | None:
    """Estimated work of a job's ready calls; None while nothing is known of one of them."""
    total = 0.0
    for model in job.models:
        for call in model.ready:
            if call.expected_s is None:
                return None
            total += call.expected_s
    return total


def _keeps(view: GroupView, serving: JobView, now: float, policy: Policy) -> bool:
    """Whether the slice of the serving job goes on although others wait."""
    match policy.hold:
        case HoldRule.ITERATION if serving.mid_iteration:
            return True
        case HoldRule.PHASE if serving.mid_phase:
            return True
        case _:
            return now - view.slice_start < slice_s(serving, policy)


def _choose(
    waiting: Sequence[JobView], starving: Sequence[JobView], serving: JobView | None, now: float, policy: Policy
) -> JobView:
    """The job that comes next. `serving` takes part as if it had just come: it has had its turn."""
    if starving:
        return min(starving, key=lambda job: (job.last_served, job.job_id))
    if serving is None and len(waiting) == 1:
        return waiting[0]
    work_s = {job.job_id: _work_s(job) for job in (*waiting, *([serving] if serving is not None else []))}
    unknown_s = min((known for known in work_s.values() if known), default=UNKNOWN_WORK_S)
    unknown_s = min(unknown_s, UNKNOWN_WORK_S)

    def rank(job: JobView, since: float) -> tuple[bool, float, float]:
        return _rank(job, work_s[job.job_id] or unknown_s, since, now, policy)

    ranked = [(*rank(job, waiting_since(job)), job.job_id, job) for job in waiting]
    if serving is not None:
        ranked.append((*rank(serving, now), serving.job_id, serving))
    return min(ranked)[-1]


def _rank(job: JobView, work_s: float, since: float, now: float, policy: Policy) -> tuple[bool, float, float]:
    """Least first; job ids, which are unique, settle ties."""
    match policy.order:
        case Order.LAS:
            return job.over_quota, job.attained_s, since
        case Order.FIFO:
            return job.over_quota, since, since
        case Order.HRRS:
            cost_s = _setup_s(job) + work_s
            ratio = (job.weight * (now - since) + cost_s) / cost_s
            return job.over_quota, -ratio, since


def _upcoming(
    view: GroupView,
    action: Action,
    serving: JobView | None,
    waiting: Sequence[JobView],
    starving: Sequence[JobView],
    now: float,
    policy: Policy,
) -> JobView | None:
    """Who is likely served after the job that the action concerns: the head of the queue, else the soonest hint."""
    if not view.background_moves or not policy.prefetch or isinstance(action, Yield):
        return None
    present = action.job_id if isinstance(action, Serve | Hold) else view.serving
    others = [job for job in waiting if job.job_id != present]
    if others:
        return _choose(others, [job for job in starving if job.job_id != present], None, now, policy)
    known = [
        (back, job.job_id, job)
        for job in view.jobs
        if job.job_id != present and (back := expected_return(job, policy)) is not None
    ]
    return min(known)[-1] if known else None


def _serve(
    view: GroupView, job: JobView, others: Sequence[JobView], starving: Sequence[JobView], policy: Policy
) -> Serve:
    """Serves the model of the job's oldest ready call, with no more than a chunk of work while others wait."""
    model = _model_of(job)
    window = policy.contended_window if others else policy.window
    calls = _ahead(model.ready, window, policy.chunk_s, policy.chunk_s if starving else 0.0)
    evict, forget_kv = make_room(view, model)
    if model.on_device:
        return Serve(job.job_id, calls)
    return Serve(job.job_id, calls, load=model.model_id, evict=evict, forget_kv=forget_kv)


def _ahead(ready: Sequence[ReadyCall], window: int, limit_s: float, unknown_s: float) -> tuple[ReadyCall, ...]:
    """The first calls that make up at most `limit_s` of work and are at most `window`, at least one. Concurrent ones
    begin at once and yield together: they are no work that lies ahead.
    """
    taken = 0
    alone = 0
    work_s = 0.0
    for call in ready:
        if not call.concurrent:
            alone += 1
            work_s += call.expected_s if call.expected_s is not None else unknown_s
            if taken and (work_s > limit_s or alone > window):
                break
        taken += 1
    return tuple(ready[:taken])


def _setup_s(job: JobView) -> float:
    """Seconds until the job's next calls can run: none while their model is on the device, or in flight."""
    if not _has_ready(job):
        return 0.0
    model = _model_of(job)
    return 0.0 if model.on_device else model.load_s


def _has_ready(job: JobView) -> bool:
    for model in job.models:  # noqa: SIM110 - a generator would cost as much as the rest of the decision
        if model.ready:
            return True
    return False


def _model_of(job: JobView) -> ModelView:
    """The model of a job's oldest ready call."""
    ready = [model for model in job.models if model.ready]
    return ready[0] if len(ready) == 1 else min(ready, key=lambda m: _call_key(m.ready[0]))


def _call_key(call: ReadyCall) -> tuple[float, str]:
    return call.ready_since, call.call_id
