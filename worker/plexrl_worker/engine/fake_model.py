"""The fake engine's deployments and arithmetic: tables of next-token logits. Never for real work."""

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from plexrl_worker.engine.ledger import ComponentLedger, state_layout
from plexrl_worker.engine.port import (
    ByteArray,
    Component,
    DeploymentSettings,
    FinishReason,
    Float32Array,
    ParkedComponent,
    SamplingParams,
)

Float64Array = np.ndarray[tuple[int], np.dtype[np.float64]]


class FakeDeployment:
    """One deployment's arrays, flat float32 by component, and its ledger."""

    def __init__(self, deployment_id: str, settings: DeploymentSettings, vocab_size: int) -> None:
        size_bytes = 4 * vocab_size * vocab_size
        sizes = [(Component.TRAIN_WEIGHTS, size_bytes)]
        if settings.trainable:
            sizes += [(Component.GRADIENTS, size_bytes), (Component.OPTIMIZER, 2 * size_bytes)]
        sizes.append((Component.ROLLOUT_WEIGHTS, size_bytes))
        self.settings = settings
        self.layout = state_layout(sizes, vocab_size * vocab_size)
        self.ledger = ComponentLedger(deployment_id, self.layout)
        self.arrays: dict[Component, Float32Array] = {}
        self.image: ByteArray | None = None
        self.preloaded: dict[ParkedComponent, Float32Array] = {}
        self._rollout_rows: dict[int, Float64Array] = {}
        self._rows_of: Float32Array | None = None

    def table(self, component: Component, vocab_size: int) -> Float32Array:
        """A component as float32 [vocab_size, vocab_size] (the optimizer: [2, ...])."""
        tables: Float32Array = self.arrays[component].reshape(-1, vocab_size, vocab_size)
        first: Float32Array = tables[0]
        return first

    def rollout_row(self, token: int, vocab_size: int) -> Float64Array:
        """Log-probabilities after a token under the rollout weights: float64 [vocab_size].

        Kept for as long as the weights stay, which are replaced and never written into.
        """
        weights = self.arrays[Component.ROLLOUT_WEIGHTS]
        if self._rows_of is not weights:
            self._rows_of, self._rollout_rows = weights, {}
        row = self._rollout_rows.get(token)
        if row is None:
            table = self.table(Component.ROLLOUT_WEIGHTS, vocab_size)
            row = self._rollout_rows[token] = log_softmax(table[token][None])[0]
        return row


@dataclass
class Sampled:
    """Completions of a generate that gave way."""

    deployment_id: str
    weights_version: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    reasons: list[FinishReason] = field(default_factory=list)


def checksum(raw: ByteArray) -> int:
    """64 bits over bytes."""
    return zlib.crc32(raw.data) << 32 | zlib.adler32(raw.data)


def log_softmax(logits: Float32Array) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """Log-probabilities of rows of logits."""
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    log_probabilities: np.ndarray[tuple[int, int], np.dtype[np.float64]] = shifted - np.log(
        np.exp(shifted).sum(axis=-1, keepdims=True)
    )
    return log_probabilities


def sample(
    row_after: Callable[[int], Float64Array], last_token: int, params: SamplingParams, seed: int
) -> tuple[list[int], list[float], FinishReason]:
    """One completion, with the log-probabilities after each token: (token ids, theirs, why it ended)."""
    ids: list[int] = []
    scores: list[float] = []
    draws = np.random.default_rng(seed) if params.temperature else None
    for _ in range(params.max_tokens):
        raw = row_after(last_token)
        if draws is None:
            last_token = int(raw.argmax())
        else:
            draw = draws.random()
            order = np.argsort(-raw, kind="stable")[: params.top_k or None]
            masses = np.exp((raw[order] - raw[order[0]]) / params.temperature)
            kept = int(np.searchsorted(np.cumsum(masses / masses.sum()), params.top_p)) + 1
            cumulative = np.cumsum(masses[:kept])
            chosen = int(np.searchsorted(cumulative, draw * cumulative[-1]))
            last_token = int(order[min(chosen, cumulative.size - 1)])
        ids.append(last_token)
        scores.append(float(raw[last_token]))
        if last_token in params.stop_token_ids:
            return ids, scores, FinishReason.STOP
    return ids, scores, FinishReason.LENGTH
