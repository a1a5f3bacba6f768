"""What engine tests work on: deployments with their host images, batches, and controls that abort or do not."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from plexrl_worker.engine import losses, port
from plexrl_worker.engine.port import ALL_COMPONENTS, LossName, LossParams

VOCAB_SIZE = 64
AGREEMENT = 2e-4
STEP = port.AdamWParams(lr=3e-3, weight_decay=0.01, max_grad_norm=1.0)
SAMPLING = port.SamplingParams(n=2, max_tokens=6, seed=11)

ImageMaker = Callable[[int], port.ByteArray]


class Patient:
    """A Control that never aborts and remembers progress."""

    def __init__(self) -> None:
        self.heard: list[tuple[int, int]] = []

    def aborted(self) -> bool:
        return False

    def yielding(self) -> bool:
        return False

    def progress(self, done: int, total: int) -> None:
        self.heard.append((done, total))


class Impatient(Patient):
    """A Control that aborts once `patience` progress reports were heard."""

    def __init__(self, patience: int = 0) -> None:
        super().__init__()
        self.patience = patience

    def aborted(self) -> bool:
        return len(self.heard) >= self.patience


class Courteous(Patient):
    """A Control that gives way once `patience` progress reports were heard."""

    def __init__(self, patience: int = 1) -> None:
        super().__init__()
        self.patience = patience

    def yielding(self) -> bool:
        return len(self.heard) >= self.patience


@dataclass
class Model:
    """A deployment under test, and its host image."""

    engine: port.Engine
    name: str
    layout: port.StateLayout
    image: port.ByteArray
    parked: port.ParkedState = field(default_factory=port.ParkedState)
    version: int = 0

    def swap_out(self) -> port.SwapReport:
        report = self.engine.swap_out(self.name, ALL_COMPONENTS, Patient())
        self.parked = report.parked
        return report

    def write_back(self) -> port.SwapReport:
        report = self.engine.write_back(self.name, ALL_COMPONENTS, Patient())
        self.parked = report.parked
        return report

    def swap_in(self) -> port.SwapReport:
        return self.engine.swap_in(self.name, self.parked, ALL_COMPONENTS, Patient())

    def generate(self, prompts: port.TokenBatch, params: port.SamplingParams = SAMPLING) -> port.Generation:
        return self.engine.generate(self.name, self.version, prompts, params, Patient())

    def score(self, batch: port.TokenBatch) -> port.Float32Array:
        return self.engine.score(self.name, batch, Patient())

    def score_rollout(self, batch: port.TokenBatch) -> port.Float32Array:
        return self.engine.score_rollout(self.name, self.version, batch, Patient())

    def train(
        self, batch: port.LossBatch, loss: LossName = LossName.CROSS_ENTROPY, params: LossParams | None = None
    ) -> port.TrainMetrics:
        return self.engine.forward_backward(self.name, batch, loss, params or LossParams(), Patient())

    def step(self) -> port.StepResult:
        return self.engine.optim_step(self.name, STEP)

    def sync(self) -> None:
        self.version += 1
        self.engine.sync(self.name, self.version)

    def save(self, directory: Path) -> port.SavedState:
        directory.mkdir()
        return self.engine.save(self.name, str(directory), Patient())

    def gradients(self, directory: Path) -> port.Float32Array:
        """All gradients as one vector; zeros are an empty one."""
        self.save(directory)
        file = directory / "gradients.safetensors"
        tensors = load_file(file) if file.exists() else {}
        return np.concatenate([tensors[name].ravel() for name in sorted(tensors)] or [np.zeros(0, np.float32)])


def batch(*sequences: Sequence[int]) -> port.TokenBatch:
    lengths = np.array([len(sequence) for sequence in sequences], np.int32)
    return port.TokenBatch(np.array([token for sequence in sequences for token in sequence], np.int32), lengths)


def random_batch(seed: int, count: int = 6, longest: int = 12) -> port.TokenBatch:
    draws = np.random.default_rng(seed)
    return batch(*(draws.integers(2, VOCAB_SIZE, draws.integers(2, longest + 1)).tolist() for _ in range(count)))


def loss_batch(seed: int, tokens: port.TokenBatch | None = None) -> port.LossBatch:
    """Every token but the first of each sequence, weighted at random."""
    tokens = tokens or random_batch(seed)
    weights = np.random.default_rng(seed).uniform(0.1, 1.0, tokens.token_ids.size).astype(np.float32)
    weights[losses.first_positions(tokens)] = 0
    return port.LossBatch(tokens, weights)


def policy_batch(model: Model, seed: int) -> port.LossBatch:
    """A batch for the policy losses: old and reference log-probabilities near the current ones."""
    plain, draws = loss_batch(seed), np.random.default_rng(seed + 1)
    current = model.score(plain.tokens)
    return replace(
        plain,
        advantages=draws.normal(size=current.size).astype(np.float32),
        old_logprobs=(current + draws.normal(0, 0.3, current.size)).astype(np.float32),
        ref_logprobs=(current + draws.normal(0, 0.3, current.size)).astype(np.float32),
    )


def hashes(saved: port.SavedState) -> dict[str, str]:
    return {file.name: file.sha256 for file in saved.files}


def train_a_little(model: Model, steps: int = 2) -> None:
    """Some steps, a sync, and gradients that wait for the next step."""
    for seed in range(steps):
        model.train(loss_batch(seed))
        model.step()
    model.sync()
    model.train(loss_batch(99))
