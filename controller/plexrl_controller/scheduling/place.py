"""Where a job's groups go, or the reason why nowhere. Pure; called at job boundaries and after losses."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from math import inf

from plexrl_controller.domain.ids import GroupId, JobId, ModelId, Tenant, WorkerId
from plexrl_controller.scheduling.policy import Policy, Strategy
from plexrl_controller.scheduling.queueing import Prediction, predict
from plexrl_controller.scheduling.views import (
    NOTHING_REQUIRED,
    ClusterView,
    Demand,
    Hardware,
    NodeView,
    PlacedGroupView,
    Requirements,
    Reservation,
)


class Side(Enum):
    """What a job's group is for."""

    ROLLOUT = "rollout"
    TRAIN = "train"
    BOTH = "both"
    """Colocated: one group generates and trains."""


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """One gang that a job needs."""

    side: Side = Side.BOTH
    world_size: int = 1
    state_bytes: int = 0
    """Per rank; 0 while unknown: the worker checks its budgets when it builds the model."""
    demand: Demand | None = None
    """From a recorded trace or learned; None for a job of which nothing is known."""


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """A job, or one model of it, that needs a place."""

    groups: tuple[GroupRequest, ...] = (GroupRequest(),)
    job_id: JobId | None = None
    tenant: Tenant | None = None
    slowdown_target: float = 1.3
    expected_s: float | None = None
    """Estimated length of the job: what lets it backfill."""
    requirements: Requirements = NOTHING_REQUIRED


@dataclass(frozen=True, slots=True)
class Assignment:
    """The gang for one of the requested groups."""

    side: Side
    worker_ids: tuple[WorkerId, ...]
    """Rank 0 first; exactly as many as were asked for."""
    group_id: GroupId | None = None
    """None: these workers form a new group."""
    prediction: Prediction | None = None
    """Of all members, the new one last; None where nothing was predicted."""


@dataclass(frozen=True, slots=True)
class Placed:
    """One assignment per requested group, all or none."""

    assignments: tuple[Assignment, ...]

    @property
    def worker_id(self) -> WorkerId:
        """Rank 0 of the first group."""
        return self.assignments[0].worker_ids[0]


class Blocker(Enum):
    """What stood in the way on most of the groups."""

    NO_WORKER = "no worker"
    NOT_READY = "not ready"
    CONSTRAINT = "constraint"
    GANG = "gang size"
    MEMORY = "memory"
    MEMBERS = "members"
    SLOWDOWN = "predicted slowdown"
    SWAPS = "swaps eat the gain"
    RESERVED = "reserved"
    QUOTA = "quota"


@dataclass(frozen=True, slots=True)
class Refused:
    """Nothing fits; `temporary`: something may when a worker is back, fewer jobs share, or a quota resets."""

    reason: str
    temporary: bool
    blocker: Blocker = Blocker.CONSTRAINT


def place(view: ClusterView, request: PlacementRequest, policy: Policy) -> Placed | Refused:
    """Places all groups of a job, or none."""
    use = view.tenants.get(request.tenant) if request.tenant is not None else None
    if use is not None and use.used_s >= use.quota_s:
        return Refused(
            f"tenant {request.tenant} has used {use.used_s:.0f} of its {use.quota_s:.0f} device seconds; the account "
            f"resets in {max(0.0, use.resets_at - view.now):.0f} s",
            temporary=True,
            blocker=Blocker.QUOTA,
        )
    if not view.groups and not any(node.free for node in view.nodes):
        return Refused(
            "no worker has registered that could take it; `plexrl workers` lists those there are",
            True,
            Blocker.NO_WORKER,
        )
    taken: set[WorkerId] = set()
    wait_s = 0.0
    assignments: dict[int, Assignment] = {}
    # The larger gang first: it has the fewest choices.
    for index in sorted(range(len(request.groups)), key=lambda i: (-request.groups[i].world_size, i)):
        outcome = _Search(view, request, request.groups[index], policy, frozenset(taken), wait_s).run()
        if isinstance(outcome, Refused):
            return outcome
        assignments[index] = outcome
        taken.update(outcome.worker_ids)
        wait_s += outcome.prediction.waits_s[-1] if outcome.prediction is not None else 0.0
    return Placed(tuple(assignments[index] for index in range(len(request.groups))))


def reserve(view: ClusterView, job_id: JobId, request: PlacementRequest, policy: Policy) -> Reservation | None:
    """The earliest start that can be promised to a job that does not fit now; None when the estimates tell none."""
    ends = sorted({m.ends_at for g in view.groups for m in g.members if m.ends_at is not None})
    low, high = 0, len(ends)
    found: Placed | None = None
    while low < high:
        middle = (low + high) // 2
        outcome = place(_after(view, ends[middle]), request, policy)
        if isinstance(outcome, Placed):
            found, high = outcome, middle
        else:
            low = middle + 1
    if found is None:
        return None
    present = {w for g in view.groups for w in g.worker_ids}
    joined = frozenset(a.group_id for a in found.assignments if a.group_id is not None)
    fresh = [w for a in found.assignments if a.group_id is None for w in a.worker_ids]
    freed = {w for w in fresh if w in present}
    dissolving = frozenset(g.group_id for g in view.groups if freed.intersection(g.worker_ids))
    return Reservation(job_id, max(view.now, ends[low]), len(fresh) - len(freed), joined | dissolving)


def _after(view: ClusterView, at: float) -> ClusterView:
    """The cluster once every job has left that ends by `at`: groups without members give their workers back."""
    groups, nodes = [], list(view.nodes)
    for group in view.groups:
        members = tuple(m for m in group.members if m.ends_at is None or m.ends_at > at)
        if members or not group.members:
            groups.append(replace(group, members=members) if len(members) < len(group.members) else group)
        else:
            nodes.append(NodeView(f"freed-{group.group_id}", group.hardware, group.worker_ids))
    return ClusterView(tuple(groups), tuple(nodes), max(at, view.now))


_Misfit = tuple[Blocker, str]


class _Search:
    """The search for one gang: candidates in the strategy's order, the first that fits wins, misfits are counted."""

    def __init__(
        self,
        view: ClusterView,
        request: PlacementRequest,
        wanted: GroupRequest,
        policy: Policy,
        taken: frozenset[WorkerId],
        elsewhere_wait_s: float,
    ) -> None:
        self._view = view
        self._request = request
        self._wanted = wanted
        self._policy = policy
        self._taken = taken
        self._elsewhere_wait_s = elsewhere_wait_s
        self._limit = policy.promised(request.slowdown_target)
        self._counts: dict[Blocker, int] = {}
        self._texts: dict[Blocker, list[str]] = {}
        self._cold = wanted.demand is None and policy.cold_spread
        self._may_share = policy.share_rollout or wanted.side is not Side.ROLLOUT
        self._group_fits: dict[int, _Misfit | None] = {}
        self._promised: dict[GroupId, float] = {}
        for reservation in view.reservations:
            if reservation.job_id != request.job_id:
                for group_id in reservation.group_ids:
                    promised = self._promised.get(group_id, reservation.start_at)
                    self._promised[group_id] = min(promised, reservation.start_at)

    def run(self) -> Assignment | Refused:
        """The assignment, or the refusal with what stood in the way most often."""
        spread = self._cold or self._policy.strategy is not Strategy.PACK
        if spread and (fresh := self._new_group()) is not None:
            return fresh
        for group, load in self._candidates(spread):
            misfit = self._misfit(group, load)
            prediction = None
            if misfit is None and group.members and self._policy.predict_slowdown and not self._cold:
                prediction, misfit = self._predict(group)
            if misfit is None:
                return Assignment(self._wanted.side, group.worker_ids, group.group_id, prediction)
            self._count(misfit, group)
        if not spread and (fresh := self._new_group()) is not None:
            return fresh
        return self._refusal()

    def _candidates(self, spread: bool) -> Sequence[tuple[PlacedGroupView, float]]:
        """Groups of the right size with their load, fullest first, or to spread the emptiest first."""
        size, unknown_share = self._wanted.world_size, self._policy.cold_busy_share
        ranked = []
        others = 0
        for group in self._view.groups:
            if len(group.worker_ids) != size:
                others += 1
                continue
            load = sum([m.demand.busy_share if m.demand is not None else unknown_share for m in group.members])
            parked = sum([m.state_bytes for m in group.members])
            ranked.append((load if spread else -load, parked, len(group.members), group.group_id, group, load))
        if others:
            self._counts[Blocker.GANG] = others
            self._texts[Blocker.GANG] = [f"no other group has {size} rank(s)"]
        ranked.sort(key=lambda entry: entry[:4])
        return [(entry[4], entry[5]) for entry in ranked]

    def _misfit(self, group: PlacedGroupView, load: float) -> _Misfit | None:
        """Why the group cannot take the gang, whatever its members' demands are."""
        wanted, members = self._wanted, group.members
        if (misfit := self._hardware_misfit(group.hardware)) is not None:
            return misfit
        model_ids = frozenset[ModelId]().union(*[m.model_ids for m in members])
        if not self._request.requirements.colocate <= model_ids:
            return Blocker.CONSTRAINT, "lacks a model to colocate with"
        if self._request.requirements.avoid & model_ids:
            return Blocker.CONSTRAINT, "has a model to stay away from"
        if self._taken.intersection(group.worker_ids):
            return Blocker.GANG, "already has another group of this job"
        parked = sum([m.state_bytes for m in members])
        if parked + wanted.state_bytes > group.hardware.host_state_bytes:
            return Blocker.MEMORY, f"host tier holds {group.hardware.host_state_bytes} bytes, {parked} are taken"
        others = [m for m in members if m.job_id != self._request.job_id]
        if others and (not self._may_share or any(m.private for m in others)):
            return Blocker.MEMBERS, "is not shared"
        if len(others) >= self._policy.max_members:
            return Blocker.MEMBERS, f"has {len(others)} members, which is the limit"
        if not group.ready:
            return Blocker.NOT_READY, "is not READY now (cordoned, stopping or not connected)"
        promised = self._promised.get(group.group_id)
        if promised is not None and not self._ends_by(promised):
            return Blocker.RESERVED, f"is promised in {max(0.0, promised - self._view.now):.0f} s"
        if wanted.demand is not None and members and self._policy.predict_slowdown:
            # A cheap necessary condition first: nobody runs faster than the group's capacity allows.
            share = load + wanted.demand.busy_share
            if share > self._limit:
                return Blocker.SLOWDOWN, f"{share:.2f} of its time would be asked for, at most {self._limit:.2f} may be"
        return None

    def _hardware_misfit(self, hardware: Hardware) -> _Misfit | None:
        """The same for what the workers offer; remembered, because most workers are alike."""
        known = self._group_fits
        if id(hardware) not in known:
            known[id(hardware)] = self._compare(hardware)
        return known[id(hardware)]

    def _compare(self, hardware: Hardware) -> _Misfit | None:
        request, wanted = self._request.requirements, self._wanted
        if request.architecture is not None and request.architecture not in hardware.architectures:
            offered = ", ".join(sorted(hardware.architectures)) or "no architecture"
            return Blocker.CONSTRAINT, f"offers {offered}, not {request.architecture}"
        if request.catalogue is not None and request.catalogue not in hardware.catalogue:
            entries = ", ".join(sorted(hardware.catalogue)) or "no entry"
            return Blocker.CONSTRAINT, f"catalogue has {entries}, not {request.catalogue!r}"
        if request.lora_rank > hardware.max_lora_rank:
            most = f"up to {hardware.max_lora_rank}" if hardware.max_lora_rank else "none"
            return Blocker.CONSTRAINT, f"offers LoRA ranks: {most}, not {request.lora_rank}"
        for key, value in sorted(request.labels.items()):
            if hardware.labels.get(key) != value:
                return Blocker.CONSTRAINT, f"label {key}={hardware.labels.get(key, '(absent)')}, want {key}={value}"
        if wanted.state_bytes > hardware.device_state_bytes:
            return (
                Blocker.MEMORY,
                f"device holds {hardware.device_state_bytes} bytes of state, the model needs {wanted.state_bytes}",
            )
        if wanted.state_bytes > hardware.host_state_bytes:
            return (
                Blocker.MEMORY,
                f"host tier holds {hardware.host_state_bytes} bytes, the model needs {wanted.state_bytes}",
            )
        return None

    def _predict(self, group: PlacedGroupView) -> tuple[Prediction, _Misfit | None]:
        """How the members would fare, and what forbids it: a missed target, or swaps that eat the gain."""
        demands, swapping = self._demands(group), swaps(group, self._wanted.state_bytes)
        prediction = _expect(demands, self._policy, swapping=swapping, at_least=True)
        if (misfit := self._misses(group, demands, prediction)) is None:
            prediction = _expect(demands, self._policy, swapping=swapping)
            misfit = self._misses(group, demands, prediction) or self._eats_gain(group, demands, prediction)
        return prediction, misfit

    def _demands(self, group: PlacedGroupView) -> list[Demand]:
        """Of the members and the new one; what is unknown is assumed with care."""
        known = [m.demand for m in group.members if m.demand is not None]
        iteration_s = sum([d.iteration_s for d in known]) / len(known) if known else 1.0
        assumed = Demand(iteration_s, self._policy.cold_busy_share * iteration_s)
        return [*[m.demand or assumed for m in group.members], self._wanted.demand or assumed]

    def _misses(self, group: PlacedGroupView, demands: Sequence[Demand], prediction: Prediction) -> _Misfit | None:
        targets = [*[m.slowdown_target for m in group.members], self._request.slowdown_target]
        elsewhere = [*[m.elsewhere_wait_s for m in group.members], self._elsewhere_wait_s]
        for index, slowdown in enumerate(prediction.slowdowns):
            total = slowdown + elsewhere[index] / demands[index].iteration_s
            if total > self._policy.promised(targets[index]):
                who = f"member {group.members[index].job_id}" if index < len(group.members) else "the job"
                may = (
                    f"its target is {targets[index]:g}, at most {self._policy.promised(targets[index]):.2f} is promised"
                )
                return Blocker.SLOWDOWN, f"{who} would run {total:.2f} times slower, {may}"
        return None

    def _eats_gain(self, group: PlacedGroupView, demands: Sequence[Demand], prediction: Prediction) -> _Misfit | None:
        before = _expect(demands[:-1], self._policy, swapping=swaps(group, 0)).work
        if prediction.work < before + self._policy.min_gain:
            return (
                Blocker.SWAPS,
                f"would do {prediction.work:.2f} groups' worth of work instead of {before:.2f}: swaps eat the gain",
            )
        return None

    def _new_group(self) -> Assignment | None:
        """Workers of nodes that belong to no group: whole nodes for large gangs, the tightest fit for small ones."""
        size, held = self._wanted.world_size, 0
        for reservation in self._view.reservations:
            if reservation.job_id != self._request.job_id and not self._ends_by(reservation.start_at):
                held += reservation.free_workers
        alike: dict[int, tuple[Hardware, list[NodeView]]] = {}
        available = 0
        for node in self._view.nodes:
            available += len(node.free)
            if node.free and self._hardware_misfit(node.hardware) is None:
                alike.setdefault(id(node.hardware), (node.hardware, []))[1].append(node)
        if available - held < size:
            if available >= size:
                self._count((Blocker.RESERVED, f"{held} of {available} free workers are promised to a waiting job"))
            return None
        for _, nodes in alike.values():
            if (workers := self._gang(nodes, size)) is not None:
                return Assignment(self._wanted.side, workers)
        return None

    def _gang(self, nodes: Sequence[NodeView], size: int) -> tuple[WorkerId, ...] | None:
        free = [(len(ids), node.node_id, ids) for node in nodes if (ids := self._free(node))]
        fitting = [entry for entry in free if entry[0] >= size]
        if fitting:
            return min(fitting)[2][:size]
        if sum([entry[0] for entry in free]) < size:
            return None
        chosen: list[WorkerId] = []
        for _, _, ids in sorted(free, key=lambda entry: (-entry[0], entry[1])):
            chosen += ids[: size - len(chosen)]
            if len(chosen) == size:
                break
        return tuple(chosen)

    def _free(self, node: NodeView) -> tuple[WorkerId, ...]:
        return tuple([w for w in node.free if w not in self._taken]) if self._taken else tuple(node.free)

    def _ends_by(self, at: float) -> bool:
        return self._request.expected_s is not None and self._view.now + self._request.expected_s <= at

    def _count(self, misfit: _Misfit, group: PlacedGroupView | None = None) -> None:
        blocker, text = misfit
        self._counts[blocker] = self._counts.get(blocker, 0) + 1
        texts = self._texts.setdefault(blocker, [])
        if len(texts) < _TEXTS:
            texts.append(f"{group.group_id}: {text}" if group is not None else text)

    def _refusal(self) -> Refused:
        """One sentence: what was wanted, what is free, and what stands in the way on most groups.

        Of several obstacles the one that may pass is named: it tells what to wait for.
        """
        free = sum([len(node.free) for node in self._view.nodes])
        passing = [b for b in _TEMPORARY if b in self._counts]
        blocker = max(passing or list(self._counts) or [Blocker.GANG], key=lambda b: self._counts.get(b, 0))
        looked, hindered = len(self._view.groups), self._counts.get(blocker, 0)
        texts = "; ".join(self._texts.get(blocker, ()))
        # A gang that the cluster could hold waits for jobs to end; one that is too large for it waits for nothing.
        workers = free + sum([len(group.worker_ids) for group in self._view.groups])
        large_enough = blocker is Blocker.GANG and workers >= self._wanted.world_size
        reason = f"of {looked} worker(s) {hindered} cannot take it for {blocker.value}: {texts}"
        if self._wanted.world_size > 1 or free:
            wanted = f"{self._wanted.world_size} worker(s) for {self._wanted.side.value}: {free} free"
            reason = f"{wanted}, and of {looked} group(s) {hindered} do not fit by {blocker.value}: {texts}"
        return Refused(
            reason,
            temporary=blocker in _TEMPORARY or large_enough,
            blocker=blocker,
        )


_TEXTS = 4
_TEMPORARY = (Blocker.NOT_READY, Blocker.RESERVED, Blocker.SLOWDOWN, Blocker.SWAPS, Blocker.MEMBERS)


def swaps(group: PlacedGroupView, incoming_bytes: int) -> bool:
    """Whether the members' states and an incoming one together exceed the device, so that turns cost swaps."""
    return sum([m.state_bytes for m in group.members]) + incoming_bytes > group.hardware.device_state_bytes


def predict_group(group: PlacedGroupView, policy: Policy) -> Prediction:
    """How the members of a group fare as it is; every member's demand must be known."""
    return _expect([m.demand for m in group.members if m.demand is not None], policy, swapping=swaps(group, 0))


def _expect(demands: Sequence[Demand], policy: Policy, *, swapping: bool, at_least: bool = False) -> Prediction:
    return predict(
        demands,
        swapping=swapping,
        correct_variation=policy.correct_variation,
        chunk_s=policy.chunk_s if policy.chunking else inf,
        at_least=at_least,
    )
