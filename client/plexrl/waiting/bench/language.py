"""`plexrl waiting llm`: does a history in its context teach a real language model to wait?

A cluster of one worker serves SmolLM2-135M through `generate`; one life per seed and history block, all in lock step.
The model is small: it is guided (see `LanguageModel`) and only its numbers are taken.
"""

import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import plexrl
from plexrl.at_once import at_once
from plexrl.demo.runs import load_example
from plexrl.demo.smollm2 import DEVICE_STATE_BYTES, HOST_STATE_BYTES, KV_CACHE_BYTES, catalogue_of
from plexrl.waiting.agents.chat import ThroughPlexRL
from plexrl.waiting.agents.language import LanguageModel
from plexrl.waiting.agents.prompts import HistoryBlock
from plexrl.waiting.bench.picture import COLOURS
from plexrl.waiting.bench.runs import Row, row
from plexrl.waiting.episodes import Run
from plexrl.waiting.sandbox import Sandbox
from plexrl.waiting.scenarios import SCENARIOS, Scenario

LAW = "gamma-16"
BLOCKS = (HistoryBlock.NONE, HistoryBlock.FULL, HistoryBlock.INTERVALS, HistoryBlock.EXACT)
MAX_TOKENS = 8
MAX_SEQUENCE_TOKENS = 2048
LEARNED_AFTER = 3
# A busy machine takes minutes to import an engine.
PLACED_WITHIN_S = 1200.0


def run(out: Path, *, seeds: int, episodes: int, console: Console | None = None) -> int:
    """Writes report.json and llm.png to `out`; 0 when a history lowered the cost."""
    from plexrl_controller.embedded.cluster import LocalCluster
    from plexrl_controller.embedded.settings import ClusterSettings

    console = console or Console()
    out.mkdir(parents=True, exist_ok=True)
    example = load_example("smollm2")
    catalogue = catalogue_of(out, example, console)
    shutil.rmtree(out / "cluster", ignore_errors=True)
    settings = ClusterSettings(
        data_dir=out / "cluster",
        workers=1,
        device_state_bytes=DEVICE_STATE_BYTES,
        host_state_bytes=HOST_STATE_BYTES,
        kv_cache_bytes=KV_CACHE_BYTES,
        threads=2,
        catalogue_file=catalogue,
    )
    start = time.monotonic()
    with (
        LocalCluster(settings) as local,
        Sandbox() as sandbox,
        plexrl.connect(local.endpoint, token=local.token) as cluster,
        cluster.job("waits") as job,
    ):
        model = job.model(
            "reader",
            base=plexrl.Catalogue(example.CATALOGUE_NAME),
            precision="bfloat16",
            role="reference",
            max_sequence_tokens=MAX_SEQUENCE_TOKENS,
        )
        model.wait_until_placed(timeout_s=PLACED_WITHIN_S)
        rows = live_together(model, sandbox, seeds, episodes, console)
    found = summary(rows)
    settings_told = {"model": example.CATALOGUE_NAME, "law": LAW, "seeds": seeds, "episodes": episodes}
    report = {"settings": settings_told, "summary": found, "rows": [{**asdict(r), "ratio": r.ratio} for r in rows]}
    (out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    draw(out / "llm.png", rows)
    console.print(_table(found))
    console.print(f"Wrote report.json and llm.png to {out}/ ({time.monotonic() - start:.0f} s)", highlight=False)
    best = min(found[block]["ratio"] for block in ("full", "intervals"))
    return 0 if best < found["none"]["ratio"] else 1


def one_operation() -> Scenario:
    """The first operation of the law's scenario: a small model is not asked for more."""
    scenario = SCENARIOS[LAW]
    return Scenario(scenario.name, scenario.operations[:1], scenario.costs)


def live_together(model: plexrl.Model, sandbox: Sandbox, seeds: int, episodes: int, console: Console) -> list[Row]:
    """All lives in lock step, so that one `generate` serves a turn of all; the first failure is raised."""
    lives = [(block, seed) for block in BLOCKS for seed in range(seeds)]
    chat = ThroughPlexRL(model, max_tokens=MAX_TOKENS, together=len(lives))
    rows: list[Row] = []

    def live(life: tuple[HistoryBlock, int]) -> None:
        block, seed = life
        try:
            agent = LanguageModel(chat, block=block, guided=True, name="smollm2")
            run = Run(one_operation(), agent, sandbox, seed, exact_history=block is HistoryBlock.EXACT)
            for episode in range(episodes):
                rows.append(row(str(block), LAW, seed, episode, run.run_episode()))
                if block is HistoryBlock.FULL and seed == 0:
                    console.print(f"episode {episode}: cost {rows[-1].cost:.0f}, floor {rows[-1].floor_cost:.0f}")
        finally:
            chat.leave()

    at_once(live, lives)
    return sorted(rows, key=lambda r: (r.agent, r.seed, r.episode or 0))


def summary(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """By history block: ratio of sums from episode LEARNED_AFTER on, its lowest and highest seed, queries, tokens."""
    found = {}
    for block in dict.fromkeys(r.agent for r in rows):
        own = [r for r in rows if r.agent == block and r.episode is not None and r.episode >= LEARNED_AFTER]
        per_seed = [_ratio([r for r in own if r.seed == seed]) for seed in sorted({r.seed for r in own})]
        found[block] = {
            "ratio": _ratio(own),
            "lowest_seed": min(per_seed),
            "highest_seed": max(per_seed),
            "queries": float(np.mean([r.queries for r in own])),
            "overshoot_s": float(np.mean([r.overshoot_s for r in own])),
            "stopped": float(np.mean([r.stopped for r in own])),
            "prompt_tokens": float(np.mean([r.prompt_tokens for r in own])),
        }
    return found


def _ratio(rows: Sequence[Row]) -> float:
    return sum(r.cost for r in rows) / sum(r.floor_cost for r in rows)


def _table(found: dict[str, dict[str, float]]) -> Table:
    title = f"SmolLM2-135M under {LAW}, from episode {LEARNED_AFTER} on"
    table = Table(title=title, title_justify="left", box=None)
    for column in ("history", "cost / floor", "seeds", "queries", "late, s", "stopped", "prompt tokens"):
        table.add_column(column, justify="left" if column == "history" else "right")
    for block, one in found.items():
        table.add_row(
            block,
            f"{one['ratio']:.2f}",
            f"{one['lowest_seed']:.2f} to {one['highest_seed']:.2f}",
            f"{one['queries']:.1f}",
            f"{one['overshoot_s']:.1f}",
            f"{one['stopped']:.1f}",
            f"{one['prompt_tokens']:.0f}",
        )
    return table


def draw(path: Path, rows: Sequence[Row]) -> None:
    """Writes cost / floor over episodes, mean and range over seeds, one line per history block."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(7, 3.4), layout="constrained")
    for block, colour in zip(dict.fromkeys(r.agent for r in rows), COLOURS, strict=False):
        own = [r for r in rows if r.agent == block and r.episode is not None]
        episodes = sorted({r.episode for r in own if r.episode is not None})
        floor = float(np.mean([r.floor_cost for r in own]))
        costs = np.array([[r.cost for r in own if r.episode == episode] for episode in episodes]) / floor
        axis.plot(episodes, costs.mean(axis=1), color=colour, label=block)
        axis.fill_between(episodes, costs.min(axis=1), costs.max(axis=1), color=colour, alpha=0.12, linewidth=0)
    _frame(axis)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _frame(axis: Any) -> None:
    axis.axhline(1.0, color="#222222", linewidth=0.8)
    axis.set_yscale("log")
    axis.set_xlabel("episode")
    axis.set_ylabel("cost / mean floor")
    axis.set_title(f"SmolLM2-135M under {LAW}, by what it is told of earlier waits", fontsize=10)
    axis.legend(frameon=False)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
