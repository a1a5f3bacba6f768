"""Checks of arguments that both engines make, so that they refuse alike. Pure."""

import math

from plexrl_worker.engine.errors import InvalidArgument
from plexrl_worker.engine.port import (
    AdamWParams,
    SamplingParams,
    TokenBatch,
)
from plexrl_worker.engine.settings import DeploymentSettings, LoraSettings

MAX_COMPLETIONS_PER_PROMPT = 1024
MAX_COMPLETIONS_PER_CALL = 65536
# Below this the generator would take another temperature than the one asked for.
MIN_TEMPERATURE = 0.01


def check_deployment(settings: DeploymentSettings, lora: LoraSettings | None) -> None:
    """Raises InvalidArgument when a deployment's settings do not go together, or not with the engine's."""
    if settings.micro_batch_tokens < 1:
        raise InvalidArgument("micro_batch_tokens must be at least 1")
    if settings.rollout_only and settings.trainable:
        raise InvalidArgument("rollout_only: what is sampled alone is not trainable")
    if settings.rollout_only and lora is not None:
        raise InvalidArgument("rollout_only: not offered for LoRA deployments, sample the policy itself")


def check_has_training_weights(deployment_id: str, settings: DeploymentSettings, function: str) -> None:
    """Raises InvalidArgument when the deployment is sampled alone."""
    if settings.rollout_only:
        raise InvalidArgument(f"{function}: {deployment_id} is sampled alone, it has rollout weights and nothing else")


def check_trainable(deployment_id: str, settings: DeploymentSettings, function: str) -> None:
    """Raises InvalidArgument when the deployment is not trained."""
    check_has_training_weights(deployment_id, settings, function)
    if not settings.trainable:
        raise InvalidArgument(f"{function}: {deployment_id} is a reference, which is not trained")


def check_sampling(params: SamplingParams, prompts: TokenBatch, max_sequence_tokens: int) -> None:
    """Raises InvalidArgument when the sampling parameters cannot be honoured for these prompts."""
    if not 1 <= params.n <= MAX_COMPLETIONS_PER_PROMPT:
        raise InvalidArgument(f"n is {params.n}, want 1 to {MAX_COMPLETIONS_PER_PROMPT}")
    completions = params.n * int(prompts.lengths.size)
    if completions > MAX_COMPLETIONS_PER_CALL:
        raise InvalidArgument(f"{completions} completions in one call, the limit is {MAX_COMPLETIONS_PER_CALL}")
    if not 0 <= params.leave < completions:
        raise InvalidArgument(f"leave is {params.leave} of {completions} completions, want 0 to {completions - 1}")
    if params.max_tokens < 1:
        raise InvalidArgument("max_tokens must be at least 1")
    if not (math.isfinite(params.temperature) and params.temperature >= 0):
        raise InvalidArgument(f"temperature is {params.temperature}, want a finite number of at least 0")
    if 0 < params.temperature < MIN_TEMPERATURE:
        raise InvalidArgument(f"temperature is {params.temperature}, want 0 (greedy) or at least {MIN_TEMPERATURE}")
    if any(not text for text in params.stop):
        raise InvalidArgument("a stop string is empty")
    if not 0 < params.top_p <= 1:
        raise InvalidArgument(f"top_p is {params.top_p}, want a number in (0, 1]")
    if params.top_k < 0:
        raise InvalidArgument(f"top_k is {params.top_k}, want 0 (all tokens) or more")
    if not 0 <= params.seed < 2**64:
        raise InvalidArgument(f"seed is {params.seed}, want 0 to 2**64 - 1")
    longest = int(prompts.lengths.max()) + params.max_tokens
    if longest > max_sequence_tokens:
        raise InvalidArgument(
            f"the longest prompt and max_tokens add up to {longest} tokens, the model's limit is {max_sequence_tokens}"
        )


def check_adamw(params: AdamWParams) -> None:
    """Raises InvalidArgument when a setting is out of its range."""
    if not (math.isfinite(params.lr) and params.lr > 0):
        raise InvalidArgument(f"lr is {params.lr}, want a finite number above 0")
    for name in ("beta1", "beta2"):
        if not 0 <= getattr(params, name) < 1:
            raise InvalidArgument(f"{name} is {getattr(params, name)}, want a number in [0, 1)")
    if not (math.isfinite(params.eps) and params.eps > 0):
        raise InvalidArgument(f"eps is {params.eps}, want a finite number above 0")
    if not (math.isfinite(params.weight_decay) and params.weight_decay >= 0):
        raise InvalidArgument(f"weight_decay is {params.weight_decay}, want a finite number of at least 0")
    clip = params.max_grad_norm
    if clip is not None and not (math.isfinite(clip) and clip > 0):
        raise InvalidArgument(f"max_grad_norm is {clip}, want a finite number above 0, or unset for no clipping")
