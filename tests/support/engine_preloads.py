"""What every engine must do about states that come into spare device memory ahead of their swap. Part of the suite."""

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from plexrl_worker.engine import port
from plexrl_worker.engine.errors import InvalidArgument, ParkedStateCorrupt
from tests.support.engine_subjects import Model, Patient, hashes, random_batch, train_a_little


class PreloadConformance:
    """Needs the fixture `make_model` of the suite."""

    def test_what_was_preloaded_is_swapped_in_without_a_copy_bit_for_bit(
        self, make_model: Callable[..., Model], tmp_path: Path
    ) -> None:
        model = make_model(36)
        train_a_little(model)
        expected = hashes(model.save(tmp_path / "before"))
        tokens = random_batch(36)
        generation = model.generate(tokens)
        model.swap_out()
        other = make_model(37)
        result: list[port.Generation] = []
        running = threading.Thread(target=lambda: result.append(other.generate(random_batch(37))))
        running.start()
        preloaded = model.engine.preload(model.name, model.parked, Patient())
        running.join()
        assert preloaded.bytes_moved > 0
        assert result[0].token_ids.tolist() == other.generate(random_batch(37)).token_ids.tolist()
        other.swap_out()
        assert model.swap_in().bytes_moved == 0
        assert hashes(model.save(tmp_path / "after")) == expected
        assert model.generate(tokens).token_ids.tolist() == generation.token_ids.tolist()

    def test_a_changed_bit_is_found_when_it_is_preloaded(self, make_model: Callable[..., Model]) -> None:
        """G08."""
        model = make_model(38)
        model.swap_out()
        make_model(39)
        model.image[model.layout.components[0].offset + 5] ^= 4
        with pytest.raises(ParkedStateCorrupt, match="train_weights"):
            model.engine.preload(model.name, model.parked, Patient())
        model.image[model.layout.components[0].offset + 5] ^= 4
        model.engine.preload(model.name, model.parked, Patient())

    def test_a_preload_that_is_given_up_leaves_the_state_parked(self, make_model: Callable[..., Model]) -> None:
        model = make_model(40)
        tokens = random_batch(40)
        scores = model.score(tokens)
        model.swap_out()
        other = make_model(41)
        model.engine.preload(model.name, model.parked, Patient())
        other.swap_out()
        model.engine.release_device()
        model.engine.acquire_device()
        assert model.swap_in().bytes_moved > 0
        np.testing.assert_array_equal(model.score(tokens), scores)

    def test_an_image_that_was_let_go_holds_nothing_for_the_engine(self, make_model: Callable[..., Model]) -> None:
        model = make_model(42)
        tokens = random_batch(42)
        scores = model.score(tokens)
        model.swap_out()
        model.engine.detach_host(model.name)
        with pytest.raises(InvalidArgument, match="has no host image"):
            model.swap_in()
        model.engine.attach_host(model.name, model.image)
        model.swap_in()
        np.testing.assert_array_equal(model.score(tokens), scores)
