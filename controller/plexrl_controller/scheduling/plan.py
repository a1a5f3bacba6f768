"""What `next_slice` can decide for a worker group."""

from dataclasses import dataclass

from plexrl_controller.domain.ids import JobId, ModelId
from plexrl_controller.scheduling.views import ReadyCall


@dataclass(frozen=True, slots=True)
class Serve:
    """Give the group these calls, after these residency changes."""

    job_id: JobId
    calls: tuple[ReadyCall, ...]
    load: ModelId | None = None
    evict: tuple[ModelId, ...] = ()
    """Models whose state leaves the device first; what is dirty of it is written back."""
    forget_kv: tuple[ModelId, ...] = ()
    """Models whose parked KV goes too, because the device has no room for it: their calls recompute it."""


@dataclass(frozen=True, slots=True)
class Hold:
    """Keep the group for `job_id` until `until`, then decide again."""

    job_id: JobId
    until: float


@dataclass(frozen=True, slots=True)
class Yield:
    """Park the calls in flight at their next step: their chunk is over and `to` comes before them."""

    job_id: JobId
    to: JobId


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to give the group now; an event will say when."""

    reason: str
    revoked: JobId | None = None
    """The job whose calls are in flight and whose turn is over: it is given no more."""


Action = Serve | Hold | Yield | Wait


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Bring a model onto the device while another works, after dropping these clean copies."""

    model_id: ModelId
    drop: tuple[ModelId, ...] = ()


@dataclass(frozen=True, slots=True)
class WriteBack:
    """Copy a model's changed state to the host tier; it stays on the device."""

    model_id: ModelId


@dataclass(frozen=True, slots=True)
class Plan:
    """The whole decision: what the group does, and what its copy engine does meanwhile."""

    action: Action
    background: tuple[Prefetch | WriteBack, ...] = ()
    """Begun after the action's own residency changes; at most one of each kind."""
    again_at: float | None = None
    """Decide again then, if no event comes earlier."""
