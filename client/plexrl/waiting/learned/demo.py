"""`plexrl waiting learn`: one job per seed on a cluster of one worker; their curves, and the clock.

All at once they share the worker. Alone, one after the other and each on a cluster of its own, shows what one takes.
"""

import json
import resource
import shutil
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import plexrl
from plexrl.waiting.agents.interface import Action, History, Observation
from plexrl.waiting.episodes import Run
from plexrl.waiting.learned import task as waiting
from plexrl.waiting.learned.job import CONFIG, Point, Settings, evaluate, imitate, reinforce
from plexrl.waiting.sandbox import Sandbox

GOAL = 1.15
LIMIT_S = 600.0
THREADS = 2
KV_CACHE_BYTES = "64M"
_WHOSE = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)


@dataclass
class Learned:
    """One seed's run. `clock`: costs of the greedy policy's code actions, run in the sandbox, by the floor's."""

    seed: int
    points: list[Point] = field(default_factory=list)
    clock: float = 0.0
    seconds: float = 0.0
    """From before the cluster's start to the last evaluation."""

    @property
    def reached(self) -> bool:
        """Within 15 % of the floor by expectation, deciding greedily."""
        return self.points[-1].greedy <= GOAL


def run(
    out: Path,
    seeds: Sequence[int],
    settings: Settings | None = None,
    *,
    alone: bool = False,
    console: Console | None = None,
) -> int:
    """Writes report.json and learned.png to `out`; 0 when every seed reached the goal, and if alone, in time."""
    console = console or Console()
    settings = settings or Settings()
    out.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    before_s = sum(usage.ru_utime + usage.ru_stime for usage in map(resource.getrusage, _WHOSE))
    found: list[Learned] = []
    for group in [[seed] for seed in seeds] if alone else [seeds]:
        found += _share(out / "cluster", group, settings, console)
    seconds = time.monotonic() - start
    # Of this process and, now that they have ended, of all parts of the clusters.
    processor_s = sum(usage.ru_utime + usage.ru_stime for usage in map(resource.getrusage, _WHOSE)) - before_s
    report = {
        "goal": GOAL,
        "tasks": {"trained_on": len(waiting.TRAINED_ON), "held_out": len(waiting.HELD_OUT)},
        "settings": asdict(settings),
        "alone": alone,
        "seconds": seconds,
        "processor_s": processor_s,
        "seeds": [asdict(one) for one in found],
    }
    (out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    draw(out / "learned.png", found)
    console.print(_table(found))
    console.print(
        f"{seconds:.0f} s in all, {processor_s:.0f} s of processor time. Wrote report.json and learned.png to {out}/",
        highlight=False,
    )
    in_time = not alone or all(one.seconds <= LIMIT_S for one in found)
    return 0 if in_time and all(one.reached for one in found) else 1


def _share(data: Path, seeds: Sequence[int], settings: Settings, console: Console) -> list[Learned]:
    """One job per seed, on one cluster with one worker."""
    from plexrl_controller.embedded.cluster import LocalCluster
    from plexrl_controller.embedded.settings import ClusterSettings

    shutil.rmtree(data, ignore_errors=True)
    cluster_settings = ClusterSettings(data_dir=data, workers=1, kv_cache_bytes=KV_CACHE_BYTES, threads=THREADS)
    start = time.monotonic()
    with LocalCluster(cluster_settings) as local, Sandbox() as sandbox, ThreadPoolExecutor(len(seeds)) as threads:

        def learn(seed: int) -> Learned:
            # Each job has its own connection, like jobs of different people.
            with plexrl.connect(local.endpoint, token=local.token) as cluster:
                return _learn(cluster, replace(settings, seed=seed), sandbox, console, start)

        return list(threads.map(learn, seeds))


def _learn(cluster: plexrl.Cluster, settings: Settings, sandbox: Sandbox, console: Console, start: float) -> Learned:
    learned = Learned(settings.seed)

    def on_point(point: Point) -> None:
        learned.points.append(point)
        console.print(
            f"seed {settings.seed}, step {point.step:3}: {point.sampled:.2f} of the floor's cost sampled, "
            f"{point.greedy:.2f} greedy",
            highlight=False,
        )

    with cluster.job(f"wait-{settings.seed}") as job:
        policy = job.model("policy", base=plexrl.Init(CONFIG, seed=settings.seed))
        imitate(policy, settings)
        on_point(evaluate(policy, settings, 0))
        reinforce(policy, settings, on_point)
        learned.seconds = time.monotonic() - start
        learned.clock = by_the_clock(policy, settings, sandbox)
    return learned


class _Scripted:
    """Says what the policy said."""

    name = "policy"

    def __init__(self, completion: waiting.Tokens) -> None:
        self._completion = completion

    def act(self, observation: Observation, history: History) -> Action:
        return Action(waiting.action(self._completion, observation.operation))


def by_the_clock(policy: plexrl.Model, settings: Settings, sandbox: Sandbox) -> float:
    """Cost of the greedy policy on held-out tasks as a multiple of the floor's, its code run in the sandbox."""
    problems = waiting.draw_problems(np.random.default_rng(30_000), 2 * settings.held_out, held_out=True)
    completions = policy.generate(
        problems.prompts(), max_tokens=waiting.COMPLETION_TOKENS, stop_token_ids=[waiting.END], temperature=0.0
    ).token_ids
    return clock_ratio(problems.tasks, completions, sandbox)


def clock_ratio(tasks: Sequence[waiting.Task], completions: Sequence[waiting.Tokens], sandbox: Sandbox) -> float:
    """One wait per task, in prices of a look; the floor's cost on the same draws."""
    spent = floor = 0.0
    for index, (task, completion) in enumerate(zip(tasks, completions, strict=True)):
        score = Run(task.scenario(), _Scripted(completion), sandbox, seed=index).run_episode()[0]
        spent += score.cost / task.price
        floor += score.floor_cost / task.price
    return spent / floor


def draw(path: Path, found: Sequence[Learned]) -> None:
    """Writes the curves, one per seed, as PNG."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(7, 3.4), layout="constrained")
    for one, colour in zip(found, ("#2a78b5", "#e07b39", "#4d9a51", "#9467bd", "#c44e52"), strict=False):
        steps = [point.step for point in one.points]
        axis.plot(steps, [point.sampled for point in one.points], color=colour, label=f"seed {one.seed}")
        axis.plot(steps, [point.greedy for point in one.points], color=colour, linestyle=":", linewidth=1)
    _frame(axis)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _frame(axis: Any) -> None:
    axis.axhline(1.0, color="#222222", linewidth=0.8)
    axis.axhline(GOAL, color="#222222", linewidth=0.8, linestyle="--")
    axis.set_xlabel("GRPO step")
    axis.set_ylabel("cost / floor, held out")
    axis.set_title("Waiting learned by RL (solid: sampled, dotted: greedy)", fontsize=10)
    axis.legend(frameon=False)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def _table(found: Sequence[Learned]) -> Table:
    table = Table(title="Cost on held-out operations as a multiple of the floor's", title_justify="left", box=None)
    for column in ("seed", "start", "sampled", "greedy", "by the clock", "seconds"):
        table.add_column(column, justify="right")
    for one in found:
        first, last = one.points[0], one.points[-1]
        table.add_row(
            str(one.seed),
            f"{first.sampled:.2f}",
            f"{last.sampled:.3f}",
            f"{last.greedy:.3f}",
            f"{one.clock:.3f}",
            f"{one.seconds:.0f}",
        )
    return table
