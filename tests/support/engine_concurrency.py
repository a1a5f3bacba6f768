"""What every engine must do with generates that run together: each samples what it samples alone, and ends alone."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from plexrl_worker.engine import port
from plexrl_worker.engine.errors import Aborted, EngineError, InvalidArgument, VersionMismatch, Yielded
from tests.support.engine_subjects import SAMPLING, Courteous, Impatient, Model, Patient, random_batch

NEAR = 1e-5
"""Log-probabilities of one request beside others and alone, in float32."""


class Coming:
    """Arrivals that come in waves: the next one when the engine asks for it after one of the wave before has got on."""

    def __init__(self, *waves: Sequence[port.ConcurrentGenerate]) -> None:
        self._waves = list(waves)
        self._present: list[port.ConcurrentGenerate] = []
        self.outcomes: dict[port.ConcurrentGenerate, port.Generation | EngineError] = {}
        self.order: list[port.ConcurrentGenerate] = []

    def take(self) -> Sequence[port.ConcurrentGenerate]:
        under_way = any(isinstance(g.control, Patient) and g.control.heard for g in self._present)
        if not self._waves or (self._present and not under_way and not self.order):
            return []
        wave = self._waves.pop(0)
        self._present = list(wave)
        return wave

    def ended(self, generate: port.ConcurrentGenerate, outcome: port.Generation | EngineError) -> None:
        assert generate not in self.outcomes
        self.outcomes[generate] = outcome
        self.order.append(generate)


class ConcurrencyConformance:
    """Part of EngineConformance, whose fixtures it uses."""

    def test_each_samples_what_it_samples_alone_in_fewer_steps(self, model: Model) -> None:
        """They differ in length and in when they come; their tokens do not, and the generator's steps are shared."""
        generates = [conversation(seed, max_tokens=4 + 3 * seed) for seed in range(6)]
        # A child tells its steps with each generate.
        model.generate(generates[0].prompts, generates[0].params)
        before = model.engine.generator_steps
        expected = [model.generate(generate.prompts, generate.params) for generate in generates]
        alone = model.engine.generator_steps - before
        together = self.run_together(model, generates[:3], generates[3:])
        for generate, undisturbed in zip(generates, expected, strict=True):
            assert_same(together.outcomes[generate], undisturbed)
        assert model.engine.generator_steps - before - alone < 0.6 * alone

    def test_one_that_ends_early_is_told_of_before_the_others_end(self, model: Model) -> None:
        long, short = conversation(1, max_tokens=40, n=8), conversation(2, max_tokens=2, n=1)
        assert self.run_together(model, [long, short]).order == [short, long]

    def test_one_is_aborted_and_one_refused_and_the_others_do_not_notice(self, model: Model) -> None:
        stays = conversation(3, max_tokens=12)
        expected = model.generate(stays.prompts, stays.params)
        aborted = replace(conversation(4, max_tokens=64, n=8), control=Impatient())
        refused = replace(conversation(5), params=replace(SAMPLING, n=0))
        together = self.run_together(model, [stays, aborted, refused])
        assert isinstance(together.outcomes[aborted], Aborted)
        assert isinstance(together.outcomes[refused], InvalidArgument)
        assert_same(together.outcomes[stays], expected)
        assert_same(model.generate(stays.prompts, stays.params), expected)

    def test_all_give_way_and_all_go_on_together_or_alone(self, model: Model) -> None:
        named, _ = self.interrupted(model, [6, 7, 8], stays=None)
        expected = [model.generate(generate.prompts, generate.params) for generate in named]
        model.swap_out()
        model.swap_in()
        go_on = [replace(generate, control=Patient()) for generate in named]
        together = self.run_together(model, go_on[:2])
        for generate, undisturbed in zip(go_on[:2], expected, strict=False):
            assert_same(together.outcomes[generate], undisturbed)
        last = go_on[2]
        generation = model.engine.generate(model.name, 0, last.prompts, last.params, last.control, last.execution)
        assert_same(generation, expected[2])

    def test_those_that_gave_way_one_after_the_other_go_on_together(self, model: Model) -> None:
        """Each may have been all that the engine runs at once: what is more than that waits its turn."""
        named = [self.interrupted(model, [seed], None, (16, 64, 256, 1024))[0][0] for seed in (12, 13)]
        expected = [model.generate(generate.prompts, generate.params) for generate in named]
        go_on = [replace(generate, control=Patient()) for generate in named]
        together = self.run_together(model, go_on)
        for generate, undisturbed in zip(go_on, expected, strict=True):
            assert_same(together.outcomes[generate], undisturbed)

    def test_one_gives_way_while_the_others_go_on(self, model: Model) -> None:
        stays = conversation(9, max_tokens=24)
        expected = model.generate(stays.prompts, stays.params)
        (goes,), together = self.interrupted(model, [10], stays)
        assert_same(together.outcomes[stays], expected)
        generation = model.engine.generate(model.name, 0, goes.prompts, goes.params, Patient(), goes.execution)
        assert_same(generation, model.generate(goes.prompts, goes.params))

    def interrupted(
        self,
        model: Model,
        seeds: Sequence[int],
        stays: port.ConcurrentGenerate | None,
        sizes: Sequence[int] = (4, 16, 64, 256, 1024),
    ) -> tuple[list[port.ConcurrentGenerate], Coming]:
        """Generates that gave way, all of them, once they had got on: as long as it takes for that on this machine."""
        for n in sizes:
            named = [
                replace(conversation(seed, max_tokens=16, n=n), execution=f"call/{seed}/{n}", control=Courteous())
                for seed in seeds
            ]
            together = self.run_together(model, [*named, stays] if stays is not None else named)
            if all(isinstance(together.outcomes[generate], Yielded) for generate in named):
                return named, together
            for generate in named:
                model.engine.forget_execution(generate.execution)
        raise AssertionError("this engine is too fast to be interrupted")

    def test_another_version_is_refused_before_anything_is_sampled(self, model: Model) -> None:
        """G06."""
        with pytest.raises(VersionMismatch, match="version 3"):
            model.engine.generate_concurrently(model.name, 3, Coming([conversation(11)]))

    @staticmethod
    def run_together(model: Model, *waves: Sequence[port.ConcurrentGenerate]) -> Coming:
        coming = Coming(*waves)
        model.engine.generate_concurrently(model.name, model.version, coming)
        assert len(coming.outcomes) == sum(map(len, waves))
        return coming


def conversation(seed: int, *, max_tokens: int = 6, n: int = 2) -> port.ConcurrentGenerate:
    """A turn: one prompt, and how to go on."""
    params = replace(SAMPLING, seed=seed, max_tokens=max_tokens, n=n)
    return port.ConcurrentGenerate(random_batch(100 + seed, count=1), params, Patient())


def assert_same(outcome: port.Generation | EngineError, expected: port.Generation) -> None:
    """The same tokens, and log-probabilities as near as other sums allow."""
    assert isinstance(outcome, port.Generation), outcome
    assert outcome.token_ids.tolist() == expected.token_ids.tolist()
    assert outcome.lengths.tolist() == expected.lengths.tolist()
    assert outcome.finish_reasons == expected.finish_reasons
    assert np.abs(outcome.logprobs - expected.logprobs).max() < NEAR
