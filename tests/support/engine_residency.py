"""What every engine must do when a model leaves its device and comes back. Part of `EngineConformance`."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from plexrl_worker.engine.errors import DeviceNotHeld, NotResident, ParkedStateCorrupt, SlotOccupied
from plexrl_worker.engine.port import ALL_COMPONENTS, Component
from plexrl_worker.engine.settings import InitBase
from tests.support.engine_subjects import (
    ImageMaker,
    Model,
    Patient,
    hashes,
    loss_batch,
    random_batch,
    train_a_little,
)


class ResidencyConformance:
    """Part of EngineConformance, whose fixtures it uses."""

    def test_swaps_keep_every_bit_with_another_model_in_between(
        self, make_model: Callable[..., Model], tmp_path: Path
    ) -> None:
        alone = make_model(31)
        train_a_little(alone)
        alone.step()
        expected = hashes(alone.save(tmp_path / "alone"))
        alone.swap_out()
        first, other = make_model(31), make_model(None)
        first.swap_out()
        other.engine.initialize(other.name, InitBase(7), 0, Patient())
        other.swap_out()
        for seed in range(2):
            for model in (first, other):
                model.swap_in()
                model.train(loss_batch(seed))
                model.swap_out()
            for model in (first, other):
                model.swap_in()
                model.step()
                model.swap_out()
        first.swap_in()
        first.sync()
        first.train(loss_batch(99))
        first.swap_out()
        other.swap_in()
        other.generate(random_batch(31))
        other.swap_out()
        first.swap_in()
        first.step()
        assert hashes(first.save(tmp_path / "shared")) == expected

    def test_only_what_changed_is_copied_again(self, model: Model) -> None:
        train_a_little(model)
        first = model.swap_out()
        assert first.bytes_moved == model.layout.device_bytes
        model.swap_in()
        assert model.swap_out().bytes_moved == 0
        model.swap_in()
        model.generate(random_batch(33))
        assert model.engine.state(model.name).dirty == frozenset()
        model.train(loss_batch(33))
        assert model.engine.state(model.name).dirty == {Component.GRADIENTS}

    def test_what_is_written_back_stays_on_the_device_and_is_the_state_of_that_moment(
        self, make_model: Callable[..., Model], make_image: ImageMaker, tmp_path: Path
    ) -> None:
        model = make_model()
        train_a_little(model)
        expected = hashes(model.save(tmp_path / "then"))
        report = model.write_back()
        state = model.engine.state(model.name)
        assert report.bytes_moved == model.layout.device_bytes
        assert (state.resident, state.dirty) == (ALL_COMPONENTS, frozenset())
        assert model.write_back().bytes_moved == 0
        image = model.image.copy()
        train_a_little(model)
        assert (image == model.image).all(), "what runs on the device must not reach the image"
        model.swap_out()
        other = make_model(seed=None)
        other.image[:] = image
        other.parked = report.parked
        other.swap_in()
        assert hashes(other.save(tmp_path / "restored")) == expected

    def test_zeros_are_not_copied(self, model: Model) -> None:
        report = model.swap_out()
        zeros = {copy.component for copy in report.parked.components if copy.is_zero}
        assert zeros == {Component.GRADIENTS, Component.OPTIMIZER}
        for entry in model.layout.components:
            if entry.component in zeros:
                model.image[entry.offset : entry.offset + entry.size_bytes] = 0xFF
        model.swap_in()
        model.train(loss_batch(34))
        model.step()

    @pytest.mark.parametrize("component", list(Component))
    def test_a_flipped_bit_in_a_parked_component_is_found(self, model: Model, component: Component) -> None:
        """G08."""
        train_a_little(model)
        model.swap_out()
        place = next(entry for entry in model.layout.components if entry.component is component)
        flipped = place.offset + place.size_bytes // 3
        model.image[flipped] ^= 0x10
        with pytest.raises(ParkedStateCorrupt, match=component):
            model.swap_in()
        assert component not in model.engine.state(model.name).resident
        model.image[flipped] ^= 0x10
        model.swap_in()
        assert model.engine.state(model.name).resident == ALL_COMPONENTS

    def test_functions_need_their_components(self, model: Model) -> None:
        model.swap_out()
        with pytest.raises(NotResident, match="rollout_weights"):
            model.generate(random_batch(35))
        with pytest.raises(NotResident, match="train_weights"):
            model.score(random_batch(35))
        model.engine.swap_in(model.name, model.parked, [Component.ROLLOUT_WEIGHTS], Patient())
        model.generate(random_batch(35))
        with pytest.raises(NotResident):
            model.train(loss_batch(35))

    def test_the_device_is_released_and_taken_again(self, model: Model) -> None:
        tokens = random_batch(36)
        scores, generation = model.score(tokens), model.generate(tokens)
        with pytest.raises(SlotOccupied):
            model.engine.release_device()
        model.swap_out()
        assert model.engine.release_device().released_bytes > 0
        with pytest.raises(DeviceNotHeld):
            model.swap_in()
        model.engine.acquire_device()
        model.swap_in()
        np.testing.assert_array_equal(model.score(tokens), scores)
        assert model.generate(tokens).token_ids.tolist() == generation.token_ids.tolist()
