"""Two LoRA jobs over one base behind the whole service: one engine, adapters that never mix, swaps of adapters only."""

from pathlib import Path

import numpy as np

import plexrl
from plexrl_controller.embedded.cluster import LocalCluster
from plexrl_controller.embedded.settings import ClusterSettings
from tests.e2e.test_shared_worker import PROMPTS, QWEN, train

BASE = plexrl.Init(QWEN, seed=3)


def test_two_lora_jobs_share_a_base_and_nothing_else(tmp_path: Path) -> None:
    settings = ClusterSettings(
        data_dir=tmp_path / "plexrl", engine="vllm", workers=1, device_state_bytes="1M", kv_cache_bytes="32M", threads=2
    )
    with (
        LocalCluster(settings) as local,
        plexrl.connect(local.endpoint, token=local.token) as cluster,
        cluster.job("one") as one,
        cluster.job("two") as two,
    ):
        first = one.model("policy", base=BASE, lora=plexrl.Lora(rank=8, alpha=16))
        second = two.model("policy", base=BASE, lora=plexrl.Lora(rank=8, alpha=16, seed=1))
        batch = [[1, 2, 3, 4, 5], [6, 7, 8]]
        np.testing.assert_array_equal(first.score(batch).flat_logprobs, second.score(batch).flat_logprobs)
        before = second.score(batch)
        for step in range(3):
            assert train(first, step) < 2e-4
        after = second.score(batch)
        np.testing.assert_array_equal(before.flat_logprobs, after.flat_logprobs)
        assert np.abs(first.score(batch).flat_logprobs - after.flat_logprobs).max() > 1e-3
        assert train(second, 9) < 2e-4
        assert first.generate(PROMPTS, n=1, max_tokens=4, seed=1).weights_version > 0
