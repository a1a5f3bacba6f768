"""A checkpoint's files as the numpy double writes and reads them: safetensors, as a real engine's."""

from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from plexrl_worker.engine import checkpoints
from plexrl_worker.engine.errors import CheckpointMismatch
from plexrl_worker.engine.fake_model import TABLE, FakeDeployment
from plexrl_worker.engine.port import Component, Float32Array

_MOMENTS = (f"exp_avg.{TABLE}", f"exp_avg_sq.{TABLE}")


def write(path: Path, deployment: FakeDeployment, vocab_size: int) -> None:
    """Writes the weights, what is sampled with if it differs, and the optimizer's state of what is trained."""
    weights = deployment.table(Component.TRAIN_WEIGHTS, vocab_size)
    rollout = deployment.table(Component.ROLLOUT_WEIGHTS, vocab_size)
    save_file({TABLE: weights}, path / checkpoints.WEIGHTS_FILE)
    if not np.array_equal(weights, rollout):
        save_file({TABLE: rollout}, path / checkpoints.ROLLOUT_FILE)
    if deployment.settings.trainable:
        moments = deployment.arrays[Component.OPTIMIZER].reshape(2, vocab_size, vocab_size)
        save_file(dict(zip(_MOMENTS, moments, strict=True)), path / checkpoints.OPTIMIZER_FILE)
        if not deployment.ledger.is_zero(Component.GRADIENTS):
            save_file({TABLE: deployment.table(Component.GRADIENTS, vocab_size)}, path / checkpoints.GRADIENTS_FILE)


def read(
    manifest: checkpoints.Manifest, vocab_size: int, *, trainable: bool
) -> tuple[Float32Array, Float32Array, tuple[Float32Array, Float32Array] | None]:
    """Flat weights, rollout weights, and gradients and moments of what is trained. Raises CheckpointMismatch."""
    weights = _tensor(manifest, checkpoints.WEIGHTS_FILE, TABLE)
    if weights.shape != (vocab_size, vocab_size):
        raise CheckpointMismatch(f"{manifest.directory}: was written for another vocabulary")
    rollout = weights
    if checkpoints.ROLLOUT_FILE in manifest.files:
        rollout = _tensor(manifest, checkpoints.ROLLOUT_FILE, TABLE)
    if not trainable:
        return weights.ravel(), rollout.ravel(), None
    if checkpoints.OPTIMIZER_FILE not in manifest.files:
        raise CheckpointMismatch(f"{manifest.directory}: has no optimizer state, it was written by a reference")
    moments = np.concatenate([_tensor(manifest, checkpoints.OPTIMIZER_FILE, name).ravel() for name in _MOMENTS])
    gradients = np.zeros_like(weights)
    if checkpoints.GRADIENTS_FILE in manifest.files:
        gradients = _tensor(manifest, checkpoints.GRADIENTS_FILE, TABLE)
    return weights.ravel(), rollout.ravel(), (gradients.ravel(), moments)


def _tensor(manifest: checkpoints.Manifest, file: str, name: str) -> Float32Array:
    tensor: Float32Array = load_file(manifest.directory / file)[name]
    return tensor
