"""Losses against their formulas, and derivatives against finite differences. The suite of the engines compares them
with
what the trainer accumulates.
"""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plexrl_worker.engine import losses
from plexrl_worker.engine.errors import InvalidArgument, NonFinite
from plexrl_worker.engine.losses import LossInputs
from plexrl_worker.engine.port import LossBatch, LossName, LossParams, TokenBatch

COUNT = 40
NEEDED = {
    LossName.CROSS_ENTROPY: (),
    LossName.IMPORTANCE_SAMPLING: ("advantages", "old_logprobs"),
    LossName.PPO: ("advantages", "old_logprobs"),
    LossName.GRPO: ("advantages", "old_logprobs", "ref_logprobs"),
    LossName.CISPO: ("advantages", "old_logprobs"),
    LossName.LINEAR: ("logprob_grads",),
}
PARAMS = {
    LossName.CROSS_ENTROPY: LossParams(),
    LossName.IMPORTANCE_SAMPLING: LossParams(),
    LossName.PPO: LossParams(clip_low=0.1, clip_high=0.3),
    LossName.GRPO: LossParams(clip_low=0.1, clip_high=0.3, kl_coef=0.5),
    LossName.CISPO: LossParams(clip_low=0.1, clip_high=0.3),
    LossName.LINEAR: LossParams(),
}


def example(loss: LossName, seed: int) -> tuple[np.ndarray, LossInputs]:
    """Log-probabilities and inputs, with ratios on both sides of both clips, away from the kinks."""
    draws = np.random.default_rng(seed)
    current = draws.uniform(-3, -0.1, COUNT).astype(np.float32)
    ratios = draws.choice([0.5, 0.85, 0.95, 1.1, 1.25, 1.6], COUNT)
    arrays = {
        "advantages": draws.normal(size=COUNT).astype(np.float32),
        "old_logprobs": (current - np.log(ratios)).astype(np.float32),
        "ref_logprobs": (current + draws.normal(0, 0.5, COUNT)).astype(np.float32),
        "logprob_grads": draws.normal(size=COUNT).astype(np.float32),
    }
    weights = draws.uniform(0.1, 2, COUNT).astype(np.float32)
    return current, LossInputs(weights, **{name: arrays[name] for name in NEEDED[loss]})


def reference(
    loss: LossName, params: LossParams, current: np.ndarray, inputs: LossInputs, constant: np.ndarray | None = None
) -> float:
    """The loss as its formula reads, token by token. `constant`: the log-probabilities under the formula's sg()."""
    constant = current if constant is None else constant
    total = 0.0
    for index, logprob in enumerate(current.astype(float)):
        if loss is LossName.CROSS_ENTROPY:
            term = -logprob
        elif loss is LossName.LINEAR:
            assert inputs.logprob_grads is not None
            term = float(inputs.logprob_grads[index]) * logprob
        else:
            assert inputs.old_logprobs is not None
            assert inputs.advantages is not None
            ratio, advantage = np.exp(logprob - float(inputs.old_logprobs[index])), float(inputs.advantages[index])
            term = -ratio * advantage
            if loss in (LossName.PPO, LossName.GRPO):
                assert params.clip_low is not None
                assert params.clip_high is not None
                clipped = min(max(ratio, 1 - params.clip_low), 1 + params.clip_high)
                term = -min(ratio * advantage, clipped * advantage)
            if loss is LossName.CISPO:
                assert params.clip_low is not None
                assert params.clip_high is not None
                still = np.exp(float(constant[index]) - float(inputs.old_logprobs[index]))
                term = -min(max(still, 1 - params.clip_low), 1 + params.clip_high) * advantage * logprob
            if loss is LossName.GRPO:
                assert inputs.ref_logprobs is not None
                assert params.kl_coef is not None
                behind = float(inputs.ref_logprobs[index]) - logprob
                term += params.kl_coef * (np.exp(behind) - behind - 1)
        total += float(inputs.weights[index]) * term
    return total


@pytest.mark.parametrize("loss", list(LossName))
@pytest.mark.parametrize("seed", range(3))
def test_the_loss_is_its_formula(loss: LossName, seed: int) -> None:
    current, inputs = example(loss, seed)
    value = losses.evaluate(loss, PARAMS[loss], current, inputs).loss
    assert value == pytest.approx(reference(loss, PARAMS[loss], current, inputs), rel=1e-9)


@pytest.mark.parametrize("loss", list(LossName))
@pytest.mark.parametrize("seed", range(3))
def test_the_derivative_is_that_of_the_formula(loss: LossName, seed: int) -> None:
    current, inputs = example(loss, seed)
    gradient = losses.evaluate(loss, PARAMS[loss], current, inputs).gradient
    for index in range(COUNT):
        above, below = current.astype(np.float64), current.astype(np.float64)
        above[index] += 1e-6
        below[index] -= 1e-6
        rise = reference(loss, PARAMS[loss], above, inputs, current)
        rise -= reference(loss, PARAMS[loss], below, inputs, current)
        assert gradient[index] == pytest.approx(rise / 2e-6, rel=1e-4, abs=1e-5)


def test_clipping_is_counted_and_stops_the_gradient() -> None:
    zeros = np.zeros(4, np.float32)
    ratios = np.array([2.0, 0.5, 2.0, 1.05])
    advantages = np.array([1.0, -1.0, -1.0, 1.0], np.float32)
    inputs = LossInputs(np.ones(4, np.float32), advantages, (zeros - np.log(ratios)).astype(np.float32))
    terms = losses.evaluate(LossName.PPO, LossParams(), zeros, inputs)
    assert terms.clipped == 2
    assert terms.gradient.tolist() == pytest.approx([0, 0, 2.0, -1.05])


def test_cispo_clips_the_weight_of_a_token_and_keeps_its_gradient() -> None:
    zeros = np.zeros(3, np.float32)
    ratios = np.array([2.0, 0.5, 1.05])
    advantages = np.array([1.0, -1.0, 1.0], np.float32)
    inputs = LossInputs(np.ones(3, np.float32), advantages, (zeros - np.log(ratios)).astype(np.float32))
    terms = losses.evaluate(LossName.CISPO, LossParams(clip_low=0.2, clip_high=0.3), zeros, inputs)
    assert terms.clipped == 2
    assert terms.gradient.tolist() == pytest.approx([-1.3, 0.8, -1.05])


def test_the_default_clip_is_a_fifth() -> None:
    current, inputs = example(LossName.PPO, 1)
    default = losses.evaluate(LossName.PPO, LossParams(), current, inputs)
    stated = losses.evaluate(LossName.PPO, LossParams(clip_low=0.2, clip_high=0.2), current, inputs)
    assert default.loss == stated.loss


def test_grpo_without_kl_is_ppo() -> None:
    current, inputs = example(LossName.PPO, 2)
    params = PARAMS[LossName.PPO]
    assert (
        losses.evaluate(LossName.GRPO, params, current, inputs).loss
        == losses.evaluate(LossName.PPO, params, current, inputs).loss
    )


@pytest.mark.parametrize("loss", [LossName.IMPORTANCE_SAMPLING, LossName.PPO, LossName.GRPO, LossName.CISPO])
def test_on_policy_all_ratios_are_one(loss: LossName) -> None:
    current, inputs = example(loss, 3)
    inputs = replace(inputs, old_logprobs=current, ref_logprobs=current if loss is LossName.GRPO else None)
    terms = losses.evaluate(loss, PARAMS[loss], current, inputs)
    assert inputs.advantages is not None
    np.testing.assert_allclose(terms.gradient, -inputs.weights * inputs.advantages, rtol=1e-6)
    assert (terms.kl_sum, terms.clipped) == (0.0, 0)


@given(st.lists(st.floats(-20, 0), min_size=1, max_size=20), st.floats(-3, 3))
def test_the_kl_estimate_is_never_negative(current: list[float], shift: float) -> None:
    logprobs = np.array(current, np.float32)
    inputs = LossInputs(np.ones_like(logprobs), np.ones_like(logprobs), logprobs + np.float32(shift))
    assert losses.evaluate(LossName.PPO, LossParams(), logprobs, inputs).kl_sum >= 0


@pytest.mark.parametrize("loss", [LossName.IMPORTANCE_SAMPLING, LossName.PPO])
def test_numbers_that_overflow_are_refused(loss: LossName) -> None:
    current, inputs = example(loss, 4)
    assert inputs.old_logprobs is not None
    with pytest.raises(NonFinite):
        losses.evaluate(loss, PARAMS[loss], current, replace(inputs, old_logprobs=inputs.old_logprobs - 2000))


def test_arrays_must_have_the_shape_of_the_tokens() -> None:
    tokens = TokenBatch(np.arange(5, dtype=np.int32), np.array([2, 3], np.int32))
    with pytest.raises(InvalidArgument, match=r"want \[5\]"):
        losses.check_loss(LossBatch(tokens, np.zeros(4, np.float32)), LossName.CROSS_ENTROPY, LossParams())


@pytest.mark.parametrize(
    ("token_ids", "lengths", "says"),
    [
        ([], [], "no sequences"),
        ([1, 2, 3], [3, 0], "at least 1"),
        ([1, 2, 3], [2], "add up"),
        ([1, 2, 3, 4], [4], "limit is 3"),
        ([1, 2, 9], [3], r"\[0, 9\)"),
    ],
)
def test_token_batches_are_checked(token_ids: list[int], lengths: list[int], says: str) -> None:
    batch = TokenBatch(np.array(token_ids, np.int32), np.array(lengths, np.int32))
    with pytest.raises(InvalidArgument, match=says):
        losses.check_tokens(batch, 9, 3)
