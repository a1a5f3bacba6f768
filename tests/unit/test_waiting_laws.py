"""Laws of latency: their functions agree with each other, with scipy, and with the figures they stand for."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats

from plexrl.waiting.laws import (
    CALM,
    COLD_START,
    NEAR_SATURATION,
    PRESETS,
    Drift,
    Gamma,
    Histogram,
    LogNormal,
    Mixture,
    Never,
    Part,
    scaled,
)

SIMPLE: st.SearchStrategy[Part] = st.one_of(
    st.builds(Gamma, st.floats(0.5, 80), st.floats(0.01, 100)),
    st.builds(LogNormal, st.floats(-2, 5), st.floats(0.05, 2)),
)
MIXED: st.SearchStrategy[Part] = st.builds(
    lambda share, a, b: Mixture((share, 1 - share), (a, b)), st.floats(0.05, 0.95), SIMPLE, SIMPLE
)
PROBABILITY = st.floats(0.001, 0.999)


@given(law=st.one_of(SIMPLE, MIXED), p=PROBABILITY)
def test_quantile_inverts_cdf_and_sf_complements_it(law: Part, p: float) -> None:
    t = float(law.quantile(p))
    assert float(law.cdf(t)) == pytest.approx(p, abs=1e-7)
    assert float(law.sf(t)) == pytest.approx(1 - p, abs=1e-7)


@settings(max_examples=30)
@given(law=st.one_of(SIMPLE, MIXED), p=st.floats(0.05, 0.9))
def test_density_is_the_slope_of_the_distribution(law: Part, p: float) -> None:
    low, high = (float(t) for t in law.quantile([p, p + 0.05]))
    area, _ = integrate.quad(lambda t: float(law.pdf(t)), low, high, limit=200)
    assert area == pytest.approx(0.05, abs=1e-4)


@pytest.mark.parametrize(
    ("law", "reference"),
    [
        (Gamma(4, 7.5), stats.gamma(4, scale=7.5)),
        (Gamma(0.7, 2), stats.gamma(0.7, scale=2)),
        (LogNormal(1, 0.5), stats.lognorm(0.5, scale=np.e)),
    ],
)
def test_agrees_with_scipy(law: Part, reference: stats.rv_continuous) -> None:
    t = np.array([0.1, 1.0, 5.0, 40.0, 300.0])
    for ours, theirs in [(law.pdf, reference.pdf), (law.cdf, reference.cdf), (law.sf, reference.sf)]:
        np.testing.assert_allclose(ours(t), theirs(t), rtol=1e-9)
    assert law.mean_s == pytest.approx(reference.mean())


@settings(max_examples=30)
@given(law=st.one_of(SIMPLE, MIXED), seed=st.integers(0, 2**32))
def test_samples_follow_the_law_and_the_seed(law: Part, seed: int) -> None:
    drawn = law.samples(np.random.default_rng(seed), 400)
    assert np.array_equal(drawn, law.samples(np.random.default_rng(seed), 400))
    # With hundreds of examples a test of level 1e-9 does not fail by chance.
    assert stats.kstest(drawn, lambda t: law.cdf(t)).pvalue > 1e-9


def test_negative_times_and_zero_have_no_density_before_them() -> None:
    for law in PRESETS.values():
        assert float(law.cdf(-1)) == float(law.cdf(0)) == float(law.pdf(-1)) == 0
        assert float(law.sf(0)) == 1


def test_what_never_finishes_lowers_the_mass() -> None:
    law = Mixture((0.9, 0.1), (Gamma(4, 1), Never()))
    assert law.mass == pytest.approx(0.9)
    assert law.mean_s == np.inf
    assert float(law.cdf(1e6)) == pytest.approx(0.9)
    assert float(law.quantile(0.95)) == np.inf
    assert float(law.cdf(law.quantile(0.89))) == pytest.approx(0.89)
    assert np.isinf(law.samples(np.random.default_rng(0), 2000)).mean() == pytest.approx(0.1, abs=0.03)
    assert Never().sample(np.random.default_rng(0)) == np.inf


def test_drift_changes_between_episodes() -> None:
    before, after = Gamma(4, 1), Gamma(4, 3)
    drift = Drift(((0, before), (30, after)))
    assert [drift.at(episode) for episode in (0, 29, 30, 1000)] == [before, before, after, after]
    assert before.at(17) is before
    with pytest.raises(ValueError, match="ascending"):
        Drift(((1, before),))


@given(law=MIXED, factor=st.floats(0.1, 10), p=PROBABILITY)
def test_scaling_scales_every_quantile(law: Part, factor: float, p: float) -> None:
    longer = scaled(law, factor)
    assert not isinstance(longer, Drift)
    assert float(longer.quantile(p)) == pytest.approx(factor * float(law.quantile(p)), rel=1e-6)


def test_scaling_keeps_when_a_drift_happens() -> None:
    assert scaled(Drift(((0, Gamma(4, 1)), (9, Never()))), 3) == Drift(((0, Gamma(4, 3)), (9, Never())))


@pytest.mark.parametrize(
    ("law", "p50_s", "p99_s"), [(CALM, 2.0, 3.1), (NEAR_SATURATION, 2.7, 16.3)], ids=["calm", "near-saturation"]
)
def test_presets_have_the_public_percentiles(law: Part, p50_s: float, p99_s: float) -> None:
    assert law.quantile([0.5, 0.99]) == pytest.approx([p50_s, p99_s], rel=0.05)


def test_cold_start_has_the_public_moments() -> None:
    assert COLD_START.mean_s == pytest.approx(3.24)
    second, _ = integrate.quad(lambda p: float(COLD_START.quantile(p)) ** 2, 0, 1, limit=500)
    assert np.sqrt(second - COLD_START.mean_s**2) == pytest.approx(7.10, rel=0.02)


@pytest.mark.parametrize("build", [lambda: Gamma(0, 1), lambda: Gamma(1, float("nan")), lambda: LogNormal(0, -1)])
def test_impossible_parameters_are_refused(build: object) -> None:
    with pytest.raises(ValueError, match="positive"):
        build()  # type: ignore[operator]
    with pytest.raises(ValueError, match="sum to 1"):
        Mixture((0.5, 0.6), (Gamma(1, 1), Gamma(1, 1)))
    with pytest.raises(ValueError, match="between 0 and 1"):
        Gamma(1, 1).quantile(1.5)


def test_a_histogram_of_samples_is_close_to_their_law() -> None:
    law = Gamma(4, 7.5)
    found = Histogram.of_samples(law.samples(np.random.default_rng(0), 3000).tolist())
    t = law.quantile(np.linspace(0.02, 0.98, 49))
    assert np.abs(found.cdf(t) - law.cdf(t)).max() < 0.03
    assert found.mean_s == pytest.approx(30, rel=0.03)
    np.testing.assert_allclose(found.cdf(found.quantile([0.1, 0.5, 0.9])), [0.1, 0.5, 0.9], atol=1e-9)
    np.testing.assert_allclose(found.cdf(t) + found.sf(t), 1, atol=1e-9)
    area, _ = integrate.quad(lambda x: float(found.pdf(x)), 10, 20, limit=500)
    assert area == pytest.approx(float(found.cdf(20) - found.cdf(10)), abs=1e-3)
    drawn = found.samples(np.random.default_rng(1), 2000)
    assert stats.kstest(drawn, lambda x: found.cdf(x)).pvalue > 1e-4
    assert scaled(found, 2.0) == Histogram(tuple(2 * edge for edge in found.edges_s), found.masses)
