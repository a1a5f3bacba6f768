"""The floor: the recurrence's schedule against dynamic programming, against its neighbours, and at the known points."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate

from plexrl.waiting.dynamic_programming import best_schedule
from plexrl.waiting.laws import PRESETS, Gamma, Histogram, Law, LogNormal, Mixture, Never, Part
from plexrl.waiting.schedules import Costs, by_recurrence, expectation, optimal_schedule

COSTS = Costs(query=5, delay=1)
LAWS: dict[str, Part] = {
    "gamma-1": Gamma.of_mean(30, 1),
    "gamma-4": Gamma.of_mean(30, 4),
    "gamma-16": Gamma.of_mean(30, 16),
    "gamma-half": Gamma.of_mean(30, 0.5),
    "lognormal": LogNormal.of_moments(30, 20),
    "lognormal-wide": LogNormal.of_moments(30, 60),
    "two-humps": Mixture((0.5, 0.5), (Gamma.of_mean(10, 64), Gamma.of_mean(60, 64))),
    "cached-or-cold": Mixture((0.7, 0.3), (Gamma.of_mean(3, 16), LogNormal.of_moments(60, 30))),
    "one-in-ten-never": Mixture((0.9, 0.1), (Gamma.of_mean(30, 4), Never())),
}


def by_dynamic_programming(law: Law, costs: Costs, deadline_s: float, bins: int = 2500) -> float:
    """Expected cost of the best schedule on a grid."""
    return best_schedule(law, costs, deadline_s, bins)[1]


@pytest.mark.parametrize("name", LAWS)
def test_the_recurrence_agrees_with_dynamic_programming(name: str) -> None:
    law = LAWS[name]
    ours = expectation(law, COSTS, by_recurrence(law, COSTS, 600), 600).cost
    assert ours == pytest.approx(by_dynamic_programming(law, COSTS, 600), rel=3e-3)


@pytest.mark.parametrize("name", PRESETS)
def test_it_agrees_for_the_presets_at_prices_in_proportion(name: str) -> None:
    law = PRESETS[name]
    costs, deadline_s = Costs(query=law.mean_s / 6), 20 * law.mean_s
    ours = expectation(law, costs, by_recurrence(law, costs, deadline_s), deadline_s).cost
    assert ours == pytest.approx(by_dynamic_programming(law, costs, deadline_s), rel=3e-3)


@settings(max_examples=10, deadline=None)
@given(
    law=st.one_of(
        st.builds(Gamma.of_mean, st.floats(1, 100), st.floats(0.7, 40)),
        st.builds(LogNormal.of_moments, st.floats(1, 100), st.floats(1, 100)),
    ),
    query=st.floats(0.2, 20),
)
def test_no_other_law_or_price_escapes_it(law: Part, query: float) -> None:
    costs = Costs(query=query)
    ours = expectation(law, costs, by_recurrence(law, costs, 600), 600).cost
    assert ours <= by_dynamic_programming(law, costs, 600, bins=800) * 1.005 + 1e-3


@settings(max_examples=10, deadline=None)
@given(first=st.floats(1, 30), gap=st.floats(0.5, 100), width=st.floats(0.2, 30), early=st.floats(0.1, 0.9))
def test_nor_does_a_law_that_never_finishes_in_between(first: float, gap: float, width: float, early: float) -> None:
    """Two stretches with nothing between them: the recurrence divides by a density of 0 there."""
    law = Histogram((0.0, first, first + gap, first + gap + width), (early, 0.0, 1.0 - early))
    ours = expectation(law, COSTS, optimal_schedule(law, COSTS, 600), 600).cost
    assert ours <= by_dynamic_programming(law, COSTS, 600) * 1.005 + 1e-3


@pytest.mark.parametrize(
    ("schedule", "queries", "overshoot_s", "cost"),
    [
        pytest.param(None, 1.98, 7.2, 17.1, id="optimal"),
        pytest.param([30 + 5 * k for k in range(200)], 2.40, 7.0, 19.0, id="mean-then-5-s"),
        pytest.param([10.0 * k for k in range(1, 100)], 3.50, 5.0, 22.5, id="every-10-s"),
        pytest.param([2.0**k - 1 for k in range(1, 11)], 5.28, 13.7, 40.1, id="doubling"),
        pytest.param([2.0 * k for k in range(1, 400)], 15.5, 1.0, 78.5, id="every-2-s"),
    ],
)
def test_the_known_points(schedule: list[float] | None, queries: float, overshoot_s: float, cost: float) -> None:
    """Gamma, k = 4, mean 30 s, a look for 5, a second for 1; these figures price the successful look too."""
    law = Gamma.of_mean(30, 4)
    found = expectation(law, COSTS, optimal_schedule(law, COSTS, 3600) if schedule is None else schedule, 3600)
    assert found.queries == pytest.approx(queries, rel=0.02)
    assert found.overshoot_s == pytest.approx(overshoot_s, rel=0.02)
    assert found.cost + COSTS.query == pytest.approx(cost, rel=0.02)


def test_expectation_is_what_chance_gives() -> None:
    law, schedule, deadline_s = LAWS["one-in-ten-never"], [8.0, 20.0, 33.0, 70.0], 90.0
    generator = np.random.default_rng(0)
    spent = []
    for finished_s in law.samples(generator, 40_000):
        looks = [x for x in schedule if x < min(finished_s, deadline_s)]
        detected_s = next((x for x in schedule if x >= finished_s), deadline_s)
        spent.append(COSTS.of(len(looks) + 1, max(detected_s - finished_s, 0.0)))
    found = expectation(law, COSTS, schedule, deadline_s)
    assert found.cost == pytest.approx(np.mean(spent), abs=4 * float(np.std(spent)) / 200)


def test_without_memory_the_intervals_are_equal() -> None:
    """For an exponential law the best interval d solves exp(d / mean) - 1 - d / mean = query / (delay mean)."""
    looks = optimal_schedule(LAWS["gamma-1"], COSTS, 600)
    intervals = np.diff((0.0, *looks[:8]))
    assert intervals == pytest.approx([intervals[0]] * 8, rel=1e-4)
    d = intervals[0] / 30
    assert np.exp(d) - 1 - d == pytest.approx(5 / 30, rel=1e-4)


@pytest.mark.parametrize("name", ["gamma-4", "gamma-16"])
def test_with_a_rising_hazard_the_intervals_shrink(name: str) -> None:
    intervals = np.diff((0.0, *optimal_schedule(LAWS[name], COSTS, 600)[:6]))
    assert np.all(np.diff(intervals) < 0)


def test_what_cannot_finish_before_the_deadline_is_not_looked_at() -> None:
    assert optimal_schedule(Never(), COSTS, 600) == ()
    assert expectation(Never(), COSTS, [10.0, 20.0], 600).cost == pytest.approx(2 * COSTS.query)


@pytest.mark.parametrize("schedule", [[0.0, 1.0], [2.0, 1.0]])
def test_schedules_that_do_not_ascend_are_refused(schedule: list[float]) -> None:
    with pytest.raises(ValueError, match="ascending"):
        expectation(LAWS["gamma-4"], COSTS, schedule, 600)


def test_overshoot_against_direct_integration() -> None:
    law, schedule = LAWS["lognormal"], [10.0, 25.0, 60.0]
    edges = [0.0, *schedule, 600.0]
    direct = sum(
        integrate.quad(lambda t, x=high: (x - t) * float(law.pdf(t)), low, high, limit=400)[0]
        for low, high in itertools.pairwise(edges)
    )
    assert expectation(law, COSTS, schedule, 600).overshoot_s == pytest.approx(direct, rel=1e-4)
