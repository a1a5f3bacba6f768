"""Predicted slowdowns against closed forms and against simulated groups with the predicted statistics."""

import heapq
import random
from dataclasses import replace
from math import factorial, inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plexrl_controller.scheduling.queueing import EXACT_LIMIT, mva, predict
from plexrl_controller.scheduling.views import Demand


def machine_repairman_s(count: int, busy_s: float, away_s: float) -> float:
    """Mean response of the finite-source M/M/1 queue: exact, by its birth-death probabilities."""
    weights = [factorial(count) / factorial(count - n) * (busy_s / away_s) ** n for n in range(count + 1)]
    total = sum(weights)
    in_system = sum(n * w for n, w in enumerate(weights)) / total
    throughput = (1.0 - weights[0] / total) / busy_s
    return in_system / throughput


@given(st.integers(1, EXACT_LIMIT), st.floats(0.1, 10.0), st.floats(0.1, 100.0))
def test_alike_members_wait_as_in_the_machine_repairman_model(count: int, busy_s: float, away_s: float) -> None:
    expected = pytest.approx(machine_repairman_s(count, busy_s, away_s), rel=1e-9)
    assert all(r == expected for r in mva([busy_s] * count, [away_s] * count))
    assert all(r == expected for r in mva([busy_s] * count, [away_s] * count, [busy_s] * count))


@pytest.mark.parametrize("share", [0.05, 0.1, 0.3])
def test_beyond_the_exact_method_the_approximation_is_close(share: float) -> None:
    count = EXACT_LIMIT + 4
    exact = machine_repairman_s(count, share, 1.0 - share)
    approximate = mva([share] * count, [1.0 - share] * count)[0]
    assert exact <= approximate, "on the safe side"
    assert approximate + 1.0 - share == pytest.approx(exact + 1.0 - share, rel=0.08)


demands = st.builds(
    lambda iteration_s, share, visits, variation, slack, slack_variation, trip: Demand(
        iteration_s, share * iteration_s, visits, variation, slack * iteration_s, trip, slack_variation
    ),
    st.floats(10, 1000),
    st.floats(0.01, 0.99),
    st.integers(1, 20),
    st.floats(0, 1),
    st.floats(0, 1),
    st.floats(0, 1),
    st.floats(0, 30),
)


@settings(max_examples=80, deadline=None)
@given(st.lists(demands, min_size=1, max_size=5), st.booleans(), st.booleans(), st.sampled_from([30.0, inf]))
def test_nobody_is_faster_than_alone_and_no_group_does_more_than_it_can(
    members: list[Demand], swapping: bool, correct: bool, chunk_s: float
) -> None:
    prediction = predict(members, swapping=swapping, correct_variation=correct, chunk_s=chunk_s)
    assert min(prediction.slowdowns) >= 1.0
    used = sum(d.busy_share / s for d, s in zip(members, prediction.slowdowns, strict=True))
    assert used <= 1.0 + 1e-9
    if len(members) == 1:
        assert prediction.slowdowns == (1.0,)


@settings(max_examples=80, deadline=None)
@given(st.lists(demands, min_size=1, max_size=4), demands)
def test_one_more_member_speeds_nobody_up(members: list[Demand], other: Demand) -> None:
    before = predict(members, swapping=False).slowdowns
    after = predict([*members, other], swapping=False).slowdowns
    assert all(b >= a - 1e-9 for a, b in zip(before, after, strict=False))


@settings(max_examples=80, deadline=None)
@given(st.lists(demands, min_size=1, max_size=6), st.booleans(), st.booleans(), st.sampled_from([30.0, inf]))
def test_the_quick_bound_never_exceeds_the_prediction(
    members: list[Demand], swapping: bool, correct: bool, chunk_s: float
) -> None:
    """A group that the bound excludes would have been excluded anyway."""
    options = {"swapping": swapping, "correct_variation": correct, "chunk_s": chunk_s}
    quick = predict(members, at_least=True, **options)  # type: ignore[arg-type]
    full = predict(members, **options)  # type: ignore[arg-type]
    assert all(q <= f + 1e-9 for q, f in zip(quick.slowdowns, full.slowdowns, strict=True))


def test_slack_hides_queueing_and_swaps_cost_what_the_stall_does_not_hide() -> None:
    plain = Demand(100.0, 30.0)
    alone, slack = predict([plain] * 2, swapping=False), predict([replace(plain, slack_s=60.0)] * 2, swapping=False)
    assert slack.slowdowns[0] < 1.0 + (alone.slowdowns[0] - 1.0) / 5
    varied = predict([replace(plain, slack_s=60.0, slack_variation=1.0)] * 2, swapping=False)
    assert slack.slowdowns[0] < varied.slowdowns[0] < alone.slowdowns[0]
    dear = [replace(plain, visits=5.0, round_trip_s=10.0)] * 2
    assert predict(dear, swapping=True).work < predict(dear, swapping=False).work - 0.2


def simulated_slowdowns(members: list[Demand], seed: int, horizon_s: float = 250_000.0) -> list[float]:
    """Each member works and stalls for gamma-distributed times, served in order of arrival."""
    rng = random.Random(seed)

    def draw(mean_s: float, variation: float) -> float:
        return rng.gammavariate(1.0 / variation, mean_s * variation)

    events = [(rng.uniform(0.0, d.iteration_s), j, True) for j, d in enumerate(members)]
    heapq.heapify(events)
    waiting: list[int] = []
    serving: int | None = None
    ideal, ends = [0.0] * len(members), [0.0] * len(members)
    while events and (now := events[0][0]) < horizon_s:
        _, j, arrives = heapq.heappop(events)
        member = members[j]
        if arrives:
            waiting.append(j)
        else:
            serving, ends[j] = None, now
            stall_s = draw((member.iteration_s - member.busy_s) / member.visits, member.variation)
            ideal[j] += stall_s
            heapq.heappush(events, (now + stall_s, j, True))
        if serving is None and waiting:
            serving = waiting.pop(0)
            work_s = draw(members[serving].busy_s / members[serving].visits, members[serving].variation)
            ideal[serving] += work_s
            heapq.heappush(events, (now + work_s, serving, False))
    return [end / own for end, own in zip(ends, ideal, strict=True)]


@pytest.mark.parametrize(
    ("count", "share", "variation"),
    [(3, 0.2, 0.0225), (4, 0.2, 0.1), (5, 0.2, 1.0), (2, 0.5, 0.0225), (2, 0.5, 1.0), (3, 0.4, 0.25), (3, 0.4, 1.0)],
)
def test_a_simulated_group_of_alike_members_agrees(count: int, share: float, variation: float) -> None:
    """Exponential members within 3 %, regular ones within 5 %: what makes the correction worth having."""
    members = [Demand(100.0, 100.0 * share, variation=variation)] * count
    measured = sum(simulated_slowdowns(members, seed=1)) / count
    assert predict(members, swapping=False).slowdowns[0] == pytest.approx(
        measured, rel=0.03 if variation == 1 else 0.05
    )


@pytest.mark.parametrize("seed", range(6))
def test_short_calls_behind_long_ones_are_predicted_to_wait(seed: int) -> None:
    """Members of unlike length: 12 % off at most in the mean, where even sharing would be off by more than half."""
    rng = random.Random(seed)
    members = [
        Demand(length := 100.0 * rng.choice([0.3, 0.6, 1.0, 1.5, 3.0]), length * rng.uniform(0.15, 0.4), variation=0.1)
        for _ in range(3)
    ]
    measured = simulated_slowdowns(members, seed)
    predicted = predict(members, swapping=False).slowdowns
    errors = [abs(p / m - 1.0) for p, m in zip(predicted, measured, strict=True)]
    assert sum(errors) / len(errors) < 0.12
