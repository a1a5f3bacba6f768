"""GRPO (arXiv 2402.03300) on tasks with a verifiable answer, as the two examples beside this file run it.

A job holds the algorithm: it draws problems, checks answers and decides when to step. The cluster executes the model's
functions. Warm up by imitation until some samples are right, then reinforce what is right.
"""

import hashlib
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

import plexrl
from examples.letters import Problem, encode, rewards

MAX_LOGPROB_GAP = 2e-4  # between generator and trainer, in float32


@dataclass(frozen=True)
class Task:
    """What a job learns, and the model that learns it."""

    name: str
    config: dict[str, object]
    draw: Callable[[random.Random], Problem]
    max_tokens: int


@dataclass(frozen=True)
class Settings:
    """Of one run; learning rates and sizes are known to work for models of about 300,000 parameters."""

    seed: int = 0
    steps: int = 60
    prompts: int = 64
    completions: int = 8
    lr: float = 4e-4
    lr_warmup_steps: int = 5
    clip: float = 0.2
    epochs: int = 2
    imitation_lr: float = 3e-3
    imitation_batch: int = 128
    imitation_goal: float = 0.22
    held_out: int = 256
    stall_mean_s: float = 1.45
    stall_sigma: float = 0.5


@dataclass(frozen=True)
class Step:
    """What one GRPO step did. `logprob_gap`: largest difference between generator and trainer over its tokens."""

    number: int
    reward: float
    logprob_gap: float
    stall_s: float
    wall_s: float


def seed_of(*parts: object) -> int:
    """The same parts give the same 63-bit seed, on every machine."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "big") >> 1


def problems(task: Task, count: int, seed: int, *, held_out: bool = False) -> list[Problem]:
    """Draws problems; one in eight belongs to the held-out set, whatever the seed, and is never trained on."""
    draws = random.Random(seed)
    found: list[Problem] = []
    while len(found) < count:
        problem = task.draw(draws)
        if (seed_of("split", problem.prompt) % 8 == 0) == held_out:
            found.append(problem)
    return found


def sample(policy: plexrl.Model, task: Task, batch: Sequence[Problem], n: int, seed: int) -> plexrl.Completions:
    prompts = [encode(problem.prompt) for problem in batch]
    return policy.generate(prompts, n=n, max_tokens=task.max_tokens, stop_token_ids=encode("."), seed=seed)


def evaluate(policy: plexrl.Model, task: Task, settings: Settings) -> float:
    """Share of held-out problems that one sample each gets right."""
    seed = seed_of(task.name, settings.seed, "held-out")
    batch = problems(task, settings.held_out, seed, held_out=True)
    return float(rewards(batch, sample(policy, task, batch, 1, seed), 1).mean())


def imitate(policy: plexrl.Model, task: Task, settings: Settings, *, most_steps: int = 400) -> int:
    """Trains on right answers until enough samples are right to reinforce; returns the steps taken."""
    for step in range(most_steps):
        if step % 10 == 0 and step > 0:
            policy.sync_weights()
            if evaluate(policy, task, settings) >= settings.imitation_goal:
                return step
        batch = problems(task, settings.imitation_batch, seed_of(task.name, settings.seed, "imitate", step))
        prompts, answers = [encode(p.prompt) for p in batch], [encode(p.answer + ".") for p in batch]
        policy.forward_backward.submit(plexrl.TrainingBatch.from_targets(prompts, answers), loss="cross_entropy")
        policy.optim_step.submit(lr=settings.imitation_lr * min(1.0, (step + 1) / 10), max_grad_norm=1.0)
    raise RuntimeError(f"{task.name}: {most_steps} imitation steps did not reach {settings.imitation_goal}")


def reinforce(
    job: plexrl.Job,
    policy: plexrl.Model,
    task: Task,
    settings: Settings,
    on_step: Callable[[Step], None] = lambda step: None,
    stall_mean_s: Callable[[int], float] | None = None,
) -> None:
    """GRPO steps. Every draw comes from (task, seed, step), so that a run can be repeated bit by bit.

    stall_mean_s: seconds by step number, instead of the setting of that name.
    """
    for number in range(1, settings.steps + 1):
        start = time.monotonic()
        seed = seed_of(task.name, settings.seed, number)
        batch = problems(task, settings.prompts, seed)
        completions = sample(policy, task, batch, settings.completions, seed)

        mean_s = stall_mean_s(number) if stall_mean_s else settings.stall_mean_s
        stall_s = use_tool(job, mean_s, settings.stall_sigma, seed)
        reward = rewards(batch, completions, settings.completions)
        advantages = (reward - reward.mean(1, keepdims=True)) / (reward.std(1, keepdims=True) + 1e-6)

        prompts = [encode(problem.prompt) for problem in batch]
        training = plexrl.TrainingBatch.from_completions(prompts, completions, advantages.ravel(), normalise="token")
        lr = settings.lr * min(1.0, number / settings.lr_warmup_steps)
        passes = []
        for _ in range(settings.epochs):
            passes.append(policy.forward_backward.submit(training, loss="grpo", clip_low=settings.clip))
            policy.optim_step.submit(lr=lr, max_grad_norm=1.0)
        policy.sync_weights()

        gap = logprob_gap(training, passes[0].result())
        if gap > MAX_LOGPROB_GAP:
            raise RuntimeError(f"{task.name}, step {number}: generator and trainer differ by {gap:.1e}")
        on_step(Step(number, float(reward.mean()), gap, stall_s, time.monotonic() - start))


def logprob_gap(batch: plexrl.TrainingBatch, trained: plexrl.ForwardBackward) -> float:
    """Largest difference between the log-probabilities of the generator and of the trainer before its step."""
    assert batch.old_logprobs is not None
    return float(np.abs(np.where(batch.weights != 0, trained.flat_logprobs - batch.old_logprobs, 0.0)).max())


def use_tool(job: plexrl.Job, mean_s: float, sigma: float, seed: int) -> float:
    """A real wait, standing for a sandbox that checks answers; the hint lets others use the device meanwhile."""
    stall_s = random.Random(seed).lognormvariate(np.log(mean_s) - sigma**2 / 2, sigma)
    job.idle(stall_s)
    time.sleep(stall_s)
    return stall_s
