"""A cluster over placements, departures, drains and moves: gangs stay whole, memory and targets are kept throughout."""

from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from plexrl_controller.domain.ids import GroupId, JobId, WorkerId
from plexrl_controller.scheduling.place import GroupRequest, Placed, PlacementRequest, Side, place, predict_group
from plexrl_controller.scheduling.policy import Policy, Strategy
from plexrl_controller.scheduling.relocate import Relocation, apply, drain, improve, join
from plexrl_controller.scheduling.views import ClusterView, Demand, Hardware, MemberView, NodeView

NODES, NODE_SIZE = 6, 8
SMALL, LARGE = Hardware(80, 200), Hardware(140, 400)


class ClusterLife(RuleBasedStateMachine):
    """Everything that placement may do to a cluster, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = Policy(max_members=5)
        self.view = ClusterView(
            nodes=tuple(
                NodeView(
                    f"n{n}", LARGE if n % 3 == 0 else SMALL, tuple(WorkerId(f"n{n}.{i}") for i in range(NODE_SIZE))
                )
                for n in range(NODES)
            )
        )
        self.jobs = 0

    @rule(
        strategy=st.sampled_from(Strategy),
        size=st.sampled_from([1, 4, 8, 12]),
        share=st.floats(0.05, 0.9),
        state_bytes=st.integers(1, 90),
        slowdown=st.sampled_from([1.2, 1.3, 2.0]),
        split=st.booleans(),
    )
    def arrive(
        self, strategy: Strategy, size: int, share: float, state_bytes: int, slowdown: float, split: bool
    ) -> None:
        demand = Demand(100.0, 100.0 * share)
        sides = (Side.ROLLOUT, Side.TRAIN) if split else (Side.BOTH,)
        job_id = JobId(f"job{self.jobs}")
        self.jobs += 1
        request = PlacementRequest(
            tuple(GroupRequest(side, size, state_bytes, demand) for side in sides), job_id, slowdown_target=slowdown
        )
        outcome = place(self.view, request, replace(self.policy, strategy=strategy))
        if isinstance(outcome, Placed):
            waits = [a.prediction.waits_s[-1] if a.prediction else 0.0 for a in outcome.assignments]
            for index, assignment in enumerate(outcome.assignments):
                elsewhere_s = sum(waits) - waits[index]
                member = MemberView(
                    job_id, state_bytes, demand=demand, slowdown_target=slowdown, elsewhere_wait_s=elsewhere_s
                )
                self.view = join(self.view, assignment, member)

    @rule(data=st.data())
    def depart(self, data: st.DataObject) -> None:
        jobs = sorted({m.job_id for g in self.view.groups for m in g.members})
        if not jobs:
            return
        gone = data.draw(st.sampled_from(jobs))
        groups, nodes = [], list(self.view.nodes)
        for group in self.view.groups:
            members = tuple(m for m in group.members if m.job_id != gone)
            if members:
                groups.append(replace(group, members=members))
            else:
                nodes.append(NodeView(f"freed-{group.group_id}-{self.jobs}", group.hardware, group.worker_ids))
        self.view = replace(self.view, groups=tuple(groups), nodes=tuple(nodes))

    @rule(wanted=st.integers(0, 48), moves=st.integers(0, 6))
    def boundary(self, wanted: int, moves: int) -> None:
        planned = improve(self.view, self.policy, workers_wanted=wanted, max_moves=moves)
        assert len(planned) <= moves
        for move in planned:
            self.view = apply(self.view, move)

    @rule(data=st.data())
    def drained(self, data: st.DataObject) -> None:
        if not self.view.groups:
            return
        group_id = data.draw(st.sampled_from(sorted(g.group_id for g in self.view.groups)))
        for move in drain(self.view, {GroupId(group_id)}, self.policy):
            if isinstance(move, Relocation):
                self.view = apply(self.view, move)

    @invariant()
    def every_worker_is_in_one_place(self) -> None:
        workers = [w for g in self.view.groups for w in g.worker_ids] + [w for n in self.view.nodes for w in n.free]
        assert len(workers) == len(set(workers)) == NODES * NODE_SIZE

    @invariant()
    def budgets_and_targets_are_kept(self) -> None:
        for group in self.view.groups:
            hardware = group.hardware
            assert sum(m.state_bytes for m in group.members) <= hardware.host_state_bytes
            assert all(m.state_bytes <= hardware.device_state_bytes for m in group.members)
            assert 1 <= len(group.members) <= self.policy.max_members
            assert len({m.job_id for m in group.members}) == len(group.members), (
                "two gangs of a job on the same workers"
            )
            prediction = predict_group(group, self.policy)
            for member, slowdown in zip(group.members, prediction.slowdowns, strict=True):
                assert slowdown <= member.slowdown_target + 1e-6


ClusterLife.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestClusterLife = ClusterLife.TestCase
