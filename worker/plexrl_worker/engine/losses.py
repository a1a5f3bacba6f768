"""Loss functions of log-probabilities, and their exact derivatives. Numpy in float64; no torch, no model.

With weight w_t, log-probability l_t, ratio r_t = exp(l_t - old_t) and advantage A_t, every loss is sum_t w_t * term_t:

    cross_entropy        -l_t
    importance_sampling  -r_t A_t
    ppo                  -min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t)     Schulman et al. 2017, eq. 7
    grpo                 ppo + kl_coef (exp(ref_t - l_t) - (ref_t - l_t) - 1)          Shao et al. 2024, eq. 3 and 4
    cispo                -sg(clip(r_t, 1 - clip_low, 1 + clip_high)) A_t l_t          MiniMax-M1 2025, eq. 4 and 5
    linear               g_t l_t

sg(x) is x, and constant under differentiation: unlike ppo, cispo gives every token a gradient, with a bounded weight.
The derivative with respect to l_t is all that the trainer needs: it goes into the model's backward pass as it is.
"""

from dataclasses import dataclass
from typing import assert_never

import numpy as np
from numpy.typing import NDArray

from plexrl_worker.engine.errors import InvalidArgument, NonFinite
from plexrl_worker.engine.port import Float32Array, Int32Array, LossBatch, LossName, LossParams, TokenBatch

DEFAULT_CLIP = 0.2
_FEW = 64

Float64Array = NDArray[np.float64]

_NEEDED: dict[LossName, frozenset[str]] = {
    LossName.CROSS_ENTROPY: frozenset(),
    LossName.IMPORTANCE_SAMPLING: frozenset({"advantages", "old_logprobs"}),
    LossName.PPO: frozenset({"advantages", "old_logprobs"}),
    LossName.GRPO: frozenset({"advantages", "old_logprobs"}),
    LossName.CISPO: frozenset({"advantages", "old_logprobs"}),
    LossName.LINEAR: frozenset({"logprob_grads"}),
}
_OPTIONAL_ARRAYS = ("advantages", "old_logprobs", "ref_logprobs", "logprob_grads")
_SETTINGS: dict[LossName, frozenset[str]] = {
    LossName.CROSS_ENTROPY: frozenset(),
    LossName.IMPORTANCE_SAMPLING: frozenset(),
    LossName.PPO: frozenset({"clip_low", "clip_high"}),
    LossName.GRPO: frozenset({"clip_low", "clip_high", "kl_coef"}),
    LossName.CISPO: frozenset({"clip_low", "clip_high"}),
    LossName.LINEAR: frozenset(),
}


@dataclass(frozen=True)
class LossTerms:
    """A loss over P weighted tokens.

    gradient: float32 [P], d loss / d logprob. kl_sum: sum of k3 estimates of KL(old || current). clipped: how many
    ratios.
    """

    loss: float
    gradient: Float32Array
    kl_sum: float
    clipped: int


@dataclass(frozen=True)
class LossInputs:
    """The per-token inputs of a loss at P tokens, each float32 [P]; what the loss does not use is None."""

    weights: Float32Array
    advantages: Float32Array | None = None
    old_logprobs: Float32Array | None = None
    ref_logprobs: Float32Array | None = None
    logprob_grads: Float32Array | None = None


def check_tokens(batch: TokenBatch, vocab_size: int, max_sequence_tokens: int) -> None:
    """Raises InvalidArgument when a sequence is empty or too long, or a token id is outside the vocabulary."""
    if batch.lengths.size == 0:
        raise InvalidArgument("the batch has no sequences")
    shortest, longest, total = _range_of(batch.lengths)
    if shortest < 1 or total != batch.token_ids.size:
        raise InvalidArgument("lengths must each be at least 1 and add up to the number of token ids")
    if longest > max_sequence_tokens:
        raise InvalidArgument(f"a sequence has {longest} tokens, the limit is {max_sequence_tokens}")
    least, greatest, _ = _range_of(batch.token_ids)
    if least < 0 or greatest >= vocab_size:
        raise InvalidArgument(f"token ids must be in [0, {vocab_size})")


def _range_of(values: Int32Array) -> tuple[int, int, int]:
    """Least, greatest and sum. Few are looked at sooner one by one than as an array."""
    if values.size <= _FEW:
        few = values.tolist()
        return min(few), max(few), sum(few)
    return int(values.min()), int(values.max()), int(values.sum(dtype=np.int64))


def first_positions(batch: TokenBatch) -> NDArray[np.int64]:
    """Flat index of each sequence's first token: int64 [B]."""
    ends = np.cumsum(batch.lengths, dtype=np.int64)
    return ends - batch.lengths


def check_loss(batch: LossBatch, loss: LossName, params: LossParams) -> None:
    """Raises InvalidArgument unless the arrays and settings are exactly those that the loss uses."""
    count = batch.tokens.token_ids.size
    needed, unused = _NEEDED[loss], set(_OPTIONAL_ARRAYS) - _NEEDED[loss]
    if loss is LossName.GRPO:
        unused.discard("ref_logprobs")
        if (params.kl_coef or 0.0) != 0.0:
            needed = needed | {"ref_logprobs"}
    for name in needed:
        if getattr(batch, name) is None:
            raise InvalidArgument(f"{loss} needs {name}")
    for name in unused:
        if getattr(batch, name) is not None:
            raise InvalidArgument(f"{loss} does not use {name}: leave it out")
    for name in ("weights", *_OPTIONAL_ARRAYS):
        values = getattr(batch, name)
        if values is not None and values.shape != (count,):
            raise InvalidArgument(f"{name} has shape {list(values.shape)}, want [{count}] as the token ids")
        if values is not None and not np.isfinite(values).all():
            raise InvalidArgument(f"{name} has values that are not finite")
    if batch.weights[first_positions(batch.tokens)].any():
        raise InvalidArgument("the first token of a sequence is not predicted from anything: its weight must be 0")
    for name in ("clip_low", "clip_high", "kl_coef"):
        value = getattr(params, name)
        if value is None:
            continue
        if name not in _SETTINGS[loss]:
            raise InvalidArgument(f"{loss} does not use {name}: leave it unset")
        if not np.isfinite(value) or value < 0 or (name == "clip_low" and value > 1):
            raise InvalidArgument(f"{name} is {value}, out of range")


def select(batch: LossBatch, positions: NDArray[np.int64]) -> LossInputs:
    """The loss's inputs at flat positions."""

    def at(values: Float32Array | None) -> Float32Array | None:
        return None if values is None else values[positions]

    return LossInputs(
        batch.weights[positions],
        at(batch.advantages),
        at(batch.old_logprobs),
        at(batch.ref_logprobs),
        at(batch.logprob_grads),
    )


def evaluate(loss: LossName, params: LossParams, logprobs: Float32Array, inputs: LossInputs) -> LossTerms:
    """The loss and its derivative at P tokens.

    Raises NonFinite when a term or derivative is not finite, InvalidArgument when an array that the loss needs is
    missing.
    """
    current = logprobs.astype(np.float64)
    weights = inputs.weights.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        terms, slopes, clipped = _terms(loss, params, current, inputs)
        value = float(np.sum(weights * terms))
        gradient = (weights * slopes).astype(np.float32)
        kl_sum = 0.0
        if inputs.old_logprobs is not None:
            log_ratio = current - inputs.old_logprobs
            kl_sum = float(np.sum(np.expm1(log_ratio) - log_ratio))
    if not (np.isfinite(value) and np.isfinite(kl_sum) and np.isfinite(gradient).all()):
        raise NonFinite(f"{loss}: the loss or its gradient is not finite; nothing was accumulated")
    return LossTerms(value, gradient, kl_sum, clipped)


def _terms(
    loss: LossName, params: LossParams, current: Float64Array, inputs: LossInputs
) -> tuple[Float64Array, Float64Array, int]:
    """(terms, d term / d logprob, clipped ratios), each [P]."""
    match loss:
        case LossName.CROSS_ENTROPY:
            return -current, np.full_like(current, -1.0), 0
        case LossName.LINEAR:
            slopes = _need(inputs.logprob_grads, "logprob_grads")
            return slopes * current, slopes, 0
        case LossName.IMPORTANCE_SAMPLING:
            surrogate = np.exp(current - _need(inputs.old_logprobs, "old_logprobs"))
            surrogate *= _need(inputs.advantages, "advantages")
            return -surrogate, -surrogate, 0
        case LossName.PPO:
            return _clipped_surrogate(params, current, inputs)
        case LossName.GRPO:
            terms, slopes, clipped = _clipped_surrogate(params, current, inputs)
            kl_coef = params.kl_coef or 0.0
            if kl_coef:
                behind = _need(inputs.ref_logprobs, "ref_logprobs") - current
                terms = terms + kl_coef * (np.expm1(behind) - behind)
                slopes = slopes - kl_coef * np.expm1(behind)
            return terms, slopes, clipped
        case LossName.CISPO:
            return _clipped_weights(params, current, inputs)
        case unreachable:
            assert_never(unreachable)


def _clipped_surrogate(
    params: LossParams, current: Float64Array, inputs: LossInputs
) -> tuple[Float64Array, Float64Array, int]:
    advantages = _need(inputs.advantages, "advantages")
    ratios, clipped_ratios = _ratios(params, current, inputs)
    plain = ratios * advantages
    limited = clipped_ratios * advantages
    is_clipped = limited < plain
    slopes = np.where(is_clipped, 0.0, -plain)
    return -np.minimum(plain, limited), slopes, int(np.count_nonzero(is_clipped))


def _clipped_weights(
    params: LossParams, current: Float64Array, inputs: LossInputs
) -> tuple[Float64Array, Float64Array, int]:
    ratios, clipped_ratios = _ratios(params, current, inputs)
    slopes = -clipped_ratios * _need(inputs.advantages, "advantages")
    return slopes * current, slopes, int(np.count_nonzero(ratios != clipped_ratios))


def _ratios(params: LossParams, current: Float64Array, inputs: LossInputs) -> tuple[Float64Array, Float64Array]:
    """(r_t, r_t clipped), each [P]."""
    low = DEFAULT_CLIP if params.clip_low is None else params.clip_low
    high = DEFAULT_CLIP if params.clip_high is None else params.clip_high
    ratios = np.exp(current - _need(inputs.old_logprobs, "old_logprobs"))
    return ratios, np.clip(ratios, 1.0 - low, 1.0 + high)


def _need(values: Float32Array | None, name: str) -> Float64Array:
    if values is None:
        raise InvalidArgument(f"the loss needs {name}")
    return values.astype(np.float64)
