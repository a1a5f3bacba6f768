"""What automatic snapshots cost a training run: a 25M-parameter model, a snapshot every 30 s of its work.

Two clusters on this machine, one that takes snapshots and one that does not, run the same steps in turn; a stretch of
the one is compared with the stretch of the other beside it, so that the machine's drift drops out. Beside the ratio
stands what the snapshots themselves took, as the worker measured it: device time, and processor time of the write.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

import plexrl
from benchmarks.measurement import Spread
from plexrl_controller.embedded.cluster import LocalCluster
from plexrl_controller.embedded.settings import ClusterSettings

LIMIT = 0.03
SEQUENCES, TOKENS = 8, 64
MODEL_25M = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 8192,
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_hidden_layers": 9,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "head_dim": 64,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True)
class Written:
    """One snapshot, as the worker tells of it."""

    bytes: int
    device_s: float
    write_s: float
    cpu_s: float


class Run:
    """A training run on a cluster of its own."""

    def __init__(self, stack: ExitStack, folder: Path, replay_s: float) -> None:
        settings = ClusterSettings(
            data_dir=folder,
            kv_cache_bytes="64M",
            threads=2,
            controller_flags=("--snapshot-replay-s", str(replay_s)),
        )
        local = stack.enter_context(LocalCluster(settings))
        cluster = stack.enter_context(plexrl.connect(local.endpoint, token=local.token))
        job = stack.enter_context(cluster.job("training", lease_s=3600))
        self._log = folder / "logs" / "worker-0.log"
        self._model = job.model("policy", base=plexrl.Init(MODEL_25M, seed=1))
        self._steps = 0
        self._model.wait_until_placed(900)
        self.step()

    def step(self) -> None:
        """One step of the training loop; steps of equal number are the same in every run."""
        self._steps += 1
        draws = random.Random(self._steps)
        prompts = [[draws.randrange(8192) for _ in range(8)] for _ in range(SEQUENCES)]
        targets = [[draws.randrange(8192) for _ in range(TOKENS - 8)] for _ in range(SEQUENCES)]
        self._model.generate(prompts, max_tokens=4, seed=self._steps)
        self._model.forward_backward.submit(plexrl.TrainingBatch.from_targets(prompts, targets), loss="cross_entropy")
        self._model.optim_step.submit(lr=1e-4, max_grad_norm=1.0)
        self._model.sync_weights()

    def stretch(self, steps: int) -> float:
        """Seconds for so many steps."""
        start = time.monotonic()
        for _ in range(steps):
            self.step()
        return time.monotonic() - start

    def until_next_snapshot(self) -> tuple[int, float]:
        """Steps until one more snapshot has been committed, and the seconds they took."""
        before, start, steps = len(self.snapshots()), time.monotonic(), 0
        while len(self.snapshots()) == before:
            self.step()
            steps += 1
        return steps, time.monotonic() - start

    def snapshots(self) -> list[Written]:
        """What was written so far."""
        lines = [line for line in self._log.read_text().splitlines() if '"snapshot_committed"' in line]
        found: list[dict[str, Any]] = [json.loads(line) for line in lines]
        return [Written(f["bytes"], f["device_s"], f["write_s"], f["cpu_s"]) for f in found]


def main() -> int:
    """Returns the exit status: 1 when the median cost is over the limit."""
    parser = argparse.ArgumentParser(prog="benchmarks.snapshots", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out/bench-snapshots"), metavar="DIR")
    parser.add_argument("--period-s", type=float, default=30.0, help="work between two snapshots (default: 30)")
    parser.add_argument("--runs", type=int, default=6, help="pairs of stretches, each with one snapshot (default: 6)")
    args = parser.parse_args()
    console = Console()
    with tempfile.TemporaryDirectory(prefix="plexrl-bench-") as folder, ExitStack() as stack:
        console.print("starting two clusters")
        with_snapshots = Run(stack, Path(folder) / "with", args.period_s)
        without = Run(stack, Path(folder) / "without", 1e9)
        ratios, seconds = [], []
        for _ in track(range(args.runs), "stretches", console=console):
            steps, ours_s = with_snapshots.until_next_snapshot()
            theirs_s = without.stretch(steps)
            ratios.append(ours_s / theirs_s)
            seconds.append(ours_s)
        written = with_snapshots.snapshots()
    report = report_of(ratios, seconds, written)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    ratio, direct = report["time_ratio"], report["direct_cost"]
    console.print(
        f"with / without snapshots, same steps side by side: {ratio['median']:.3f} "
        f"({ratio['min']:.3f} to {ratio['max']:.3f}, {ratio['runs']} pairs)\n"
        f"each snapshot: {written[-1].bytes / 1e6:.0f} MB; device {report['device_s']['median'] * 1e3:.0f} ms, write "
        f"{report['write_s']['median']:.2f} s beside the calls, of it {report['cpu_s']['median']:.2f} s processor\n"
        f"device and processor time of snapshots / time of the run: {direct['median']:.2%} "
        f"({direct['min']:.2%} to {direct['max']:.2%}); the limit is {LIMIT:.0%}"
    )
    return int(direct["median"] > LIMIT)


def report_of(ratios: list[float], seconds: list[float], written: list[Written]) -> dict[str, Any]:
    """The report: the ratio, and what was measured of each snapshot."""
    direct = [(w.device_s + w.cpu_s) / s for w, s in zip(written, seconds, strict=False)]
    return {
        "time_ratio": Spread(tuple(ratios)).as_json(),
        "direct_cost": Spread(tuple(direct)).as_json(),
        "stretch_s": Spread(tuple(seconds)).as_json(),
        "device_s": Spread(tuple(w.device_s for w in written)).as_json(),
        "write_s": Spread(tuple(w.write_s for w in written)).as_json(),
        "cpu_s": Spread(tuple(w.cpu_s for w in written)).as_json(),
        "snapshots": [asdict(w) for w in written],
    }


if __name__ == "__main__":
    sys.exit(main())
