"""What the policy promises whatever the jobs do: nobody waits for longer than the bound, and budgets are kept.

`docs/scheduling.md` has the proof of the bound; here adversaries look for a way around it.
"""

from hypothesis import given, settings
from hypothesis import strategies as st

from plexrl_controller.domain.ids import JobId, ModelId
from plexrl_controller.scheduling.policy import HoldRule, Order, Policy
from tests.support.group_machine import Arrival, Machine, MachineJob

TOLERANCE_S = 1e-6

policies = st.builds(
    Policy,
    order=st.sampled_from(Order),
    hold=st.sampled_from(HoldRule),
    quantum_s=st.sampled_from([0.5, 5.0, 20.0]),
    starvation_bound_s=st.sampled_from([1.0, 30.0, 200.0]),
    chunk_s=st.sampled_from([2.0, 30.0, 60.0]),
    hold_limit_s=st.sampled_from([5.0, 120.0]),
    trust=st.sampled_from([0.25, 1.0]),
    window=st.sampled_from([8, 64]),
    contended_window=st.integers(1, 8),
)


@st.composite
def machines(draw: st.DrawFn, *, can_yield: bool = True) -> Machine:
    """Groups whose jobs fit the device alone, together, or in part."""
    count = draw(st.integers(2, 5))
    jobs = []
    for index in range(count):
        models = draw(st.integers(1, 2))
        sizes = {ModelId(f"m{index}.{m}"): draw(st.integers(1, 100)) for m in range(models)}
        jobs.append(MachineJob(JobId(f"j{index}"), sizes, draw(st.sampled_from([0.0, 0.5, 4.0, 30.0]))))
    return Machine(
        jobs,
        draw(st.integers(100, 1000)),
        draw(policies),
        can_yield=can_yield,
        estimates=draw(st.booleans()),
        background_moves=draw(st.booleans()),
    )


arrivals = st.lists(
    st.builds(
        Arrival,
        st.floats(0, 2000).map(lambda x: round(x, 3)),
        st.integers(0, 1),
        st.sampled_from([0.001, 0.1, 3.0, 45.0, 400.0]),
        st.integers(0, 1),
    ),
    max_size=60,
)


def bound_s(machine: Machine, chunk_max_s: float) -> float:
    """B + (k - 1) (chunk_max + sigma_max) + chunk_max, DESIGN section 6."""
    sigma_max_s = max(job.load_s for job in machine.jobs)
    others = len(machine.jobs) - 1
    return machine.policy.starvation_bound_s + others * (chunk_max_s + sigma_max_s) + chunk_max_s


@settings(max_examples=100, deadline=None)
@given(machines(), arrivals, st.lists(st.integers(0, 4), min_size=60, max_size=60))
def test_nobody_waits_for_longer_than_the_bound(machine: Machine, calls: list[Arrival], jobs: list[int]) -> None:
    """On a group that can yield, a chunk is `chunk_s`, however long the calls are."""
    count = len(machine.jobs)
    machine.run([Arrival(c.at, job % count, c.service_s, c.model) for c, job in zip(calls, jobs, strict=False)])
    for job_id, wait_s in machine.waits.items():
        assert wait_s <= bound_s(machine, machine.policy.chunk_s) + TOLERANCE_S, job_id


@settings(max_examples=60, deadline=None)
@given(machines(can_yield=False), arrivals, st.lists(st.integers(0, 4), min_size=60, max_size=60))
def test_the_bound_holds_where_calls_cannot_yield(machine: Machine, calls: list[Arrival], jobs: list[int]) -> None:
    """There a chunk is the longest stretch of calls that were given together."""
    count = len(machine.jobs)
    machine.run([Arrival(c.at, job % count, c.service_s, c.model) for c, job in zip(calls, jobs, strict=False)])
    for job_id, wait_s in machine.waits.items():
        assert wait_s <= bound_s(machine, max(machine.stretches)) + TOLERANCE_S, job_id


@settings(max_examples=12, deadline=None)
@given(st.sampled_from(Order), st.sampled_from(HoldRule), st.integers(1, 3), st.sampled_from([0.0, 2.0]))
def test_a_flood_starves_nobody(order: Order, hold: HoldRule, floods: int, load_s: float) -> None:
    """G13: jobs that always have short calls ready against one whose single call every order would rank last."""
    policy = Policy(order=order, hold=hold, starvation_bound_s=50.0, chunk_s=15.0)
    jobs = [MachineJob(JobId(f"flood{i}"), {ModelId(f"f{i}"): 60}, load_s) for i in range(floods)]
    victim = MachineJob(JobId("victim"), {ModelId("v"): 60}, load_s, attained_s=1e9)
    machine = Machine([*jobs, victim], 100, policy)
    calls = [Arrival(float(t), i, 1.5) for t in range(100) for i in range(floods)]
    machine.run([*calls, Arrival(10.0, floods, 20.0)])
    assert machine.waits[JobId("victim")] <= bound_s(machine, policy.chunk_s) + TOLERANCE_S


def test_without_the_starvation_bound_the_flood_does_starve() -> None:
    """The negative control of the test above: the bound is what saves the victim."""
    policy = Policy(order=Order.LAS, starvation_bound_s=1e9, chunk_s=30.0)
    flood = MachineJob(JobId("flood"), {ModelId("f"): 60}, 0.0)
    victim = MachineJob(JobId("victim"), {ModelId("v"): 60}, 0.0, attained_s=1e9)
    machine = Machine([flood, victim], 100, policy)
    machine.run([*[Arrival(float(t), 0, 1.5) for t in range(400)], Arrival(10.0, 1, 20.0)])
    assert machine.waits[JobId("victim")] > 300.0
