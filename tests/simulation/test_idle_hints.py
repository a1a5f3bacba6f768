"""What jobs say of their sleeps can cost device time up to a bound, and nothing else, whatever they say."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.bridge.hints import HINTS, Say
from benchmarks.bridge.simulated import Costs, bound_s, simulate
from benchmarks.bridge.trace import figures, idle_stretches
from plexrl_controller.scheduling.policy import HoldRule, Policy

sleeps = st.floats(0.01, 40.0)
scripts = st.lists(sleeps, min_size=1, max_size=4).map(tuple)
jobs_ = st.lists(st.lists(st.lists(scripts, min_size=1, max_size=3), min_size=1, max_size=3), min_size=2, max_size=4)
costs_ = st.builds(
    Costs,
    think_s=st.floats(0.05, 5.0),
    train_s=st.floats(0.05, 5.0),
    load_s=st.floats(0.01, 5.0),
    store_s=st.floats(0.0, 5.0),
)
statements = st.lists(st.none() | st.floats(0.0, 1e4), min_size=1, max_size=6)


@given(jobs=jobs_, costs=costs_, said=statements, trust=st.sampled_from([0.25, 0.5, 1.0]), states=st.integers(1, 2))
@settings(max_examples=30, deadline=None)
def test_no_statement_costs_more_than_the_bound(
    jobs: list[list[list[tuple[float, ...]]]],
    costs: Costs,
    said: list[float | None],
    trust: float,
    states: int,
) -> None:
    policy = Policy(trust=trust)

    def liar(job: int) -> Say:
        turn = itertools.count(job)
        return lambda seconds: said[next(turn) % len(said)]

    run = simulate(jobs, costs, liar, policy=policy, device_states=states)
    asked = sum(len(script) for rounds in jobs for scripts_ in rounds for script in scripts_) + sum(map(len, jobs))
    assert run.calls == asked, "every call ran, once"
    assert figures(run.trace).lost_s <= bound_s(run, policy) + 1e-6


def test_a_rule_that_waits_for_the_iteration_breaks_the_bound() -> None:
    """So the bound can be broken, and ski rental is what keeps it."""
    jobs = [[[(30.0, 30.0)]] * 3] * 2
    costs = Costs(think_s=0.5, train_s=0.5, load_s=0.1, store_s=0.1)
    policy = Policy(hold=HoldRule.ITERATION)
    run = simulate(jobs, costs, lambda job: lambda seconds: None, policy=policy, device_states=1)
    assert figures(run.trace).lost_s > bound_s(run, policy)
    run = simulate(jobs, costs, lambda job: lambda seconds: None, policy=replace(policy, hold=HoldRule.SKI_RENTAL))
    assert figures(run.trace).lost_s <= bound_s(run, policy)


def test_true_hints_shorten_sleepers_total_time() -> None:
    """Three jobs whose sleeps are shorter than the slice: without hints the device is held through many of them."""
    lengths = (0.3, 4.0, 1.5, 6.0, 0.8, 3.0)
    jobs = [[[lengths[shift:] + lengths[:shift]] for shift in range(job, job + 4)] for job in range(3)]
    costs = Costs(think_s=0.4, train_s=0.3, load_s=0.6, store_s=0.3)
    total_s = {
        name: figures(
            simulate(jobs, costs, lambda job, name=name: HINTS[name](job, costs.round_trip_s)).trace  # type: ignore[misc]
        ).total_s
        for name in ("off", "on")
    }
    assert total_s["on"] < 0.9 * total_s["off"]


@pytest.mark.parametrize(
    ("lives", "sleeps_", "idle"),
    [
        ([(0, 10)], [(2, 5), (5, 9)], [(2, 9)]),
        ([(0, 10), (0, 10)], [(2, 6), (4, 9)], [(4, 6)]),
        ([(0, 4), (0, 10)], [(5, 9), (1, 3)], [(5, 9)]),
        ([(0, 10), (3, 10)], [(1, 8), (4, 7)], [(1, 3), (4, 7)]),
    ],
)
def test_a_job_is_idle_while_everybody_alive_sleeps(
    lives: list[tuple[float, float]], sleeps_: list[tuple[float, float]], idle: list[tuple[float, float]]
) -> None:
    assert idle_stretches(lives, sleeps_) == idle
