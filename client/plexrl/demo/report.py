"""The demo's report: a table for people, report.json for programs, and what must hold, said where it does not."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

from plexrl.demo.figures import JobFigures

PUBLISHED_SAVING = 0.3758
"""The largest saving that PlexRL's paper reports (arXiv 2605.20863)."""


@dataclass(frozen=True)
class Expectation:
    """Something that must hold of a run."""

    name: str
    holds: bool
    value: str


MOST_DRIFT = 1.15
"""From here on the report says that the machine changed between the phases that it compares."""


@dataclass(frozen=True)
class Report:
    """Everything the demo found."""

    jobs: Sequence[JobFigures]
    hold_saving: float
    bound_saving: float
    device_state_bytes: int
    larger_state_bytes: int
    stall_mean_s: float
    seconds: float
    timeline: Path
    trace: Path

    @property
    def mean_saving(self) -> float:
        """Over jobs."""
        return fmean(job.saving for job in self.jobs)

    @property
    def mean_slowdown(self) -> float:
        """Over jobs."""
        return fmean(job.slowdown.value for job in self.jobs)

    def expectations(self) -> list[Expectation]:
        """What the demo claims, checked on this run."""
        budget = self.device_state_bytes / self.larger_state_bytes
        claims = [
            Expectation(
                "saving at least the published 37.58 %", self.mean_saving >= PUBLISHED_SAVING, f"{self.mean_saving:.1%}"
            ),
            Expectation(
                "holding through stalls saves at most half of that",
                self.hold_saving <= self.mean_saving / 2,
                f"{self.hold_saving:.1%}",
            ),
            Expectation("device budget under 1.3 of the larger state", budget < 1.3, f"{budget:.2f}"),
        ]
        for job in self.jobs:
            rise = job.reward_after - job.reward_before
            claims += [
                Expectation(
                    f"{job.name}: reward up by 0.3 from at most 0.5",
                    rise >= 0.3 and job.reward_before <= 0.5,
                    f"{rise:+.2f}",
                ),
                Expectation(
                    f"{job.name}: weights equal the run alone, bit by bit",
                    job.weights_equal_alone,
                    str(job.weights_equal_alone),
                ),
                Expectation(
                    f"{job.name}: device-busy share in [.30, .45]",
                    0.30 <= job.busy_share <= 0.45,
                    f"{job.busy_share:.2f}",
                ),
                Expectation(
                    f"{job.name}: a swap per step at least", job.swaps >= job.steps, f"{job.swaps}/{job.steps}"
                ),
            ]
        return claims

    def as_json(self) -> dict[str, Any]:
        """The report for programs."""
        return {
            "jobs": [job.as_json() for job in self.jobs],
            "mean_saving": self.mean_saving,
            "mean_slowdown": self.mean_slowdown,
            "hold_saving": self.hold_saving,
            "bound_saving": self.bound_saving,
            "published_saving": PUBLISHED_SAVING,
            "device_state_bytes": self.device_state_bytes,
            "larger_state_bytes": self.larger_state_bytes,
            "stall_mean_s": self.stall_mean_s,
            "seconds": self.seconds,
            "timeline": str(self.timeline),
            "trace": str(self.trace),
            "expectations": [{"name": e.name, "ok": e.holds, "value": e.value} for e in self.expectations()],
        }

    def write(self, path: Path) -> None:
        """Writes report.json."""
        path.write_text(json.dumps(self.as_json(), indent=2) + "\n")

    def show(self, console: Console) -> None:
        """Prints the table and the verdicts."""
        table = Table(title="two RLVR jobs on one worker", box=None, padding=(0, 1, 0, 0), pad_edge=False)
        for heading in (
            "job",
            "reward",
            "steps",
            "d",
            "busy s",
            "swap s",
            "idle s",
            "swaps",
            "slowdown",
            "cost",
            "saving",
        ):
            table.add_column(heading, justify="left" if heading == "job" else "right", no_wrap=True)
        for job in self.jobs:
            ratio = job.slowdown
            table.add_row(
                job.name,
                f"{job.reward_before:.2f}→{job.reward_after:.2f}",
                str(job.steps),
                f"{job.busy_share:.2f}",
                f"{job.busy_s:.1f}",
                f"{job.swap_s:.2f}",
                f"{job.idle_s:.1f}",
                str(job.swaps),
                f"{ratio.value:.3f}",
                f"{1 - job.saving:.2f}",
                f"{job.saving:.1%}",
            )
        console.print(table)
        for job in self.jobs:
            ratio = job.slowdown
            console.print(
                f"{job.name}: slowdown within [{ratio.low:.3f}, {ratio.high:.3f}] (95 % bootstrap over the same "
                f"{ratio.steps} steps with the same draws)"
            )
        console.print(
            f"Mean saving {self.mean_saving:.1%} at mean slowdown {self.mean_slowdown:.3f}; the most that any schedule "
            f"could save is {self.bound_saving:.1%}. Published: {PUBLISHED_SAVING:.2%}. "
            f"Holding the group through the stalls instead: {self.hold_saving:.1%}."
        )
        console.print(
            "cost: device time charged per step (split equally while shared) over the same steps alone. d: device-busy "
            f"share alone. The stalls, {self.stall_mean_s:.1f} s in the mean, are real waits that stand for a sandbox."
        )
        drift = fmean(job.drift for job in self.jobs)
        if not 1 / MOST_DRIFT <= drift <= MOST_DRIFT:
            console.print(
                f"[yellow]The machine changed[/]: a step took {drift:.2f} times as much device time while they shared "
                "as alone, though it computed the same. Slowdown and saving are off by what that did; run it again on "
                "a calmer machine."
            )
        for expectation in self.expectations():
            mark = "[green]holds[/]" if expectation.holds else "[red]does not hold[/]"
            console.print(f"  {mark}  {expectation.name}: {expectation.value}")
        console.print(f"timeline: {self.timeline}\ntrace for https://ui.perfetto.dev: {self.trace}")
