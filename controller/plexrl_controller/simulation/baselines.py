"""B0 to B9: the policies that ours is compared with, each with the best form that its publication allows.

The classes with staleness 0 run colocated, those with staleness 1 split, unless a baseline prescribes a form.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random

from plexrl_controller.simulation import rollout
from plexrl_controller.simulation.cluster import Admission, Cluster, Seat
from plexrl_controller.simulation.disciplines import QueueDiscipline, Ranking
from plexrl_controller.simulation.family import FamilyGroup
from plexrl_controller.simulation.pools import Group, OverlappingGroup, SharedGroup
from plexrl_controller.simulation.processes import Execution, Form
from plexrl_controller.simulation.workload import Job, JobClass

INTERFERENCE = (1.4, 1.64)
"""How much slower each of two rollouts runs that overlap on the same GPUs."""


def own_form(c: JobClass) -> Form:
    """The form in which the class runs by itself."""
    if c.colocated_gpus is not None:
        return Form(0, c.colocated_gpus)
    return Form(c.rollout_gpus, c.train_gpus, c.staleness)


def colocated_form(c: JobClass) -> Form:
    """All GPUs of the class roll out, then train. Rollouts gain by more replicas, training by more GPUs."""
    if c.colocated_gpus is not None:
        return Form(0, c.colocated_gpus)
    gpus = c.rollout_gpus + c.train_gpus
    return Form(0, gpus, rollout_scale=rollout.scale(c, gpus), train_scale=c.train_gpus / gpus)


def split_form(c: JobClass, staleness: int) -> Form:
    """Rollout beside training. Times of a class with a colocated size hold for that size."""
    if c.colocated_gpus is None:
        return Form(c.rollout_gpus, c.train_gpus, staleness)
    own = rollout.scale(c, c.colocated_gpus)
    return Form(
        c.rollout_gpus,
        c.train_gpus,
        staleness,
        rollout_scale=rollout.scale(c, c.rollout_gpus) / own,
        train_scale=c.colocated_gpus / c.train_gpus,
    )


def streaming_form(c: JobClass, rollout_parts: int, parts: int) -> Form:
    """Fully asynchronous: this part of the dedicated GPUs rolls out without ever draining, the rest trains."""
    rollout_gpus = min(max(c.replica_gpus, c.dedicated_gpus * rollout_parts // parts), c.dedicated_gpus - 1)
    train_gpus = c.dedicated_gpus - rollout_gpus
    own = c.colocated_gpus or c.train_gpus
    return Form(
        rollout_gpus,
        train_gpus,
        staleness=4,
        rollout_scale=rollout.streaming_scale(c, rollout_gpus) / rollout.scale(c, c.colocated_gpus or c.rollout_gpus),
        train_scale=own / train_gpus,
        hide_tail=True,
    )


def best_streaming_form(c: JobClass) -> Form:
    """The same with the split that gives the shortest mean iteration, by eighths of the GPUs."""
    forms = [streaming_form(c, parts, 8) for parts in range(1, 8)]
    mean_rollout = c.rollout_s
    return min(forms, key=lambda f: max(mean_rollout * f.rollout_scale, c.train_s * f.train_scale) + c.sync_s)


@dataclass
class Baseline:
    """A named policy: forms, who may share with whom, and the order on a shared group."""

    name: str
    title: str
    form: Callable[[JobClass], Form]
    members: int = 1
    """Most jobs on a training or colocated group."""
    discipline: QueueDiscipline | None = None
    spread: bool = False
    """New groups while there are GPUs; otherwise the fullest group first."""
    backfill: bool = False
    """EASY: later jobs start if they do not delay the first one by the estimates."""
    worst_case: bool = False
    """Members are admitted only if the longest calls of all fit everybody's target."""
    overlap: bool = False
    migrate: bool = False
    _random: Random = field(default_factory=lambda: Random(7), repr=False)

    def next(self, cluster: Cluster) -> tuple[Job, Admission] | None:
        """First come, first served; with backfill also those that delay nobody."""
        head = cluster.queue[0]
        admission = self._admit(cluster, head)
        if admission is not None:
            return head, admission
        if not self.backfill:
            return None
        start_at, spare = self._shadow(cluster, self.form(head.job_class).gpus)
        for job in cluster.queue[1:]:
            admission = self._admit(cluster, job)
            if admission is None:
                continue
            ends_at = cluster.simulation.now + estimated_s(job, len(job.iterations))
            if ends_at <= start_at or admission.new_gpus <= spare:
                return job, admission
        return None

    def ended(self, cluster: Cluster, execution: Execution) -> None:
        """A family with too many groups for its members gives one back."""
        for group in list(cluster.groups):
            if isinstance(group, FamilyGroup):
                while group.servers > 1 and len(group.residents) <= self.members * (group.servers - 1):
                    if not group.shrink():
                        break
                    cluster.free_gpus += group.server_gpus

    def _admit(self, cluster: Cluster, job: Job) -> Admission | None:
        c, form = job.job_class, self.form(job.job_class)
        rollout_bytes = c.rollout_bytes / c.replica_gpus
        main = Seat(rollout_bytes if form.colocated else 0.0, c.train_bytes / form.train_gpus, gpus=form.train_gpus)
        beside = () if form.colocated else (Seat(rollout_bytes, gpus=form.rollout_gpus),)
        free = cluster.free_gpus - form.rollout_gpus
        if free < 0:
            return None
        seat = self._seat(cluster, job, form, main, free)
        return Admission(form, (*beside, seat)) if seat is not None else None

    def _seat(self, cluster: Cluster, job: Job, form: Form, main: Seat, free: int) -> Seat | None:
        size = form.train_gpus
        kind = f"{'colocated' if form.colocated else 'train'}{size}"
        fresh = replace(main, make=self._maker(kind, size)) if free >= size else None
        if self.members == 1:
            return main if free >= size else None
        if self.migrate:
            return self._family_seat(cluster, kind, main, fresh)
        if self.spread and fresh is not None:
            return fresh
        open_groups = [
            g for g in cluster.groups if g.name.startswith(f"{kind}-") and self._takes(cluster, g, job, main)
        ]
        if open_groups:
            chosen = max(open_groups, key=lambda g: -len(g.residents) if self.spread else len(g.residents))
            return replace(main, group=chosen)
        return fresh

    def _maker(self, kind: str, size: int) -> Callable[[Cluster], Group]:
        def make(cluster: Cluster) -> Group:
            name = cluster.name(kind)
            if self.overlap:
                factor = self._random.uniform(*INTERFERENCE)
                return OverlappingGroup(cluster.simulation, cluster.totals, name, size, factor, 2.0)
            if self.migrate:
                return FamilyGroup(cluster.simulation, cluster.totals, name, size, 1, cluster.hardware.migrate_s)
            assert self.discipline is not None
            return SharedGroup(
                cluster.simulation, cluster.totals, name, size, self.discipline, cluster.hardware.device_state_bytes
            )

        return make

    def _takes(self, cluster: Cluster, group: Group, job: Job, main: Seat) -> bool:
        if len(group.residents) >= self.members:
            return False
        held = sum([r.bytes for r in group.residents]) + main.rollout_bytes + main.train_bytes
        limit = cluster.hardware.device_state_bytes if self.overlap else cluster.hardware.host_bytes_per_gpu
        if held > limit:
            return False
        if not self.worst_case:
            return True
        jobs = [*[cluster.running[r.job].job for r in group.residents], job]
        return all(_worst_case_fits(one, jobs, self.form) for one in jobs)

    def _family_seat(self, cluster: Cluster, kind: str, main: Seat, fresh: Seat | None) -> Seat | None:
        family = next((g for g in cluster.groups if g.name.startswith(f"{kind}-")), None)
        if not isinstance(family, FamilyGroup):
            return fresh
        if len(family.residents) < self.members * family.servers:
            return replace(main, group=family)
        if fresh is None:
            return None
        family.grow()
        cluster.free_gpus -= main.gpus
        return replace(main, group=family)

    def _shadow(self, cluster: Cluster, wanted: int) -> tuple[float, int]:
        """When the first job can start by the estimates, and how many GPUs are to spare then."""
        free, now = cluster.free_gpus, cluster.simulation.now
        ends = {e.job.index: estimated_end(e, now) for e in cluster.running.values()}
        releases = sorted((max(ends.get(r.job, now) for r in g.residents), g.gpus) for g in cluster.groups)
        for at, gpus in releases:
            if free >= wanted:
                break
            now, free = at, free + gpus
        return now, max(0, free - wanted)


def estimated_s(job: Job, iterations: int) -> float:
    """What the submission says that so many iterations take."""
    return job.dedicated_s * iterations * job.estimate_factor


def estimated_end(execution: Execution, now: float) -> float:
    """When a running job ends, by its estimate."""
    return now + estimated_s(execution.job, len(execution.job.iterations) - len(execution.ends))


def _worst_case_fits(job: Job, jobs: list[Job], form: Callable[[JobClass], Form], target: float = 1.3) -> bool:
    """Whether one worst-case turn of everybody else fits into the job's iteration times its target."""
    c = job.job_class
    own = form(c)
    busy = c.train_s * own.train_scale + c.sync_s
    period = c.rollout_s * own.rollout_scale + c.stall_s * (c.turns - 1) + c.reward_s
    period = max(period, busy) if own.staleness else period + busy
    slack = period - busy if own.staleness else 0.0
    others = sum(_worst_case_call_s(other, form(other.job_class)) for other in jobs if other is not job)
    return others <= slack + (target - 1.0) * period


def _worst_case_call_s(job: Job, form: Form) -> float:
    """The 99th percentile of what a job does on the group in one turn of the cycle."""
    c = job.job_class
    train = (c.train_s * 1.42 + c.sync_s) * form.train_scale
    if not form.colocated:
        return train
    return train + c.rollout_s * (1.0 + 2.33 * c.rollout_cv) + c.stall_s * (c.turns - 1) * 1.5


def baselines() -> tuple[Baseline, ...]:
    """Fresh objects of B0 to B9."""
    fifo = QueueDiscipline(Ranking.FIFO)
    hrrs = QueueDiscipline(Ranking.HRRS)
    b9 = Baseline("B9-pack", "PlexRL as published: Pack, HRRS, k = 2", own_form, 2, hrrs)
    return (
        Baseline("B0", "dedicated, each class in its own form", own_form),
        Baseline("B0c", "dedicated colocated on all GPUs of the job (verl-like)", colocated_form),
        Baseline("B1", "dedicated split, synchronous", lambda c: split_form(c, 0)),
        Baseline("B2", "dedicated split, one-step asynchronous", lambda c: split_form(c, 1)),
        Baseline("B3", "fully asynchronous, staleness 4, 3:1", lambda c: streaming_form(c, 3, 4)),
        Baseline("B3t", "the same, GPUs split best for each class", best_streaming_form),
        Baseline(
            "B4",
            "co-execution groups in cyclic order, worst-case admission (RollMux-like)",
            own_form,
            8,
            QueueDiscipline(Ranking.CYCLIC, hold_phase=True),
            worst_case=True,
        ),
        Baseline(
            "B5",
            "FIFO lock with full snapshots (llm-d-like)",
            own_form,
            2,
            QueueDiscipline(Ranking.FIFO, hold_phase=True, full_snapshots=True),
        ),
        Baseline("B6", "FIFO without affinity, state migrates at 25 GB/s", own_form, 2, fifo, migrate=True),
        Baseline("B7", "packing in memory with interference (Gandiva/Salus-like)", own_form, 2, overlap=True),
        Baseline("B8", "gang queue with EASY backfill, dedicated groups (Slurm/Kueue-like)", own_form, backfill=True),
        b9,
        replace(b9, name="B9-spread", title="PlexRL as published: Spread, HRRS, k = 2", spread=True),
        replace(
            b9,
            name="B9-backfill",
            title="PlexRL as published: Spread+Backfill, HRRS, k = 2",
            spread=True,
            backfill=True,
        ),
    )
