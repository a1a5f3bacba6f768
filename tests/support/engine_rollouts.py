"""What every engine must do with a deployment that is sampled alone: its state is rollout weights, which may be
another's. Part of the suite.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from plexrl_worker.engine import port
from plexrl_worker.engine.errors import EngineError, InvalidArgument, ParkedStateCorrupt, VersionMismatch, Yielded
from plexrl_worker.engine.port import Component
from plexrl_worker.engine.settings import DeploymentSettings, DirectoryBase, InitBase
from tests.support.engine_subjects import (
    SAMPLING,
    VOCAB_SIZE,
    Courteous,
    Model,
    Patient,
    batch,
    loss_batch,
    random_batch,
    train_a_little,
)
from tests.support.engine_yields import assert_equal, long_enough

ROLLOUT_WEIGHTS = frozenset({Component.ROLLOUT_WEIGHTS})
GREEDY = replace(SAMPLING, temperature=0.0)


class RolloutConformance:
    """Part of EngineConformance, whose fixtures it uses."""

    def test_its_state_is_its_rollout_weights_and_they_are_the_bases(self, make_model: Callable[..., Model]) -> None:
        tokens = random_batch(50)
        model = make_model(50, rollout_only=True)
        assert [(entry.component, entry.offset) for entry in model.layout.components] == [("rollout_weights", 0)]
        state = model.engine.state(model.name)
        assert (state.resident, state.dirty) == (ROLLOUT_WEIGHTS, ROLLOUT_WEIGHTS)
        assert (state.optimizer_step, state.rollout_version) == (0, 0)
        generation, scores = model.generate(tokens), model.score_rollout(tokens)
        model.swap_out()
        ordinary = make_model(50)
        assert_equal(generation, ordinary.generate(tokens))
        assert scores.tobytes() == ordinary.score_rollout(tokens).tobytes()
        ordinary.swap_out()
        assert (rollout_bytes(ordinary) == rollout_bytes(model)).all()
        assert parked_rollout(ordinary) == parked_rollout(model)

    def test_the_weights_of_another_are_sampled_under_a_version_of_its_own(
        self, make_model: Callable[..., Model]
    ) -> None:
        """G06, G07: prompts that are cached under the weights before are none of the new ones'."""
        prompts = batch(*(np.random.default_rng(s).integers(2, VOCAB_SIZE, 100).tolist() for s in range(3)))
        rollouts, source = make_model(51, rollout_only=True), make_model(None)
        before = rollouts.score_rollout(prompts)
        rollouts.generate(prompts, GREEDY)
        rollouts.swap_out()
        source.engine.initialize(source.name, InitBase(52), 0, Patient())
        for version in (5, 9):
            train_a_little(source)
            generation, scores = source.generate(prompts, GREEDY), source.score_rollout(prompts)
            source.engine.write_back(source.name, ROLLOUT_WEIGHTS, Patient())
            source.swap_out()
            take_weights(rollouts, source, version)
            assert rollouts.engine.state(rollouts.name) == port.DeploymentState(
                ROLLOUT_WEIGHTS, frozenset(), optimizer_step=0, rollout_version=version
            )
            assert_same_tokens(rollouts.generate(prompts, GREEDY), generation)
            assert rollouts.score_rollout(prompts).tobytes() == scores.tobytes()
            assert scores.tobytes() != before.tobytes()
            rollouts.version = version - 1
            with pytest.raises(VersionMismatch, match=f"holds {version}"):
                rollouts.generate(prompts)
            before = scores
            rollouts.version = version
            assert rollouts.swap_out().bytes_moved == 0
            source.swap_in()

    def test_weights_of_another_that_are_not_whole_are_not_served(self, make_model: Callable[..., Model]) -> None:
        """G08."""
        tokens = random_batch(53)
        source = make_model(53)
        expected = source.score_rollout(tokens)
        source.swap_out()
        rollouts = make_model(54, rollout_only=True)
        rollouts.swap_out()
        source.image[source.layout.components[-1].offset + 9] ^= 2
        with pytest.raises(ParkedStateCorrupt, match="rollout_weights"):
            take_weights(rollouts, source, 3)
        assert rollouts.engine.state(rollouts.name).resident == frozenset()
        source.image[source.layout.components[-1].offset + 9] ^= 2
        take_weights(rollouts, source, 3)
        assert rollouts.score_rollout(tokens).tobytes() == expected.tobytes()

    def test_it_is_parked_preloaded_and_written_back_as_any(self, make_model: Callable[..., Model]) -> None:
        tokens = random_batch(55)
        model = make_model(55, rollout_only=True)
        scores = model.score_rollout(tokens)
        assert model.write_back().bytes_moved == model.layout.device_bytes
        assert model.swap_out().bytes_moved == 0
        other = make_model(56)
        assert model.engine.preload(model.name, model.parked, Patient()).bytes_moved == model.layout.device_bytes
        other.swap_out()
        assert model.swap_in().bytes_moved == 0
        assert model.score_rollout(tokens).tobytes() == scores.tobytes()
        model.swap_out()
        model.engine.release_device()
        model.engine.acquire_device()
        assert model.swap_in().bytes_moved == model.layout.device_bytes
        assert model.score_rollout(tokens).tobytes() == scores.tobytes()

    def test_what_gave_way_begins_anew_under_the_weights_of_another(self, make_model: Callable[..., Model]) -> None:
        prompts = random_batch(57)
        source = make_model(57)
        params = long_enough(source, prompts)
        expected = source.generate(prompts, params)
        source.swap_out()
        rollouts = make_model(58, rollout_only=True)
        with pytest.raises(Yielded):
            rollouts.engine.generate(rollouts.name, 0, prompts, params, Courteous(), "call/1")
        rollouts.swap_out()
        take_weights(rollouts, source, 1)
        generation = rollouts.engine.generate(rollouts.name, 1, prompts, params, Patient(), "call/1")
        assert_equal(replace(generation, weights_version=0), expected)

    @pytest.mark.parametrize("function", ["score", "forward_backward", "optim_step", "sync", "save"])
    def test_what_needs_training_weights_is_refused(
        self, make_model: Callable[..., Model], tmp_path: Path, function: str
    ) -> None:
        model, tokens = make_model(59, rollout_only=True), random_batch(59)
        state, scores = model.engine.state(model.name), model.score_rollout(tokens)
        functions: dict[str, Callable[[], object]] = {
            "score": lambda: model.score(tokens),
            "forward_backward": lambda: model.train(loss_batch(59)),
            "optim_step": model.step,
            "sync": lambda: model.engine.sync(model.name, 1),
            "save": lambda: model.save(tmp_path / "saved"),
        }
        with pytest.raises(InvalidArgument, match=f"{function}: {model.name} is sampled alone"):
            functions[function]()
        assert model.engine.state(model.name) == state
        assert model.score_rollout(tokens).tobytes() == scores.tobytes()
        assert not list(tmp_path.glob("saved/*"))

    def test_it_is_not_trainable(self, engine: port.Engine) -> None:
        with pytest.raises(InvalidArgument, match="not trainable"):
            engine.declare("both", DeploymentSettings(rollout_only=True))

    def test_it_takes_the_rollout_weights_of_a_checkpoint(
        self, make_model: Callable[..., Model], tmp_path: Path
    ) -> None:
        """Those that were synced, where the training weights are ahead of them; as a base, the training weights."""
        tokens = random_batch(60)
        source = make_model(60)
        train_a_little(source)
        source.step()
        behind = source.score_rollout(tokens)
        source.save(tmp_path / "saved")
        source.sync()
        ahead = source.score_rollout(tokens)
        source.save(tmp_path / "in-step")
        source.swap_out()
        rollouts = make_model(None, rollout_only=True)
        state = rollouts.engine.load(rollouts.name, str(tmp_path / "saved"), None, Patient())
        assert state == port.DeploymentState(ROLLOUT_WEIGHTS, ROLLOUT_WEIGHTS, optimizer_step=0, rollout_version=1)
        rollouts.version = 1
        assert rollouts.score_rollout(tokens).tobytes() == behind.tobytes()
        rollouts.engine.load(rollouts.name, str(tmp_path / "in-step"), 7, Patient())
        rollouts.version = 7
        assert rollouts.score_rollout(tokens).tobytes() == ahead.tobytes()
        rollouts.swap_out()
        rollouts.swap_in()
        assert rollouts.engine.state(rollouts.name).optimizer_step == 0
        rollouts.engine.initialize(rollouts.name, DirectoryBase(str(tmp_path / "saved")), 8, Patient())
        rollouts.version = 8
        assert rollouts.score_rollout(tokens).tobytes() == ahead.tobytes()

    def test_a_base_that_cannot_be_read_changes_nothing(self, make_model: Callable[..., Model], tmp_path: Path) -> None:
        model, tokens = make_model(61, rollout_only=True), random_batch(61)
        scores = model.score_rollout(tokens)
        with pytest.raises(EngineError, match="cannot read"):
            model.engine.initialize(model.name, DirectoryBase(str(tmp_path)), 4, Patient())
        assert model.score_rollout(tokens).tobytes() == scores.tobytes()


def parked_rollout(model: Model) -> port.ParkedComponent:
    """What is parked of a model's rollout weights."""
    (copy,) = (copy for copy in model.parked.components if copy.component is Component.ROLLOUT_WEIGHTS)
    return copy


def rollout_bytes(model: Model) -> port.ByteArray:
    """Their bytes in its image, which can be written."""
    (place,) = (entry for entry in model.layout.components if entry.component is Component.ROLLOUT_WEIGHTS)
    return model.image[place.offset : place.offset + place.size_bytes]


def take_weights(rollouts: Model, source: Model, version: int) -> None:
    """Brings a parked model's rollout weights in as those of another parked one, as if it had been parked so."""
    rollout_bytes(rollouts)[:] = rollout_bytes(source)
    copy = parked_rollout(source)
    rollouts.parked = port.ParkedState((copy,), optimizer_step=0, rollout_version=version)
    rollouts.swap_in()
    rollouts.version = version


def assert_same_tokens(generation: port.Generation, expected: port.Generation) -> None:
    """Bit for bit, of another version."""
    assert_equal(replace(generation, weights_version=expected.weights_version), expected)
