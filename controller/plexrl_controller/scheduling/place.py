"""Where a job's groups go, or the reason why nowhere. Pure; called at job boundaries and after losses."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from math import inf

from plexrl_controller.domain.ids import GroupId, JobId, ModelId, Tenant, WorkerId
from plexrl_controller.scheduling.policy import Policy, Strategy
from plexrl_controller.scheduling.queueing import Prediction, predict
from plexrl_controller.scheduling.views import (
    ClusterView,
    Demand,
    Hardware,
    NodeView,
    PlacedGroupView,
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
    architecture: str | None = None
    """Hugging Face architecture name, where the base tells it."""
    catalogue: str | None = None
    require: Mapping[str, str] = field(default_factory=dict)
    colocate: frozenset[ModelId] = frozenset()
    avoid: frozenset[ModelId] = frozenset()


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
    """Nothing fits; `temporary` says whether something may when a worker is back, a job ends or a quota resets."""

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
            "no worker has registered; start one with `plexrl-worker` or `plexrl up`", True, Blocker.NO_WORKER
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
        self._misfits: dict[Blocker, list[str]] = {}
        self._cold = wanted.demand is None and policy.cold_spread
        self._may_share = policy.share_rollout or wanted.side is not Side.ROLLOUT
        self._group_fits: dict[int, tuple[Blocker, str] | None] = {}
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
        for group in self._candidates(spread):
            if (assignment := self._join(group)) is not None:
                return assignment
        if not spread and (fresh := self._new_group()) is not None:
            return fresh
        return self._refusal()

    def _candidates(self, spread: bool) -> Sequence[PlacedGroupView]:
        """Groups of the right size, fullest first, or emptiest first to spread."""
        size = self._wanted.world_size
        ranked = []
        for group in self._view.groups:
            if len(group.worker_ids) == size:
                load = sum([m.demand.busy_share if m.demand is not None else 1.0 for m in group.members])
                parked = sum([m.state_bytes for m in group.members])
                ranked.append((load if spread else -load, len(group.members), parked, group.group_id, group))
            else:
                self._count(Blocker.GANG, f"{group.group_id}: has {len(group.worker_ids)} rank(s), not {size}")
        ranked.sort(key=lambda entry: entry[:4])
        return [entry[4] for entry in ranked]

    def _join(self, group: PlacedGroupView) -> Assignment | None:
        misfit = self._misfit(group)
        if misfit is not None:
            self._count(misfit[0], f"{group.group_id}: {misfit[1]}")
            return None
        prediction = None
        if group.members and self._policy.predict_slowdown and not (self._cold and self._is_known(group)):
            prediction = self._predict(group)
            if (misfit := self._misses(group, prediction)) is not None:
                self._count(misfit[0], f"{group.group_id}: {misfit[1]}")
                return None
        return Assignment(self._wanted.side, group.worker_ids, group.group_id, prediction)

    def _misfit(self, group: PlacedGroupView) -> tuple[Blocker, str] | None:
        """Why the group cannot take the gang, whatever its members' demands are."""
        wanted, members = self._wanted, group.members
        if (misfit := self._hardware_misfit(group.hardware)) is not None:
            return misfit
        model_ids = frozenset[ModelId]().union(*[m.model_ids for m in members])
        if not self._request.colocate <= model_ids:
            return Blocker.CONSTRAINT, "lacks a model to colocate with"
        if self._request.avoid & model_ids:
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
            return Blocker.NOT_READY, "is not READY now"
        promised = self._promised.get(group.group_id)
        if promised is not None and not self._ends_by(promised):
            return Blocker.RESERVED, f"is promised in {max(0.0, promised - self._view.now):.0f} s"
        return None

    def _hardware_misfit(self, hardware: Hardware) -> tuple[Blocker, str] | None:
        """The same for what the workers offer; remembered, because most workers are alike."""
        known = self._group_fits
        if id(hardware) not in known:
            known[id(hardware)] = self._compare(hardware)
        return known[id(hardware)]

    def _compare(self, hardware: Hardware) -> tuple[Blocker, str] | None:
        request, wanted = self._request, self._wanted
        if request.architecture is not None and request.architecture not in hardware.architectures:
            offered = ", ".join(sorted(hardware.architectures)) or "no architecture"
            return Blocker.CONSTRAINT, f"offers {offered}, not {request.architecture}"
        if request.catalogue is not None and request.catalogue not in hardware.catalogue:
            entries = ", ".join(sorted(hardware.catalogue)) or "no entry"
            return Blocker.CONSTRAINT, f"catalogue has {entries}, not {request.catalogue!r}"
        for key, value in sorted(request.require.items()):
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

    def _is_known(self, group: PlacedGroupView) -> bool:
        return all(m.demand is not None for m in group.members)

    def _predict(self, group: PlacedGroupView) -> Prediction:
        return self._expect(self._demands(group), swapping=swaps(group, self._wanted.state_bytes))

    def _expect(self, demands: Sequence[Demand], *, swapping: bool) -> Prediction:
        return predict(
            demands,
            swapping=swapping,
            correct_variation=self._policy.correct_variation,
            chunk_s=self._policy.chunk_s if self._policy.chunking else inf,
        )

    def _demands(self, group: PlacedGroupView) -> list[Demand]:
        """Of the members and the new one; what is unknown is assumed with care."""
        known = [m.demand for m in group.members if m.demand is not None]
        iteration_s = sum([d.iteration_s for d in known]) / len(known) if known else 1.0
        assumed = Demand(iteration_s, self._policy.cold_busy_share * iteration_s)
        return [*[m.demand or assumed for m in group.members], self._wanted.demand or assumed]

    def _misses(self, group: PlacedGroupView, prediction: Prediction) -> tuple[Blocker, str] | None:
        """Whose target would be missed, or whether the swaps would eat the gain."""
        demands = self._demands(group)
        targets = [*[m.slowdown_target for m in group.members], self._request.slowdown_target]
        elsewhere = [*[m.elsewhere_wait_s for m in group.members], self._elsewhere_wait_s]
        for index, slowdown in enumerate(prediction.slowdowns):
            total = slowdown + elsewhere[index] / demands[index].iteration_s
            if total > targets[index] - self._policy.slowdown_margin:
                who = f"member {group.members[index].job_id}" if index < len(group.members) else "the job"
                return Blocker.SLOWDOWN, f"{who} would run {total:.2f} times slower, its target is {targets[index]:g}"
        before = self._expect(demands[:-1], swapping=swaps(group, 0)).work
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
                self._count(Blocker.RESERVED, f"{held} of {available} free workers are promised to a waiting job")
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

    def _count(self, blocker: Blocker, text: str) -> None:
        self._misfits.setdefault(blocker, []).append(text)

    def _refusal(self) -> Refused:
        """One sentence: how many groups were looked at, and why the first few do not fit."""
        free = sum([len(node.free) for node in self._view.nodes])
        looked = sum(len(texts) for texts in self._misfits.values())
        # What may pass comes first: it tells what to wait for.
        for blocker in (*_TEMPORARY, *Blocker):
            if blocker in self._misfits:
                break
        else:
            blocker = Blocker.GANG
        texts = self._misfits.get(blocker, [])
        gang = f"{self._wanted.world_size} worker(s) wanted for {self._wanted.side.value}, {free} free"
        return Refused(
            f"{gang}; none of {looked} group(s) fits, {len(texts)} by {blocker.value}: {'; '.join(sorted(texts)[:4])}",
            temporary=blocker in _TEMPORARY,
            blocker=blocker,
        )


_TEMPORARY = (Blocker.NOT_READY, Blocker.RESERVED, Blocker.SLOWDOWN, Blocker.SWAPS, Blocker.MEMBERS)


def swaps(group: PlacedGroupView, incoming_bytes: int) -> bool:
    """Whether the members' states and an incoming one together exceed the device, so that turns cost swaps."""
    return sum([m.state_bytes for m in group.members]) + incoming_bytes > group.hardware.device_state_bytes
