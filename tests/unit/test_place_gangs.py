"""Placement of gangs among members whose demand is known: targets are kept, or the refusal says what is in the way."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plexrl_controller.domain.ids import GroupId, JobId, ModelId, Tenant, WorkerId
from plexrl_controller.scheduling.place import (
    Blocker,
    GroupRequest,
    Placed,
    PlacementRequest,
    Refused,
    Side,
    place,
    predict_group,
    reserve,
)
from plexrl_controller.scheduling.policy import Policy, Strategy
from plexrl_controller.scheduling.relocate import Relocation, Stuck, drain, improve
from plexrl_controller.scheduling.views import (
    ClusterView,
    Demand,
    Hardware,
    MemberView,
    NodeView,
    PlacedGroupView,
    Requirements,
    TenantUse,
)

H100 = Hardware(80, 400, {"gpu": "h100"})


def member(name: str, share: float, state_bytes: int = 20, **facts: object) -> MemberView:
    made = MemberView(JobId(name), state_bytes, frozenset({ModelId(f"m-{name}")}), Demand(100.0, 100.0 * share))
    return replace(made, **facts)  # type: ignore[arg-type]


def gang(name: str, size: int, *members: MemberView, **facts: object) -> PlacedGroupView:
    workers = tuple(WorkerId(f"{name}.{rank}") for rank in range(size))
    return replace(PlacedGroupView(GroupId(name), workers, H100, True, members), **facts)  # type: ignore[arg-type]


def node(name: str, free: int) -> NodeView:
    return NodeView(name, H100, tuple(WorkerId(f"{name}.{i}") for i in range(free)))


def wanted(share: float | None, size: int = 8, state_bytes: int = 20, **facts: object) -> PlacementRequest:
    demand = Demand(100.0, 100.0 * share) if share is not None else None
    return PlacementRequest((GroupRequest(Side.BOTH, size, state_bytes, demand),), JobId("new"), **facts)  # type: ignore[arg-type]


def joined(view: ClusterView, request: PlacementRequest, policy: Policy | None = None) -> GroupId | None:
    outcome = place(view, request, policy or Policy())
    assert isinstance(outcome, Placed), outcome
    return outcome.assignments[0].group_id


def refused(view: ClusterView, request: PlacementRequest, policy: Policy | None = None) -> Refused:
    outcome = place(view, request, policy or Policy())
    assert isinstance(outcome, Refused), outcome
    assert outcome.reason
    return outcome


shares = st.floats(0.02, 0.9)
members = st.builds(
    member,
    st.integers(0, 10**9).map(str),
    shares,
    st.integers(0, 80),
    slowdown_target=st.sampled_from([1.05, 1.3, 2.0]),
    private=st.sampled_from([False, False, True]),
    elsewhere_wait_s=st.sampled_from([0.0, 10.0]),
)
groups = st.lists(
    st.builds(
        lambda size, inside, ready: (size, inside, ready),
        st.sampled_from([4, 8]),
        st.lists(members, max_size=4),
        st.booleans(),
    ),
    max_size=5,
).map(lambda made: tuple(gang(f"g{i}", size, *inside, ready=ready) for i, (size, inside, ready) in enumerate(made)))
clusters = st.builds(
    ClusterView,
    groups,
    st.lists(st.integers(0, 8), max_size=4).map(lambda f: tuple(node(f"n{i}", n) for i, n in enumerate(f))),
)
requests = st.builds(
    lambda shape, share, size, target: PlacementRequest(
        tuple(GroupRequest(side, size, 20, Demand(100.0, 100.0 * share) if share else None) for side in shape),
        JobId("new"),
        slowdown_target=target,
    ),
    st.sampled_from([(Side.BOTH,), (Side.ROLLOUT, Side.TRAIN)]),
    st.none() | shares,
    st.sampled_from([4, 8, 12]),
    st.sampled_from([1.0, 1.3, 2.0]),
)
policies = st.builds(
    Policy,
    strategy=st.sampled_from(Strategy),
    max_members=st.integers(1, 4),
    share_rollout=st.booleans(),
    cold_spread=st.booleans(),
    correct_variation=st.booleans(),
)


@settings(max_examples=120, deadline=None)
@given(clusters, requests, policies)
def test_a_placed_job_keeps_gangs_memory_and_targets(
    view: ClusterView, request: PlacementRequest, policy: Policy
) -> None:
    outcome = place(view, request, policy)
    assert outcome == place(view, request, policy), "the same view gave another placement"
    if isinstance(outcome, Refused):
        assert outcome.reason
        return
    by_id = {g.group_id: g for g in view.groups}
    free = {w for n in view.nodes for w in n.free}
    used: set[WorkerId] = set()
    for asked, given_ in zip(request.groups, outcome.assignments, strict=True):
        assert len(set(given_.worker_ids)) == asked.world_size, "a gang is complete"
        assert not used & set(given_.worker_ids), "gangs never overlap"
        used |= set(given_.worker_ids)
        if given_.group_id is None:
            assert set(given_.worker_ids) <= free
            continue
        group = by_id[given_.group_id]
        assert given_.worker_ids == group.worker_ids
        assert group.ready
        assert not any(m.private for m in group.members)
        assert len(group.members) < policy.max_members
        assert sum(m.state_bytes for m in group.members) + asked.state_bytes <= group.hardware.host_state_bytes
        if given_.prediction is not None:
            targets = [*[m.slowdown_target for m in group.members], request.slowdown_target]
            for slowdown, target in zip(given_.prediction.slowdowns, targets, strict=True):
                assert slowdown <= target + 1e-9


def test_pack_takes_the_fullest_group_that_keeps_every_target_and_spread_the_emptiest() -> None:
    view = ClusterView(
        (
            gang("full", 8, member("a", 0.5), member("b", 0.5)),
            gang("half", 8, member("c", 0.3)),
            gang("low", 8, member("d", 0.1)),
        ),
        (node("n", 8),),
    )
    assert joined(view, wanted(0.2)) == "half"
    assert joined(replace(view, nodes=()), wanted(0.2), Policy(strategy=Strategy.SPREAD)) == "low"
    assert joined(view, wanted(0.2), Policy(strategy=Strategy.SPREAD)) is None


def test_a_strict_member_keeps_others_out_and_is_named() -> None:
    strict = member("strict", 0.3, slowdown_target=1.02)
    outcome = refused(ClusterView((gang("g", 8, strict),)), wanted(0.3))
    assert outcome.blocker is Blocker.SLOWDOWN
    assert outcome.temporary
    assert "strict" in outcome.reason
    assert "1.02" in outcome.reason
    assert joined(ClusterView((gang("g", 8, strict),)), wanted(0.3), Policy(predict_slowdown=False)) == "g"


def test_what_a_job_waits_elsewhere_counts_against_its_target() -> None:
    """Two shared groups of one job: the second must leave room for the waiting on the first."""
    late = member("a", 0.3, elsewhere_wait_s=25.0)
    assert refused(ClusterView((gang("g", 8, late),)), wanted(0.3)).blocker is Blocker.SLOWDOWN
    assert joined(ClusterView((gang("g", 8, replace(late, elsewhere_wait_s=0.0)),)), wanted(0.3)) == "g"


def test_slack_of_an_asynchronous_job_hides_waiting_but_no_lack_of_capacity() -> None:
    async_demand = Demand(100.0, 30.0, slack_s=70.0, variation=0.02)
    a, b, c, d = (replace(member(name, 0.3), demand=async_demand) for name in "abcd")
    request = PlacementRequest((GroupRequest(Side.TRAIN, 8, 20, async_demand),), JobId("new"), slowdown_target=1.1)
    assert joined(ClusterView((gang("g", 8, a, b),)), request) == "g"
    assert refused(ClusterView((gang("g", 8, a, b, c, d),)), request).blocker is Blocker.SLOWDOWN


def test_swaps_that_eat_the_gain_are_refused_as_such() -> None:
    def swapping(round_trip_s: float) -> Demand:
        return Demand(100.0, 50.0, visits=10.0, round_trip_s=round_trip_s)

    present = replace(member("a", 0.5, 60, slowdown_target=9.0), demand=swapping(5.0))
    request = PlacementRequest((GroupRequest(Side.BOTH, 8, 60, swapping(5.0)),), JobId("new"), slowdown_target=9.0)
    outcome = refused(ClusterView((gang("g", 8, present),)), request)
    assert outcome.blocker is Blocker.SWAPS
    together = PlacementRequest((GroupRequest(Side.BOTH, 8, 20, swapping(5.0)),), JobId("new"), slowdown_target=9.0)
    assert joined(ClusterView((gang("g", 8, present),)), together) == "g"


def test_memory_of_device_and_host_refuses_with_the_numbers() -> None:
    view = ClusterView((gang("g", 8, member("a", 0.1, 390)),))
    assert "host tier holds 400 bytes, 390 are taken" in refused(view, wanted(0.1)).reason
    assert "device holds 80 bytes of state, the model needs 90" in refused(view, wanted(0.1, state_bytes=90)).reason


def test_an_unknown_job_gets_a_group_of_its_own_while_there_is_room_else_the_emptiest() -> None:
    view = ClusterView((gang("a", 8, member("a", 0.5)), gang("b", 8, member("b", 0.1))), (node("n", 8),))
    assert joined(view, wanted(None)) is None
    assert joined(replace(view, nodes=()), wanted(None)) == "b"


def test_a_gang_takes_the_tightest_node_or_whole_nodes() -> None:
    view = ClusterView((), (node("big", 8), node("small", 4), node("other", 8)))
    small = place(view, wanted(0.1, size=3), Policy())
    assert isinstance(small, Placed)
    assert small.assignments[0].worker_ids == ("small.0", "small.1", "small.2")
    large = place(view, wanted(0.1, size=16), Policy())
    assert isinstance(large, Placed)
    assert {w.split(".")[0] for w in large.assignments[0].worker_ids} == {"big", "other"}
    never = refused(view, wanted(0.1, size=32))
    assert (never.blocker, never.temporary) == (Blocker.GANG, False)
    later = refused(replace(view, groups=(gang("g", 16, member("a", 0.5)),)), wanted(0.1, size=32))
    assert (later.blocker, later.temporary) == (Blocker.GANG, True)


def test_a_tenant_over_its_quota_is_told_when_it_resets() -> None:
    view = ClusterView((), (node("n", 8),), 100.0, tenants={Tenant("t"): TenantUse(50.0, 50.0, 160.0)})
    outcome = refused(view, wanted(0.1, tenant=Tenant("t")))
    assert outcome.blocker is Blocker.QUOTA
    assert "60 s" in outcome.reason
    assert joined(view, wanted(0.1, tenant=Tenant("other"))) is None


def test_a_reservation_is_the_earliest_end_that_makes_room_and_backfill_does_not_delay_it() -> None:
    ends = [gang(f"g{i}", 8, member(f"m{i}", 0.9, ends_at=1000.0 * (3 - i))) for i in range(3)]
    view = ClusterView(tuple(ends), (node("n", 8),))
    big = wanted(0.9, size=24)
    reservation = reserve(view, JobId("big"), big, Policy())
    assert reservation is not None
    assert reservation.start_at == 2000.0
    assert reservation.free_workers == 8
    assert reservation.group_ids == {"g1", "g2"}
    held = replace(view, reservations=(reservation,))
    long = wanted(0.9, expected_s=5000.0)
    short = wanted(0.9, expected_s=1500.0)
    assert refused(held, long).blocker is Blocker.RESERVED
    assert joined(held, short) is None
    assert joined(view, long) is None, "without the reservation it would have started, and delayed the big one"
    assert reserve(replace(view, groups=(gang("g", 8, member("a", 0.9)),)), JobId("big"), big, Policy()) is None


def test_drain_moves_everybody_who_fits_and_names_who_does_not() -> None:
    pinned = member("pinned", 0.1, requirements=Requirements(labels={"gpu": "b200"}))
    view = ClusterView((gang("old", 8, member("a", 0.1), pinned), gang("other", 8, member("b", 0.1))), ())
    moves = drain(view, {GroupId("old")}, Policy())
    assert {type(m): m.job_id for m in moves} == {Relocation: "a", Stuck: "pinned"}
    stuck = next(m for m in moves if isinstance(m, Stuck))
    assert "gpu=h100, want gpu=b200" in stuck.refused.reason


def test_drained_groups_take_nobody_from_each_other() -> None:
    view = ClusterView((gang("p", 8, member("a", 0.1)), gang("q", 8, member("b", 0.1))), (node("n", 8),))
    moves = drain(view, {GroupId("p"), GroupId("q")}, Policy())
    targets = [m.assignment.group_id for m in moves if isinstance(m, Relocation)]
    assert targets == [None, "new-n.0"]


def test_a_member_that_misses_its_target_is_relieved_when_room_has_come() -> None:
    crowded = gang("g", 8, *(member(name, 0.4) for name in "abc"))
    moves = improve(ClusterView((crowded,), (node("n", 8),)), Policy())
    assert len(moves) == 1
    assert moves[0].assignment.group_id is None
    rest = replace(crowded, members=tuple(m for m in crowded.members if m.job_id != moves[0].job_id))
    assert max(predict_group(rest, Policy()).slowdowns) <= 1.3
    assert improve(ClusterView((crowded,)), Policy()) == ()
    assert improve(ClusterView((crowded,), (node("n", 8),)), Policy(replace_at_boundaries=False)) == ()


def test_groups_are_emptied_only_for_workers_that_are_wanted() -> None:
    view = ClusterView((gang("p", 8, member("a", 0.1)), gang("q", 8, member("b", 0.2)), gang("r", 8, member("c", 0.2))))
    assert improve(view, Policy()) == ()
    moves = improve(view, Policy(), workers_wanted=8)
    assert [(m.job_id, m.source, m.assignment.group_id) for m in moves] == [("a", "p", "q")]
    assert "8 worker(s) come free" in moves[0].why


@pytest.mark.parametrize("share", [0.05, 0.2])
def test_more_members_than_the_exact_method_takes_are_predicted_too(share: float) -> None:
    crowd = gang("g", 8, *(member(f"j{i}", share, 1) for i in range(12)))
    slowdowns = predict_group(crowd, Policy(correct_variation=False)).slowdowns
    assert max(slowdowns) - min(slowdowns) < 1e-6
    assert slowdowns[0] >= max(1.0, 12 * share)
