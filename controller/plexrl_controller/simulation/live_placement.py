"""The placement of the live controller in a simulated cluster: the same `place` and `reserve` over the same views.

This module only builds views and takes workers; it decides nothing but which form a job asks for.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from time import thread_time

import numpy as np

from plexrl_controller.domain.ids import GroupId, JobId, WorkerId
from plexrl_controller.scheduling.place import Assignment, GroupRequest, Placed, PlacementRequest, Side, place, reserve
from plexrl_controller.scheduling.policy import Policy, Strategy
from plexrl_controller.scheduling.queueing import predict
from plexrl_controller.scheduling.views import ClusterView, Demand, MemberView, NodeView, PlacedGroupView, Reservation
from plexrl_controller.scheduling.views import Hardware as RankHardware
from plexrl_controller.simulation import demands, rollout
from plexrl_controller.simulation.baselines import estimated_end, estimated_s, own_form
from plexrl_controller.simulation.cluster import Admission, Cluster, Seat
from plexrl_controller.simulation.live_policy import Decisions, LivePolicy
from plexrl_controller.simulation.pools import Group, SharedGroup
from plexrl_controller.simulation.processes import Execution, Form, Profile
from plexrl_controller.simulation.workload import Job, JobClass, iterations_of

ROLLOUT_MEMBERS = 2
"""Most jobs on a group with consolidated tails: beside one tail, one bulk has the other replicas."""


@dataclass(slots=True)
class _Member:
    """What placement remembers of a job that it has placed."""

    job: Job
    form: Form
    target: float
    elsewhere_s: dict[Side, float]
    known: dict[tuple[Side, int], Demand] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Placed:
    """A group and its workers."""

    group_id: GroupId
    workers: tuple[WorkerId, ...]
    side: Side
    private: bool


@dataclass
class LivePlacement:
    """Places jobs by `place`: first come, first served, with reservations if the strategy says so."""

    policy: Policy = field(default_factory=lambda: Policy(strategy=Strategy.PACK))
    name: str = "B10"
    title: str = "PlexRL"
    target: float = 1.3
    """Slowdown that no member of a group may be predicted to exceed."""
    consolidate: bool = True
    """Rollout groups may be shared by two jobs whose tails move to a few replicas."""
    clean_eviction: bool = True
    backfill: bool = True
    """Later jobs start if they delay no reservation of the first one that does not fit."""
    decisions: Decisions = field(default_factory=Decisions)
    placement_s: list[float] = field(default_factory=list)
    """Processor time of each `place`."""
    _hardware: RankHardware | None = None
    _nodes: list[list[WorkerId]] = field(default_factory=list)
    _groups: dict[Group, _Placed] = field(default_factory=dict)
    _by_id: dict[GroupId, Group] = field(default_factory=dict)
    _members: dict[int, _Member] = field(default_factory=dict)
    _pairing: dict[JobClass, bool] = field(default_factory=dict)
    _policies: dict[bool, Policy] = field(default_factory=dict)
    _requests: dict[tuple[int, Form], PlacementRequest] = field(default_factory=dict)

    def next(self, cluster: Cluster) -> tuple[Job, Admission] | None:
        """The first waiting job that fits; one behind it only if that delays nobody's reservation."""
        view = self._view(cluster, ())
        reserved = False
        for job in list(cluster.queue):
            admission = self._admit(cluster, job, view)
            if admission is not None:
                return job, admission
            if not self.backfill:
                return None
            if not reserved:
                reservation = self._reserve(cluster, job, view)
                if reservation is None:
                    return None
                view, reserved = replace(view, reservations=(reservation,)), True
        return None

    def ended(self, cluster: Cluster, execution: Execution) -> None:
        """Gives back the workers of groups that are gone."""
        self._members.pop(execution.job.index, None)
        for resident in execution.residents:
            group = resident.group
            if not group.residents and group in self._groups:
                placed = self._groups.pop(group)
                del self._by_id[placed.group_id]
                self._return(placed.workers, cluster.hardware.node_gpus)

    def _admit(self, cluster: Cluster, job: Job, view: ClusterView) -> Admission | None:
        """Of the forms that fit, the one that takes the fewest GPUs per unit of work, as predicted."""
        best: tuple[float, Form, Placed] | None = None
        for form in self._forms(job.job_class):
            request, policy = self._request(cluster, job, form), self._policy_for(form)
            began = thread_time()
            outcome = place(view, request, policy)
            self.placement_s.append(thread_time() - began)
            if isinstance(outcome, Placed):
                partner = any(other is not job and other.job_class is job.job_class for other in cluster.queue)
                cost = _cost(job.job_class, form, outcome, partner)
                if best is None or cost < best[0]:
                    best = (cost, form, outcome)
        return self._take(job, best[1], best[2]) if best is not None else None

    def _forms(self, c: JobClass) -> list[Form]:
        form = own_form(c)
        if form.colocated or not self.consolidate or c.turns > 1:
            return [form]
        replicas = rollout.replicas_of(c, form.rollout_gpus)
        if replicas < 2:
            return [form]
        tail = max(1, replicas // 4)
        consolidated = replace(form, consolidation=(replicas - tail, tail))
        return [form, consolidated] if self._pairs(c, consolidated) else [form]

    def _pairs(self, c: JobClass, form: Form) -> bool:
        """Whether two jobs of the class can share a rollout group within the target."""
        if c not in self._pairing:
            sample = iterations_of(c, 4 * demands.SAMPLE, np.random.Generator(np.random.PCG64(0)))
            pair = [demands.demand(c, sample, form, Side.ROLLOUT)] * ROLLOUT_MEMBERS
            slowdown = predict(pair, swapping=False, chunk_s=self.policy.chunk_s).slowdowns[0]
            self._pairing[c] = slowdown <= self.policy.promised(self.target / demands.stretch(c, form))
        return self._pairing[c]

    def _policy_for(self, form: Form) -> Policy:
        share = form.consolidation is not None
        if share not in self._policies:
            self._policies[share] = replace(self.policy, share_rollout=share)
        return self._policies[share]

    def _request(self, cluster: Cluster, job: Job, form: Form) -> PlacementRequest:
        key = (job.index, form)
        if key not in self._requests:
            self._requests[key] = self._new_request(cluster, job, form)
        return self._requests[key]

    def _new_request(self, cluster: Cluster, job: Job, form: Form) -> PlacementRequest:
        c = job.job_class
        groups = []
        for side in _sides(form):
            rollout_bytes, train_bytes = _bytes(c, form, side)
            state_bytes = int(rollout_bytes + train_bytes)
            wanted = demands.submitted(job, 0, form, side, _round_trip_s(cluster, rollout_bytes, train_bytes))
            gpus = form.rollout_gpus if side is Side.ROLLOUT else form.train_gpus
            groups.append(GroupRequest(side, gpus, state_bytes, wanted))
        return PlacementRequest(
            tuple(groups),
            JobId(job.name),
            slowdown_target=self.target / demands.stretch(c, form),
            expected_s=estimated_s(job, len(job.iterations)),
        )

    def _reserve(self, cluster: Cluster, job: Job, view: ClusterView) -> Reservation | None:
        form = own_form(job.job_class)
        return reserve(view, JobId(job.name), self._request(cluster, job, form), self._policy_for(form))

    def _take(self, job: Job, form: Form, placed: Placed) -> Admission:
        c = job.job_class
        for key in [key for key in self._requests if key[0] == job.index]:
            del self._requests[key]
        waits = [a.prediction.waits_s[-1] if a.prediction is not None else 0.0 for a in placed.assignments]
        elsewhere = {a.side: sum(waits) - wait_s for a, wait_s in zip(placed.assignments, waits, strict=True)}
        self._members[job.index] = _Member(job, form, self.target / demands.stretch(c, form), elsewhere)
        for assignment in placed.assignments:
            self._note_waits(assignment)
        profile: Profile | None = None
        if form.consolidation is not None:
            main, tail = form.consolidation
            profile = partial(rollout.consolidation, c, main_replicas=main, tail_replicas=tail)
        return Admission(form, tuple(self._seat(c, form, a) for a in placed.assignments), profile)

    def _note_waits(self, assignment: Assignment) -> None:
        """The members that a job joins will wait longer there: what their other groups must know."""
        if assignment.group_id is None or assignment.prediction is None:
            return
        residents = self._by_id[assignment.group_id].residents
        for resident, wait_s in zip(residents, assignment.prediction.waits_s, strict=False):
            member = self._members[resident.job]
            for side in member.elsewhere_s:
                if side is not assignment.side:
                    member.elsewhere_s[side] = wait_s

    def _seat(self, c: JobClass, form: Form, assignment: Assignment) -> Seat:
        rollout_bytes, train_bytes = _bytes(c, form, assignment.side)
        if assignment.group_id is not None:
            return Seat(rollout_bytes, train_bytes, self._by_id[assignment.group_id])
        taken = set(assignment.worker_ids)
        self._nodes = [[w for w in node if w not in taken] for node in self._nodes]
        private = assignment.side is Side.ROLLOUT and form.consolidation is None
        make = partial(self._make, workers=assignment.worker_ids, side=assignment.side, private=private)
        return Seat(rollout_bytes, train_bytes, make=make, gpus=len(assignment.worker_ids))

    def _make(self, cluster: Cluster, workers: tuple[WorkerId, ...], side: Side, private: bool) -> Group:
        name = cluster.name(f"{side.value}{len(workers)}")
        group = SharedGroup(
            cluster.simulation,
            cluster.totals,
            name,
            len(workers),
            LivePolicy(self.policy, self.decisions, clean_eviction=self.clean_eviction),
            cluster.hardware.device_state_bytes,
        )
        self._groups[group] = _Placed(GroupId(name), workers, side, private)
        self._by_id[GroupId(name)] = group
        return group

    def _return(self, workers: Sequence[WorkerId], node_gpus: int) -> None:
        for worker in workers:
            self._nodes[int(worker) // node_gpus].append(worker)
        for index in {int(worker) // node_gpus for worker in workers}:
            self._nodes[index].sort()

    def _view(self, cluster: Cluster, reservations: tuple[Reservation, ...]) -> ClusterView:
        if self._hardware is None:
            offered, node = cluster.hardware, cluster.hardware.node_gpus
            self._hardware = RankHardware(int(offered.device_state_bytes), int(offered.host_bytes_per_gpu))
            ids = [WorkerId(f"{i:06d}") for i in range(cluster.gpus)]
            self._nodes = [ids[i : i + node] for i in range(0, cluster.gpus, node)]
        groups = [self._group_view(cluster, group, placed) for group, placed in self._groups.items()]
        nodes = [NodeView(f"{i:05d}", self._hardware, tuple(free)) for i, free in enumerate(self._nodes) if free]
        return ClusterView(groups, nodes, cluster.simulation.now, reservations)

    def _group_view(self, cluster: Cluster, group: Group, placed: _Placed) -> PlacedGroupView:
        assert self._hardware is not None
        full = placed.private or (placed.side is Side.ROLLOUT and len(group.residents) >= ROLLOUT_MEMBERS)
        members = tuple([self._member_view(cluster, r.job, r.bytes, placed.side, full) for r in group.residents])
        return PlacedGroupView(placed.group_id, placed.workers, self._hardware, True, members)

    def _member_view(self, cluster: Cluster, index: int, state_bytes: int, side: Side, full: bool) -> MemberView:
        member, execution = self._members[index], cluster.running[index]
        job, form, done = member.job, member.form, len(execution.ends)
        # Measurements move slowly: they are looked at again every few iterations.
        seen = done // demands.LEARNED_AFTER
        known = member.known.get((side, seen))
        if known is None:
            round_trip_s = _round_trip_s(cluster, *_bytes(job.job_class, form, side))
            learned = demands.measured if seen else demands.submitted
            known = learned(job, done, form, side, round_trip_s)
            member.known[side, seen] = known
        return MemberView(
            JobId(job.name),
            state_bytes,
            demand=known,
            slowdown_target=member.target,
            private=full,
            elsewhere_wait_s=member.elsewhere_s.get(side, 0.0),
            ends_at=estimated_end(execution, cluster.simulation.now),
        )


def _sides(form: Form) -> tuple[Side, ...]:
    return (Side.BOTH,) if form.colocated else (Side.ROLLOUT, Side.TRAIN)


def _bytes(c: JobClass, form: Form, side: Side) -> tuple[float, float]:
    """Rollout weights and training state on each GPU of the side's group."""
    rollout_bytes = c.rollout_bytes / c.replica_gpus if side is not Side.TRAIN else 0.0
    return rollout_bytes, c.train_bytes / form.train_gpus if side is not Side.ROLLOUT else 0.0


def _round_trip_s(cluster: Cluster, rollout_bytes: float, train_bytes: float) -> float:
    """Giving a group away and coming back, where states do not fit together: the larger state out and in."""
    return 2.0 * (
        cluster.swap_s if cluster.swap_s is not None else cluster.hardware.move_s(max(rollout_bytes, train_bytes))
    )


def _cost(c: JobClass, form: Form, placed: Placed, partner: bool) -> float:
    """GPUs per member times slowdown; a new group with consolidated tails counts on a `partner` that waits already."""
    slowdown, gpus = demands.stretch(c, form), 0.0
    for assignment in placed.assignments:
        members = 1
        if assignment.prediction is not None:
            members = len(assignment.prediction.slowdowns)
            slowdown *= assignment.prediction.slowdowns[-1]
        elif assignment.side is Side.ROLLOUT and form.consolidation is not None and partner:
            members = ROLLOUT_MEMBERS
        gpus += len(assignment.worker_ids) / members
    return gpus * slowdown
