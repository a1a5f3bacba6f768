"""Who has had how much: attained service per job, device seconds per tenant. Told the time, never asks for it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from plexrl_controller.domain.ids import JobId, Tenant
from plexrl_controller.scheduling.views import TenantUse


@dataclass(frozen=True, slots=True)
class Quota:
    """Device seconds that a tenant may use in each window; windows follow each other without gaps."""

    device_s: float
    window_s: float = 86_400.0


@dataclass(slots=True)
class _Job:
    tenant: Tenant | None
    weight: float
    attained_s: float


@dataclass(slots=True)
class _Window:
    start: float
    used_s: float = 0.0


@dataclass(slots=True)
class Accounts:
    """Accounts of one group's jobs (attained service) and of a cluster's tenants (quotas).

    A job that joins starts level with the least served one: it neither owes nor is owed for the time before.
    """

    quotas: Mapping[Tenant, Quota] = field(default_factory=dict)
    default_quota: Quota | None = None
    """Of tenants that `quotas` does not name."""
    _jobs: dict[JobId, _Job] = field(default_factory=dict)
    _windows: dict[Tenant, _Window] = field(default_factory=dict)

    def join(self, job_id: JobId, tenant: Tenant | None = None, weight: float = 1.0) -> None:
        """Opens a job's account; joining again changes its weight alone."""
        if weight <= 0.0:
            raise ValueError(f"weight of job {job_id} is {weight}, want a positive number")
        if (job := self._jobs.get(job_id)) is not None:
            job.weight = weight
            return
        level = min((job.attained_s for job in self._jobs.values()), default=0.0)
        self._jobs[job_id] = _Job(tenant, weight, level)

    def leave(self, job_id: JobId) -> None:
        """Closes a job's account; its tenant's stays."""
        self._jobs.pop(job_id, None)

    def charge(self, job_id: JobId, seconds: float, now: float, world_size: int = 1) -> None:
        """Adds a group's time, swaps and recomputation included; `world_size` devices were taken for it."""
        job = self._jobs.get(job_id)
        if job is None:
            return
        job.attained_s += seconds / job.weight
        if (quota := self._quota(job.tenant)) is not None and job.tenant is not None:
            self._window(job.tenant, quota, now).used_s += seconds * world_size

    def attained_s(self, job_id: JobId) -> float:
        """Service so far divided by weight; 0 for a job that has not joined."""
        job = self._jobs.get(job_id)
        return job.attained_s if job is not None else 0.0

    def over_quota(self, job_id: JobId, now: float) -> bool:
        """Whether the job's tenant has used up its window."""
        job = self._jobs.get(job_id)
        if job is None or job.tenant is None or (quota := self._quota(job.tenant)) is None:
            return False
        return self._window(job.tenant, quota, now).used_s >= quota.device_s

    def tenants(self, now: float) -> dict[Tenant, TenantUse]:
        """Every tenant that has a quota and has used some of it, as placement sees it."""
        uses = {}
        for tenant in (*self.quotas, *self._windows):
            if (quota := self._quota(tenant)) is not None:
                window = self._window(tenant, quota, now)
                uses[tenant] = TenantUse(window.used_s, quota.device_s, window.start + quota.window_s)
        return uses

    def _quota(self, tenant: Tenant | None) -> Quota | None:
        return self.quotas.get(tenant, self.default_quota) if tenant is not None else None

    def _window(self, tenant: Tenant, quota: Quota, now: float) -> _Window:
        window = self._windows.setdefault(tenant, _Window(now))
        if now >= window.start + quota.window_s:
            window.start += quota.window_s * ((now - window.start) // quota.window_s)
            window.used_s = 0.0
        return window
