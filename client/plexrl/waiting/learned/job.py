"""The RLVR job: GRPO (arXiv 2402.03300) on the cost of waiting, through the SDK.

Imitate completions that are well formed and otherwise left to chance, then reinforce what the clock says was cheap.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

import plexrl
from plexrl.waiting.learned import task as waiting

# A Llama of about 300,000 parameters.
CONFIG: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": waiting.VOCABULARY_SIZE,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 100.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}


@dataclass(frozen=True)
class Settings:
    """Of one run."""

    seed: int = 0
    imitation_steps: int = 150
    imitation_batch: int = 128
    imitation_lr: float = 3e-3
    steps: int = 160
    prompts: int = 64
    completions: int = 8
    draws: int = 128
    """Waits that each completion is tried on, the same for all completions of a prompt."""
    lr: float = 2e-3
    """At first; it falls to nothing, evenly: the surer the policy, the more of what its completions differ by is
    chance."""
    lr_warmup_steps: int = 5
    epochs: int = 1
    held_out: int = 256
    evaluate_every: int = 20


@dataclass(frozen=True)
class Point:
    """Where the policy stands on held-out tasks: expected cost as a multiple of the floor's."""

    step: int
    sampled: float
    greedy: float
    well_formed: float
    """Share of sampled completions."""


def evaluate(policy: plexrl.Model, settings: Settings, step: int) -> Point:
    """On the same held-out tasks and histories for every seed and step."""
    problems = waiting.draw_problems(np.random.default_rng(20_000), settings.held_out, held_out=True)
    ratios, share = [], 0.0
    for temperature in (1.0, 0.0):
        completions = policy.generate(
            problems.prompts(),
            max_tokens=waiting.COMPLETION_TOKENS,
            stop_token_ids=[waiting.END],
            temperature=temperature,
            seed=settings.seed,
        ).token_ids
        ratios.append(waiting.expected_ratio(problems, completions))
        if temperature:
            share = float(np.mean([waiting.well_formed(completion) for completion in completions]))
    return Point(step, ratios[0], ratios[1], share)


def imitate(policy: plexrl.Model, settings: Settings) -> None:
    """Teaches the form of an answer."""
    for step in range(settings.imitation_steps):
        generator = np.random.default_rng([settings.seed, 1, step])
        problems = waiting.draw_problems(generator, settings.imitation_batch)
        batch = plexrl.TrainingBatch.from_targets(problems.prompts(), waiting.imitation(problems, generator))
        policy.forward_backward.submit(batch, loss="cross_entropy")
        policy.optim_step.submit(lr=settings.imitation_lr * min(1.0, (step + 1) / 10), max_grad_norm=1.0)
    policy.sync_weights()


def learning_rate(settings: Settings, step: int) -> float:
    """Of a GRPO step, counted from 1."""
    left = 1.0 - (step - 1) / settings.steps
    return settings.lr * left * min(1.0, step / settings.lr_warmup_steps)


def reinforce(policy: plexrl.Model, settings: Settings, on_point: Callable[[Point], None]) -> None:
    """Teaches the content: the reward of a completion is minus its mean cost on `draws` waits."""
    for step in range(1, settings.steps + 1):
        generator = np.random.default_rng([settings.seed, 2, step])
        problems = waiting.draw_problems(generator, settings.prompts)
        prompts = problems.prompts()
        completions = policy.generate(
            prompts,
            n=settings.completions,
            max_tokens=waiting.COMPLETION_TOKENS,
            stop_token_ids=[waiting.END],
            seed=int(generator.integers(2**62)),
        )
        durations_s = problems.durations_s(generator, settings.draws)
        reward = np.array(
            [
                -waiting.cost(problems.tasks[i // settings.completions], tokens, durations_s[i // settings.completions])
                for i, tokens in enumerate(completions.token_ids)
            ]
        ).reshape(-1, settings.completions)
        advantages = (reward - reward.mean(1, keepdims=True)) / (reward.std(1, keepdims=True) + 1e-6)
        batch = plexrl.TrainingBatch.from_completions(
            prompts, completions, advantages.ravel().astype(np.float32), normalise="token"
        )
        for _ in range(settings.epochs):
            policy.forward_backward.submit(batch, loss="grpo")
            policy.optim_step.submit(lr=learning_rate(settings, step), max_grad_norm=1.0)
        policy.sync_weights()
        if step % settings.evaluate_every == 0 or step == settings.steps:
            on_point(evaluate(policy, settings, step))
