"""What a cluster gains when agents say how long they will sleep, and what it loses when they say it wrongly.

    python -m benchmarks.bridge --out out/bench-waiting-bridge

The same agentic jobs on one worker, with hints and without, in turn; live, then in the simulator with the same sleeps
and the same costs. Fails when a job's results differ by a bit between any two runs, or when a simulated run loses more
device time than the bound allows.
"""

import argparse
import json
import random
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.bridge import live
from benchmarks.bridge.hints import HINTS
from benchmarks.bridge.simulated import Costs, bound_s, simulate
from benchmarks.bridge.trace import Figures, figures
from benchmarks.bridge.workload import JOBS, Lives, lives, scripts
from benchmarks.measurement import Spread
from plexrl.waiting.learned.job import CONFIG
from plexrl.waiting.sandbox import Sandbox
from plexrl_controller.embedded.cluster import LocalCluster
from plexrl_controller.embedded.settings import ClusterSettings
from plexrl_controller.scheduling.policy import Policy

# What the test double takes for each; the proportions of a small model on a device with a slow link.
COSTS = Costs(think_s=0.4, train_s=0.3, load_s=0.6, store_s=0.3)
SIMULATED_REPETITIONS = 20
_FAKE_VOCABULARY = 64
_FAKE_STATE_BYTES = 5 * 4 * _FAKE_VOCABULARY**2


def main() -> int:
    """Returns the exit status."""
    arguments = _arguments()
    console = Console(width=110)
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    names = [name for name in HINTS if not arguments.hints or name in arguments.hints.split(",")]
    with Sandbox(processes=2) as sandbox:
        all_lives = [lives(job, sandbox, seed) for seed, job in enumerate(JOBS)]
        report: dict[str, Any] = {"engine": arguments.engine, "rounds": arguments.rounds, "costs": asdict(COSTS)}
        sound = True
        if arguments.engine == "fake":
            rounds = max(arguments.rounds, arguments.simulated_rounds)
            found = [scripts(own, rounds) for own in all_lives]
            report["simulated"], sound = _simulated(found, names, arguments, console)
        if arguments.repetitions:
            report["live"], equal = _live(all_lives, names, arguments, console)
            sound = sound and equal
    (out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    console.print(f"Wrote report.json to {out}/", highlight=False)
    return 0 if sound else 1


def _simulated(
    found: Sequence[Any], names: Sequence[str], arguments: argparse.Namespace, console: Console
) -> tuple[dict[str, Any], bool]:
    """The rounds of the live runs, and longer runs; the bound is checked in both."""
    report: dict[str, Any] = {}
    sound = True
    for rounds in sorted({arguments.rounds, arguments.simulated_rounds}):
        by_name: dict[str, list[Figures]] = {name: [] for name in names}
        limit_s = 0.0
        for repetition in range(SIMULATED_REPETITIONS):
            # The same rounds in another order: other sleeps of other jobs meet.
            draws = random.Random(repetition)
            jobs = [own[:rounds] if repetition == 0 else draws.sample(own[:rounds], rounds) for own in found]
            for name in names:
                run = simulate(jobs, COSTS, lambda job, name=name: HINTS[name](job, COSTS.round_trip_s))  # type: ignore[misc]
                by_name[name].append(figures(run.trace))
                limit_s = max(limit_s, bound_s(run, Policy()))
                sound = sound and by_name[name][-1].lost_s <= bound_s(run, Policy())
        console.print(_table(f"Simulated, {rounds} rounds; no statement may lose more than {limit_s:.0f} s", by_name))
        report[str(rounds)] = _as_json(by_name) | {"bound_s": limit_s}
    return report, sound


def _live(
    all_lives: list[Lives], names: Sequence[str], arguments: argparse.Namespace, console: Console
) -> tuple[dict[str, Any], bool]:
    folder = arguments.out / "cluster"
    shutil.rmtree(folder, ignore_errors=True)
    thinking, settings = _fake(folder) if arguments.engine == "fake" else _vllm(folder)
    by_name: dict[str, list[Figures]] = {name: [] for name in names}
    digests: list[dict[str, str]] = []
    with LocalCluster(settings) as local:
        for repetition in range(arguments.repetitions):
            # Each goes first, last and in between equally often.
            shift = repetition % len(names)
            for name in [*names[shift:], *names[:shift]]:
                began_s = time.monotonic()
                outcome = live.run(
                    local,
                    all_lives,
                    arguments.rounds,
                    thinking,
                    lambda job, name=name: HINTS[name](job, COSTS.round_trip_s),  # type: ignore[misc]
                )
                by_name[name].append(figures(outcome.trace))
                digests.append(outcome.digests)
                console.print(
                    f"repetition {repetition}, {name}: {by_name[name][-1]}, {time.monotonic() - began_s:.0f} s",
                    highlight=False,
                )
    equal = all(digest == digests[0] for digest in digests)
    console.print(_table(f"Live, {arguments.engine} engine, {arguments.rounds} rounds", by_name))
    console.print(f"results bit-equal over {len(digests)} runs: {'yes' if equal else 'NO'}")
    return _as_json(by_name) | {"bit_equal": equal}, equal


def _fake(folder: Path) -> tuple[live.Thinking, ClusterSettings]:
    """The numpy double, which takes its time where a real engine would."""
    slow = {"generate": COSTS.think_s, "load": COSTS.load_s, "swap_out": COSTS.store_s, "optim_step": COSTS.train_s}
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": _FAKE_VOCABULARY,
        "max_position_embeddings": 64,
        "plexrl_fake": [{"function": name, "fault": "slow", "delay_s": delay_s} for name, delay_s in slow.items()],
    }
    settings = ClusterSettings(
        data_dir=folder, engine="fake", workers=1, threads=1, device_state_bytes=str(int(2.5 * _FAKE_STATE_BYTES))
    )
    return live.Thinking(config, tokens=8, vocabulary=_FAKE_VOCABULARY), settings


def _vllm(folder: Path) -> tuple[live.Thinking, ClusterSettings]:
    """A Llama of 25 million parameters on real vLLM and torch."""
    size = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8}
    config = CONFIG | size | {"num_key_value_heads": 8, "head_dim": 64, "vocab_size": 1024}
    settings = ClusterSettings(
        data_dir=folder, engine="vllm", workers=1, threads=2, device_state_bytes="1200M", kv_cache_bytes="64M"
    )
    return live.Thinking(config, tokens=24, vocabulary=1024), settings


_COLUMNS: Mapping[str, str] = {
    "total_s": "total, s",
    "given": "given to others",
    "swaps": "swaps",
    "ready": "found ready",
    "lost_s": "swapping and holding, s",
}


def _table(title: str, by_name: Mapping[str, Sequence[Figures]]) -> Table:
    """Medians over repetitions with their range, and the total over that without hints, pairwise."""
    table = Table(title=title, title_justify="left", box=None)
    for column in ("hints", *_COLUMNS.values(), "total / off"):
        table.add_column(column, justify="left" if column == "hints" else "right")
    for name, found in by_name.items():
        cells = [_cell(Spread(tuple(float(getattr(one, field)) for one in found))) for field in _COLUMNS]
        table.add_row(name, *cells, _cell(ratio(found, by_name["off"])) if "off" in by_name else "-")
    return table


def ratio(found: Sequence[Figures], off: Sequence[Figures]) -> Spread:
    """Total time over that without hints in the same repetition."""
    return Spread(tuple(one.total_s / other.total_s for one, other in zip(found, off, strict=True)))


def _cell(spread: Spread) -> str:
    digits = 2 if spread.high < 10 else 0
    text = f"{spread.median:.{digits}f}"
    return text if spread.low == spread.high else f"{text} ({spread.low:.{digits}f}–{spread.high:.{digits}f})"


def _as_json(by_name: Mapping[str, Sequence[Figures]]) -> dict[str, Any]:
    return {name: [asdict(one) for one in found] for name, found in by_name.items()}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench-waiting-bridge", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("out/bench-waiting-bridge"), metavar="DIR")
    parser.add_argument("--engine", choices=("fake", "vllm"), default="fake", help="default: fake, with costs of ours")
    parser.add_argument("--rounds", type=int, default=3, help="episodes of each rollout in a live run (default: 3)")
    parser.add_argument("--repetitions", type=int, default=3, help="live runs of each kind; 0: none (default: 3)")
    parser.add_argument("--simulated-rounds", type=int, default=12, help="of the longer simulation (default: 12)")
    parser.add_argument("--hints", default="", metavar="A,B", help=f"of {', '.join(HINTS)} (default: all)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
