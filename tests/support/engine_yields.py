"""What every engine must do with a generate that gives way: nothing of it changes but when it is over."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from plexrl_worker.engine import port
from plexrl_worker.engine.errors import Yielded
from tests.support.engine_subjects import SAMPLING, Courteous, Model, Patient, loss_batch, random_batch


class YieldConformance:
    """Part of EngineConformance, whose fixtures it uses."""

    def test_a_generate_that_gave_way_samples_what_an_undisturbed_one_samples(
        self, make_model: Callable[..., Model]
    ) -> None:
        """G02: while it was parked another model had the device, and sampled too; not one bit differs."""
        first, prompts = make_model(1), random_batch(13)
        params = long_enough(first, prompts)
        undisturbed = first.generate(prompts, params)
        assert_equal(sampled_in_parts(first, prompts, params, "call/1", between=lambda: None), undisturbed)
        first.swap_out()
        second = make_model(2)
        beside = second.generate(prompts, params)
        second.swap_out()
        first.swap_in()

        def another_has_the_device() -> None:
            first.swap_out()
            second.swap_in()
            assert_equal(second.generate(prompts, params), beside)
            second.swap_out()
            first.swap_in()

        assert_equal(sampled_in_parts(first, prompts, params, "call/2", between=another_has_the_device), undisturbed)

    def test_what_was_parked_is_kept_when_the_engine_gives_up_the_device(self, model: Model) -> None:
        """Only its KV goes: the same tokens, and log-probabilities as near as another order of sums allows."""
        prompts = random_batch(14)
        params = long_enough(model, prompts)
        undisturbed = model.generate(prompts, params)

        def the_device_goes() -> None:
            model.swap_out()
            model.engine.release_device()
            model.engine.acquire_device()
            model.swap_in()

        generation = sampled_in_parts(model, prompts, params, "call/1", between=the_device_goes)
        assert generation.token_ids.tolist() == undisturbed.token_ids.tolist()
        assert np.abs(generation.logprobs - undisturbed.logprobs).max() < 1e-5

    def test_what_is_forgotten_or_of_older_weights_begins_anew(self, model: Model) -> None:
        prompts = random_batch(15)
        params = long_enough(model, prompts)
        undisturbed = model.generate(prompts, params)
        with pytest.raises(Yielded):
            model.engine.generate(model.name, 0, prompts, params, Courteous(), "call/1")
        model.engine.forget_execution("call/1")
        model.engine.forget_execution("call/1")
        assert_equal(model.engine.generate(model.name, 0, prompts, params, Patient(), "call/1"), undisturbed)
        with pytest.raises(Yielded):
            model.engine.generate(model.name, 0, prompts, params, Courteous(), "call/2")
        model.train(loss_batch(15))
        model.step()
        model.sync()
        expected = model.generate(prompts, params)
        assert expected.logprobs.tobytes() != undisturbed.logprobs.tobytes()
        assert_equal(model.engine.generate(model.name, 1, prompts, params, Patient(), "call/2"), expected)

    def test_one_without_a_name_goes_on(self, model: Model) -> None:
        model.engine.generate(model.name, 0, random_batch(16), SAMPLING, Courteous(0))


def long_enough(model: Model, prompts: port.TokenBatch) -> port.SamplingParams:
    """Sampling that takes so long that a child, which is silent about what is over in a moment, tells its progress
    several times; twice in a row, since once may be a busy machine's.
    """

    def reports(params: port.SamplingParams) -> int:
        control = Patient()
        model.engine.generate(model.name, model.version, prompts, params, control)
        return len(control.heard)

    for n in (8, 32, 128, 512, 1024):
        params = replace(SAMPLING, n=n, max_tokens=16)
        if all(reports(params) > 2 for _ in range(2)):
            return params
    raise AssertionError("this engine is too fast to be interrupted")


def sampled_in_parts(
    model: Model, prompts: port.TokenBatch, params: port.SamplingParams, execution: str, between: Callable[[], None]
) -> port.Generation:
    """Samples with an execution that gives way at least once, and up to three times, when it has got on."""
    parked = 0
    while True:
        control = Courteous() if parked < 3 else Patient()
        try:
            generation = model.engine.generate(model.name, model.version, prompts, params, control, execution)
        except Yielded:
            parked += 1
            between()
        else:
            assert parked
            return generation


def assert_equal(generation: port.Generation, expected: port.Generation) -> None:
    """Bit for bit."""
    assert generation.token_ids.tolist() == expected.token_ids.tolist()
    assert generation.lengths.tolist() == expected.lengths.tolist()
    assert generation.logprobs.tobytes() == expected.logprobs.tobytes()
    assert generation.finish_reasons == expected.finish_reasons
