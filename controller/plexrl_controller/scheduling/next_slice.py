"""Which job a worker group serves next, and with which calls. Pure and cheap: O(jobs on the group).

Order of the rules: calls in flight finish; the resident job goes on within its quantum; the group is kept for a job
whose stall is likely shorter than a round-trip swap; then first come, first served.
"""

from dataclasses import dataclass
from enum import Enum

from plexrl_controller.domain.ids import JobId, ModelId
from plexrl_controller.scheduling.views import GroupView, JobView, ModelView, ReadyCall


class HoldRule(Enum):
    """When a group is kept for a job that has nothing to run."""

    SKI_RENTAL = "ski_rental"
    """As long as a round-trip swap would take, unless the job said that it will be idle for longer. At worst this costs
    twice the optimum (Karlin et al. 1988, "Competitive snoopy caching")."""
    ITERATION = "iteration"
    """Until the job has synced its weights: the phase-level sharing that PlexRL is compared with."""


@dataclass(frozen=True, slots=True)
class Policy:
    """The settings of `next_slice`."""

    hold: HoldRule = HoldRule.SKI_RENTAL
    quantum_s: float = 10.0
    """A job that always has work keeps the group this long while others wait."""
    hold_limit_s: float = 120.0
    """No rule keeps the group idle for a job longer than this while others wait."""
    window: int = 64
    """Most calls given to a group ahead of their execution."""
    contended_window: int = 4
    """The same while another job waits."""


@dataclass(frozen=True, slots=True)
class Serve:
    """Give the group these calls, after these residency changes."""

    job_id: JobId
    calls: tuple[ReadyCall, ...]
    load: ModelId | None = None
    evict: tuple[ModelId, ...] = ()
    held_since: float | None = None
    """The group was kept idle for this job since then, while others waited."""


@dataclass(frozen=True, slots=True)
class Hold:
    """Keep the group for `job_id` until `until`, then decide again."""

    job_id: JobId
    until: float


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to give the group now; an event will say when."""

    reason: str


Decision = Serve | Hold | Wait


def next_slice(view: GroupView, now: float, policy: Policy) -> Decision:
    """Decides what `view`'s group does next at time `now`."""
    if not view.available:
        return Wait("worker unavailable")
    serving = view.job(view.serving) if view.serving is not None else None
    waiting = tuple(job for job in view.jobs if job.ready and job is not serving)
    if view.in_flight:
        return _top_up(view, serving, waiting, now, policy)
    if serving is not None and serving.ready and (not waiting or now - view.slice_start < policy.quantum_s):
        return _serve(view, serving, bool(waiting), policy)
    if not waiting:
        return Wait("no ready call") if serving is None or not serving.ready else _serve(view, serving, False, policy)
    if serving is not None and not serving.ready:
        until = hold_until(serving, now, policy)
        if until > now:
            return Hold(serving.job_id, until)
    return _serve(view, min(waiting, key=lambda job: (job.ready[0].ready_since, job.job_id)), True, policy)


def hold_until(job: JobView, now: float, policy: Policy) -> float:
    """Until when the group is kept for a job without ready calls; `now` or earlier means not at all."""
    if job.last_finish <= 0.0:
        return now
    match policy.hold:
        case HoldRule.ITERATION:
            return job.last_finish + policy.hold_limit_s if job.mid_iteration else now
        case HoldRule.SKI_RENTAL:
            if job.idle_until is not None and job.idle_until - now > job.round_trip_s:
                return now
            return job.last_finish + min(job.round_trip_s, policy.hold_limit_s)


def _top_up(
    view: GroupView, serving: JobView | None, waiting: tuple[JobView, ...], now: float, policy: Policy
) -> Decision:
    """While calls are in flight, adds calls of the same job that need no residency change."""
    if serving is None or not serving.ready:
        return Wait("calls in flight")
    if waiting and now - view.slice_start >= policy.quantum_s:
        return Wait("quantum used, calls in flight")
    room = (policy.contended_window if waiting else policy.window) - view.in_flight
    model = next(m for m in serving.models if m.model_id == serving.ready[0].model_id)
    if room <= 0 or not model.on_device:
        return Wait("calls in flight")
    return Serve(serving.job_id, model.ready[:room])


def _serve(view: GroupView, job: JobView, contended: bool, policy: Policy) -> Decision:
    """Serves the model of the job's oldest ready call."""
    model = next(m for m in job.models if m.model_id == job.ready[0].model_id)
    calls = model.ready[: policy.contended_window if contended else policy.window]
    if model.on_device:
        return Serve(job.job_id, calls)
    return Serve(job.job_id, calls, load=model.model_id, evict=_evictions(view, model))


def _evictions(view: GroupView, incoming: ModelView) -> tuple[ModelId, ...]:
    """The least recently used models that must leave so that `incoming` fits the device."""
    residents = sorted(
        (m for job in view.jobs for m in job.models if m.on_device), key=lambda m: (m.last_used, m.model_id)
    )
    used = sum(m.state_bytes for m in residents)
    leaving: list[ModelId] = []
    for resident in residents:
        if used + incoming.state_bytes <= view.device_state_bytes:
            break
        leaving.append(resident.model_id)
        used -= resident.state_bytes
    return tuple(leaving)
