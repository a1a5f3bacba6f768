"""What is learned online: bounded, within its error, and quick to follow a drift."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plexrl_controller.domain.ids import JobId, Tenant
from plexrl_controller.domain.states import CallKind
from plexrl_controller.scheduling.estimates import Estimates, Sketch
from plexrl_controller.scheduling.fairness import Accounts, Quota

JOB = JobId("job")


@given(st.lists(st.floats(1e-3, 1e5), min_size=1, max_size=60), st.floats(0.0, 1.0))
def test_quantiles_are_within_five_percent(values: list[float], share: float) -> None:
    sketch = Sketch(memory=1e9)
    for value in values:
        sketch.add(value)
    ordered = sorted(values)
    rank = min(len(values) - 1, max(0, -(-share * len(values) // 1) - 1))
    near = [ordered[int(max(0, rank - 1))], ordered[int(min(len(values) - 1, rank + 1))]]
    quantile = sketch.quantile(share)
    assert quantile is not None
    assert 0.95 * near[0] <= quantile <= 1.05 * near[1]


def test_a_sketch_stays_small_and_follows_a_drift() -> None:
    rng = random.Random(3)
    sketch = Sketch()
    for _ in range(5000):
        sketch.add(rng.lognormvariate(0.0, 4.0))
    assert len(list(sketch.items())) <= 243
    for _ in range(200):
        sketch.add(rng.uniform(90.0, 110.0))
    median = sketch.quantile(0.5)
    assert median == pytest.approx(100.0, rel=0.1)
    assert sketch.mean == pytest.approx(100.0, rel=0.5)


@given(st.lists(st.floats(0.01, 1000.0), min_size=2, max_size=100))
def test_mean_and_variation_are_those_of_what_was_measured(values: list[float]) -> None:
    sketch = Sketch(memory=1e9)
    for value in values:
        sketch.add(value)
    mean = sum(values) / len(values)
    variance = sum((v - mean) ** 2 for v in values) / len(values)
    assert sketch.mean == pytest.approx(mean, rel=1e-6)
    assert sketch.variation == pytest.approx(variance / mean**2, rel=1e-5, abs=1e-6)


def test_nothing_is_claimed_before_it_is_known() -> None:
    estimates = Estimates()
    assert estimates.expected_s(JOB, CallKind.GENERATE) is None
    assert estimates.demand(JOB) is None
    assert estimates.hint_factor(JOB) == 1.0
    assert estimates.round_trip_s(JOB) is None
    for _ in range(2):
        estimates.service(JOB, CallKind.GENERATE, 2.0)
    assert estimates.expected_s(JOB, CallKind.GENERATE) is None
    estimates.service(JOB, CallKind.GENERATE, 2.0)
    assert estimates.expected_s(JOB, CallKind.GENERATE) == pytest.approx(2.0, rel=0.05)


@pytest.mark.parametrize("truth", [0.5, 1.0, 3.0, 100.0])
def test_hints_are_corrected_by_how_far_off_they_were_within_bounds(truth: float) -> None:
    estimates = Estimates()
    rng = random.Random(1)
    for _ in range(40):
        hinted_s = rng.uniform(5.0, 20.0)
        estimates.stall(JOB, CallKind.GENERATE, truth * hinted_s * rng.uniform(0.9, 1.1), hinted_s)
    assert estimates.hint_factor(JOB) == pytest.approx(min(truth, 8.0), rel=0.1)


def test_a_demand_is_what_an_iteration_asks_of_the_group() -> None:
    estimates = Estimates()
    for _ in range(5):
        for _ in range(4):
            estimates.service(JOB, CallKind.GENERATE, 5.0)
            estimates.stall(JOB, CallKind.GENERATE, 10.0)
        estimates.service(JOB, CallKind.FORWARD_BACKWARD, 20.0)
        estimates.stall(JOB, CallKind.FORWARD_BACKWARD, 0.0)
        estimates.swap(JOB, 1.5)
        estimates.iteration(JOB)
    demand = estimates.demand(JOB)
    assert demand is not None
    assert demand.iteration_s == pytest.approx(80.0)
    assert demand.busy_s == pytest.approx(40.0)
    assert demand.visits == pytest.approx(5.0)
    assert demand.variation == pytest.approx(0.0, abs=1e-6)
    assert demand.round_trip_s == pytest.approx(3.0)
    estimates.forget(JOB)
    assert estimates.demand(JOB) is None


def test_accounts_divide_by_weight_and_newcomers_start_level() -> None:
    accounts = Accounts()
    accounts.join(JobId("heavy"), weight=2.0)
    accounts.join(JobId("light"))
    accounts.charge(JobId("heavy"), 30.0, 0.0)
    accounts.charge(JobId("light"), 20.0, 0.0)
    assert accounts.attained_s(JobId("heavy")) == 15.0
    assert accounts.attained_s(JobId("light")) == 20.0
    accounts.join(JobId("new"))
    assert accounts.attained_s(JobId("new")) == 15.0
    with pytest.raises(ValueError, match="want a positive number"):
        accounts.join(JobId("broken"), weight=0.0)


def test_a_quota_is_used_up_by_device_seconds_of_all_ranks_and_comes_back_with_the_window() -> None:
    accounts = Accounts({Tenant("t"): Quota(device_s=100.0, window_s=1000.0)})
    accounts.join(JOB, Tenant("t"))
    accounts.join(JobId("free"), Tenant("u"))
    accounts.charge(JOB, 12.0, 10.0, world_size=8)
    assert not accounts.over_quota(JOB, 10.0)
    accounts.charge(JOB, 0.5, 20.0, world_size=8)
    accounts.charge(JobId("free"), 1e6, 20.0)
    assert accounts.over_quota(JOB, 20.0)
    assert not accounts.over_quota(JobId("free"), 20.0)
    use = accounts.tenants(20.0)[Tenant("t")]
    assert (use.used_s, use.quota_s, use.resets_at) == (100.0, 100.0, 1010.0)
    assert not accounts.over_quota(JOB, 3500.0)
    assert accounts.tenants(3500.0)[Tenant("t")].resets_at == 4010.0
