"""Real vLLM on two workers: a policy trains on one, its rollouts sample on the other, with the very same weights."""

import os
import signal
from collections.abc import Iterator

import numpy as np
import pytest

import plexrl
from plexrl.v1.call_pb2 import ListCallsRequest
from plexrl.v1.types_pb2 import CALL_KIND_GENERATE
from plexrl_controller.embedded.cluster import LocalCluster
from plexrl_controller.embedded.settings import ClusterSettings
from tests.e2e.test_shared_worker import LOGPROB_TOLERANCE, PROMPTS, QWEN


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    settings = ClusterSettings(
        data_dir=tmp_path_factory.mktemp("cluster") / "plexrl",
        engine="vllm",
        workers=2,
        device_state_bytes="2M",
        kv_cache_bytes="32M",
        threads=1,
        restart_delay_s=0.1,
    )
    with LocalCluster(settings) as cluster:
        yield cluster


def step(policy: plexrl.Model, completions: plexrl.Completions) -> None:
    advantages = [1.0 if row[0] % 2 else -1.0 for row in completions.token_ids]
    batch = plexrl.TrainingBatch.from_completions(PROMPTS, completions, advantages)
    policy.forward_backward(batch, loss="grpo")
    policy.optim_step(lr=1e-2)
    policy.sync_weights()


def sampled(model: plexrl.Model, seed: int) -> plexrl.Completions:
    return model.generate(PROMPTS, n=2, max_tokens=6, seed=seed)


def assert_equal(one: plexrl.Completions, other: plexrl.Completions) -> None:
    assert [list(row) for row in one.token_ids] == [list(row) for row in other.token_ids]
    assert [list(row) for row in one.logprobs] == [list(row) for row in other.logprobs]


def test_rollouts_sample_what_the_policy_has_learned_through_deaths_of_both(local: LocalCluster) -> None:
    with plexrl.connect(local.endpoint, token=local.token) as cluster, cluster.job("split") as job:
        base = plexrl.Init(QWEN, seed=1)
        policy = job.model("policy", base=base)
        rollouts = job.model("rollouts", base=base, role="rollout", affinity=plexrl.Affinity(avoid=[policy]))
        for model in (policy, rollouts):
            model.wait_until_placed()
        assert_equal(sampled(policy, 0), sampled(rollouts, 0))
        for number in range(1, 4):
            step(policy, sampled(rollouts, number))
            before = sampled(rollouts, number)
            pulled = rollouts.pull_weights(policy)
            after = sampled(rollouts, number)
            assert pulled.source_version == policy.generate(PROMPTS, max_tokens=1).weights_version
            assert_equal(sampled(policy, number), after)
            assert any(not np.array_equal(*pair) for pair in zip(before.logprobs, after.logprobs, strict=True))

        # Both engines die, one after the other, and with them what was on their devices.
        for name in ("worker-0", "worker-1"):
            os.kill(local.pids()[name], signal.SIGKILL)
            assert_equal(sampled(policy, 9), sampled(rollouts, 9))

        # Both sides at once: the next rollouts are under way while the step is made.
        ahead = rollouts.generate.submit(PROMPTS, n=2, max_tokens=6, seed=10)
        step(policy, sampled(policy, 10))
        rollouts.pull_weights(policy)
        assert ahead.result(120).token_ids
        assert_equal(sampled(policy, 11), sampled(rollouts, 11))


def test_replicas_go_on_elsewhere_with_what_they_left(local: LocalCluster) -> None:
    """What is put together is a sample of the policy: it gives every token the log-probability that came with it."""
    with plexrl.connect(local.endpoint, token=local.token) as cluster, cluster.job("replicas") as job:
        base = plexrl.Init(QWEN, seed=1)
        policy = job.model("policy", base=base)
        tail = job.model("tail", base=base, role="rollout")
        other = job.model("other", base=base, role="rollout", affinity=plexrl.Affinity(avoid=[tail]))
        replicas = plexrl.RolloutReplicas([tail, other], leave=0.5)
        step(policy, sampled(policy, 0))
        assert replicas.pull_weights(policy) == 3
        prompts = [*PROMPTS, [10, 11], [12], [13, 14]]
        made = replicas.generate(prompts, n=8, max_tokens=24, stop_token_ids=range(2, 18), seed=5)
        assert len(made) == 48
        assert made.weights_version == 3
        assert set(made.finish_reasons) <= {"stop", "length"}
        began_with = [prompt for prompt in prompts for _ in range(8)]
        sequences = [prompt + ids.tolist() for prompt, ids in zip(began_with, made.token_ids, strict=True)]
        scores = policy.score(sequences).flat_logprobs
        ends = np.cumsum([len(sequence) for sequence in sequences])
        whole = zip(ends, made.lengths, made.logprobs, made.token_ids, made.finish_reasons, strict=True)
        for end, length, logprobs, ids, reason in whole:
            np.testing.assert_allclose(logprobs, scores[end - length : end], atol=LOGPROB_TOLERANCE)
            stops = [token for token in ids.tolist() if 2 <= token < 18]
            assert stops == ([ids[-1]] if reason == "stop" else [])
            assert reason == "stop" or length == 24
        calls = cluster.connection.unary(cluster.connection.calls.ListCalls, ListCallsRequest(job_id=job.job_id)).calls
        generates = [call for call in calls if call.kind == CALL_KIND_GENERATE]
        assert [call.model_id for call in generates].count(other.model_id) == 1
        assert [call.model_id for call in generates].count(tail.model_id) > 1
