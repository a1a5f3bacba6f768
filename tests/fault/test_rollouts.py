"""Weights from worker to worker over real processes and the numpy engine, while every part is killed in turn."""

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

import plexrl
from plexrl_controller.embedded.cluster import LocalCluster
from plexrl_controller.embedded.settings import ClusterSettings

pytestmark = pytest.mark.fault

CONFIG = {"architectures": ["Qwen3ForCausalLM"], "vocab_size": 64, "max_position_embeddings": 64}
PROMPTS = [[1, 2], [3]]
BATCH = plexrl.TrainingBatch.from_targets(PROMPTS, [[4], [5]])
Rows = list[list[int]]
ROUNDS = 120
KILLED = ("worker-1", "controller", "worker-0", "worker-1", "worker-0")
"""The rollouts' worker, then the policy's; each with what else is under way."""


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    settings = ClusterSettings(
        data_dir=tmp_path_factory.mktemp("cluster") / "plexrl",
        engine="fake",
        workers=2,
        device_state_bytes="256K",
        kv_cache_bytes="1M",
        restart_delay_s=0.05,
    )
    with LocalCluster(settings) as cluster:
        yield cluster


def sampled(model: plexrl.Model, seed: int) -> Rows:
    completions = model.generate(PROMPTS, n=2, max_tokens=8, seed=seed)
    return [list(map(int, row)) for row in completions.token_ids]


def taken(rollouts: plexrl.Model, policy: plexrl.Model, seed: int) -> tuple[plexrl.results.LoadCheckpoint, Rows, int]:
    """A pull, what is sampled with it, and how often the rollouts were lost before that.

    They are when their worker has died and the policy has gone on: they say so, and the next pull mends it.
    """
    for lost in range(len(KILLED) + 1):
        try:
            return rollouts.pull_weights(policy), sampled(rollouts, seed), lost
        except plexrl.StateLost:
            continue
    raise AssertionError("lost more often than anything was killed")


def test_each_version_is_sampled_elsewhere_whoever_dies(local: LocalCluster) -> None:
    """G01, G06, G20, G21: the rollouts' tokens are those that the policy samples with the version that was pulled."""
    killed: list[str] = []
    over = threading.Event()

    def kill() -> None:
        for part in KILLED:
            if over.wait(1.0):
                return
            if (pid := local.pids().get(part)) is not None:
                os.kill(pid, signal.SIGKILL)
                killed.append(part)

    with plexrl.connect(local.endpoint, token=local.token) as cluster, cluster.job("split", lease_s=120) as job:
        base = plexrl.Init(CONFIG, seed=3)
        policy = job.model("policy", base=base)
        rollouts = job.model("rollouts", base=base, role="rollout", affinity=plexrl.Affinity(avoid=[policy]))
        sampled(rollouts, 0)
        killer = threading.Thread(target=kill)
        killer.start()
        lost = rounds = 0
        began_s = time.monotonic()
        try:
            while rounds < ROUNDS and (killer.is_alive() or rounds < 10):
                rounds += 1
                policy.forward_backward(BATCH, loss="cross_entropy")
                policy.optim_step(lr=0.5)
                policy.sync_weights()
                pulled, mine, again = taken(rollouts, policy, rounds)
                lost += again
                at = policy.generate(PROMPTS, n=2, max_tokens=8, seed=rounds)
                assert pulled.source_version == at.weights_version == 3 * rounds
                assert mine == [list(map(int, row)) for row in at.token_ids]
        finally:
            over.set()
            killer.join()
    assert len(killed) >= 3, killed
    print(f"{rounds} rounds in {time.monotonic() - began_s:.1f} s, killed {killed}, rollouts lost {lost} times")
