"""What it gives two jobs, whose rollouts share two workers, to have the last responses of each go on together on one.

Real vLLM, a small model, response lengths as uneven as stop tokens at random make them. Three ways, in turn: every
rollout on both workers ("spread"), a worker for each job ("own"), and one worker for the bulk of both and one for the
tails of both ("consolidated"). Counted are rollouts of both jobs in a second, and how long a rollout is that has both
workers to itself.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

import plexrl
from benchmarks.measurement import Spread
from plexrl.at_once import at_once
from plexrl_controller.embedded.cluster import LocalCluster
from plexrl_controller.embedded.settings import ClusterSettings

PROMPTS = [[2 + number, 40 + number % 8] for number in range(16)]
COMPLETIONS, MAX_TOKENS = 8, 240
STOPS = (0, 1)
"""Two tokens of 64: a response has 32 of them on average."""
MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}
LEAVE = 0.2


class Job:
    """One of the jobs: its models on the two workers, and the ways to have a rollout of them."""

    def __init__(self, stack: ExitStack, cluster: plexrl.Cluster, name: str, own: int) -> None:
        job = stack.enter_context(cluster.job(name, lease_s=3600))
        base = plexrl.Init(MODEL, seed=1)
        first = job.model("one", base=base, role="rollout")
        first.wait_until_placed(900)
        second = job.model("other", base=base, role="rollout", affinity=plexrl.Affinity(avoid=[first]))
        second.wait_until_placed(900)
        # By worker, so that both jobs have their tails on the same.
        models = sorted((first, second), key=lambda model: model._describe().worker_id)
        self.ways = {
            "spread": plexrl.RolloutReplicas(models, leave=0.0),
            "own": plexrl.RolloutReplicas([models[own]], leave=0.0),
            "consolidated": plexrl.RolloutReplicas(models, leave=LEAVE, tail_only=True),
        }

    def roll_out(self, way: str, seed: int) -> int:
        """One rollout; its tokens."""
        made = self.ways[way].generate(
            PROMPTS, n=COMPLETIONS, max_tokens=MAX_TOKENS, stop_token_ids=STOPS, seed=seed, timeout_s=600
        )
        return int(made.lengths.sum())


def rollouts_s(jobs: Sequence[Job], way: str, seeds: Sequence[int]) -> float:
    """Rollouts in a second, of all jobs side by side, each with one after the other."""
    start = time.monotonic()
    at_once(lambda job: [job.roll_out(way, seed) for seed in seeds], jobs)
    return len(jobs) * len(seeds) / (time.monotonic() - start)


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(prog="benchmarks.tails", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out/bench-tails"), metavar="DIR")
    parser.add_argument("--runs", type=int, default=6, help="repetitions, the ways in turn (default: 6)")
    parser.add_argument("--rollouts", type=int, default=4, help="of each job in a repetition (default: 4)")
    args = parser.parse_args()
    console = Console()
    together: dict[str, list[float]] = {}
    alone_s: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="plexrl-bench-") as folder, ExitStack() as stack:
        console.print("starting two workers")
        settings = ClusterSettings(data_dir=Path(folder), workers=2, threads=1, kv_cache_bytes="64M")
        local = stack.enter_context(LocalCluster(settings))
        cluster = stack.enter_context(plexrl.connect(local.endpoint, token=local.token))
        jobs = [Job(stack, cluster, f"job-{number}", number) for number in range(2)]
        ways = list(jobs[0].ways)
        for job in jobs:
            for way in ways:
                job.roll_out(way, 0)
        for run in track(range(args.runs), "repetitions", console=console):
            seeds = range(1 + run * args.rollouts, 1 + (run + 1) * args.rollouts)
            for way in ways[run % len(ways) :] + ways[: run % len(ways)]:
                together.setdefault(way, []).append(rollouts_s(jobs, way, seeds))
                alone_s.setdefault(way, []).append(1 / rollouts_s(jobs[:1], way, seeds))
    args.out.mkdir(parents=True, exist_ok=True)
    report = {
        "together_per_s": {way: Spread(tuple(values)).as_json() for way, values in together.items()},
        "alone_s": {way: Spread(tuple(values)).as_json() for way, values in alone_s.items()},
    }
    (args.out / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    table = Table("way", "rollouts of two jobs, 1/s", "to spread", "a rollout alone, s", "to spread")
    for way in ways:
        more = Spread(tuple(a / b for a, b in zip(together[way], together["spread"], strict=True)))
        longer = Spread(tuple(a / b for a, b in zip(alone_s[way], alone_s["spread"], strict=True)))
        cells = (Spread(tuple(together[way])), more, Spread(tuple(alone_s[way])), longer)
        table.add_row(way, *(f"{cell.median:.2f} ({cell.low:.2f} to {cell.high:.2f})" for cell in cells))
    console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
