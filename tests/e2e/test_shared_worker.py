"""Real vLLM and torch behind the whole service: what sharing a worker changes about a job is time, not one bit.

One local cluster, a device budget that holds one model at a time, and three jobs: two of one architecture, one of
another.
"""

import hashlib
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import plexrl
from plexrl_controller.embedded.cluster import LocalCluster
from plexrl_controller.embedded.settings import ClusterSettings

SIZE = {
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
QWEN = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", **SIZE}
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **SIZE}
LOGPROB_TOLERANCE = 2e-4
PROMPTS = [[1, 2, 3, 4], [5, 6], [7, 8, 9]]


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    settings = ClusterSettings(
        data_dir=tmp_path_factory.mktemp("cluster") / "plexrl",
        engine="vllm",
        workers=1,
        device_state_bytes="2M",
        kv_cache_bytes="32M",
        threads=2,
        restart_delay_s=0.1,
    )
    with LocalCluster(settings) as cluster:
        yield cluster


def train(model: plexrl.Model, step: int) -> float:
    """One GRPO-shaped step that leaves gradients behind; returns the largest generator-trainer difference."""
    completions = model.generate(PROMPTS, n=2, max_tokens=6, seed=step)
    advantages = [1.0 if row[0] % 2 else -1.0 for row in completions.token_ids]
    batch = plexrl.TrainingBatch.from_completions(PROMPTS, completions, advantages)
    out = model.forward_backward(batch, loss="grpo")
    difference = largest_difference(batch, out)
    model.optim_step(lr=1e-3)
    model.sync_weights()
    # Accumulated and not applied: gradients are state too.
    model.forward_backward(batch, loss="importance_sampling")
    return difference


def largest_difference(batch: plexrl.TrainingBatch, out: plexrl.results.ForwardBackward) -> float:
    assert batch.old_logprobs is not None
    return float(np.abs(out.flat_logprobs - batch.old_logprobs)[batch.weights != 0].max())


def fingerprint(model: plexrl.Model, label: str, folder: Path) -> dict[str, str]:
    """SHA-256 of everything in a checkpoint: weights, moments, gradients."""
    model.export(model.save_checkpoint(label), folder, training_state=True)
    tensors = [path for path in folder.iterdir() if path.suffix == ".safetensors"]
    assert len(tensors) >= 3
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in tensors}


def test_shared_runs_equal_undisturbed_ones_bit_for_bit(local: LocalCluster, tmp_path: Path) -> None:
    """G02: weights, optimizer state and accumulated gradients survive swaps; point by point against a run alone."""
    bases = {
        "qwen-1": plexrl.Init(QWEN, seed=1),
        "qwen-2": plexrl.Init(QWEN, seed=2),
        "llama": plexrl.Init(LLAMA, seed=1),
    }
    alone, shared = {}, {}
    with plexrl.connect(local.endpoint, token=local.token) as cluster:
        for name, base in bases.items():
            with cluster.job(f"alone-{name}") as job:
                model = job.model("policy", base=base)
                for step in range(3):
                    assert train(model, step) < LOGPROB_TOLERANCE
                alone[name] = fingerprint(model, "end", tmp_path / f"alone-{name}")
        jobs = {name: cluster.job(f"shared-{name}") for name in bases}
        try:
            models = {name: job.model("policy", base=bases[name]) for name, job in jobs.items()}
            for step in range(3):
                for model in models.values():
                    assert train(model, step) < LOGPROB_TOLERANCE
            for name, model in models.items():
                shared[name] = fingerprint(model, "end", tmp_path / f"shared-{name}")
            for job in jobs.values():
                assert job.account().swaps >= 3
        finally:
            for job in jobs.values():
                job.finish()
    assert shared == alone


def test_conversations_of_a_session_sample_what_they_sample_alone_in_a_fraction_of_the_device_time(
    local: LocalCluster,
) -> None:
    """Each has two turns, the second of what the first one said, and comes when it comes."""

    def converse(generate: Callable[..., plexrl.Completions], number: int) -> list[list[int]]:
        prompt = [1 + number % 30, 2 + number % 7]
        first = list(map(int, generate([prompt], max_tokens=20, seed=number).token_ids[0]))
        turn = generate([prompt + first], max_tokens=8 + number, seed=number)
        assert np.isfinite(turn.logprobs[0]).all()
        return [first, list(map(int, turn.token_ids[0]))]

    with (
        plexrl.connect(local.endpoint, token=local.token) as cluster,
        cluster.job("agents") as job,
        ThreadPoolExecutor(16) as threads,
    ):
        model = job.model("policy", base=plexrl.Init(QWEN, seed=4))
        model.generate(PROMPTS, max_tokens=2)
        before_s = job.account().busy_s
        alone = [converse(model.generate, number) for number in range(16)]
        alone_s = job.account().busy_s - before_s
        with model.session(max_concurrent=16) as session:
            conversations = [threads.submit(converse, session.generate, number) for number in range(16)]
            assert [conversation.result() for conversation in conversations] == alone
        together_s = job.account().busy_s - before_s - alone_s
    print(f"16 conversations, device time: {alone_s:.2f} s one by one, {together_s:.2f} s in a session")
    assert together_s < 0.7 * alone_s


def test_the_logprob_check_fails_when_the_generator_is_one_version_behind(local: LocalCluster) -> None:
    """The negative control of the check that every training step makes (G06)."""
    with plexrl.connect(local.endpoint, token=local.token) as cluster, cluster.job("behind") as job:
        model = job.model("policy", base=plexrl.Init(QWEN, seed=1))
        train(model, 0)
        model.optim_step(lr=3e-3)  # not synced: the generator stays one step behind
        stale = model.generate(PROMPTS, n=2, max_tokens=6, seed=9)
        batch = plexrl.TrainingBatch.from_completions(PROMPTS, stale, [1.0] * 6)
        assert largest_difference(batch, model.forward_backward(batch, loss="grpo")) > LOGPROB_TOLERANCE
        model.sync_weights()
        fresh = model.generate(PROMPTS, n=2, max_tokens=6, seed=9)
        batch = plexrl.TrainingBatch.from_completions(PROMPTS, fresh, [1.0] * 6)
        assert largest_difference(batch, model.forward_backward(batch, loss="grpo")) < LOGPROB_TOLERANCE


def test_a_checkpoint_resumes_bit_for_bit_after_the_engine_is_killed(local: LocalCluster, tmp_path: Path) -> None:
    """G15: what was saved is what comes back, and the export opens in transformers."""
    with plexrl.connect(local.endpoint, token=local.token) as cluster, cluster.job("resumed") as job:
        model = job.model("policy", base=plexrl.Init(QWEN, seed=5))
        train(model, 0)
        saved = model.save_checkpoint("half")
        train(model, 1)
        undisturbed = fingerprint(model, "end", tmp_path / "undisturbed")
        train(model, 2)
        for pid in local.engine_pids("worker-0"):
            os.kill(pid, signal.SIGKILL)
        # The state comes back by itself (G21); the checkpoint brings the earlier one back all the same.
        assert len(model.generate(PROMPTS, max_tokens=2).token_ids) == len(PROMPTS)
        model.load_checkpoint(saved)
        train(model, 1)
        assert fingerprint(model, "end-again", tmp_path / "resumed") == undisturbed
    import transformers

    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "resumed")
    assert loaded.config.hidden_size == SIZE["hidden_size"]
