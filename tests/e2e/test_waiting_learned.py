"""Waiting as an RLVR job, on real vLLM and torch: a few steps already lower the cost of held-out waits.

`plexrl waiting learn` goes all the way; this is its beginning.
"""

from pathlib import Path

import pytest

import plexrl
from plexrl.waiting.learned.demo import by_the_clock
from plexrl.waiting.learned.job import CONFIG, Point, Settings, evaluate, imitate, reinforce
from plexrl.waiting.sandbox import Sandbox
from plexrl_controller.embedded.cluster import LocalCluster
from plexrl_controller.embedded.settings import ClusterSettings

SETTINGS = Settings(imitation_steps=60, steps=15, held_out=96, evaluate_every=15)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_job_learns_to_wait(tmp_path: Path) -> None:
    points: list[Point] = []
    cluster_settings = ClusterSettings(
        data_dir=tmp_path / "plexrl", engine="vllm", workers=1, kv_cache_bytes="64M", threads=2
    )
    with (
        LocalCluster(cluster_settings) as local,
        Sandbox() as sandbox,
        plexrl.connect(local.endpoint, token=local.token) as cluster,
        cluster.job("wait") as job,
    ):
        policy = job.model("policy", base=plexrl.Init(CONFIG, seed=SETTINGS.seed))
        imitate(policy, SETTINGS)
        points.append(evaluate(policy, SETTINGS, 0))
        reinforce(policy, SETTINGS, points.append)
        on_the_clock = by_the_clock(policy, SETTINGS, sandbox)
    start, end = points[0], points[-1]
    assert start.well_formed > 0.9
    assert end.well_formed > 0.9
    assert end.sampled < 0.9 * start.sampled
    # 256 waits, one draw each, against the expectation over all draws: within a few standard errors.
    assert abs(on_the_clock - end.greedy) < 0.25
