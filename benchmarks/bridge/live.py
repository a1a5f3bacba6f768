"""The benchmark's jobs on a live cluster of one worker: real processes, real time, and the service's own accounts."""

import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import plexrl
from benchmarks.bridge.hints import Say
from benchmarks.bridge.trace import READY_S, JobTrace, Stretch, Trace, idle_stretches
from benchmarks.bridge.workload import Lives
from plexrl.at_once import at_once
from plexrl.cli import timeline
from plexrl.v1 import types_pb2 as t
from plexrl.waiting.bridge import IdleBridge, Rollout
from plexrl_controller.embedded.cluster import LocalCluster

START_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Thinking:
    """What the jobs' model is, and how much it is asked for."""

    config: dict[str, Any]
    tokens: int
    vocabulary: int

    def prompt(self, *parts: int) -> list[int]:
        """The same parts give the same 8 tokens."""
        return [int(token) for token in np.random.default_rng(parts).integers(1, self.vocabulary, 8)]


@dataclass
class Outcome:
    """One run of all jobs."""

    trace: Trace
    digests: dict[str, str]
    """Of each job: SHA-256 over its tokens, log-probabilities, sleeps, costs and losses."""


@dataclass
class _JobRun:
    """One job while it runs. Times are Unix seconds: those of the device's intervals."""

    lives: Lives
    digest: Any = field(default_factory=hashlib.sha256)
    alive: list[Stretch] = field(default_factory=list)
    asleep: list[Stretch] = field(default_factory=list)
    began_s: float = 0.0
    ended_s: float = 0.0
    job_id: str = ""


class _Watched(Rollout):
    """Notes when it slept."""

    def __init__(self, bridge: IdleBridge, rollout: Rollout, asleep: list[Stretch]) -> None:
        super().__init__(bridge)
        self._rollout = rollout
        self._asleep = asleep

    @contextmanager
    def sleeping(self, seconds: float) -> Iterator[None]:
        with self._rollout.sleeping(seconds):
            began_s = time.time()
            yield
            self._asleep.append((began_s, time.time()))


def run(local: LocalCluster, lives: list[Lives], rounds: int, thinking: Thinking, say: Callable[[int], Say]) -> Outcome:
    """All jobs at once, `rounds` rounds each. `say`: what a job says of its sleeps, by its number."""
    runs = [_JobRun(own.copy()) for own in lives]
    start = threading.Barrier(len(runs))

    def body(number: int) -> None:
        with plexrl.connect(local.endpoint, token=local.token) as cluster:
            _job(cluster, number, runs[number], rounds, thinking, say(number), start)

    at_once(body, range(len(runs)), barrier=start)
    with plexrl.connect(local.endpoint, token=local.token) as cluster:
        intervals = timeline.read_intervals(cluster.connection)
    return Outcome(_trace(runs, intervals), {own.lives.job.name: own.digest.hexdigest() for own in runs})


def _job(
    cluster: plexrl.Cluster,
    number: int,
    own: _JobRun,
    rounds: int,
    thinking: Thinking,
    say: Say,
    start: threading.Barrier,
) -> None:
    with cluster.job(own.lives.job.name) as job:
        own.job_id = job.job_id
        policy = job.model("policy", base=plexrl.Init(thinking.config, seed=number))
        policy.wait_until_placed()
        _think(policy, thinking, number, 0)
        start.wait(START_TIMEOUT_S)
        own.began_s = time.time()
        bridge = IdleBridge(lambda seconds: _hint(job, say, seconds))
        for number_of_round in range(rounds):
            _round(bridge, policy, own, number, number_of_round, thinking)
        own.ended_s = time.time()


def _hint(job: plexrl.Job, say: Say, seconds: float) -> None:
    # That somebody is awake is not a statement about a sleep; a job that says nothing does not say this either.
    said = say(seconds) if seconds > 0.0 else None
    if said is not None:
        job.idle(said)


def _round(
    bridge: IdleBridge, policy: plexrl.Model, own: _JobRun, number: int, number_of_round: int, thinking: Thinking
) -> None:
    """Every rollout's episode, in a thread each, then a step on what they thought, weighted by what it cost."""
    count = len(own.lives.runs)
    thoughts: list[list[plexrl.Completions]] = [[] for _ in range(count)]
    prompts: list[list[list[int]]] = [[] for _ in range(count)]
    costs = [0.0] * count

    def live(index: int, rollout: Rollout) -> None:
        began_s = time.time()
        try:
            watched = _Watched(bridge, rollout, own.asleep)

            def think(thought: int) -> None:
                parts = (number, number_of_round, index, thought)
                prompts[index].append(thinking.prompt(*parts))
                thoughts[index].append(_think(policy, thinking, *parts))

            costs[index] = sum(score.cost for score in own.lives.episode(index, watched, think))
        finally:
            own.alive.append((began_s, time.time()))

    def in_thread(index: int) -> None:
        with bridge.rollout() as rollout:
            live(index, rollout)

    at_once(in_thread, range(count))
    losses = []
    mean = sum(costs) / count
    for index in range(count):
        own.digest.update(repr((number_of_round, index, costs[index])).encode())
        for prompt, thought in zip(prompts[index], thoughts[index], strict=True):
            own.digest.update(repr(thought.token_ids).encode())
            own.digest.update(np.asarray(thought.flat_logprobs, np.float32).tobytes())
            batch = plexrl.TrainingBatch.from_completions([prompt], thought, [mean - costs[index]], normalise="token")
            losses.append(policy.forward_backward.submit(batch, loss="grpo"))
    policy.optim_step(lr=1e-3, max_grad_norm=1.0)
    policy.sync_weights()
    own.digest.update(repr([loss.result().loss for loss in losses]).encode())


def _think(policy: plexrl.Model, thinking: Thinking, *parts: int) -> plexrl.Completions:
    seed = int(np.random.default_rng((*parts, 1)).integers(2**62))
    return policy.generate([thinking.prompt(*parts)], max_tokens=thinking.tokens, seed=seed)


def _trace(runs: list[_JobRun], intervals: list[t.DeviceInterval]) -> Trace:
    began_s = min(own.began_s for own in runs)
    ended_s = max(own.ended_s for own in runs)
    names = {own.job_id: own.lives.job.name for own in runs}
    jobs = {name: JobTrace() for name in names.values()}
    swaps, swap_s, hold_s = 0, 0.0, 0.0
    for interval in intervals:
        stretch = interval.start_unix_ns / 1e9, interval.end_unix_ns / 1e9
        if interval.job_id not in names or stretch[0] < began_s:
            continue
        job = jobs[names[interval.job_id]]
        match interval.kind:
            case t.INTERVAL_KIND_BUSY:
                job.busy.append(stretch)
            case t.INTERVAL_KIND_SWAP_IN:
                job.loads.append(stretch)
                swaps += stretch[1] - stretch[0] > READY_S
                swap_s += stretch[1] - stretch[0]
            case t.INTERVAL_KIND_SWAP_OUT:
                swap_s += stretch[1] - stretch[0]
            case t.INTERVAL_KIND_HOLD:
                hold_s += stretch[1] - stretch[0]
            case _:
                pass
    for own in runs:
        job = jobs[own.lives.job.name]
        job.idle = idle_stretches(own.alive, own.asleep)
        begins = [begin for begin, _ in job.idle[1:]]
        # A rollout that wakes, looks and is done asks for nothing.
        job.wakes = [
            end
            for (_, end), following in zip(job.idle, [*begins, float("inf")], strict=True)
            if any(end <= begin < following for begin, _ in job.busy)
        ]
    return Trace(jobs, ended_s - began_s, swaps, swap_s, hold_s)
