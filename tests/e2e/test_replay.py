"""G21 on the real engine: the worker is killed -9 at random moments of a training run, and the run does not notice.

PLEXRL_KILLS sets how often (`make kills`: 20 times). The table says what each kill cost against the number and age of
the snapshots that were there.
"""

import os
import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest

from plexrl_controller.embedded.cluster import LocalCluster
from plexrl_controller.embedded.settings import ClusterSettings
from tests.support.training_run import Killer, Shape, run

KILLS = int(os.environ.get("PLEXRL_KILLS", "2"))
SNAPSHOT_REPLAY_S = 1.0
QWEN = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 32,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
SHAPE = Shape(QWEN, prompts=16, completions=4, max_tokens=8, tokens=32)


@pytest.fixture
def local(tmp_path: Path) -> Iterator[LocalCluster]:
    settings = ClusterSettings(
        data_dir=tmp_path / "plexrl",
        engine="vllm",
        workers=1,
        kv_cache_bytes="32M",
        threads=1,
        restart_delay_s=0.1,
        controller_flags=("--snapshot-replay-s", str(SNAPSHOT_REPLAY_S)),
        worker_flags=("--engine-start-timeout-s", "900", "--hang-timeout-s", "900"),
    )
    with LocalCluster(settings) as cluster:
        yield cluster


@pytest.mark.long
@pytest.mark.timeout(int(os.environ.get("PLEXRL_E2E_LIMIT_S", 900 + 180 * KILLS)))
def test_kills_at_random_moments_change_not_one_bit(local: LocalCluster, tmp_path: Path) -> None:
    killer = Killer(local, "worker-0", count=KILLS, seed=5, span_s=2.0)
    steps = 0

    def more(step: int) -> bool:
        nonlocal steps
        steps = step
        return killer.at_work or step < 8

    disturbed = run(local, "disturbed", SHAPE, tmp_path, more, killer.begin)
    killer.join(60)
    if killer.failure is not None:
        raise killer.failure
    assert len(killer.kills) == KILLS
    undisturbed = run(local, "undisturbed", SHAPE, tmp_path, lambda step: step < steps)
    lost = [kill.lost_s for kill in killer.kills]
    print(
        f"\n{killer.report()}\n{steps} steps, {KILLS} kills, {disturbed.recoveries} recoveries; lost per kill: median"
    )
    print(f"{statistics.median(lost):.1f} s, longest {max(lost):.1f} s, of which a new engine's start is most")
    assert disturbed.rewards == undisturbed.rewards
    assert disturbed.losses == undisturbed.losses
    assert disturbed.state == undisturbed.state
    assert undisturbed.recoveries == 0
