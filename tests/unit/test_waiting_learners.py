"""Learners of latencies: near the floor after 30 episodes, and again after a drift, over seeds.

Costs here are expectations under the true law, so that the only chance is in what a learner has seen.
"""

import functools
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from _pytest.mark import ParameterSet
from hypothesis import given, settings
from hypothesis import strategies as st

from plexrl.waiting.agents.estimates import BayesianGamma, Estimate, Interval, SmoothedTurnbull, grid
from plexrl.waiting.agents.interface import Observation, Record
from plexrl.waiting.agents.learners import DriftDetector, Learner, bayesian_gamma, empirical_quantiles
from plexrl.waiting.agents.mixtures import EmpiricalEstimate, LogNormalMixtures, telling
from plexrl.waiting.dynamic_programming import best_looks
from plexrl.waiting.laws import Gamma, Mixture, Part
from plexrl.waiting.scenarios import DRIFT_AT, SCENARIOS, STATIONARY, Scenario
from plexrl.waiting.schedules import Costs, expectation, optimal_schedule

SEEDS = range(4)
# Laws with a valley between two humps, where 30 censored observations leave most to be learned.
BIMODAL = ("two-humps", "image-pull")
# One of each kind in every run; `make test-long` has all.
QUICK = ("gamma-4", "near-saturation", "node-provisioning", "two-humps")


def laws(*names: str) -> list[ParameterSet]:
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.long) for name in names]


def seen(plan: Sequence[float], duration_s: float, episode: int, deadline_s: float) -> Record:
    """What following a plan shows of an operation that takes `duration_s`."""
    in_vain = [at_s for at_s in plan if at_s < min(duration_s, deadline_s)]
    told_s = next((at_s for at_s in plan if at_s >= duration_s), deadline_s)
    if duration_s > told_s:
        return Record(episode, (), len(in_vain) + 1, (), told_s, np.inf)
    return Record(episode, (), len(in_vain) + 1, (), max(in_vain, default=0.0), told_s)


class Life:
    """A learner that meets a scenario's first operation, episode after episode."""

    def __init__(self, learner: Learner, scenario: Scenario, seed: int) -> None:
        self.learner, self.scenario, self.seed = learner, scenario, seed
        self.operation = scenario.operations[0]
        self.history: dict[str, list[Record]] = {self.operation.name: []}

    @property
    def episode(self) -> int:
        return len(self.history[self.operation.name])

    def plan(self) -> tuple[float, ...]:
        observation = Observation(self.operation, self.scenario.costs, self.episode, 0, None, (), "", "", "")
        return self.learner.plan(observation, self.history)

    def live(self, episodes: int) -> "Life":
        for _ in range(episodes):
            plan = self.plan()
            generator = np.random.default_rng([self.seed, self.episode])
            duration_s = self.operation.law.at(self.episode).sample(generator)
            record = seen(plan, duration_s, self.episode, self.operation.deadline_s)
            self.history[self.operation.name].append(record)
        return self

    def ratio(self) -> float:
        """Expected cost of its next plan by the floor's."""
        law, costs, deadline_s = self.operation.law.at(self.episode), self.scenario.costs, self.operation.deadline_s
        return expectation(law, costs, self.plan(), deadline_s).cost / floor_cost(law, costs, deadline_s)


@functools.cache
def floor_cost(law: Part, costs: Costs, deadline_s: float) -> float:
    return expectation(law, costs, optimal_schedule(law, costs, deadline_s), deadline_s).cost


@functools.cache
def after_30(law: str) -> list[float]:
    """The empirical learner's ratios, one per seed: three episodes after the 30th, looks to find out included."""
    lives = [Life(empirical_quantiles(), SCENARIOS[law], seed).live(30) for seed in SEEDS]
    return [float(np.mean([life.live(min(step, 1)).ratio() for step in range(3)])) for life in lives]


def interval(ratios: Sequence[float]) -> tuple[float, float]:
    """95 % bootstrap interval of the mean."""
    picks = np.random.default_rng(0).integers(0, len(ratios), (2000, len(ratios)))
    low, high = np.quantile(np.array(ratios)[picks].mean(axis=1), [0.025, 0.975])
    return float(low), float(high)


@pytest.mark.parametrize("law", laws(*STATIONARY))
def test_the_empirical_learner_is_within_10_percent_of_the_floor(law: str) -> None:
    # Four seeds of a law with a valley between two humps vary more than its mean is off.
    allowed = 1.20 if law in BIMODAL else 1.10
    assert np.mean(after_30(law)) <= allowed, after_30(law)
    assert interval(after_30(law))[0] <= 1.08, after_30(law)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_over_all_stationary_laws_it_is_within_10_percent() -> None:
    per_seed = [float(np.mean([after_30(law)[index] for law in STATIONARY])) for index in range(len(SEEDS))]
    assert interval(per_seed)[1] <= 1.10, per_seed


@pytest.mark.parametrize("law", ["gamma-1", "gamma-4", "gamma-16"])
def test_the_bayesian_learner_gets_close_where_its_family_is_right(law: str) -> None:
    ratios = [Life(bayesian_gamma(), SCENARIOS[law], seed).live(30).ratio() for seed in SEEDS[:3]]
    assert interval(ratios)[1] <= 1.10, ratios


@pytest.mark.parametrize("law", ["drift-up", "drift-down"])
@pytest.mark.parametrize("learner", [empirical_quantiles, bayesian_gamma])
def test_recovery_after_a_drift(law: str, learner: Callable[..., Learner]) -> None:
    just_after, recovered, stubborn = [], [], []
    for seed in SEEDS[:2]:
        life = Life(learner(), SCENARIOS[law], seed).live(DRIFT_AT)
        just_after.append(life.ratio())
        # Some of these plans have a look more, to find out.
        recovered.append(float(np.mean([life.live(step).ratio() for step in (25, 1, 1, 1, 1)])))
        stubborn.append(Life(learner(forgets=False), SCENARIOS[law], seed).live(DRIFT_AT + 25).ratio())
    assert np.mean(just_after) > 1.5
    assert np.mean(recovered) <= 1.25, recovered
    assert np.mean(recovered) < np.mean(stubborn)


def test_after_a_false_alarm_what_was_known_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """It alarms in the 25th wait of a law that stands still, whatever it sees."""
    ratios, anew = [], []
    for seed in SEEDS[:3]:
        with monkeypatch.context() as patch:
            patch.setattr(DriftDetector, "update", lambda *_: 0)
            life = Life(empirical_quantiles(), SCENARIOS["gamma-16"], seed).live(25)
            patch.setattr(DriftDetector, "update", lambda *_: 3)
            life.plan()
        ratios.append(life.live(15).ratio())
        # What it would know by then had it believed the alarm.
        anew.append(Life(empirical_quantiles(), SCENARIOS["gamma-16"], seed).live(3 + 15).ratio())
    assert np.mean(ratios) <= 1.10, ratios
    assert np.mean(ratios) < np.mean(anew), (ratios, anew)


def test_false_alarms_are_rare() -> None:
    """Under a law that stands still, with looks as the best schedule has them."""
    scenario = SCENARIOS["gamma-4"]
    operation, edges = scenario.operations[0], grid(scenario.operations[0].deadline_s)
    law = operation.law.at(0)
    plan = optimal_schedule(law, scenario.costs, operation.deadline_s)
    detector, mass, alarms = DriftDetector(), np.diff(law.cdf(edges)), 0
    for duration_s in law.samples(np.random.default_rng(1), 5000):
        record = seen(plan, duration_s, 0, operation.deadline_s)
        alarms += bool(detector.update(Interval(record.after_s, record.by_s), edges, mass))
    assert alarms <= 15


def test_without_history_it_is_no_better_than_a_guess() -> None:
    assert Life(empirical_quantiles(), SCENARIOS["gamma-16"], 0).ratio() > 1.5


ESTIMATES: list[Callable[[np.ndarray], Estimate]] = [
    SmoothedTurnbull,
    BayesianGamma,
    LogNormalMixtures,
    EmpiricalEstimate,
]


@pytest.mark.parametrize("make", ESTIMATES)
@settings(max_examples=20)
@given(
    ends=st.lists(st.tuples(st.floats(0, 590), st.floats(1e-3, 600)), min_size=1, max_size=12),
    unfinished=st.integers(0, 3),
)
def test_an_estimate_is_a_distribution(
    make: Callable[[np.ndarray], Estimate], ends: list[tuple[float, float]], unfinished: int
) -> None:
    estimate = make(grid(600.0))
    for after_s, width_s in ends:
        estimate.add(Interval(after_s, min(after_s + width_s, 600.0)))
    for _ in range(unfinished):
        estimate.add(Interval(600.0, np.inf))
    mass = estimate.mass()
    assert np.all(np.isfinite(mass))
    assert np.all(mass >= 0)
    assert mass.sum() <= 1 + 1e-9


@pytest.mark.parametrize("make", ESTIMATES)
def test_estimates_learn_what_never_finishes(make: Callable[[np.ndarray], Estimate]) -> None:
    estimate = make(grid(600.0))
    for number in range(40):
        estimate.add(Interval(25.0, 35.0) if number % 4 else Interval(600.0, np.inf))
    missing = 1 - estimate.mass().sum()
    # The Bayesian one begins with the belief that about one in fifty does not finish.
    assert 0.1 < missing < 0.35


@pytest.mark.parametrize("make", [SmoothedTurnbull, EmpiricalEstimate])
def test_narrow_intervals_show_the_law(make: Callable[[np.ndarray], Estimate]) -> None:
    law = SCENARIOS["two-humps"].operations[0].law.at(0)
    edges = grid(600.0)
    estimate = make(edges)
    for duration_s in law.samples(np.random.default_rng(0), 150):
        estimate.add(Interval(duration_s * 0.97, duration_s * 1.03))
    apart = np.abs(np.cumsum(estimate.mass()) - law.cdf(edges[1:])).max()
    assert apart < 0.12


def test_three_humps_are_believed_though_the_mixtures_have_two() -> None:
    """Turnbull's estimate takes over where the family does not hold."""
    law = Mixture((1 / 3, 1 / 3, 1 / 3), (Gamma.of_mean(6, 40), Gamma.of_mean(24, 40), Gamma.of_mean(90, 40)))
    edges = grid(600.0)
    both, mixtures = EmpiricalEstimate(edges), LogNormalMixtures(edges)
    for duration_s in law.samples(np.random.default_rng(0), 150):
        both.add(Interval(duration_s * 0.97, duration_s * 1.03))
        mixtures.add(Interval(duration_s * 0.97, duration_s * 1.03))
    apart, mixtures_apart = (
        np.abs(np.cumsum(estimate.mass()) - law.cdf(edges[1:])).max() for estimate in (both, mixtures)
    )
    assert apart < 0.1
    assert apart < mixtures_apart


def test_it_asks_where_it_does_not_know() -> None:
    """Half the times lie somewhere between 15 and 65 s, and no look ever told where."""
    edges, costs, looks = grid(600.0), Costs(), np.array([15.0, 65.0, 75.0])
    guesses = LogNormalMixtures(edges)
    for number in range(20):
        guesses.add(Interval(15.0, 65.0) if number % 2 else Interval(8.0, 10.0))
    more = telling(edges, guesses.mass(), guesses, looks, 10.0, costs, 1)
    assert np.setdiff1d(more, looks).size == 1
    assert 15 < np.setdiff1d(more, looks)[0] < 65


def test_what_is_known_is_not_asked_for() -> None:
    """What a look tells is worth less the more is known, and then less than the look."""
    law = SCENARIOS["gamma-16"].operations[0].law.at(0)
    edges = grid(600.0)
    guesses = LogNormalMixtures(edges)

    def more() -> int:
        looks, expected = best_looks(edges, guesses.mass(), (edges[:-1] + edges[1:]) / 2, Costs())
        return telling(edges, guesses.mass(), guesses, looks, expected, Costs(), 2).size - looks.size

    asked_at_first = more()
    for duration_s in law.samples(np.random.default_rng(0), 300):
        guesses.add(Interval(duration_s * 0.97, duration_s * 1.03))
    assert (asked_at_first, more()) == (2, 0)
