"""One training run that is a function of its seeds alone, and what it leaves: rewards and every bit of the final state.

Whatever happens to workers and engines meanwhile, two runs of the same length must be equal.
"""

import hashlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import plexrl
from plexrl.v1 import model_pb2
from plexrl_controller.embedded.cluster import LocalCluster

WAIT_S = 900.0


@dataclass(frozen=True)
class Shape:
    """What is trained: a model, and how much each step asks of it."""

    config: dict[str, object]
    prompts: int
    completions: int
    max_tokens: int
    tokens: int


@dataclass
class Outcome:
    """What a run leaves."""

    rewards: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    state: dict[str, str] = field(default_factory=dict)
    """File of the final state to the SHA-256 of its bytes."""
    recoveries: int = field(default=0, compare=False)
    """How often the state was rebuilt on the way."""


def train_step(model: plexrl.Model, shape: Shape, step: int, outcome: Outcome) -> None:
    """Samples, rewards even tokens, trains twice on the batch and publishes; every draw comes from the step."""
    draws = random.Random(step)
    prompts = [[draws.randrange(1, shape.tokens) for _ in range(draws.randrange(2, 6))] for _ in range(shape.prompts)]
    sampled = model.generate(prompts, n=shape.completions, max_tokens=shape.max_tokens, seed=step)
    rewards = [sum(1.0 for token in row if token % 2 == 0) / len(row) for row in sampled.token_ids]
    mean = sum(rewards) / len(rewards)
    batch = plexrl.TrainingBatch.from_completions(prompts, sampled, [reward - mean for reward in rewards])
    passes = []
    for _ in range(2):
        passes.append(model.forward_backward.submit(batch, loss="grpo"))
        model.optim_step.submit(lr=1e-3, max_grad_norm=1.0)
    model.sync_weights.submit()
    outcome.rewards.append(mean)
    outcome.losses.extend(future.result(WAIT_S).loss for future in passes)


def run(
    local: LocalCluster,
    name: str,
    shape: Shape,
    folder: Path,
    more: Callable[[int], bool],
    on_model: Callable[[plexrl.Model], None] = lambda model: None,
) -> Outcome:
    """Runs steps while `more(step)`, then saves the state with gradients accumulated in it."""
    outcome = Outcome()
    with plexrl.connect(local.endpoint, token=local.token) as cluster, cluster.job(name, lease_s=120) as job:
        model = job.model("policy", base=plexrl.Init(shape.config, seed=11))
        model.wait_until_placed(WAIT_S)
        on_model(model)
        step = 0
        while more(step):
            train_step(model, shape, step, outcome)
            step += 1
        batch = plexrl.TrainingBatch.from_targets([[1, 2]], [[3, 4]])
        model.forward_backward(batch, loss="cross_entropy")
        outcome.recoveries = model._describe().recoveries
        target = folder / name
        model.export(model.save_checkpoint("end"), target, training_state=True)
        outcome.state = {
            path.name: hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(target.iterdir())
            if path.suffix == ".safetensors"
        }
    return outcome


@dataclass(frozen=True)
class Kill:
    """One kill, and what it cost."""

    part: str
    lost_s: float
    """From the kill until the model was rebuilt and placed again."""
    snapshots: int
    snapshot_age_s: float
    """Of the newest one at the moment of the kill; the model's own age when there was none."""


class Killer(threading.Thread):
    """Kills -9 a worker daemon with its engine, or the engine alone, at random moments of a run."""

    def __init__(self, local: LocalCluster, worker: str, count: int, seed: int, span_s: float) -> None:
        super().__init__(name="killer", daemon=True)
        self.kills: list[Kill] = []
        self.failure: BaseException | None = None
        self.model: plexrl.Model | None = None
        self._local, self._worker, self._count, self._span_s = local, worker, count, span_s
        self._draws = random.Random(seed)
        self._began = time.time()

    @property
    def at_work(self) -> bool:
        """Whether kills are still to come."""
        return self.is_alive()

    def begin(self, model: plexrl.Model) -> None:
        """The run has its model: from now on it is disturbed."""
        self.model = model
        self.start()

    def run(self) -> None:
        try:
            for number in range(self._count):
                self._wait_for_work(self._draws.randrange(3, 30))
                time.sleep(self._draws.uniform(0.0, self._span_s))
                self._kill(engine_alone=number % 3 == 2)
        except BaseException as error:  # noqa: BLE001 - told to the test's thread
            self.failure = error

    def _wait_for_work(self, calls: int) -> None:
        """Until so many more calls are applied."""
        assert self.model is not None
        before, deadline = self.model._describe().applied_sequence, time.monotonic() + WAIT_S
        while self.model._describe().applied_sequence < before + calls:
            assert time.monotonic() < deadline, "the run stands still"
            time.sleep(0.02)

    def _kill(self, *, engine_alone: bool) -> None:
        assert self.model is not None
        before = self.model._describe()
        newest = max((s.create_time.ToNanoseconds() / 1e9 for s in before.snapshots), default=self._began)
        age_s = time.time() - newest
        started = time.monotonic()
        if engine_alone:
            for pid in self._local.engine_pids(self._worker):
                os.kill(pid, signal.SIGKILL)
        else:
            pid = self._local.kill(self._worker)
            self._local.wait_replaced(self._worker, pid, WAIT_S)
        deadline = started + WAIT_S
        while True:
            now = self.model._describe()
            # An engine that had no newer state than the host tier costs no recovery: then there is nothing to wait for.
            rebuilt = now.recoveries > before.recoveries or engine_alone
            if rebuilt and now.state == model_pb2.MODEL_STATE_PLACED:
                break
            assert time.monotonic() < deadline, f"not rebuilt: {now}"
            time.sleep(0.02)
        part = f"{self._worker}'s engine" if engine_alone else self._worker
        self.kills.append(Kill(part, time.monotonic() - started, len(before.snapshots), age_s))

    def report(self) -> str:
        """A table: what each kill cost, against the number and age of snapshots."""
        lines = [f"{'killed':20} {'snapshots':>9} {'newest, s':>9} {'lost, s':>8}"]
        lines += [f"{k.part:20} {k.snapshots:9d} {k.snapshot_age_s:9.1f} {k.lost_s:8.1f}" for k in self.kills]
        return "\n".join(lines)
