"""The jobs: GRPO on letters in three shapes, each with a stall that stands for its verifier or its tools.

Fixed work per step, so that both halves of a run ask for the same: what differs between them is who is in whose way.
"""

import math
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import plexrl
from plexrl.at_once import at_once
from plexrl.demo.runs import Endpoint, load_example

# Engines start slowly on a busy machine.
PLACEMENT_TIMEOUT_S = 1200.0
BARRIER_TIMEOUT_S = 1200.0


@dataclass(frozen=True)
class Shape:
    """What a step of a job is made of. Turns: samples, each with a stall after it, before it trains."""

    name: str
    task: str
    prompts: int
    completions: int
    epochs: int
    turns: int
    stall_mean_s: float
    stall_sigma: float = 0.5
    hints: bool = False
    """Whether it says how long its stalls last."""


SHAPES = (
    Shape("rollout-heavy", "reverse", prompts=64, completions=8, epochs=1, turns=1, stall_mean_s=2.4),
    Shape("train-heavy", "interleave", prompts=32, completions=4, epochs=4, turns=1, stall_mean_s=1.8),
    Shape("tool-stalls", "reverse", prompts=32, completions=4, epochs=2, turns=4, stall_mean_s=0.7, hints=True),
)


@dataclass
class Run:
    """What the jobs left: who they are, and between which Unix times all of them were at their steps."""

    job_ids: dict[str, str]
    steps: dict[str, int]
    start_s: float
    end_s: float


def run_together(endpoint: Endpoint, run_s: float, imitation: bool, tell: Callable[[str], None]) -> Run:
    """Runs all jobs at once, for `run_s` seconds after the last one has warmed up; raises the first one's failure.

    imitation: first take a few steps on right answers, as the demo does.
    """
    run = Run({}, {shape.name: 0 for shape in SHAPES}, 0.0, 0.0)

    def all_warm() -> None:
        run.start_s = time.time()
        run.end_s = run.start_s + run_s

    barrier = threading.Barrier(len(SHAPES), action=all_warm)

    def body(shape: Shape) -> None:
        task = load_example(shape.task).TASK
        with endpoint.connect() as cluster, cluster.job(shape.name) as job:
            run.job_ids[job.job_id] = shape.name
            # One architecture, so that all of them share one engine.
            policy = job.model("policy", base=plexrl.Init(load_example(SHAPES[0].task).TASK.config, seed=0))
            policy.wait_until_placed(PLACEMENT_TIMEOUT_S)
            if imitation:
                grpo = load_example("grpo")
                grpo.imitate(policy, task, grpo.Settings(imitation_goal=0.0))
                tell(f"{shape.name}: warm")
            policy.sync_weights()
            barrier.wait(BARRIER_TIMEOUT_S)
            while time.time() < run.end_s:
                run.steps[shape.name] += 1
                step(job, policy, task, shape, run.steps[shape.name])

    at_once(body, SHAPES, barrier=barrier)
    return run


def step(job: plexrl.Job, policy: plexrl.Model, task: Any, shape: Shape, number: int) -> None:
    """One step: sample and wait, as often as the shape has turns, then train on the last samples, and sync."""
    for turn in range(1, shape.turns):
        sample(job, policy, task, shape, number, turn)
    train(policy, shape, *sample(job, policy, task, shape, number, shape.turns))


def sample(
    job: plexrl.Job, policy: plexrl.Model, task: Any, shape: Shape, number: int, turn: int
) -> tuple[Any, plexrl.Completions]:
    """One turn: problems and their samples, and the stall that follows."""
    grpo = load_example("grpo")
    seed = grpo.seed_of(shape.name, number, turn)
    batch = grpo.problems(task, shape.prompts, seed)
    completions = grpo.sample(policy, task, batch, shape.completions, seed)
    sigma = shape.stall_sigma
    stall_s = random.Random(seed).lognormvariate(math.log(shape.stall_mean_s) - sigma**2 / 2, sigma)
    if shape.hints:
        job.idle(stall_s)
    time.sleep(stall_s)
    return batch, completions


def train(policy: plexrl.Model, shape: Shape, batch: Any, completions: plexrl.Completions) -> None:
    """Trains on the samples and waits for the sync."""
    letters = load_example("letters")
    reward = letters.rewards(batch, completions, shape.completions)
    advantages = (reward - reward.mean(1, keepdims=True)) / (reward.std(1, keepdims=True) + 1e-6)
    prompts = [letters.encode(problem.prompt) for problem in batch]
    training = plexrl.TrainingBatch.from_completions(prompts, completions, advantages.ravel(), normalise="token")
    for _ in range(shape.epochs):
        policy.forward_backward.submit(training, loss="grpo", clip_low=0.2)
        policy.optim_step.submit(lr=1e-5, max_grad_norm=1.0)
    policy.sync_weights()
