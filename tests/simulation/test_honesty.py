"""The checks that keep the benchmark honest: systems whose answer is known without a simulator."""

import math
from collections.abc import Sequence

import numpy as np
import pytest

from plexrl_controller.scheduling.policy import Order, Policy
from plexrl_controller.scheduling.queueing import mva
from plexrl_controller.simulation.baselines import baselines
from plexrl_controller.simulation.bounds import Work, completion_bound, sharing_bound, two_job_optimum
from plexrl_controller.simulation.cluster import Cluster, Placement
from plexrl_controller.simulation.live_placement import LivePlacement
from plexrl_controller.simulation.live_policy import Decisions, LivePolicy
from plexrl_controller.simulation.metrics import job_results, measure
from plexrl_controller.simulation.pools import Mode
from plexrl_controller.simulation.processes import Form
from plexrl_controller.simulation.scenarios import share, share_two_pools
from plexrl_controller.simulation.workload import (
    BY_NAME,
    GeneratorSettings,
    Hardware,
    Iteration,
    Job,
    generate,
    iterations_of,
)


def live(**settings: object) -> LivePolicy:
    """The policy of the live controller, its plans checked against the invariants."""
    return LivePolicy(Policy(**settings), Decisions())  # type: ignore[arg-type]


def small_trace(rep: int = 0, gpus: int = 64) -> tuple[Job, ...]:
    return generate(GeneratorSettings(gpus, 1.2, rep, window_s=4 * 3600.0, mean_iterations=12.0))


def clockwork(index: int, rollout_s: float, train_s: float, count: int) -> Job:
    """A job without variance, stalls, reward or sync."""
    iterations = (Iteration((rollout_s,), (), (None,), 0.0, None, train_s, 0.0),) * count
    return Job(index, BY_NAME["math-7B"], 0.0, iterations, 1.3, 1.0)


def test_two_balanced_jobs_without_variance_fill_two_pools() -> None:
    count, phase_s = 200, 100.0
    jobs = [clockwork(i, phase_s, phase_s, count) for i in range(2)]
    executions, _ = share_two_pools(jobs, Form(8, 16), lambda: live(chunking=False), share_rollout=True)
    done_s = max(e.ends[-1] for e in executions)
    ecap = 2 * count * 2 * phase_s / done_s
    assert 1.98 <= ecap <= 2.0 + 1e-9


@pytest.mark.parametrize("seed", range(3))
def test_the_dedicated_baseline_saves_nothing(seed: int) -> None:
    cluster = Cluster(64, Hardware(), baselines()[0])
    cluster.run(small_trace(seed))
    metrics = measure(cluster, 1800.0, 4 * 3600.0, complete=True)
    assert abs(metrics.saving) <= 0.005
    assert metrics.slowdown_worst == pytest.approx(1.0)


def test_every_second_of_every_group_is_busy_swap_hold_or_idle() -> None:
    trace = small_trace()
    policies: list[Placement] = [*baselines(), LivePlacement()]
    for policy in policies:
        cluster = Cluster(64, Hardware(), policy)
        cluster.run(trace)
        assert cluster.closed
        for closed in cluster.closed:
            assert math.fsum(closed.spent_s.values()) == pytest.approx(closed.lifetime_s, rel=1e-9, abs=1e-6)


def test_busy_time_is_what_the_jobs_asked_for() -> None:
    """No work is lost or done twice, whatever is chunked, swapped or prefetched."""
    trace = small_trace()
    cluster = Cluster(64, Hardware(), LivePlacement(consolidate=False))
    cluster.run(trace)
    busy = math.fsum(closed.spent_s[Mode.BUSY] * closed.unit_gpus for closed in cluster.closed)
    assert busy == pytest.approx(math.fsum(job.busy_gpu_s for job in trace), rel=1e-9)
    assert all(len(e.ends) == len(e.job.iterations) for e in cluster.executions)
    assert len(cluster.executions) == len(trace)


def noisy(seed: int, busy_share: float, jobs: int = 2, iterations: int = 30, turns: int = 3) -> list[list[list[Work]]]:
    """Jobs of iterations of `turns` stretches with lognormal noise, cv .35."""
    rng = np.random.Generator(np.random.PCG64(seed))
    sigma = math.sqrt(math.log1p(0.35**2))

    def values(mean: float) -> list[float]:
        noise = sigma * rng.standard_normal(turns) - sigma**2 / 2
        return [float(v) for v in mean / turns * np.exp(noise)]

    return [
        [
            [Work(b, z) for b, z in zip(values(100.0 * busy_share), values(100.0 * (1 - busy_share)), strict=True)]
            for _ in range(iterations)
        ]
        for _ in range(jobs)
    ]


@pytest.mark.parametrize("order", list(Order))
@pytest.mark.parametrize("busy_share", [0.2, 0.35, 0.5])
def test_online_is_never_below_the_exact_optimum_of_two_jobs_and_within_five_percent(
    order: Order, busy_share: float
) -> None:
    for seed in range(2):
        jobs = noisy(seed, busy_share, iterations=20)
        optimum = two_job_optimum(*[[work for iteration in job for work in iteration] for job in jobs])
        # The optimum runs calls to their end, so the policy must too.
        online = max(ends[-1] for ends in share(jobs, live(order=order, chunking=False)).ends_s)
        assert 1.0 - 1e-9 <= online / optimum <= 1.05


def test_the_optimum_of_two_jobs_matches_exhaustive_search() -> None:
    for seed in range(40):
        rng = np.random.Generator(np.random.PCG64(seed))
        a, b = ([Work(float(x), float(y)) for x, y in rng.integers(1, 6, (4, 2))] for _ in range(2))
        assert two_job_optimum(a, b) == pytest.approx(_exhaustive(a, b))


def _exhaustive(a: Sequence[Work], b: Sequence[Work]) -> float:
    """Every order of the two jobs' busy stretches on the group; each order's earliest schedule."""

    def search(i: int, j: int, a_ready: float, b_ready: float, free: float) -> float:
        if i == len(a) and j == len(b):
            return max(a_ready, b_ready)
        best = math.inf
        if i < len(a):
            end = max(a_ready, free) + a[i].busy_s
            best = min(best, search(i + 1, j, end + a[i].stall_s, b_ready, end))
        if j < len(b):
            end = max(b_ready, free) + b[j].busy_s
            best = min(best, search(i, j + 1, a_ready, end + b[j].stall_s, end))
        return best

    return search(0, 0, 0.0, 0.0, 0.0)


@pytest.mark.parametrize(("members", "busy_share"), [(2, 0.5), (3, 0.4), (4, 0.2), (5, 0.25)])
def test_a_homogeneous_group_agrees_with_mean_value_analysis(members: int, busy_share: float) -> None:
    """Exponential service and stalls, for which mean value analysis is exact."""
    rng = np.random.Generator(np.random.PCG64(members))
    count = 2500
    jobs = [
        [[Work(float(b), float(z))] for b, z in zip(*_exponential(rng, busy_share, count), strict=True)]
        for _ in range(members)
    ]
    until_s = 100.0 * count
    shared = share(jobs, LivePolicy(Policy(chunking=False), Decisions(every=0), learn=False), until_s=until_s)
    iterations = sum(len(ends) for ends in shared.ends_s)
    slowdown = until_s * members / iterations / 100.0
    response = mva([100.0 * busy_share] * members, [100.0 * (1 - busy_share)] * members)[0]
    assert slowdown == pytest.approx((response + 100.0 * (1 - busy_share)) / 100.0, rel=0.03)


def _exponential(rng: np.random.Generator, busy_share: float, count: int) -> tuple[list[float], list[float]]:
    return (
        rng.exponential(100.0 * busy_share, count).tolist(),
        rng.exponential(100.0 * (1 - busy_share), count).tolist(),
    )


@pytest.mark.parametrize(("members", "busy_share"), [(2, 0.8), (3, 0.5), (4, 0.4), (6, 0.3)])
def test_a_group_with_enough_work_reaches_the_bound_and_never_passes_it(members: int, busy_share: float) -> None:
    jobs = noisy(members, busy_share, members, 60)
    shared = share(jobs, live())
    ideal_s = [[math.fsum(w.busy_s + w.stall_s for w in it) for it in job] for job in jobs]
    until_s = min(ends[-1] for ends in shared.ends_s)
    done = sum(ideal_s[j][i] for j, ends in enumerate(shared.ends_s) for i, end in enumerate(ends) if end <= until_s)
    busy = [
        math.fsum(w.busy_s for it in job for w in it) / sum(ideal) for job, ideal in zip(jobs, ideal_s, strict=True)
    ]
    bound = sharing_bound(members, float(np.mean(busy)), (), 100.0, 0.0)
    assert 0.93 <= done / until_s / bound <= 1.01


def test_no_schedule_beats_the_completion_bound() -> None:
    trace = small_trace(1)
    bound = completion_bound(trace, 64)
    in_own_form = ("B0", "B4", "B5", "B6", "B8", "B9-pack", "B9-backfill")
    policies: list[Placement] = [b for b in baselines() if b.name in in_own_form]
    for policy in [*policies, LivePlacement(consolidate=False)]:
        cluster = Cluster(64, Hardware(), policy)
        cluster.run(trace)
        assert max(e.ends[-1] for e in cluster.executions) >= bound * (1 - 1e-9)


@pytest.mark.parametrize("policy", ["B4", "B9-backfill", "B10"])
def test_the_same_seed_gives_the_same_bytes(policy: str) -> None:
    def run() -> bytes:
        placements: dict[str, Placement] = {b.name: b for b in baselines()}
        cluster = Cluster(64, Hardware(), placements.get(policy, LivePlacement()))
        cluster.run(small_trace(2))
        metrics = measure(cluster, 1800.0, 4 * 3600.0, complete=True)
        return repr((metrics, job_results(cluster.executions, 0.0, math.inf))).encode()

    assert run() == run()


def test_a_job_draws_the_same_segments_whatever_else_is_in_the_trace() -> None:
    short, long = (GeneratorSettings(64, load, 0, window_s=4 * 3600.0, mean_iterations=12.0) for load in (0.6, 1.2))
    pairs = [(a, b) for a, b in zip(generate(short), generate(long), strict=False) if a.arrival_s == b.arrival_s == 0.0]
    assert len(pairs) >= 3
    for a, b in pairs:
        assert a.job_class is b.job_class
        assert a.iterations == b.iterations


def test_the_generator_draws_what_the_class_says() -> None:
    c = BY_NAME["tool-8B"]
    its = iterations_of(c, 4000, np.random.Generator(np.random.PCG64(5)))
    assert float(np.median([it.rollout for it in its])) == pytest.approx(c.rollout_s, rel=0.05)
    assert float(np.mean([s for it in its for s in it.stalls])) == pytest.approx(c.stall_s, rel=0.05)
    hinted = [h for it in its for h in it.hints]
    assert sum(h is not None for h in hinted) / len(hinted) == pytest.approx(0.8, abs=0.02)
    assert float(np.mean([it.train for it in its])) == pytest.approx(c.train_s, rel=0.03)
    assert max(len(it.turns) for it in its) == c.turns
