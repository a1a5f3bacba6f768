"""What calls return: small frozen records of numbers and numpy arrays, and how to read them off the wire.

Knows the wire's results; knows nothing of how calls travel.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import assert_never

import numpy as np

from plexrl.v1 import types_pb2 as t
from plexrl.wire import Float32Array, Int32Array, WireError, batch_arrays, float32s, split

FINISH_REASONS = {
    t.FINISH_REASON_STOP: "stop",
    t.FINISH_REASON_LENGTH: "length",
    t.FINISH_REASON_UNFINISHED: "unfinished",
}


@dataclass(frozen=True, eq=False)
class Completions:
    """Outcome of `generate`: S = prompts * n completions, ordered by prompt, then by completion index.

    flat_token_ids: int32 [N], all completions one after the other, without their prompts.
    lengths: int32 [S].
    flat_logprobs: float32 [N] under the raw model (before temperature), or empty if not asked for.
    finish_reasons: S times "stop" or "length", or "unfinished" where the call was told to `leave` some.
    weights_version: the version of the weights that made every token.
    """

    flat_token_ids: Int32Array
    lengths: Int32Array
    flat_logprobs: Float32Array
    finish_reasons: tuple[str, ...]
    weights_version: int

    def __len__(self) -> int:
        return len(self.lengths)

    @cached_property
    def token_ids(self) -> list[Int32Array]:
        """One int32 view per completion."""
        return _int32_views(self.flat_token_ids, self.lengths)

    @cached_property
    def logprobs(self) -> list[Float32Array]:
        """One float32 view per completion."""
        if self.flat_logprobs.size == 0 and self.flat_token_ids.size:
            raise ValueError("log-probabilities were not asked for: generate(..., logprobs=True)")
        return ragged(self.flat_logprobs, self.lengths)


@dataclass(frozen=True, eq=False)
class Scores:
    """Outcome of `score`.

    flat_logprobs: float32 [N], aligned with the tokens sent; 0 for the first token of each sequence.
    """

    flat_logprobs: Float32Array


@dataclass(frozen=True, eq=False)
class ForwardBackward:
    """Outcome of `forward_backward`; sums are weighted like the loss.

    loss: sum of weight times term. kl: mean estimate of KL(old || current). entropy: mean, in nats.
    clip_fraction: share of weighted tokens that were clipped. token_count: tokens with weight other than 0.
    flat_logprobs: float32 [N], aligned with the batch; 0 where the weight is 0.
    """

    loss: float
    kl: float
    entropy: float
    clip_fraction: float
    token_count: int
    flat_logprobs: Float32Array


@dataclass(frozen=True)
class OptimStep:
    """Outcome of `optim_step`: global gradient norm before clipping, and steps taken so far."""

    grad_norm: float
    step: int


@dataclass(frozen=True)
class SyncWeights:
    """Outcome of `sync_weights`: the version that `generate` uses from now on."""

    weights_version: int


@dataclass(frozen=True)
class Checkpoint:
    """A committed copy of a model's full training state (outcome of `save_checkpoint`)."""

    checkpoint_id: str
    label: str
    sequence: int
    step: int
    size_bytes: int
    manifest_sha256: str


@dataclass(frozen=True)
class LoadCheckpoint:
    """Outcome of `load_checkpoint` and `pull_weights`: version of the rollout weights from now on.

    step: optimizer steps in the state; 0 of pulled weights. source_version: of pulled weights, the policy's version.
    """

    weights_version: int
    step: int
    source_version: int = 0


Result = Completions | Scores | ForwardBackward | OptimStep | SyncWeights | Checkpoint | LoadCheckpoint


def ragged(flat: Float32Array, lengths: Int32Array) -> list[Float32Array]:
    """Cuts a flat float32 [N] array into one view per sequence."""
    return [np.asarray(view, dtype=np.float32) for view in split(flat, lengths)]


def _int32_views(flat: Int32Array, lengths: Int32Array) -> list[Int32Array]:
    return [np.asarray(view, dtype=np.int32) for view in split(flat, lengths)]


def _float32s(message: t.Tensor, name: str) -> Float32Array:
    if message.dtype == t.DTYPE_UNSPECIFIED and not message.data:
        return np.zeros(0, np.float32)
    return float32s(message, name=name)


def decode(result: t.CallResult) -> Result:
    """Reads a result. Raises WireError when it is not what its schema says."""
    outcome = result.WhichOneof("outcome")
    match outcome:
        case "generate":
            return _completions(result.generate)
        case "score":
            return Scores(_float32s(result.score.logprobs, "score.logprobs"))
        case "forward_backward":
            fb = result.forward_backward
            logprobs = _float32s(fb.logprobs, "forward_backward.logprobs")
            return ForwardBackward(fb.loss, fb.kl, fb.entropy, fb.clip_fraction, fb.token_count, logprobs)
        case "optim_step":
            return OptimStep(result.optim_step.grad_norm, result.optim_step.step)
        case "sync_weights":
            return SyncWeights(result.sync_weights.weights_version)
        case "save_checkpoint":
            return checkpoint(result.save_checkpoint.checkpoint)
        case "load_checkpoint":
            loaded = result.load_checkpoint
            return LoadCheckpoint(loaded.weights_version, loaded.step, loaded.source_version)
        case None:
            raise WireError("result.outcome: not set; the server may be newer than this client: upgrade it")
        case _:
            assert_never(outcome)


def _completions(result: t.GenerateResult) -> Completions:
    token_ids, lengths = batch_arrays(result.completions, name="generate.completions", min_length=0)
    logprobs = _float32s(result.logprobs, "generate.logprobs")
    if logprobs.size not in (0, token_ids.size):
        raise WireError(f"generate.logprobs: has {logprobs.size} elements, completions have {token_ids.size} tokens")
    reasons = tuple(FINISH_REASONS.get(reason, "unknown") for reason in result.finish_reasons)
    return Completions(token_ids, lengths, logprobs, reasons, result.weights_version)


def checkpoint(message: t.Checkpoint) -> Checkpoint:
    """Reads a checkpoint's record."""
    return Checkpoint(
        message.checkpoint_id,
        message.label,
        message.sequence,
        message.step,
        message.size_bytes,
        message.manifest_sha256,
    )
