"""Training batches: prompts, completions and advantages as the flat arrays that losses read.

Pure numpy; knows nothing of models or calls.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from plexrl import errors
from plexrl.results import Completions, ragged
from plexrl.wire import Float32Array, Int32Array, integers

Tokens = Sequence[int] | Int32Array

# How token weights are chosen. "token": every completion token of the batch counts the same and weights sum to 1
# (DAPO, arXiv 2503.14476). "sequence": every completion counts the same, its tokens share its weight, weights sum to 1
# (GRPO, arXiv 2402.03300). A number: every completion token has that weight, e.g. 1 / (completions * max_tokens) of
# Dr. GRPO (arXiv 2503.20783).
Normalisation = Literal["token", "sequence"] | float


@dataclass(frozen=True, eq=False)
class TrainingBatch:
    """B sequences, stored flat; entry t of every per-token array belongs to predicting token t from those before it.

    token_ids: int32 [N]. lengths: int32 [B], adding up to N. weights: float32 [N], 0 leaves a token out, always 0 for
    the first token of a sequence. advantages, old_logprobs (under the policy that sampled), ref_logprobs, logprob_grads
    (for loss "linear"): float32 [N] or None.
    """

    token_ids: Int32Array
    lengths: Int32Array
    weights: Float32Array
    advantages: Float32Array | None = None
    old_logprobs: Float32Array | None = None
    ref_logprobs: Float32Array | None = None
    logprob_grads: Float32Array | None = None

    @classmethod
    def from_targets(
        cls, prompts: Sequence[Tokens], targets: Sequence[Tokens], *, normalise: Normalisation = "token"
    ) -> "TrainingBatch":
        """Supervised pairs: weight on the targets' tokens, none on the prompts'."""
        _same_length("targets", targets, "prompts", prompts)
        prompt_lengths = np.array([len(prompt) for prompt in prompts], np.int32)
        target_lengths = np.array([len(target) for target in targets], np.int32)
        if prompt_lengths.size == 0 or prompt_lengths.min() < 1:
            raise errors.InvalidArgument("prompts: every sequence needs a prompt of at least one token")
        pairs = zip(prompts, targets, strict=True)
        token_ids = np.concatenate([integers(part) for pair in pairs for part in pair])
        weights = _spread(_weights(target_lengths, normalise), prompt_lengths, target_lengths)
        return cls(token_ids, prompt_lengths + target_lengths, weights)

    @classmethod
    def from_completions(
        cls,
        prompts: Sequence[Tokens],
        completions: Completions,
        advantages: Sequence[float] | Float32Array,
        *,
        normalise: Normalisation = "token",
        ref_logprobs: Sequence[Float32Array] | None = None,
    ) -> "TrainingBatch":
        """What `generate` returned for `prompts`, with one advantage per completion.

        ref_logprobs: one float32 array per completion, aligned with its tokens.
        """
        if len(prompts) == 0 or len(completions) % len(prompts):
            raise errors.InvalidArgument(
                f"completions: {len(completions)} are not a multiple of the {len(prompts)} prompts"
            )
        _same_length("advantages", advantages, "completions", completions.token_ids)
        n = len(completions) // len(prompts)
        repeated = [prompt for prompt in prompts for _ in range(n)]
        batch = cls.from_targets(repeated, completions.token_ids, normalise=normalise)
        prompt_lengths = np.array([len(prompt) for prompt in repeated], np.int32)
        lengths = completions.lengths
        per_token = np.repeat(np.asarray(advantages, np.float32), lengths)
        old = np.concatenate(completions.logprobs) if len(completions) else np.zeros(0, np.float32)
        reference = None
        if ref_logprobs is not None:
            _same_length("ref_logprobs", ref_logprobs, "completions", completions.token_ids)
            reference = _spread(np.concatenate(list(ref_logprobs)), prompt_lengths, lengths)
        return cls(
            batch.token_ids,
            batch.lengths,
            batch.weights,
            advantages=_spread(per_token, prompt_lengths, lengths),
            old_logprobs=_spread(old, prompt_lengths, lengths),
            ref_logprobs=reference,
        )

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def sequences(self) -> list[Int32Array]:
        """One int32 view per sequence, prompt and completion together."""
        return [np.asarray(view, np.int32) for view in np.split(self.token_ids, np.cumsum(self.lengths)[:-1])]

    def split(self, per_token: Float32Array) -> list[Float32Array]:
        """Cuts a float32 [N] array, such as a result's flat_logprobs, into one view per sequence."""
        return ragged(per_token, self.lengths)


def _weights(lengths: Int32Array, normalise: Normalisation) -> Float32Array:
    """float32 [sum(lengths)]."""
    total = int(lengths.sum())
    if normalise == "token":
        return np.full(total, 1.0 / max(total, 1), np.float32)
    if normalise == "sequence":
        return np.repeat(1.0 / (len(lengths) * np.maximum(lengths, 1)), lengths).astype(np.float32)
    if isinstance(normalise, str):
        raise errors.InvalidArgument(f'normalise: {normalise!r} is unknown, want "token", "sequence" or a number')
    return np.full(total, normalise, np.float32)


def _spread(values: Float32Array, prompt_lengths: Int32Array, lengths: Int32Array) -> Float32Array:
    """Puts per-completion-token values [sum(lengths)] into [sum(prompt_lengths + lengths)], with 0 on prompt tokens."""
    both = np.stack([prompt_lengths, lengths], axis=1).ravel()
    is_completion = np.repeat(np.tile([False, True], len(lengths)), both)
    if values.size != int(lengths.sum()):
        raise errors.InvalidArgument(f"per-token values: {values.size} for {int(lengths.sum())} completion tokens")
    spread = np.zeros(int(both.sum()), np.float32)
    spread[is_completion] = values
    return spread


def _same_length(name: str, values: Sequence[object] | Float32Array, of: str, others: Sequence[object]) -> None:
    if len(values) != len(others):
        raise errors.InvalidArgument(f"{name}: has {len(values)} entries, {of} has {len(others)}")
