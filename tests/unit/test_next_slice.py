"""`next_slice` as properties: whatever the group looks like, its decisions keep the invariants and waste nothing."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plexrl_controller.domain.ids import CallId, JobId, ModelId, WorkerId
from plexrl_controller.domain.states import CallKind
from plexrl_controller.scheduling.invariants import violations
from plexrl_controller.scheduling.next_slice import next_slice
from plexrl_controller.scheduling.plan import Action, Hold, Plan, Serve, Wait
from plexrl_controller.scheduling.policy import HoldRule, Policy
from plexrl_controller.scheduling.views import GroupView, JobView, ModelView, ReadyCall

NOW = 100.0


def ready(name: str, model: str, since: float) -> ReadyCall:
    return ReadyCall(CallId(name), ModelId(model), CallKind.GENERATE, since)


def job(name: str, *since: float, on_device: bool = False, **facts: object) -> JobView:
    calls = tuple(ready(f"{name}{i}", f"m-{name}", s) for i, s in enumerate(since))
    view = JobView(JobId(name), (ModelView(ModelId(f"m-{name}"), 1000, on_device, ready=calls),))
    return replace(view, **facts)  # type: ignore[arg-type]


def group(*jobs: JobView, serving: str | None = None, slice_start: float = NOW) -> GroupView:
    return GroupView(WorkerId("w"), True, 1500, jobs, JobId(serving) if serving else None, slice_start)


def decide(view: GroupView, policy: Policy) -> Action:
    return next_slice(view, NOW, policy).action


@st.composite
def group_views(draw: st.DrawFn) -> GroupView:
    """Groups that can occur: at most one job has calls in flight, and what is on the device fits it."""
    budget = draw(st.integers(1000, 4000))
    room = budget
    jobs = []
    for name in draw(st.lists(st.sampled_from("abcdef"), unique=True, max_size=5)):
        models = []
        for index in range(draw(st.integers(1, 2))):
            size = draw(st.integers(1, 1000))
            resident = draw(st.booleans()) and size <= room
            room -= size if resident else 0
            since = sorted(draw(st.lists(st.floats(0, NOW), max_size=3)))
            calls = tuple(ready(f"{name}{index}{i}", f"{name}{index}", s) for i, s in enumerate(since))
            models.append(ModelView(ModelId(f"{name}{index}"), size, resident, draw(st.floats(0, NOW)), calls))
        jobs.append(
            JobView(
                JobId(name),
                tuple(models),
                idle_until=draw(st.none() | st.floats(0, 2 * NOW)),
                mid_iteration=draw(st.booleans()),
                last_finish=draw(st.floats(0, NOW)),
                round_trip_s=draw(st.floats(0, 10)),
            )
        )
    serving = draw(st.none() | st.sampled_from([j.job_id for j in jobs])) if jobs else None
    if serving is not None and draw(st.booleans()):
        jobs = [replace(j, in_flight=draw(st.integers(1, 70))) if j.job_id == serving else j for j in jobs]
    return GroupView(WorkerId("w"), draw(st.booleans()), budget, tuple(jobs), serving, draw(st.floats(0, NOW)))


policies = st.builds(
    Policy,
    hold=st.sampled_from(HoldRule),
    quantum_s=st.floats(0.1, 60),
    window=st.integers(8, 64),
    contended_window=st.integers(1, 8),
)


@given(group_views(), policies)
def test_every_decision_keeps_the_invariants(view: GroupView, policy: Policy) -> None:
    assert violations(view, next_slice(view, NOW, policy)) == ()


@given(group_views(), policies)
def test_the_same_view_gives_the_same_decision(view: GroupView, policy: Policy) -> None:
    assert next_slice(view, NOW, policy) == next_slice(view, NOW, policy)


@given(group_views(), policies)
def test_a_free_group_with_ready_calls_serves_or_holds_for_a_bounded_time(view: GroupView, policy: Policy) -> None:
    decision = decide(view, policy)
    if view.available and not view.in_flight and any(j.ready for j in view.jobs):
        assert not isinstance(decision, Wait)
    if isinstance(decision, Hold):
        assert NOW < decision.until <= NOW + policy.hold_limit_s


def test_first_come_first_served_between_jobs() -> None:
    decision = decide(group(job("a", 5.0), job("b", 4.0)), Policy())
    assert isinstance(decision, Serve)
    assert decision.job_id == "b"
    assert decision.load == "m-b"


def test_the_resident_job_goes_on_within_its_quantum_and_not_beyond() -> None:
    resident, other = job("a", 50.0, on_device=True), job("b", 4.0)
    within = decide(group(resident, other, serving="a", slice_start=NOW - 1), Policy(quantum_s=10))
    beyond = decide(group(resident, other, serving="a", slice_start=NOW - 11), Policy(quantum_s=10))
    assert isinstance(within, Serve)
    assert isinstance(beyond, Serve)
    assert (within.job_id, beyond.job_id) == ("a", "b")
    assert beyond.evict == ("m-a",)


def test_a_short_stall_keeps_the_group_and_a_stated_long_one_gives_it_away() -> None:
    """The ski-rental rule: wait as long as a round trip costs, unless the job says that it will be idle for longer."""
    other = job("b", 4.0)
    stalled = job("a", on_device=True, last_finish=NOW - 0.1, round_trip_s=1.0)
    held = decide(group(stalled, other, serving="a"), Policy())
    assert isinstance(held, Hold)
    assert held.job_id == "a"
    assert held.until == pytest.approx(NOW + 0.9)
    hinted = decide(group(replace(stalled, idle_until=NOW + 30), other, serving="a"), Policy())
    assert isinstance(hinted, Serve)
    past = decide(group(replace(stalled, last_finish=NOW - 1.1), other, serving="a"), Policy())
    assert isinstance(past, Serve)


def test_hold_by_iteration_waits_for_the_sync() -> None:
    policy = Policy(hold=HoldRule.ITERATION)
    stalled = job("a", on_device=True, last_finish=NOW - 20, mid_iteration=True)
    assert isinstance(decide(group(stalled, job("b", 4.0), serving="a"), policy), Hold)
    synced = replace(stalled, mid_iteration=False)
    assert isinstance(decide(group(synced, job("b", 4.0), serving="a"), policy), Serve)


def test_calls_in_flight_are_topped_up_for_their_job_only() -> None:
    busy = job("a", 50.0, on_device=True, in_flight=1)
    decision = decide(group(busy, job("b", 4.0), serving="a", slice_start=NOW - 1), Policy())
    assert isinstance(decision, Serve)
    assert decision.job_id == "a"
    assert decision.load is None
    late = decide(group(busy, job("b", 4.0), serving="a", slice_start=NOW - 60), Policy())
    assert isinstance(late, Wait)


def test_the_invariants_reject_each_kind_of_broken_decision() -> None:
    """The checker itself: a check that accepts anything would be worse than none."""
    view = group(job("a", 1.0, on_device=True), job("b", 2.0), serving="a")
    a, b = (j.ready for j in view.jobs)
    broken = {
        "I2": Serve(JobId("a"), ()),
        "I3": Serve(JobId("a"), b, load=ModelId("m-b"), evict=(ModelId("m-a"),)),
        "I5": Serve(JobId("b"), b, load=ModelId("m-b"), evict=(ModelId("m-x"), ModelId("m-a"))),
        "I6": Serve(JobId("a"), a, load=ModelId("m-a")),
        "I7": Serve(JobId("b"), b, load=ModelId("m-b")),
        "I8": Serve(JobId("b"), b),
    }
    for number, decision in broken.items():
        assert any(v.startswith(number) for v in violations(view, Plan(decision))), number
    in_flight = group(job("a", 1.0, on_device=True, in_flight=1), job("b", 2.0), serving="a")
    swap = Serve(JobId("b"), b, load=ModelId("m-b"), evict=(ModelId("m-a"),))
    assert {v[:2] for v in violations(in_flight, Plan(swap))} >= {"I4", "I9"}
    unavailable = replace(view, available=False)
    assert any(v.startswith("I1") for v in violations(unavailable, Plan(Serve(JobId("a"), a))))
