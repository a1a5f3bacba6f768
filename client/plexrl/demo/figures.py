"""What the demo's runs say: slowdown, saving, bound, each with how it is computed. Pure.

Cost follows plexbench: a device's time is split equally among the jobs that share it, so a step of a job that shares
with one other costs half its duration. Saving compares that with the same step on the same draws alone.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from plexrl.demo.runs import JobRun

BOOTSTRAP_SAMPLES = 2000


@dataclass(frozen=True)
class Slowdown:
    """Ratio of shared to alone duration over the same steps, with a 95 % bootstrap interval over steps."""

    value: float
    low: float
    high: float
    steps: int


@dataclass(frozen=True)
class JobFigures:
    """One job's row of the report."""

    name: str
    reward_before: float
    reward_after: float
    steps: int
    busy_share: float
    """d: device-busy seconds over duration, alone."""
    busy_s: float
    swap_s: float
    idle_s: float
    swaps: int
    drift: float
    """Device-busy seconds of a step while shared, over those alone: what the machine itself changed meanwhile."""
    slowdown: Slowdown
    saving: float
    weights_equal_alone: bool
    logprob_gap: float

    def as_json(self) -> dict[str, Any]:
        """The report's form."""
        return {
            "name": self.name,
            "reward_before": self.reward_before,
            "reward_after": self.reward_after,
            "steps": self.steps,
            "busy_share": self.busy_share,
            "busy_s": self.busy_s,
            "swap_s": self.swap_s,
            "idle_s": self.idle_s,
            "swaps": self.swaps,
            "drift": self.drift,
            "slowdown": self.slowdown.value,
            "slowdown_interval": [self.slowdown.low, self.slowdown.high],
            "slowdown_steps": self.slowdown.steps,
            "saving": self.saving,
            "weights_equal_alone": self.weights_equal_alone,
            "largest_logprob_gap": self.logprob_gap,
        }


def slowdown(shared: Sequence[float], alone: Sequence[float], seed: int = 0) -> Slowdown:
    """Total duration ratio over the steps that both have; steps are paired, so their draws cancel."""
    pairs = list(zip(shared, alone, strict=False))
    draws = random.Random(seed)
    ratios = sorted(_ratio(draws.choices(pairs, k=len(pairs))) for _ in range(BOOTSTRAP_SAMPLES))
    low, high = ratios[int(0.025 * len(ratios))], ratios[int(0.975 * len(ratios))]
    return Slowdown(_ratio(pairs), low, high, len(pairs))


def saving(slowdown_value: float, sharing: int) -> float:
    """Share of the exclusive cost that a job saves when `sharing` jobs split the device: 1 - slowdown / k."""
    return 1.0 - slowdown_value / sharing


def bound(sharing: int, busy_share: float) -> float:
    """The most that any schedule can save: 1 - max(1 / k, d)."""
    return 1.0 - max(1.0 / sharing, busy_share)


def job_figures(shared: JobRun, alone: JobRun, sharing: int) -> JobFigures:
    """One job's figures from its two runs."""
    ratio = slowdown([s.wall_s for s in shared.steps], [s.wall_s for s in alone.steps])
    return JobFigures(
        name=shared.name,
        reward_before=shared.reward_before,
        reward_after=shared.reward_after,
        steps=len(shared.steps),
        busy_share=alone.busy_s / alone.wall_s,
        busy_s=shared.busy_s,
        swap_s=shared.swap_s,
        idle_s=max(0.0, shared.wall_s - shared.busy_s - shared.swap_s),
        swaps=shared.swaps,
        drift=(shared.busy_s / len(shared.steps)) / (alone.busy_s / len(alone.steps)),
        slowdown=ratio,
        saving=saving(ratio.value, sharing),
        weights_equal_alone=bool(alone.fingerprints) and alone.fingerprints.items() <= shared.fingerprints.items(),
        logprob_gap=max(s.logprob_gap for s in shared.steps),
    )


def held_saving(held: dict[str, JobRun], alone: dict[str, JobRun], sharing: int) -> float:
    """Mean saving when the group is held through stalls."""
    ratios = [slowdown([s.wall_s for s in held[n].steps], [s.wall_s for s in alone[n].steps]).value for n in held]
    return fmean(saving(ratio, sharing) for ratio in ratios)


def _ratio(pairs: Sequence[tuple[float, float]]) -> float:
    return sum(a for a, _ in pairs) / sum(b for _, b in pairs)
