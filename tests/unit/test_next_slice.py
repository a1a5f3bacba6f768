"""`next_slice` as properties: whatever the group looks like, its decisions keep the invariants and waste nothing."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plexrl_controller.domain.ids import CallId, JobId, ModelId, WorkerId
from plexrl_controller.domain.states import CallKind
from plexrl_controller.scheduling.invariants import violations
from plexrl_controller.scheduling.next_slice import next_slice
from plexrl_controller.scheduling.plan import Action, Hold, Plan, Prefetch, Serve, Wait, WriteBack, Yield
from plexrl_controller.scheduling.policy import HoldRule, Order, Policy
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
            moving = draw(st.sampled_from([False, False, False, True])) and (resident or size <= room)
            room -= size if moving and not resident else 0
            parked = draw(st.integers(0, min(room, 200)))
            room -= parked
            since = sorted(draw(st.lists(st.floats(0, NOW), max_size=3)))
            calls = tuple(ready(f"{name}{index}{i}", f"{name}{index}", s) for i, s in enumerate(since))
            models.append(
                ModelView(
                    ModelId(f"{name}{index}"),
                    size,
                    resident,
                    draw(st.floats(0, NOW)),
                    calls,
                    dirty_bytes=draw(st.integers(0, size)) if resident else 0,
                    changing=resident and draw(st.booleans()),
                    moving=moving,
                    load_s=draw(st.floats(0, 10)),
                    parked_bytes=parked,
                )
            )
        jobs.append(
            JobView(
                JobId(name),
                tuple(models),
                idle_until=draw(st.none() | st.floats(0, 2 * NOW)),
                mid_iteration=draw(st.booleans()),
                last_finish=draw(st.floats(0, NOW)),
                round_trip_s=draw(st.floats(0, 10)),
                mid_phase=draw(st.booleans()),
                expected_stall_s=draw(st.none() | st.floats(0, 100)),
                attained_s=draw(st.floats(0, 1000)),
                over_quota=draw(st.booleans()),
                last_served=draw(st.floats(0, NOW)),
            )
        )
    serving = draw(st.none() | st.sampled_from([j.job_id for j in jobs])) if jobs else None
    if serving is not None and draw(st.booleans()):
        jobs = [replace(j, in_flight=draw(st.integers(1, 70))) if j.job_id == serving else j for j in jobs]
    return GroupView(
        WorkerId("w"),
        draw(st.booleans()),
        budget,
        tuple(jobs),
        serving,
        draw(st.floats(0, NOW)),
        world_size=8,
        lost_ranks=draw(st.sampled_from([0, 0, 0, 1])),
        can_yield=draw(st.booleans()),
        chunk_start=draw(st.floats(0, NOW)),
        background_moves=draw(st.booleans()),
    )


policies = st.builds(
    Policy,
    order=st.sampled_from(Order),
    hold=st.sampled_from(HoldRule),
    starvation_bound_s=st.sampled_from([1.0, 50.0, 600.0]),
    chunk_s=st.sampled_from([1.0, 60.0]),
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
    if view.available and not view.lost_ranks and not view.in_flight and any(j.ready for j in view.jobs):
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
    """The ski-rental rule: wait as long as one move costs, unless the job says that it will be idle for longer."""
    other = job("b", 4.0)
    stalled = job("a", on_device=True, last_finish=NOW - 0.1, round_trip_s=2.0)
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


def test_no_more_than_a_chunk_of_work_is_given_ahead() -> None:
    calls = tuple(replace(ready(f"a{i}", "m-a", 50.0 + i), expected_s=12.0) for i in range(9))
    model = ModelView(ModelId("m-a"), 1000, True, ready=calls)
    policy = Policy(chunk_s=30.0)
    free = decide(group(JobView(JobId("a"), (model,)), serving="a"), policy)
    assert isinstance(free, Serve)
    assert len(free.calls) == 2
    for left_s, added in ((None, 2), (5.0, 2), (20.0, 1), (30.0, 0)):
        running = JobView(JobId("a"), (model,), in_flight=1, in_flight_left_s=left_s)
        decision = decide(group(running, serving="a"), policy)
        assert (len(decision.calls) if isinstance(decision, Serve) else 0) == added, left_s


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


def test_the_group_is_not_held_past_the_moment_from_which_another_job_starves() -> None:
    policy = Policy(hold=HoldRule.ITERATION, hold_limit_s=120.0, starvation_bound_s=30.0)
    stalled = job("a", on_device=True, last_finish=NOW - 5, mid_iteration=True)
    held = decide(group(stalled, job("b", NOW - 20), serving="a"), policy)
    assert held == Hold(JobId("a"), NOW + 10)
    assert isinstance(decide(group(stalled, job("b", NOW - 31), serving="a"), policy), Serve)


def test_a_starving_job_comes_before_the_resident_one_and_gets_no_company() -> None:
    policy = Policy(starvation_bound_s=30.0)
    resident = job("a", NOW - 1, on_device=True)
    decision = decide(group(resident, job("b", NOW - 31, NOW - 2), serving="a"), policy)
    assert isinstance(decision, Serve)
    assert decision.job_id == "b"
    busy = job("a", NOW - 1, on_device=True, in_flight=1)
    assert isinstance(decide(group(busy, job("b", NOW - 31), serving="a"), policy), Wait)


def yielding(running: JobView, *others: JobView, chunk_start: float = NOW - 61) -> GroupView:
    view = group(running, *others, serving="a", slice_start=chunk_start)
    return replace(view, can_yield=True, chunk_start=chunk_start)


def test_a_long_call_yields_at_the_end_of_its_chunk_to_a_shorter_one_only() -> None:
    """Taking turns between calls of equal length makes both late; between unknown ones it is the safer bet."""
    running = job("a", on_device=True, in_flight=1, in_flight_left_s=100.0, attained_s=5.0)

    def other(expected_s: float | None) -> JobView:
        call = replace(ready("b0", "m-b", NOW - 50), expected_s=expected_s)
        return JobView(JobId("b"), (ModelView(ModelId("m-b"), 1000, False, ready=(call,)),))

    assert decide(yielding(running, other(20.0)), Policy()) == Yield(JobId("a"), JobId("b"))
    assert decide(yielding(running, other(None)), Policy()) == Yield(JobId("a"), JobId("b"))
    assert isinstance(decide(yielding(running, other(100.0)), Policy()), Wait)
    assert isinstance(decide(yielding(running, other(20.0)), Policy(chunking=False)), Wait)
    within = next_slice(yielding(running, other(20.0), chunk_start=NOW - 10), NOW, Policy(chunk_s=60.0))
    assert within.again_at == pytest.approx(NOW + 50)
    starving = Policy(starvation_bound_s=40.0)
    assert isinstance(decide(yielding(running, other(1000.0)), starving), Yield)


def test_a_call_does_not_yield_within_a_slice_that_would_give_it_the_group_back() -> None:
    running = job("a", on_device=True, in_flight=1, in_flight_left_s=100.0)
    waits = job("b", NOW - 50)
    kept = next_slice(yielding(running, waits), NOW, Policy(quantum_s=80.0))
    assert isinstance(kept.action, Wait)
    assert kept.again_at == pytest.approx(NOW + 19)
    starving = Policy(quantum_s=80.0, starvation_bound_s=40.0)
    assert isinstance(decide(yielding(running, waits), starving), Yield)


def session_turns(count: int, expected_s: float = 50.0) -> tuple[ReadyCall, ...]:
    return tuple(
        replace(ready(f"a{number}", "m-a", NOW), expected_s=expected_s, concurrent=True) for number in range(count)
    )


def in_session(turns: int, *others: JobView, **facts: object) -> GroupView:
    """Job a has the group, and a session with so many turns that may begin."""
    model = ModelView(ModelId("m-a"), 1000, True, ready=session_turns(turns))
    return group(JobView(JobId("a"), (model,), **facts), *others, serving="a", slice_start=NOW - 1)  # type: ignore[arg-type]


def test_turns_of_a_session_join_what_runs_whatever_lies_ahead() -> None:
    """They begin at once: neither the window nor a chunk of work bounds them, which are for calls that wait in line."""
    policy = Policy(contended_window=4, chunk_s=30.0)
    for others in ((), (job("b", NOW - 5),)):
        for facts in ({}, {"in_flight": 20, "in_flight_left_s": 500.0}):
            decision = decide(in_session(12, *others, **facts), policy)
            assert isinstance(decision, Serve)
            assert len(decision.calls) == 12


def test_a_call_in_line_before_turns_of_a_session_holds_them_back() -> None:
    """So a training call is never kept from the device by a session that always has another turn."""
    first = replace(ready("train", "m-a", NOW - 1), kind=CallKind.FORWARD_BACKWARD, expected_s=1.0)
    view = in_session(3, in_flight=64, in_flight_left_s=100.0)
    behind = replace(view.jobs[0].models[0], ready=(first, *session_turns(3)))
    view = replace(view, jobs=(replace(view.jobs[0], models=(behind,)),))
    assert isinstance(decide(view, Policy(chunk_s=30.0)), Wait)


def test_a_session_whose_slice_is_over_is_given_no_more_and_that_is_said() -> None:
    busy = in_session(3, job("b", NOW - 5), in_flight=2, in_flight_left_s=1.0)
    over = decide(replace(busy, slice_start=NOW - 100), Policy())
    assert over == Wait("quantum used, calls in flight", revoked=JobId("a"))
    full = in_session(0, job("b", NOW - 5), in_flight=2, in_flight_left_s=1.0)
    assert decide(replace(full, slice_start=NOW - 100), Policy()) == Wait("calls in flight", revoked=JobId("a"))
    assert decide(full, Policy()) == Wait("calls in flight")


def test_a_tenant_over_its_quota_comes_last_and_does_not_starve() -> None:
    over = job("a", 4.0, over_quota=True)
    within = job("b", 50.0, attained_s=1e6)
    decision = decide(group(over, within), Policy())
    assert isinstance(decision, Serve)
    assert decision.job_id == "b"
    decision = decide(group(over, within), Policy(starvation_bound_s=90.0))
    assert isinstance(decision, Serve)
    assert decision.job_id == "a"


def test_each_order_ranks_by_its_own_measure() -> None:
    def waiting(name: str, since: float, expected_s: float, attained_s: float) -> JobView:
        call = replace(ready(name, f"m-{name}", since), expected_s=expected_s)
        return JobView(JobId(name), (ModelView(ModelId(f"m-{name}"), 100, True, ready=(call,)),), attained_s=attained_s)

    view = group(waiting("old", 50.0, 400.0, 9.0), waiting("short", 60.0, 1.0, 8.0), waiting("poor", 70.0, 90.0, 1.0))
    first = {order: decide(view, Policy(order=order)) for order in Order}
    assert {o: d.job_id for o, d in first.items() if isinstance(d, Serve)} == {
        Order.FIFO: "old",
        Order.HRRS: "short",
        Order.LAS: "poor",
    }


@pytest.mark.parametrize("known_s", [0.001, 0.1, 10.0])
def test_a_new_job_is_not_passed_by_one_that_has_waited_less_for_being_known_as_short(known_s: float) -> None:
    """Two jobs of short calls took turns of a whole slice each; a third waited for as many as a second has calls."""
    known = job("b", NOW - 10.0)
    call = replace(known.models[0].ready[0], expected_s=known_s)
    known = replace(known, models=(replace(known.models[0], ready=(call,)),))
    new = job("c", NOW - 11.0)
    action = decide(group(known, new), Policy(order=Order.HRRS))
    assert isinstance(action, Serve)
    assert action.job_id == "c"


def test_a_heavier_job_waits_less_for_its_turn() -> None:
    light, heavy = job("light", 50.0), job("heavy", 60.0, weight=3.0)
    for order in (Order.HRRS, Order.LAS):
        view = group(replace(light, attained_s=30.0), replace(heavy, attained_s=10.0))
        decision = decide(view, Policy(order=order))
        assert isinstance(decision, Serve)
        assert decision.job_id == "heavy"
    assert decide(group(light, replace(heavy, weight=1.0)), Policy()) != decide(group(light, heavy), Policy())


def test_learned_stalls_shorten_or_lengthen_the_hold_by_as_much_as_they_are_trusted() -> None:
    stalled = job("a", on_device=True, last_finish=NOW, round_trip_s=8.0)
    other, policy = job("b", 4.0), Policy(trust=0.5)
    for expected_s, until in ((None, 4.0), (1.0, 8.0), (100.0, 2.0)):
        held = decide(group(replace(stalled, expected_stall_s=expected_s), other, serving="a"), policy)
        assert held == Hold(JobId("a"), NOW + until), expected_s
    blind = replace(policy, use_learned_stalls=False)
    assert decide(group(replace(stalled, expected_stall_s=1.0), other, serving="a"), blind) == Hold(JobId("a"), NOW + 4)
    hinted = replace(stalled, idle_until=NOW + 50)
    assert isinstance(decide(group(hinted, other, serving="a"), policy), Serve)
    assert isinstance(decide(group(hinted, other, serving="a"), replace(policy, use_hints=False)), Hold)


def test_a_gang_runs_with_all_its_ranks_or_not_at_all() -> None:
    view = replace(group(job("a", 4.0, on_device=True)), world_size=8, lost_ranks=1)
    assert decide(view, Policy()) == Wait("1 of the gang's 8 ranks are missing")
    serve = decide(replace(view, lost_ranks=0), Policy())
    assert any(v.startswith("I10") for v in violations(view, Plan(serve)))


def resident(name: str, state_bytes: int, **facts: object) -> JobView:
    """A job without ready calls whose model is on the device."""
    model = ModelView(ModelId(f"m-{name}"), state_bytes, True)
    return JobView(JobId(name), (replace(model, **facts),))  # type: ignore[arg-type]


def test_the_head_of_the_queue_is_prefetched_beside_the_running_job_where_there_is_room() -> None:
    running = resident("a", 400)
    view = replace(group(replace(running, in_flight=1), job("b", 4.0), serving="a"), background_moves=True)
    assert next_slice(view, NOW, Policy()).background == (Prefetch(ModelId("m-b")),)
    assert next_slice(view, NOW, Policy(prefetch=False)).background == ()
    assert next_slice(replace(view, background_moves=False), NOW, Policy()).background == ()
    tight = replace(view, device_state_bytes=1300)
    assert next_slice(tight, NOW, Policy()).background == ()


def test_the_soonest_expected_job_is_prefetched_while_nobody_waits_and_clean_copies_make_room() -> None:
    soon = replace(job("soon"), idle_until=NOW + 5, last_finish=NOW - 1)
    late = replace(job("late"), idle_until=NOW + 50, last_finish=NOW - 1)
    running = replace(resident("a", 400), in_flight=1)
    view = replace(group(running, late, soon, resident("c", 400), serving="a"), background_moves=True)
    assert next_slice(view, NOW, Policy()).background == (Prefetch(ModelId("m-soon"), (ModelId("m-c"),)),)
    dirty = replace(view, jobs=(running, late, soon, resident("c", 400, dirty_bytes=1)))
    assert next_slice(dirty, NOW, Policy()).background == (WriteBack(ModelId("m-c")),)


def test_changed_state_is_written_back_while_it_is_at_rest() -> None:
    running = replace(resident("a", 1000, dirty_bytes=9, changing=True), in_flight=1)
    view = replace(group(running, resident("b", 500, dirty_bytes=9), job("c"), serving="a"), background_moves=True)
    assert next_slice(view, NOW, Policy()).background == (WriteBack(ModelId("m-b")),)
    assert next_slice(view, NOW, Policy(write_back=False)).background == ()
    roomy = replace(view, device_state_bytes=10_000)
    assert next_slice(roomy, NOW, Policy()).background == ()


def test_parked_kv_goes_only_when_every_other_state_has_left() -> None:
    parked = JobView(JobId("a"), (ModelView(ModelId("m-a"), 500, True, parked_bytes=400),))
    incoming = job("b", 4.0)
    roomy = decide(replace(group(parked, incoming, serving="a"), device_state_bytes=1400), Policy())
    assert isinstance(roomy, Serve)
    assert (roomy.evict, roomy.forget_kv) == (("m-a",), ())
    tight = decide(replace(group(parked, incoming, serving="a"), device_state_bytes=1300), Policy())
    assert isinstance(tight, Serve)
    assert (tight.evict, tight.forget_kv) == (("m-a",), ("m-a",))


def test_the_invariants_reject_each_kind_of_broken_background_move() -> None:
    running = replace(resident("a", 400), in_flight=1)
    view = replace(group(running, job("b"), resident("c", 400, dirty_bytes=1), serving="a"), background_moves=True)
    wait = Wait("calls in flight")
    broken = {
        "I13": (replace(view, background_moves=False), Plan(wait, (WriteBack(ModelId("m-c")),))),
        "I14": (view, Plan(wait, (Prefetch(ModelId("m-b"), (ModelId("m-c"),)),))),
        "I15": (view, Plan(wait, (Prefetch(ModelId("m-c")),))),
        "I16": (view, Plan(wait, (WriteBack(ModelId("m-a")),))),
        "I7": (view, Plan(wait, (Prefetch(ModelId("m-b")),))),
        "I11": (view, Plan(Yield(JobId("a"), JobId("b")))),
        "I12": (view, Plan(Hold(JobId("a"), NOW + 1))),
    }
    for number, (seen, plan) in broken.items():
        assert any(v.startswith(number + ":") for v in violations(seen, plan)), number
