"""The real engine, in its child process, passes the suite; and what only real models can show."""

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from plexrl_worker.engine import port
from plexrl_worker.engine.errors import CheckpointMismatch, InvalidArgument, Unsupported
from plexrl_worker.engine.port import ALL_COMPONENTS
from plexrl_worker.engine.settings import DeploymentSettings, DirectoryBase, EngineSettings, InitBase, Precision
from tests.support.engine_conformance import EngineConformance
from tests.support.engine_leaves import assert_left
from tests.support.engine_subjects import (
    ImageMaker,
    Model,
    Patient,
    batch,
    hashes,
    loss_batch,
    random_batch,
    train_a_little,
)
from tests.support.remote_engine import RemoteEngine

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 128,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 96,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "attention_bias": True,
}


def start(config: dict[str, object], **settings: object) -> RemoteEngine:
    return RemoteEngine("vllm", EngineSettings(json.dumps(config), kv_cache_bytes=32 << 20, **settings))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def qwen3() -> Iterator[RemoteEngine]:
    engine = start(QWEN3)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def llama() -> Iterator[RemoteEngine]:
    # Few at once: what goes on must not be more than that, which vLLM asserts.
    engine = start(LLAMA, max_running_sequences=12)
    yield engine
    engine.close()


class TestQwen3(EngineConformance):
    """Tied embeddings, q and k norms."""

    @pytest.fixture
    def engine(self, qwen3: RemoteEngine) -> port.Engine:
        return qwen3

    @pytest.fixture
    def make_image(self, qwen3: RemoteEngine) -> ImageMaker:
        return qwen3.image

    def test_the_saved_directory_is_a_hugging_face_model(self, model: Model, tmp_path: Path) -> None:
        train_a_little(model)
        model.save(tmp_path / "saved")
        tokens = random_batch(60)
        np.testing.assert_allclose(_hugging_face_scores(tmp_path / "saved", tokens), model.score(tokens), atol=1e-4)

    def test_generating_on_a_swapped_in_model_is_bit_equal(self, model: Model) -> None:
        train_a_little(model)
        prompts = random_batch(61)
        before = model.generate(prompts)
        model.swap_out()
        model.swap_in()
        after = model.generate(prompts)
        assert after.logprobs.tobytes() == before.logprobs.tobytes()

    def test_swapping_out_returns_the_memory(self, qwen3: RemoteEngine, model: Model) -> None:
        """Measured by the engine, and seen from outside."""
        held = _anonymous_bytes(qwen3.process.pid)
        report = model.swap_out()
        assert report.device_bytes >= 0.9 * model.layout.device_bytes
        assert held - _anonymous_bytes(qwen3.process.pid) >= 0.9 * model.layout.device_bytes

    def test_releasing_the_device_returns_the_kv_cache(self, qwen3: RemoteEngine, model: Model) -> None:
        prompts = batch(*(np.random.default_rng(s).integers(2, 64, 100).tolist() for s in range(64)))
        before = model.generate(prompts)
        model.swap_out()
        held = _anonymous_bytes(qwen3.process.pid)
        released = qwen3.release_device()
        fell = held - _anonymous_bytes(qwen3.process.pid)
        qwen3.acquire_device()
        assert released.released_bytes > 3 << 20
        assert fell > 3 << 20
        model.swap_in()
        assert model.generate(prompts).logprobs.tobytes() == before.logprobs.tobytes()

    def test_more_sequences_than_run_at_once(self, model: Model) -> None:
        """520 long requests: KV cache and running limit are exceeded, each seeded draw stays its own."""
        prompts = batch(*(np.random.default_rng(s).integers(2, 64, 41).tolist() for s in range(130)))
        params = port.SamplingParams(n=4, max_tokens=4, seed=5)
        whole = model.generate(prompts, params)
        part = model.generate(batch(*[prompts.token_ids[i * 41 : i * 41 + 41].tolist() for i in range(3)]), params)
        assert whole.token_ids[: part.token_ids.size].tolist() == part.token_ids.tolist()

    def test_stop_strings(self, qwen3: RemoteEngine, make_model: Callable[..., Model], tmp_path: Path) -> None:
        _write_letters_tokenizer(tmp_path / "tokenizer.json")
        model = make_model()
        settings = DeploymentSettings(tokenizer_file=str(tmp_path / "tokenizer.json"))
        model.swap_out()
        layout = qwen3.declare("lettered", settings)
        qwen3.attach_host("lettered", qwen3.image(layout.host_bytes))
        qwen3.initialize("lettered", InitBase(7), 0, Patient())
        try:
            params = port.SamplingParams(n=4, max_tokens=12, seed=3)
            free = qwen3.generate("lettered", 0, random_batch(62), params, Patient())
            first = np.split(free.token_ids, np.cumsum(free.lengths)[:-1])[0].tolist()
            word = "".join(_letter(token) for token in first[3:5])
            stopping = port.SamplingParams(n=4, max_tokens=12, seed=3, stop=(word,))
            stopped = qwen3.generate("lettered", 0, random_batch(62), stopping, Patient())
            assert stopped.token_ids[: stopped.lengths[0]].tolist() == first[:5]
            assert stopped.finish_reasons[0] is port.FinishReason.STOP
            left = qwen3.generate("lettered", 0, random_batch(62), replace(stopping, leave=23), Patient())
            assert_left(left, stopped, 23)
        finally:
            qwen3.drop("lettered")

    def test_activation_checkpointing_changes_nothing(
        self, qwen3: RemoteEngine, make_model: Callable[..., Model], tmp_path: Path
    ) -> None:
        plain = make_model()
        plain.train(loss_batch(63))
        expected = hashes(plain.save(tmp_path / "plain"))
        plain.swap_out()
        settings = DeploymentSettings(micro_batch_tokens=64, activation_checkpointing=True)
        qwen3.declare("recomputed", settings)
        qwen3.initialize("recomputed", InitBase(7), 0, Patient())
        try:
            recomputed = Model(qwen3, "recomputed", plain.layout, plain.image)
            recomputed.train(loss_batch(63))
            assert hashes(recomputed.save(tmp_path / "recomputed")) == expected
        finally:
            qwen3.drop("recomputed")

    def test_a_base_of_another_architecture_is_refused(self, model: Model, tmp_path: Path) -> None:
        model.save(tmp_path / "saved")
        config = tmp_path / "saved" / "config.json"
        config.write_text(json.dumps({**QWEN3, "rms_norm_eps": 1e-3}))
        with pytest.raises(InvalidArgument, match="rms_norm_eps"):
            model.engine.initialize(model.name, DirectoryBase(str(tmp_path / "saved")), 0, Patient())


class TestLlama(EngineConformance):
    """Separate output layer, biases, one head group."""

    @pytest.fixture
    def engine(self, llama: RemoteEngine) -> port.Engine:
        return llama

    @pytest.fixture
    def make_image(self, llama: RemoteEngine) -> ImageMaker:
        return llama.image

    def test_the_saved_directory_is_a_hugging_face_model(self, model: Model, tmp_path: Path) -> None:
        train_a_little(model)
        model.save(tmp_path / "saved")
        tokens = random_batch(70)
        np.testing.assert_allclose(_hugging_face_scores(tmp_path / "saved", tokens), model.score(tokens), atol=1e-4)


def test_parked_models_and_checkpoints_outlive_a_killed_engine(tmp_path: Path) -> None:
    """A model parked by one engine process goes on in the next, bit for bit; bfloat16 and one thread besides."""
    config = {**QWEN3, "vocab_size": 100}
    precision = Precision.BFLOAT16
    first = start(config, precision=precision, threads=1)
    settings = DeploymentSettings()
    layout = first.declare("model", settings)
    image = first.image(layout.host_bytes)
    first.attach_host("model", image)
    first.initialize("model", InitBase(3), 0, Patient())
    model = Model(first, "model", layout, image)
    train_a_little(model)
    scores, generation = model.score(random_batch(80)), model.generate(random_batch(80))
    rollout = model.score_rollout(random_batch(80))
    assert 0 < np.abs(scores - rollout).max() < 0.1, "bfloat16 agrees only roughly"
    model.save(tmp_path / "saved")
    model.swap_out()
    os.kill(first.process.pid, 9)

    second = start(config, precision=precision, threads=1)
    try:
        second.take_images(first)
        second.declare("model", settings)
        second.attach_host("model", image)
        model.engine = second
        model.swap_in()
        assert model.score(random_batch(80)).tobytes() == scores.tobytes()
        assert model.generate(random_batch(80)).logprobs.tobytes() == generation.logprobs.tobytes()
        second.load("model", str(tmp_path / "saved"), None, Patient())
        assert model.score(random_batch(80)).tobytes() == scores.tobytes()
        assert model.score_rollout(random_batch(80)).tobytes() == rollout.tobytes()
        manifest = tmp_path / "saved" / "manifest.json"
        manifest.write_text(manifest.read_text().replace('"threads": "1"', '"threads": "2"'))
        with pytest.raises(CheckpointMismatch, match="threads was 2 when the checkpoint was written, here it is 1"):
            second.load("model", str(tmp_path / "saved"), None, Patient())
        assert second.state("model").resident == ALL_COMPONENTS
    finally:
        second.close()
        first.close()


@pytest.mark.parametrize(
    ("config", "error", "says"),
    [
        pytest.param({**QWEN3, "architectures": ["A", "B"]}, InvalidArgument, "exactly one", marks=pytest.mark.long),
        pytest.param(
            {"model_type": "bert", "architectures": ["BertForMaskedLM"]},
            Unsupported,
            "after its output layer",
            marks=pytest.mark.long,
        ),
        ({**QWEN3, "head_dim": 16}, Unsupported, "heads of size 16 are not offered on CPU: want one of 32, 64"),
    ],
)
def test_a_model_that_cannot_be_run_is_refused_with_the_reason(
    config: dict[str, object], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        start(config).close()


def _hugging_face_scores(directory: Path, tokens: port.TokenBatch) -> port.Float32Array:
    """Log-probabilities by transformers alone, one sequence at a time."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(directory), dtype=torch.float32)
    scores: list[float] = []
    for sequence in np.split(tokens.token_ids, np.cumsum(tokens.lengths)[:-1]):
        ids = torch.from_numpy(sequence.astype(np.int64))
        with torch.no_grad():
            log_probabilities = torch.log_softmax(model(ids[None]).logits[0], -1)
        scores += [0.0, *log_probabilities[:-1].gather(1, ids[1:, None])[:, 0].tolist()]
    return np.array(scores, np.float32)


def _anonymous_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no line 'Anonymous:'")


def _letter(token: int) -> str:
    return chr(ord("A") + token)


def _write_letters_tokenizer(file: Path) -> None:
    """One character per token."""
    from tokenizers import Tokenizer, decoders, models

    tokenizer = Tokenizer(models.BPE({_letter(token): token for token in range(64)}, []))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(file))
