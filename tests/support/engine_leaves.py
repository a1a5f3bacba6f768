"""What every engine must do with a generate that may leave some completions unfinished: it ends sooner, and what it
returns is as far as it goes that of the same generate which leaves none.
"""

from dataclasses import replace

import numpy as np
import pytest

from plexrl_worker.engine import port
from plexrl_worker.engine.errors import InvalidArgument, Yielded
from plexrl_worker.engine.port import FinishReason
from tests.support.engine_concurrency import NEAR, ConcurrencyConformance, assert_same, conversation
from tests.support.engine_subjects import Courteous, Model, Patient, batch, random_batch

UNEVEN = port.SamplingParams(n=4, max_tokens=40, seed=17, stop_token_ids=tuple(range(2, 10)))
"""Every eighth token ends a completion, or so: some are over at once, some take all that they may."""
TOTAL = 24


class LeaveConformance:
    """Part of EngineConformance, whose fixtures it uses."""

    @pytest.mark.parametrize("leave", [1, 5, TOTAL // 2, TOTAL - 1])
    def test_it_ends_when_so_many_are_left_and_they_are_as_far_as_they_are(self, model: Model, leave: int) -> None:
        prompts = random_batch(70)
        whole, steps = _counted(model, prompts, UNEVEN)
        left, fewer = _counted(model, prompts, replace(UNEVEN, leave=leave))
        assert_left(left, whole, leave)
        assert fewer < steps

    def test_without_log_probabilities_none_come_with_what_is_left(self, model: Model) -> None:
        left = model.generate(random_batch(71), replace(UNEVEN, leave=9, logprobs=False))
        assert left.logprobs.size == 0
        assert left.token_ids.size == left.lengths.sum()
        assert FinishReason.UNFINISHED in left.finish_reasons

    def test_prompt_and_tokens_so_far_go_on_to_the_same_end(self, model: Model) -> None:
        """Greedily, where a continuation draws nothing."""
        prompts, params = random_batch(72, count=12), replace(UNEVEN, n=1, temperature=0.0, stop_token_ids=())
        first = int(model.generate(prompts, params).token_ids[0])
        params = replace(params, stop_token_ids=(first,))
        whole = _rows(model.generate(prompts, params))
        left = model.generate(prompts, replace(params, leave=11))
        asked = np.split(prompts.token_ids, np.cumsum(prompts.lengths)[:-1])
        gone_on = 0
        for prompt, (ids, scores, reason), expected in zip(asked, _rows(left), whole, strict=True):
            if reason is FinishReason.UNFINISHED:
                rest = replace(params, max_tokens=params.max_tokens - len(ids))
                more_ids, more_scores, reason = _rows(model.generate(batch([*prompt.tolist(), *ids]), rest))[0]
                ids, scores, gone_on = ids + more_ids, scores + more_scores, gone_on + 1
            assert (ids, reason) == (expected[0], expected[2])
            np.testing.assert_allclose(scores, expected[1], atol=NEAR)
        assert gone_on

    def test_one_that_gave_way_goes_on_and_still_leaves(self, model: Model) -> None:
        prompts = random_batch(73)
        for n in (4, 16, 64, 256, 1024):
            params, leave = replace(UNEVEN, n=n), n
            given, execution = replace(params, leave=leave), f"call/{n}"
            try:
                model.engine.generate(model.name, 0, prompts, given, Courteous(), execution)
            except Yielded:
                model.swap_out()
                model.swap_in()
                left = model.engine.generate(model.name, 0, prompts, given, Patient(), execution)
                assert_left(left, model.generate(prompts, params), leave)
                return
        raise AssertionError("this engine is too fast to be interrupted")

    def test_it_leaves_beside_others_that_leave_none(self, model: Model) -> None:
        """What it leaves makes room, and the others do not notice."""
        stays = conversation(4, max_tokens=40, n=16)
        leaves = replace(conversation(5), params=replace(UNEVEN, n=8, leave=4))
        expected = model.generate(stays.prompts, stays.params)
        whole = model.generate(leaves.prompts, replace(leaves.params, leave=0))
        together = ConcurrencyConformance.run_together(model, [stays, leaves])
        assert together.order == [leaves, stays]
        assert_same(together.outcomes[stays], expected)
        outcome = together.outcomes[leaves]
        assert isinstance(outcome, port.Generation)
        assert_left(outcome, whole, 4)
        assert_same(model.generate(stays.prompts, stays.params), expected)

    def test_one_that_may_leave_all_is_refused(self, model: Model) -> None:
        with pytest.raises(InvalidArgument, match="24 of 24 completions, want 0 to 23"):
            model.generate(random_batch(74), replace(UNEVEN, leave=TOTAL))


def assert_left(left: port.Generation, whole: port.Generation, leave: int) -> None:
    """It left some, no more than it may: what has ended is that of the whole, what has not a beginning of it."""
    assert 0 < left.finish_reasons.count(FinishReason.UNFINISHED) <= leave
    assert left.weights_version == whole.weights_version
    for (ids, scores, reason), (all_ids, all_scores, end) in zip(_rows(left), _rows(whole), strict=True):
        if reason is FinishReason.UNFINISHED:
            assert len(ids) < len(all_ids)
            assert ids == all_ids[: len(ids)]
        else:
            assert (ids, reason) == (all_ids, end)
        np.testing.assert_allclose(scores, all_scores[: len(scores)], atol=NEAR)


def _counted(model: Model, prompts: port.TokenBatch, params: port.SamplingParams) -> tuple[port.Generation, int]:
    """A generation, and the generator's steps that it took."""
    # A child tells its steps with each generate.
    model.generate(batch([1]))
    before = model.engine.generator_steps
    generation = model.generate(prompts, params)
    return generation, model.engine.generator_steps - before


def _rows(generation: port.Generation) -> list[tuple[list[int], list[float], FinishReason]]:
    """Each completion's token ids, log-probabilities and why it ended."""
    cuts = np.cumsum(generation.lengths)[:-1]
    ids, scores = np.split(generation.token_ids, cuts), np.split(generation.logprobs, cuts)
    rows = zip(ids, scores, generation.finish_reasons, strict=True)
    return [(some.tolist(), theirs.tolist(), reason) for some, theirs, reason in rows]
