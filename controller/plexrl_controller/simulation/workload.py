"""The plexbench generator: job classes, hardware, and jobs with every segment of every iteration drawn ahead.

All policies of a run see the same realised segments. Seeds: one PCG64 stream per job, spawned from the run's seed, so
that a job's segments depend neither on the other jobs nor on the policy. Knows nothing of groups or policies.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

PROFILES = 32
"""Rollout profiles in the bank that `rollout` draws response lengths for."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """What a node offers. Bytes, seconds, bytes per second."""

    node_gpus: int = 8
    device_bytes: float = 80e9
    state_share: float = 0.75
    """Part of a device that model state may take; the rest is for activations and KV."""
    node_host_bytes: float = 2e12
    link_bytes_per_s: float = 16e9
    """Per GPU, host to device and back."""
    swap_fixed_s: float = 0.5
    disk_bytes_per_s: float = 7e9
    """Per node."""
    network_bytes_per_s: float = 25e9
    """Per node."""
    cold_start_s: float = 48.0

    @property
    def device_state_bytes(self) -> float:
        """Per GPU."""
        return self.device_bytes * self.state_share

    @property
    def host_bytes_per_gpu(self) -> float:
        """A GPU's part of its node's memory."""
        return self.node_host_bytes / self.node_gpus

    def move_s(self, bytes_per_gpu: float) -> float:
        """Seconds of one move between host tier and device; every GPU has a link of its own."""
        return self.swap_fixed_s + bytes_per_gpu / self.link_bytes_per_s

    def migrate_s(self, bytes_per_gpu: float) -> float:
        """Seconds to bring a state from another node's host tier and load it."""
        return bytes_per_gpu * self.node_gpus / self.network_bytes_per_s + self.move_s(bytes_per_gpu)

    def cold_s(self, bytes_per_gpu: float) -> float:
        """Seconds from nothing to a model on the device."""
        return self.cold_start_s + bytes_per_gpu * self.node_gpus / self.disk_bytes_per_s


@dataclass(frozen=True, slots=True)
class JobClass:
    """A row of the plexbench table. Seconds are those of one iteration on the class's dedicated GPUs."""

    name: str
    weight: float
    parameters: float
    rollout_gpus: int
    train_gpus: int
    colocated_gpus: int | None
    """GPUs of the colocated form; None: the class runs split, rollout beside training."""
    rollout_s: float
    """Median of the busy part."""
    rollout_cv: float
    turns: int
    stall_s: float
    """Mean of one tool call of the whole batch, between two turns."""
    stall_cv: float
    reward_s: float
    reward_cv: float
    train_s: float
    sync_s: float
    staleness: int
    replica_gpus: int
    """Tensor-parallel GPUs of one rollout replica."""
    batch_knee: float
    """Responses on a replica at which a decoding step takes twice as long as with one."""
    drift: float = 0.0
    """Growth of every busy segment per iteration: responses get longer as the job learns."""

    @property
    def dedicated_gpus(self) -> int:
        """GPUs of the form in which the class runs by itself: G_j."""
        return self.colocated_gpus if self.colocated_gpus is not None else self.rollout_gpus + self.train_gpus

    @property
    def train_bytes(self) -> float:
        """Weights, gradients, master weights and moments: 16 bytes per parameter."""
        return 16.0 * self.parameters

    @property
    def rollout_bytes(self) -> float:
        """16-bit weights."""
        return 2.0 * self.parameters


CLASSES: tuple[JobClass, ...] = (
    JobClass("math-7B", 0.30, 7e9, 8, 16, None, 240, 0.35, 1, 0, 0, 2, 0, 60, 3, 1, 1, 31, 0.002),
    JobClass("math-30B-A3B", 0.15, 30e9, 64, 128, None, 300, 0.35, 1, 0, 0, 2, 0, 110, 6, 1, 2, 48, 0.002),
    JobClass("big-235B", 0.05, 235e9, 32, 96, None, 500, 0.35, 1, 0, 0, 5, 0, 115, 15, 1, 8, 120, 0.002),
    JobClass("tool-8B", 0.20, 8e9, 8, 8, 8, 160, 0.5, 8, 20, 1.0, 10, 0, 90, 4, 0, 1, 31),
    JobClass("swe-32B", 0.15, 32e9, 32, 32, 32, 400, 0.5, 20, 25, 1.5, 60, 0, 200, 8, 0, 4, 60),
    JobClass("code-reward-8B", 0.15, 8e9, 4, 4, 8, 60, 0.5, 1, 0, 0, 400, 0.5, 75, 4, 0, 1, 31),
)
BY_NAME = {job_class.name: job_class for job_class in CLASSES}


@dataclass(frozen=True, slots=True)
class Iteration:
    """One realised iteration, seconds on the class's dedicated GPUs."""

    turns: tuple[float, ...]
    """Busy seconds of the rollout, turn by turn."""
    stalls: tuple[float, ...]
    """The tool call after each turn but the last."""
    hints: tuple[float | None, ...]
    """What the job says that each stall will last; None where it says nothing."""
    reward: float
    reward_hint: float | None
    train: float
    """Log-probabilities and training."""
    sync: float
    profile: int = 0
    """Which rollout profile of the class's bank this rollout has."""

    @property
    def rollout(self) -> float:
        """Busy seconds of all turns."""
        return math.fsum(self.turns)

    @property
    def stall(self) -> float:
        """Seconds of all tool calls and the reward."""
        return math.fsum(self.stalls) + self.reward


@dataclass(frozen=True)
class Job:
    """A job with its whole future drawn."""

    index: int
    job_class: JobClass
    arrival_s: float
    iterations: tuple[Iteration, ...]
    slowdown_target: float
    """s_j of the SLO that differs by job, U(1.1, 2)."""
    estimate_factor: float
    """By how much the estimates given at submission are off."""

    @property
    def name(self) -> str:
        """Class and number."""
        return f"{self.job_class.name}#{self.index}"

    @cached_property
    def dedicated_ends(self) -> tuple[float, ...]:
        """End of each iteration, from the first one's start, in the class's dedicated form: the ideal."""
        if self.job_class.colocated_gpus is not None or self.job_class.staleness == 0:
            ends, now = [], 0.0
            for it in self.iterations:
                now += it.rollout + it.stall + it.train + it.sync
                ends.append(now)
            return tuple(ends)
        return split_ends(self.iterations, self.job_class.staleness)

    @property
    def dedicated_s(self) -> float:
        """Mean dedicated iteration: T0_j."""
        return self.dedicated_ends[-1] / len(self.iterations)

    @property
    def busy_gpu_s(self) -> float:
        """Useful GPU-seconds of the whole job in its dedicated form."""
        c = self.job_class
        if c.colocated_gpus is not None:
            return c.colocated_gpus * math.fsum(it.rollout + it.train + it.sync for it in self.iterations)
        rollout = math.fsum(it.rollout + it.sync for it in self.iterations)
        return c.rollout_gpus * rollout + c.train_gpus * math.fsum(it.train + it.sync for it in self.iterations)


def split_ends(iterations: Sequence[Iteration], staleness: int, rollout_scale: float = 1.0) -> tuple[float, ...]:
    """Ends of the iterations with rollout and training on GPUs of their own.

    The rollout of iteration i starts when that of i - 1 is over and the weights of iteration i - 1 - staleness are
    synced; a sync takes both sides.
    """
    ends: list[float] = []
    rollout_end = 0.0
    for i, it in enumerate(iterations):
        gate = ends[i - 1 - staleness] if i - 1 - staleness >= 0 else 0.0
        rollout_end = max(rollout_end, gate) + it.rollout * rollout_scale + math.fsum(it.stalls)
        if staleness > 0:
            rollout_end += it.sync
        ends.append(max(rollout_end + it.reward, ends[-1] if ends else 0.0) + it.train + it.sync)
    return tuple(ends)


@dataclass(frozen=True, slots=True)
class GeneratorSettings:
    """What the generator is asked for."""

    gpus: int
    load: float = 1.2
    """Useful busy GPU-seconds that arrive per GPU-second of the window: above 1 no scheduler can keep up."""
    rep: int = 0
    window_s: float = 24 * 3600.0
    """Jobs arrive during this time; the first `initial_share` of the work is there at the start."""
    initial_share: float = 0.5
    mean_iterations: float = 300.0
    iterations_cv: float = 1.0
    diurnal: float = 0.3
    """Amplitude of the arrival rate's daily swing."""
    hint_probability: float = 0.8
    error_sigma: float = 0.25
    classes: tuple[JobClass, ...] = field(default=CLASSES)

    @property
    def seed(self) -> int:
        """1000 · scale + rep."""
        return 1000 * self.gpus + self.rep


def lognormal(rng: np.random.Generator, mean: float, cv: float, size: int | tuple[int, ...]) -> np.ndarray:
    """Lognormal values with this mean and coefficient of variation; constant where either is 0."""
    if mean <= 0.0 or cv <= 0.0:
        return np.full(size, float(mean))
    sigma = math.sqrt(math.log1p(cv * cv))
    return mean * np.exp(sigma * rng.standard_normal(size) - 0.5 * sigma * sigma)


def iterations_of(
    job_class: JobClass,
    count: int,
    rng: np.random.Generator,
    hint_probability: float = 0.8,
    error_sigma: float = 0.25,
    common_cv: float = 0.15,
) -> tuple[Iteration, ...]:
    """Draws `count` iterations of a class."""
    c = job_class
    common = lognormal(rng, 1.0, common_cv, count) * (1.0 + c.drift * np.arange(count))
    sigma = math.sqrt(math.log1p(c.rollout_cv**2))
    rollout = c.rollout_s * np.exp(sigma * rng.standard_normal(count)) * common
    shares = np.full((count, c.turns), 1.0 / c.turns)
    if c.turns > 1:
        weights = lognormal(rng, 1.0, 0.5, (count, c.turns))
        shares = weights / weights.sum(axis=1, keepdims=True)
    turns = rollout[:, None] * shares
    stalls = lognormal(rng, c.stall_s, c.stall_cv, (count, max(0, c.turns - 1)))
    reward = lognormal(rng, c.reward_s, c.reward_cv, count)
    train = c.train_s * common
    given = rng.random((count, c.turns)) < hint_probability
    wrong = np.exp(error_sigma * rng.standard_normal((count, c.turns)))
    profiles = rng.integers(0, PROFILES, count)
    said = np.where(given[:, :-1], stalls * wrong[:, :-1], np.nan)
    said_reward = np.where(given[:, -1], reward * wrong[:, -1], np.nan)
    return tuple(
        Iteration(
            turns=tuple(t),
            stalls=tuple(s),
            hints=tuple(None if h != h else h for h in hs),
            reward=r,
            reward_hint=None if rh != rh else rh,
            train=tr,
            sync=c.sync_s,
            profile=p,
        )
        for t, s, hs, r, rh, tr, p in zip(
            turns.tolist(),
            stalls.tolist(),
            said.tolist(),
            reward.tolist(),
            said_reward.tolist(),
            train.tolist(),
            profiles.tolist(),
            strict=True,
        )
    )


def generate(settings: GeneratorSettings) -> tuple[Job, ...]:
    """Jobs in order of arrival.

    Classes whose dedicated form exceeds the cluster are left out and the weights renormalised. Work is offered by
    useful GPU-seconds: `load · gpus · window_s` in all. The initial population is in mid-life (a uniform part of its
    iterations is left); the others arrive as a Poisson stream with a daily swing.

    Raises:
        ValueError: no class fits the cluster.
    """
    fitting = [c for c in settings.classes if c.dedicated_gpus <= settings.gpus]
    if not fitting:
        smallest = min(settings.classes, key=lambda c: c.dedicated_gpus)
        raise ValueError(
            f"the cluster has {settings.gpus} GPUs and the smallest class, {smallest.name}, "
            f"needs {smallest.dedicated_gpus}; give it more GPUs or another class"
        )
    root = np.random.SeedSequence(settings.seed)
    stream = np.random.Generator(np.random.PCG64(root.spawn(1)[0]))
    weights = np.array([c.weight for c in fitting])
    weights /= weights.sum()
    budget = settings.load * settings.gpus * settings.window_s
    sigma = math.sqrt(math.log1p(settings.iterations_cv**2))
    jobs: list[Job] = []
    late: list[int] = []
    offered = 0.0
    while offered < budget:
        index = len(jobs)
        initial = offered < settings.initial_share * budget
        rng = np.random.Generator(np.random.PCG64(root.spawn(1)[0]))
        job_class = fitting[int(rng.choice(len(fitting), p=weights))]
        length = settings.mean_iterations * math.exp(sigma * rng.standard_normal() - 0.5 * sigma * sigma)
        part = float(rng.random())
        count = max(3, round(length * (part if initial else 1.0)))
        job = Job(
            index=index,
            job_class=job_class,
            arrival_s=0.0,
            iterations=iterations_of(job_class, count, rng, settings.hint_probability, settings.error_sigma),
            slowdown_target=float(rng.uniform(1.1, 2.0)),
            estimate_factor=float(np.exp(settings.error_sigma * rng.standard_normal())),
        )
        offered += job.busy_gpu_s
        jobs.append(job)
        if not initial:
            late.append(index)
    arrivals = dict(zip(late, _arrivals(len(late), settings, stream), strict=True))
    return tuple(replace(job, arrival_s=arrivals.get(job.index, 0.0)) for job in jobs)


def _arrivals(count: int, settings: GeneratorSettings, rng: np.random.Generator) -> list[float]:
    """Sorted times of a Poisson stream over the window, given its count, thinned to the daily swing."""
    times: list[float] = []
    while len(times) < count:
        t = float(rng.uniform(0.0, settings.window_s))
        rate = 1.0 + settings.diurnal * math.sin(2 * math.pi * t / 86_400.0)
        if rng.uniform(0.0, 1.0 + settings.diurnal) < rate:
            times.append(t)
    return sorted(times)
