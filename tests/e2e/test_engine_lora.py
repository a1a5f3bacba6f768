"""Adapters over one frozen base on the real engine: the engine's whole suite, and what only adapters can show."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from plexrl_worker.engine import port
from plexrl_worker.engine.errors import CheckpointMismatch, InvalidArgument, Unsupported
from plexrl_worker.engine.settings import (
    Base,
    DeploymentSettings,
    DirectoryBase,
    EngineSettings,
    InitBase,
    LoraSettings,
)
from tests.e2e.test_engine_vllm import QWEN3
from tests.support.engine_conformance import EngineConformance
from tests.support.engine_subjects import (
    AGREEMENT,
    SAMPLING,
    Courteous,
    ImageMaker,
    Model,
    Patient,
    loss_batch,
    random_batch,
    train_a_little,
)
from tests.support.remote_engine import RemoteEngine

BASE = InitBase(7)


def start(rank: int = 4, base: Base = BASE, config: dict[str, object] = QWEN3) -> RemoteEngine:
    lora = LoraSettings(rank, 2.0 * rank, base)
    return RemoteEngine("vllm", EngineSettings(json.dumps(config), kv_cache_bytes=32 << 20, lora=lora))


@pytest.fixture(scope="module")
def adapters() -> Iterator[RemoteEngine]:
    engine = start()
    yield engine
    engine.close()


class TestLora(EngineConformance):
    """The suite, with an adapter's state in the place of a model's."""

    # An adapter's base is the engine's: another, or a directory, is for another engine (below).
    test_a_checkpoint_serves_as_a_base = None  # type: ignore[assignment]
    test_a_directory_without_weights_is_no_base = None  # type: ignore[assignment]
    # An adapter is not sampled alone: it is refused (below).
    test_its_state_is_its_rollout_weights_and_they_are_the_bases = None  # type: ignore[assignment]
    test_the_weights_of_another_are_sampled_under_a_version_of_its_own = None  # type: ignore[assignment]
    test_weights_of_another_that_are_not_whole_are_not_served = None  # type: ignore[assignment]
    test_it_is_parked_preloaded_and_written_back_as_any = None  # type: ignore[assignment]
    test_what_gave_way_begins_anew_under_the_weights_of_another = None  # type: ignore[assignment]
    test_what_needs_training_weights_is_refused = None
    test_it_takes_the_rollout_weights_of_a_checkpoint = None  # type: ignore[assignment]
    test_a_base_that_cannot_be_read_changes_nothing = None  # type: ignore[assignment]
    # An adapter's generate is not parked: asked to give way, it goes on (below).
    test_a_generate_that_gave_way_samples_what_an_undisturbed_one_samples = None  # type: ignore[assignment]
    test_what_was_parked_is_kept_when_the_engine_gives_up_the_device = None  # type: ignore[assignment]
    test_what_is_forgotten_or_of_older_weights_begins_anew = None  # type: ignore[assignment]
    test_all_give_way_and_all_go_on_together_or_alone = None  # type: ignore[assignment]
    test_one_gives_way_while_the_others_go_on = None  # type: ignore[assignment]
    test_those_that_gave_way_one_after_the_other_go_on_together = None  # type: ignore[assignment]
    test_one_that_gave_way_goes_on_and_still_leaves = None  # type: ignore[assignment]

    def test_asked_to_give_way_it_goes_on_to_its_end(self, model: Model) -> None:
        prompts = random_batch(62)
        expected = model.generate(prompts)
        generation = model.engine.generate(model.name, model.version, prompts, SAMPLING, Courteous(), "call/1")
        assert generation.token_ids.tolist() == expected.token_ids.tolist()

    @pytest.fixture
    def engine(self, adapters: RemoteEngine) -> port.Engine:
        return adapters

    @pytest.fixture
    def make_image(self, adapters: RemoteEngine) -> ImageMaker:
        return adapters.image

    @pytest.fixture
    def make_model(self, engine: port.Engine, make_image: ImageMaker) -> Iterator[Callable[..., Model]]:
        """Adapters that differ from their first step on: the second factor of each begins at zero."""
        names: list[str] = []

        def make(seed: int | None = 7, *, trainable: bool = True, micro_batch_tokens: int = 64) -> Model:
            names.append(f"model-{len(names)}")
            settings = DeploymentSettings(trainable, micro_batch_tokens, adapter_seed=abs((seed or 7) - 7))
            layout = engine.declare(names[-1], settings)
            model = Model(engine, names[-1], layout, make_image(layout.host_bytes))
            engine.attach_host(model.name, model.image)
            if seed is not None:
                engine.initialize(model.name, BASE, 0, Patient())
            return model

        yield make
        for name in names:
            engine.drop(name)

    def test_a_first_adapter_changes_nothing_and_a_step_does(self, make_model: Callable[..., Model]) -> None:
        model, batch = make_model(), random_batch(1)
        plain = model.score(batch)
        np.testing.assert_allclose(model.score_rollout(batch), plain, atol=AGREEMENT)
        train_a_little(model)
        assert np.abs(model.score(batch) - plain).max() > 0.01
        np.testing.assert_allclose(model.score_rollout(batch), model.score(batch), atol=AGREEMENT)

    def test_only_the_adapter_is_state(self, make_model: Callable[..., Model]) -> None:
        layers, hidden, heads, kv_heads, head, inner, rank = 2, 64, 4, 2, 32, 128, 4
        wide = [(hidden, heads * head), (hidden, kv_heads * head), (hidden, kv_heads * head), (heads * head, hidden)]
        wide += [(hidden, inner), (hidden, inner), (inner, hidden)]
        assert make_model().layout.parameter_count == layers * rank * sum(i + o for i, o in wide)

    def test_versions_never_mix(self, make_model: Callable[..., Model]) -> None:
        """G06, G07: the same prompts at two versions, with the prefix cache on, match each version's trainer."""
        model, batch = make_model(), random_batch(2)
        for _ in range(3):
            model.generate(batch)
            train_a_little(model, steps=1)
            np.testing.assert_allclose(model.score_rollout(batch), model.score(batch), atol=AGREEMENT)

    def test_a_checkpoint_opens_as_a_peft_adapter(self, make_model: Callable[..., Model], tmp_path: Path) -> None:
        model = make_model()
        train_a_little(model)
        model.save(tmp_path / "saved")
        config = json.loads((tmp_path / "saved" / "adapter_config.json").read_text())
        assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 4, 8.0)
        assert {"q_proj", "down_proj"} <= set(config["target_modules"])
        names = set(load_file(tmp_path / "saved" / "adapter_model.safetensors"))
        assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in names
        assert not (tmp_path / "saved" / "model.safetensors").exists()

    def test_sampled_alone_it_is_refused(self, engine: port.Engine) -> None:
        with pytest.raises(InvalidArgument, match="not offered for LoRA"):
            engine.declare("alone", DeploymentSettings(trainable=False, rollout_only=True))

    def test_another_base_is_refused(self, engine: port.Engine) -> None:
        engine.declare("stranger", DeploymentSettings())
        with pytest.raises(InvalidArgument, match="another base"):
            engine.initialize("stranger", InitBase(8), 0, Patient())
        engine.drop("stranger")


def test_a_directory_base_and_another_rank(tmp_path: Path) -> None:
    """Over a saved full-parameter model: its scores are the first adapter's, its checkpoints fit rank 4 only."""
    full = RemoteEngine("vllm", EngineSettings(json.dumps(QWEN3), kv_cache_bytes=32 << 20))
    layout = full.declare("full", DeploymentSettings())
    model = Model(full, "full", layout, full.image(layout.host_bytes))
    full.attach_host("full", model.image)
    full.initialize("full", InitBase(3), 0, Patient())
    model.train(loss_batch(1))
    model.step()
    expected = model.score(random_batch(5))
    model.save(tmp_path / "base")
    full.close()
    engine = start(rank=12, base=DirectoryBase(str(tmp_path / "base")))
    layout = engine.declare("adapter", DeploymentSettings(adapter_seed=5))
    adapter = Model(engine, "adapter", layout, engine.image(layout.host_bytes))
    engine.attach_host("adapter", adapter.image)
    engine.initialize("adapter", DirectoryBase(str(tmp_path / "base")), 0, Patient())
    np.testing.assert_allclose(adapter.score(random_batch(5)), expected, atol=AGREEMENT)
    np.testing.assert_allclose(adapter.score_rollout(random_batch(5)), expected, atol=AGREEMENT)
    with pytest.raises(CheckpointMismatch):
        engine.load("adapter", str(tmp_path / "base"), None, Patient())
    engine.close()


def test_a_rank_above_the_generators_is_refused() -> None:
    with pytest.raises(Unsupported, match="rank 600"):
        start(rank=600)
