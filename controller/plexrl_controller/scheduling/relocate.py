"""Who should move: off groups that are drained, and at a job's end, when room has come free. Pure.

A move costs a snapshot and a restore, so these run at job boundaries and on an operator's word, never per call. Every
move is planned on the cluster as the moves before it leave it; whoever executes them may stop after any.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace

from plexrl_controller.domain.ids import GroupId, JobId
from plexrl_controller.scheduling.place import (
    Assignment,
    GroupRequest,
    Placed,
    PlacementRequest,
    Refused,
    place,
    predict_group,
)
from plexrl_controller.scheduling.policy import Policy, Strategy
from plexrl_controller.scheduling.views import ClusterView, MemberView, NodeView, PlacedGroupView


@dataclass(frozen=True, slots=True)
class Relocation:
    """A job's share of a group goes elsewhere."""

    job_id: JobId
    source: GroupId
    assignment: Assignment
    why: str


@dataclass(frozen=True, slots=True)
class Stuck:
    """A job that cannot leave a drained group, and why."""

    job_id: JobId
    source: GroupId
    refused: Refused


def drain(view: ClusterView, group_ids: Collection[GroupId], policy: Policy) -> tuple[Relocation | Stuck, ...]:
    """Moves everybody off these groups, the largest state first; whoever fits nowhere stays and is named."""
    leaving = [group for group in view.groups if group.group_id in group_ids]
    # Drained groups take nobody, and their workers do not come free.
    view = replace(view, groups=tuple(replace(g, ready=False) if g.group_id in group_ids else g for g in view.groups))
    moves: list[Relocation | Stuck] = []
    entries = [(member, group) for group in leaving for member in group.members]
    for member, group in sorted(entries, key=lambda e: (-e[0].state_bytes, e[0].job_id)):
        outcome = _place_member(view, group, member, policy)
        if isinstance(outcome, Refused):
            moves.append(Stuck(member.job_id, group.group_id, outcome))
            continue
        move = Relocation(member.job_id, group.group_id, outcome, "its group is drained")
        moves.append(move)
        view = apply(view, move, dissolve=False)
    return tuple(moves)


def improve(
    view: ClusterView, policy: Policy, *, workers_wanted: int = 0, max_moves: int = 4
) -> tuple[Relocation, ...]:
    """At a job's end: members that miss their target move to where everyone meets it; then, as long as `workers_wanted`
    exceeds the free ones, groups whose members all fit into others are emptied, the least loaded first."""
    if not policy.replace_at_boundaries:
        return ()
    view, moves = _relieve(view, policy, max_moves)
    return tuple(moves + _defragment(view, policy, workers_wanted, max_moves - len(moves)))


def _relieve(view: ClusterView, policy: Policy, max_moves: int) -> tuple[ClusterView, list[Relocation]]:
    moves: list[Relocation] = []
    for group in view.groups:
        if len(moves) >= max_moves:
            break
        late = _late(group, policy)
        if late is None:
            continue
        why = f"{late[0].job_id} runs {late[1]:.2f} times slower here, its target is {late[0].slowdown_target:g}"
        for member in sorted(group.members, key=lambda m: (m.state_bytes, m.job_id)):
            rest = replace(group, members=tuple(m for m in group.members if m is not member))
            if _late(rest, policy) is not None:
                continue
            outcome = _place_member(view, group, member, policy)
            if isinstance(outcome, Assignment):
                moves.append(Relocation(member.job_id, group.group_id, outcome, why))
                view = apply(view, moves[-1])
                break
    return view, moves


def _late(group: PlacedGroupView, policy: Policy) -> tuple[MemberView, float] | None:
    """The member that misses its target by most, with its predicted slowdown."""
    if len(group.members) < 2 or any(m.demand is None for m in group.members):
        return None
    prediction = predict_group(group, policy)
    worst: tuple[float, MemberView, float] | None = None
    for member, slowdown in zip(group.members, prediction.slowdowns, strict=True):
        elsewhere = member.elsewhere_wait_s / member.demand.iteration_s if member.demand is not None else 0.0
        excess = slowdown + elsewhere - member.slowdown_target
        if excess > 1e-9 and (worst is None or excess > worst[0]):
            worst = (excess, member, slowdown + elsewhere)
    return (worst[1], worst[2]) if worst is not None else None


def _defragment(view: ClusterView, policy: Policy, workers_wanted: int, max_moves: int) -> list[Relocation]:
    moves: list[Relocation] = []
    packed = replace(policy, strategy=Strategy.PACK)
    for group in sorted(view.groups, key=lambda g: (_load(g), g.group_id)):
        free = sum(len(node.free) for node in view.nodes)
        if free >= workers_wanted:
            break
        if not group.members or len(moves) + len(group.members) > max_moves:
            continue
        emptied, planned = view, []
        for member in group.members:
            outcome = _place_member(emptied, group, member, packed)
            if not isinstance(outcome, Assignment) or outcome.group_id is None:
                break
            why = f"{group.world_size} worker(s) come free for {workers_wanted} that are wanted"
            planned.append(Relocation(member.job_id, group.group_id, outcome, why))
            emptied = apply(emptied, planned[-1])
        else:
            view = emptied
            moves += planned
    return moves


def _load(group: PlacedGroupView) -> float:
    return sum(m.demand.busy_share if m.demand is not None else 1.0 for m in group.members)


def _place_member(
    view: ClusterView, group: PlacedGroupView, member: MemberView, policy: Policy
) -> Assignment | Refused:
    """A place for one member anywhere but on its own group."""
    # Nor on a group that has another gang of its job: the two would take turns with each other.
    others = tuple(g for g in view.groups if all(m.job_id != member.job_id for m in g.members))
    elsewhere = replace(view, groups=others, tenants={})
    wanted = GroupRequest(world_size=group.world_size, state_bytes=member.state_bytes, demand=member.demand)
    request = PlacementRequest(
        (wanted,), member.job_id, slowdown_target=member.slowdown_target, requirements=member.requirements
    )
    outcome = place(elsewhere, request, policy)
    return outcome.assignments[0] if isinstance(outcome, Placed) else outcome


def apply(view: ClusterView, move: Relocation, *, dissolve: bool = True) -> ClusterView:
    """The cluster after a move; an empty group gives its workers back if it may `dissolve`."""
    source = next(g for g in view.groups if g.group_id == move.source)
    member = next(m for m in source.members if m.job_id == move.job_id)
    left = replace(source, members=tuple(m for m in source.members if m is not member))
    groups = [left if g is source else g for g in view.groups if left.members or not dissolve or g is not source]
    nodes = list(view.nodes)
    if dissolve and not left.members:
        nodes.append(NodeView(f"freed-{source.group_id}", source.hardware, source.worker_ids))
    return join(replace(view, groups=tuple(groups), nodes=tuple(nodes)), move.assignment, member)


def join(view: ClusterView, to: Assignment, member: MemberView) -> ClusterView:
    """The cluster once a member has what it was assigned."""
    if to.group_id is not None:
        groups = [replace(g, members=(*g.members, member)) if g.group_id == to.group_id else g for g in view.groups]
        return replace(view, groups=tuple(groups))
    taken = set(to.worker_ids)
    hardware = next(node.hardware for node in view.nodes if taken.intersection(node.free))
    nodes = [replace(node, free=tuple(w for w in node.free if w not in taken)) for node in view.nodes]
    group = PlacedGroupView(GroupId(f"new-{to.worker_ids[0]}"), to.worker_ids, hardware, True, (member,))
    return replace(view, groups=(*view.groups, group), nodes=tuple(nodes))
