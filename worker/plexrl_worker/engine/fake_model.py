"""The fake engine's deployments and arithmetic: tables of next-token logits. Never for real work."""

import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from plexrl_worker.engine import checkpoints
from plexrl_worker.engine.errors import Aborted, InvalidArgument, Yielded
from plexrl_worker.engine.fake_faults import Faults
from plexrl_worker.engine.ledger import ComponentLedger, state_layout
from plexrl_worker.engine.port import (
    ByteArray,
    Component,
    ConcurrentGenerate,
    FinishReason,
    Float32Array,
    Generation,
    ParkedComponent,
    SamplingParams,
)
from plexrl_worker.engine.seeds import completion_seed
from plexrl_worker.engine.settings import Base, DeploymentSettings, DirectoryBase, InitBase

TABLE = "table"
"""The one tensor in files."""

_HELD_S = 0.002

Float64Array = np.ndarray[tuple[int], np.dtype[np.float64]]


class FakeDeployment:
    """One deployment's arrays, flat float32 by component, and its ledger."""

    def __init__(self, deployment_id: str, settings: DeploymentSettings, vocab_size: int) -> None:
        size_bytes = 4 * vocab_size * vocab_size
        sizes = [] if settings.rollout_only else [(Component.TRAIN_WEIGHTS, size_bytes)]
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

    def host_image(self) -> ByteArray:
        """Its pages in the host tier. Raises InvalidArgument where none are attached."""
        if self.image is None:
            raise InvalidArgument(f"{self.ledger.deployment_id} has no host image: attach one first")
        return self.image

    def fill(
        self,
        weights: Float32Array,
        training: tuple[Float32Array, Float32Array] | None,
        rollout: Float32Array,
    ) -> None:
        """Sets all components that there are; `training` is (gradients, moments), None for zeros."""
        arrays = {Component.ROLLOUT_WEIGHTS: rollout}
        if not self.settings.rollout_only:
            arrays[Component.TRAIN_WEIGHTS] = weights
        if self.settings.trainable:
            zeros = (np.zeros(weights.size, np.float32), np.zeros(2 * weights.size, np.float32))
            arrays[Component.GRADIENTS], arrays[Component.OPTIMIZER] = training or zeros
        for component, values in arrays.items():
            self.arrays[component] = np.array(values, np.float32)
            self.ledger.write(component, zero=not values.any())


Completion = tuple[list[int], list[float], FinishReason]
"""Token ids, their log-probabilities, and why it ended."""


@dataclass
class Sampled:
    """Completions of a generate that gave way."""

    deployment_id: str
    weights_version: int
    completions: list[Completion] = field(default_factory=list)


def base_weights(base: Base, vocab_size: int) -> Float32Array:
    """First weights: float32 [vocab_size, vocab_size]. Raises InvalidArgument for a directory without them."""
    shape = (vocab_size, vocab_size)
    match base:
        case InitBase(seed):
            return np.random.default_rng(seed).normal(0.0, 0.02, shape).astype(np.float32)
        case DirectoryBase(path):
            try:
                weights: Float32Array = load_file(Path(path) / checkpoints.WEIGHTS_FILE)[TABLE]
            except (OSError, KeyError, SafetensorError) as error:
                raise InvalidArgument(f"{path}: cannot read its weights: {error!r}") from error
            if weights.shape != shape:
                raise InvalidArgument(f"{path}: {TABLE} has shape {list(weights.shape)}, want {list(shape)}")
            return weights


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


def sample(row_after: Callable[[int], Float64Array], last_token: int, params: SamplingParams, seed: int) -> Completion:
    """One completion, from the log-probabilities after each token."""
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


@dataclass
class Sampling:
    """A generate that is under way, with the last token of each of its prompts.

    Time passes for as many completions as are to finish; those that are left cost none.
    """

    generate: ConcurrentGenerate
    sampled: Sampled
    last_tokens: list[int]

    def go_on(self, row_after: Callable[[int], Float64Array], faults: Faults) -> Generation | None:
        """Samples the next completion, unless a fault holds it; the generation, if that was the last.

        Raises Aborted, Yielded.
        """
        generate, sampled, params = self.generate, self.sampled, self.generate.params
        index, total = len(sampled.completions), len(self.last_tokens) * params.n
        if generate.control.aborted():
            raise Aborted("generate was aborted")
        if generate.execution and generate.control.yielding():
            raise Yielded(f"{index} of {total} completions are sampled, and kept")
        if faults.holds(f"completion-{index}"):
            time.sleep(_HELD_S)
            return None
        faults.strike(f"completion-{index}", generate.control)
        sampled.completions.append(self._sample(row_after, index))
        generate.control.progress(index + 1, total)
        if index + 1 + params.leave < total:
            return None
        left = [self._sample(row_after, number) for number in range(index + 1, total)]
        completions = _cut([*sampled.completions, *left], params.leave)
        logprobs = [score for _, scores, _ in completions for score in scores] if params.logprobs else []
        return Generation(
            token_ids=np.array([token for ids, _, _ in completions for token in ids], np.int32),
            lengths=np.array([len(ids) for ids, _, _ in completions], np.int32),
            logprobs=np.array(logprobs, np.float32),
            finish_reasons=tuple(reason for _, _, reason in completions),
            weights_version=sampled.weights_version,
        )

    def _sample(self, row_after: Callable[[int], Float64Array], index: int) -> Completion:
        prompt_index, completion_index = divmod(index, self.generate.params.n)
        seed = completion_seed(self.generate.params.seed, prompt_index, completion_index)
        return sample(row_after, self.last_tokens[prompt_index], self.generate.params, seed)


def _cut(completions: Sequence[Completion], leave: int) -> list[Completion]:
    """What an engine has of them that samples a token of each at every step, when all but `leave` have ended."""
    steps = sorted(len(ids) for ids, _, _ in completions)[-1 - leave]
    return [
        whole if len(whole[0]) <= steps else (whole[0][:steps], whole[1][:steps], FinishReason.UNFINISHED)
        for whole in completions
    ]
