"""A rollout, response by response: its length on other numbers of replicas, and what consolidating its tail frees.

512 responses (64 prompts of 8), lengths lognormal with cv .9 and correlation .6 within a prompt. A decoding step of a
replica with b responses takes 1 + b / knee units: memory-bound at first, then growing with the batch. Times are
fractions of the same rollout on the class's own replicas, so that they multiply the realised segments.
"""

import math
from dataclasses import dataclass
from functools import cache

import numpy as np

from plexrl_controller.simulation.workload import PROFILES, JobClass

PROMPTS = 64
RESPONSES_PER_PROMPT = 8
LENGTH_CV = 0.9
PROMPT_CORRELATION = 0.6
PROFILE_SEED = 20_260_101
"""The bank of profiles is the same in every run."""
LONGEST = 4.0
"""The token limit of a response, over the mean length, such as 32,768 for 8,192."""
TAIL_SHARE = 0.2
"""Part of the responses that is consolidated."""
MIGRATION_SHARE = 0.01
"""Cost of moving the KV of the tail's responses to other replicas, as a part of the rollout: about 100 responses of
10,000 tokens at 57 KB per token over 25 GB/s are 2.3 s of 240 s."""


@dataclass(frozen=True, slots=True)
class Consolidation:
    """A rollout in two parts: `main` holds all replicas left to it, `tail` its own few. Fractions of the plain one."""

    main: float
    tail: float


@cache
def lengths(profile: int) -> np.ndarray:
    """Response lengths of one rollout, shape [512], mean about 1; prompts in order."""
    rng = np.random.Generator(np.random.PCG64([PROFILE_SEED, profile]))
    sigma = math.sqrt(math.log1p(LENGTH_CV**2))
    prompt = rng.standard_normal((PROMPTS, 1)) * math.sqrt(PROMPT_CORRELATION)
    own = rng.standard_normal((PROMPTS, RESPONSES_PER_PROMPT)) * math.sqrt(1.0 - PROMPT_CORRELATION)
    values = np.exp(sigma * (prompt + own) - 0.5 * sigma * sigma).ravel()
    return np.asarray(np.minimum(values, LONGEST))


def replicas_of(job_class: JobClass, gpus: int) -> int:
    """Replicas on `gpus` GPUs; a remainder is not used, and at least one replica is assumed."""
    return max(1, gpus // job_class.replica_gpus)


def _finish_times(tokens: np.ndarray, knee: float) -> np.ndarray:
    """When each response of one replica ends, by length, all admitted at the start."""
    ordered = np.sort(tokens)
    active = np.arange(len(ordered), 0, -1)
    return np.cumsum(np.diff(ordered, prepend=0.0) * (1.0 + active / knee))


def _spread(tokens: np.ndarray, replicas: int) -> list[np.ndarray]:
    """Responses dealt to replicas in turn."""
    return [tokens[r::replicas] for r in range(replicas)]


def _duration(tokens: np.ndarray, replicas: int, knee: float) -> float:
    return max(float(_finish_times(part, knee)[-1]) for part in _spread(tokens, replicas) if len(part))


@cache
def plain_duration(job_class: JobClass, profile: int) -> float:
    """Of the rollout on the class's own replicas, in units."""
    replicas = replicas_of(job_class, job_class.rollout_gpus)
    return _duration(lengths(profile), replicas, job_class.batch_knee)


@cache
def scale(job_class: JobClass, gpus: int) -> float:
    """Duration on `gpus` GPUs over that on the class's own, mean over the bank."""
    replicas = replicas_of(job_class, gpus)
    ratios = [
        _duration(lengths(p), replicas, job_class.batch_knee) / plain_duration(job_class, p) for p in range(PROFILES)
    ]
    return float(np.mean(ratios))


@cache
def streaming_scale(job_class: JobClass, gpus: int) -> float:
    """The same when replicas never drain, as in fully asynchronous training: throughput alone counts."""
    batch = PROMPTS * RESPONSES_PER_PROMPT / replicas_of(job_class, gpus)
    per_iteration = 1.0 + batch / job_class.batch_knee
    return float(np.mean([per_iteration / plain_duration(job_class, p) for p in range(PROFILES)]))


@cache
def consolidation(job_class: JobClass, profile: int, main_replicas: int, tail_replicas: int) -> Consolidation:
    """The rollout on `main_replicas` until a fifth of its responses is left, and that fifth on `tail_replicas`."""
    tokens, knee = lengths(profile), job_class.batch_knee
    parts = _spread(tokens, main_replicas)
    ends = np.sort(np.concatenate([_finish_times(part, knee) for part in parts]))
    switch = float(ends[round((1.0 - TAIL_SHARE) * len(ends)) - 1])
    left = np.concatenate([_left_at(part, knee, switch) for part in parts])
    # Longest first to the replica with the fewest tokens keeps the parts alike.
    loads = np.zeros(tail_replicas)
    shares: list[list[float]] = [[] for _ in range(tail_replicas)]
    for tokens_left in np.sort(left)[::-1].tolist():
        target = int(np.argmin(loads))
        loads[target] += tokens_left
        shares[target].append(tokens_left)
    tail = max(float(_finish_times(np.array(share), knee)[-1]) if share else 0.0 for share in shares)
    plain = plain_duration(job_class, profile)
    return Consolidation(main=switch / plain, tail=tail / plain + MIGRATION_SHARE)


def _left_at(tokens: np.ndarray, knee: float, at: float) -> np.ndarray:
    """Tokens that each unfinished response of a replica still lacks at a time."""
    ordered = np.sort(tokens)
    ends = _finish_times(tokens, knee)
    done = int(np.searchsorted(ends, at, side="right"))
    if done == len(ordered):
        return np.zeros(0)
    before, token = (float(ends[done - 1]), float(ordered[done - 1])) if done else (0.0, 0.0)
    reached = token + (at - before) / (1.0 + (len(ordered) - done) / knee)
    return ordered[done:] - reached
