"""A running call that its client cancels, through every real part: it ends as cancelled, and the model goes on."""

import time
from pathlib import Path

import pytest

import plexrl
from plexrl_controller.embedded.cluster import LocalCluster
from plexrl_controller.embedded.settings import ClusterSettings

LIMIT_S = 20.0


def test_a_running_call_is_cancelled_and_the_next_one_runs(tmp_path: Path) -> None:
    settings = ClusterSettings(
        data_dir=tmp_path / "plexrl", engine="fake", workers=1, device_state_bytes="24K", kv_cache_bytes="1M"
    )
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 16,
        "max_position_embeddings": 64,
        "plexrl_fake": [{"function": "generate", "fault": "slow", "delay_s": 120}],
    }
    with (
        LocalCluster(settings) as local,
        plexrl.connect(local.endpoint, token=local.token) as client,
        client.job("cancelling") as job,
        job.model("m", base=plexrl.Init(config, seed=1)) as model,
    ):
        running = model.generate.submit([[1, 2, 3]], max_tokens=4, seed=1)
        deadline_s = time.monotonic() + LIMIT_S
        while running.state != "RUNNING":
            assert time.monotonic() < deadline_s, running.state
            time.sleep(0.05)
        running.cancel()
        with pytest.raises(plexrl.CallCancelled):
            running.result(LIMIT_S)
        assert model.score([[1, 2, 3]]).flat_logprobs.size == 3
