"""G21: kill -9 of workers and engines under several training runs; every run ends as if nothing had happened.

Real processes; the engine is the numpy double, whose training is real.
"""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from operator import gt
from pathlib import Path

import pytest

import plexrl
from plexrl_controller.embedded.cluster import LocalCluster
from plexrl_controller.embedded.settings import ClusterSettings
from tests.support.training_run import Killer, Outcome, Shape, run

VOCAB = 24


def shape(vocab_size: int = VOCAB) -> Shape:
    config = {"architectures": ["Qwen3ForCausalLM"], "vocab_size": vocab_size, "max_position_embeddings": 64}
    return Shape(config, prompts=4, completions=2, max_tokens=6, tokens=vocab_size)


def settings(folder: Path, **changes: object) -> ClusterSettings:
    return ClusterSettings(
        data_dir=folder / "plexrl",
        engine="fake",
        device_state_bytes="24K",
        kv_cache_bytes="1M",
        threads=1,
        restart_delay_s=0.1,
        controller_flags=("--snapshot-replay-s", "0.02"),
        **changes,  # type: ignore[arg-type]
    )


@pytest.fixture
def local(tmp_path: Path) -> Iterator[LocalCluster]:
    with LocalCluster(settings(tmp_path, workers=1)) as cluster:
        yield cluster


def test_a_run_is_bit_equal_whatever_dies_under_it(local: LocalCluster, tmp_path: Path) -> None:
    """Daemon, daemon, engine, daemon: rewards, losses, weights, moments and gradients are the same."""
    killer = Killer(local, "worker-0", count=4, seed=3, span_s=0.5)
    steps = 0

    def more(step: int) -> bool:
        nonlocal steps
        steps = step
        return killer.at_work or step < 20

    disturbed = run(local, "disturbed", shape(), tmp_path, more, killer.begin)
    killer.join(60)
    if killer.failure is not None:
        raise killer.failure
    print(killer.report())
    assert len(killer.kills) == 4
    undisturbed = run(local, "undisturbed", shape(), tmp_path, lambda step: step < steps)
    assert disturbed.rewards == undisturbed.rewards
    assert disturbed.losses == undisturbed.losses
    assert disturbed.state == undisturbed.state


def test_two_jobs_move_to_the_other_worker_with_their_states(tmp_path: Path) -> None:
    """A worker that does not come back: what it had is restored where it fits, and goes on."""
    with LocalCluster(settings(tmp_path, workers=2, restart=False)) as local:
        with plexrl.connect(local.endpoint, token=local.token) as cluster, cluster.job("probe") as job:
            first = job.model("probe", base=plexrl.Init(shape().config, seed=1))
            first.wait_until_placed()
        reached = [0, 0, 0]
        killed, one_at_a_time = threading.Event(), threading.Lock()

        def until_killed(number: int, step: int) -> bool:
            """Kills once every job is at work, whichever of them is on that worker; nobody is through before."""
            reached[number] = step
            with one_at_a_time:
                if min(reached) >= 10 and not killed.is_set():
                    killed.set()
                    local.kill("worker-0")
            return step < 50 or not killed.is_set()

        with ThreadPoolExecutor(3) as pool:
            runs = [
                pool.submit(run, local, f"job-{n}", shape(VOCAB + 4 * n), tmp_path, partial(until_killed, n))
                for n in range(3)
            ]
            disturbed = [future.result(180) for future in runs]
        assert killed.is_set()
        assert "worker-0" not in local.pids()
        assert sum(outcome.recoveries for outcome in disturbed) >= 1, "the lost worker had models"
        for n, outcome in enumerate(disturbed):
            alone: Outcome = run(local, f"alone-{n}", shape(VOCAB + 4 * n), tmp_path, partial(gt, reached[n]))
            assert outcome == alone, f"job-{n}"
