"""What every engine must do with checkpoints: whoever loads one goes on as whoever saved it, or is told why not."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from plexrl_worker.engine.errors import (
    CheckpointCorrupt,
    EngineError,
)
from plexrl_worker.engine.settings import DirectoryBase
from tests.support.engine_subjects import (
    AGREEMENT,
    Model,
    Patient,
    hashes,
    random_batch,
    train_a_little,
)


class CheckpointConformance:
    """Part of EngineConformance, whose fixtures it uses."""

    def test_a_loaded_checkpoint_goes_on_bit_for_bit(self, make_model: Callable[..., Model], tmp_path: Path) -> None:
        model = make_model(41)
        train_a_little(model)
        model.save(tmp_path / "saved")
        model.step()
        model.sync()
        expected = hashes(model.save(tmp_path / "went-on"))
        model.swap_out()
        other = make_model(None)
        state = other.engine.load(other.name, str(tmp_path / "saved"), None, Patient())
        assert (state.optimizer_step, state.rollout_version) == (2, 1)
        other.version = 1
        other.step()
        other.sync()
        assert hashes(other.save(tmp_path / "loaded")) == expected

    def test_rollout_weights_behind_the_training_weights_are_kept(self, model: Model, tmp_path: Path) -> None:
        tokens = random_batch(42)
        train_a_little(model)
        model.step()
        behind, ahead = model.score_rollout(tokens), model.score(tokens)
        model.save(tmp_path / "saved")
        model.sync()
        model.engine.load(model.name, str(tmp_path / "saved"), 9, Patient())
        model.version = 9
        np.testing.assert_array_equal(model.score_rollout(tokens), behind)
        np.testing.assert_array_equal(model.score(tokens), ahead)

    @pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "no-manifest"])
    def test_a_damaged_checkpoint_is_refused(self, model: Model, tmp_path: Path, damage: str) -> None:
        train_a_little(model)
        model.save(tmp_path / "saved")
        tokens = random_batch(43)
        before = model.score(tokens)
        file = tmp_path / "saved" / "optimizer.safetensors"
        data = bytearray(file.read_bytes())
        match damage:
            case "flip":
                data[-5] ^= 1
                file.write_bytes(data)
            case "truncate":
                file.write_bytes(data[:-4])
            case "remove":
                file.unlink()
            case "no-manifest":
                (tmp_path / "saved" / "manifest.json").unlink()
        with pytest.raises(CheckpointCorrupt):
            model.engine.load(model.name, str(tmp_path / "saved"), None, Patient())
        np.testing.assert_array_equal(model.score(tokens), before)

    def test_a_checkpoint_serves_as_a_base(self, model: Model, tmp_path: Path) -> None:
        tokens = random_batch(44)
        train_a_little(model)
        model.step()
        expected = model.score(tokens)
        model.save(tmp_path / "saved")
        model.engine.initialize(model.name, DirectoryBase(str(tmp_path / "saved")), 5, Patient())
        model.version = 5
        np.testing.assert_array_equal(model.score(tokens), expected)
        assert np.abs(model.score_rollout(tokens) - expected).max() < AGREEMENT
        assert model.engine.state(model.name).optimizer_step == 0

    def test_a_directory_without_weights_is_no_base(self, make_model: Callable[..., Model], tmp_path: Path) -> None:
        model = make_model(None)
        with pytest.raises(EngineError, match="cannot read"):
            model.engine.initialize(model.name, DirectoryBase(str(tmp_path)), 0, Patient())
