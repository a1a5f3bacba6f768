"""Memory over many swaps and calls: every process of a worker, sampled after each swap, must stay where it was.

    python -m benchmarks.soak --out out/soak --minutes 30

Four models in two engines share a device that holds one, host memory that holds two, and the disk. A round swaps the
next model in, generates, trains and publishes. Writes memory.csv and memory.png; the exit status says whether every
line was flat.
"""

import argparse
import asyncio
import csv
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.worker_process import MIB, WorkerProcess, qwen3, running

# The first part of a run, in which pools and caches fill.
_WARM_UP_SHARE = 0.3
# Growth from the first third after that to the last third that still is a flat line.
BOUND_BYTES = 48 * MIB
_CALLS_PER_SWAP = 10


@dataclass(frozen=True)
class Sample:
    """Memory of one process after a swap. anonymous: its own; shared: files and host images that it maps."""

    seconds: float
    swaps: int
    calls: int
    process: str
    anonymous_bytes: int
    shared_bytes: int


@dataclass(frozen=True)
class Line:
    """A process's own memory over a run: the medians of the first and the last third after warming up."""

    process: str
    first_bytes: int
    last_bytes: int
    highest_bytes: int

    @property
    def flat(self) -> bool:
        """Whether it stayed within the bound."""
        return self.last_bytes - self.first_bytes <= BOUND_BYTES


def lines_of(samples: Sequence[Sample]) -> list[Line]:
    """One per process that lived to the end; needs at least ten samples of each."""
    found = []
    for process in sorted({sample.process for sample in samples}):
        values = [sample.anonymous_bytes for sample in samples if sample.process == process]
        values = values[int(len(values) * _WARM_UP_SHARE) :]
        third = max(1, len(values) // 3)
        first, last = statistics.median(values[:third]), statistics.median(values[-third:])
        found.append(Line(process, int(first), int(last), max(values)))
    return found


async def soak(
    worker: WorkerProcess, configs: Sequence[str], *, swaps: int, calls_per_swap: int, limit_s: float
) -> list[Sample]:
    """Swaps through one model per config, at least `swaps` times and then until `limit_s`."""
    names = [f"model-{number}" for number in range(len(configs))]
    for number, (name, config) in enumerate(zip(names, configs, strict=True)):
        await worker.deploy(name, config, seed=number)
    samples: list[Sample] = []
    started_s, done_swaps, done_calls = time.monotonic(), 0, 0
    while done_swaps < swaps or time.monotonic() - started_s < limit_s:
        name = names[done_swaps % len(names)]
        await worker.swap(name, *(other for other in names if other != name))
        done_swaps += 1
        await worker.train(name)
        for number in range(calls_per_swap - 3):
            await worker.generate(name, max_tokens=8, seed=number)
        done_calls += calls_per_swap
        for process, handle in worker.processes().items():
            memory = handle.memory_info()
            samples.append(
                Sample(
                    time.monotonic() - started_s,
                    done_swaps,
                    done_calls,
                    process,
                    memory.rss - memory.shared,
                    memory.shared,
                )
            )
    return samples


def write(samples: Sequence[Sample], directory: Path) -> None:
    """memory.csv and memory.png."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "memory.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(Sample.__dataclass_fields__)
        for sample in samples:
            writer.writerow([getattr(sample, name) for name in Sample.__dataclass_fields__])
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 4.5))
    for process in sorted({sample.process for sample in samples}):
        own = [sample for sample in samples if sample.process == process]
        axes.plot([s.swaps for s in own], [s.anonymous_bytes / MIB for s in own], label=process)
    axes.set_xlabel(f"swaps ({samples[-1].calls} calls, {samples[-1].seconds / 60:.1f} minutes)")
    axes.set_ylabel("own memory, MiB")
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.tight_layout()
    figure.savefig(directory / "memory.png", dpi=120)
    plt.close(figure)


async def _run(out: Path, minutes: float, swaps: int) -> int:
    small, other = qwen3(128, 2), qwen3(128, 2, num_key_value_heads=1)
    with tempfile.TemporaryDirectory(prefix="plexrl-soak-") as directory:
        flags = ("--host-state-bytes", "16M", "--disk-state-bytes", "1G", "--kv-cache-bytes", "32M")
        async with running(Path(directory), *flags, log=out / "worker.log") as worker:
            samples = await soak(
                worker,
                [small, other, small, other],
                swaps=swaps,
                calls_per_swap=_CALLS_PER_SWAP,
                limit_s=minutes * 60,
            )
            tiers = (await worker.status()).tiers
    write(samples, out)
    print(f"{samples[-1].swaps} swaps, {samples[-1].calls} calls, {samples[-1].seconds / 60:.1f} minutes; {tiers}")
    lines = lines_of(samples)
    for line in lines:
        print(
            f"{line.process:10} {line.first_bytes / MIB:8.1f} MiB -> {line.last_bytes / MIB:8.1f} MiB "
            f"(highest {line.highest_bytes / MIB:.1f}): {'flat' if line.flat else 'GROWS'}"
        )
    return 0 if all(line.flat for line in lines) else 1


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(prog="soak", description="Memory of a worker's processes over swaps and calls.")
    parser.add_argument("--out", type=Path, default=Path("out/soak"), metavar="DIR", help="default: out/soak")
    parser.add_argument("--minutes", type=float, default=30.0, help="length, after the least swaps (default: 30)")
    parser.add_argument("--swaps", type=int, default=200, help="least number of swaps, ten calls each (default: 200)")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    return asyncio.run(_run(arguments.out, arguments.minutes, arguments.swaps))


if __name__ == "__main__":
    sys.exit(main())
