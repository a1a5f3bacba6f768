"""What a swap costs: the host tier beside plain memcpy on the same pages, and how long job B waits for its first token.

    python -m benchmarks.swap --out out/bench-swap

1. A buffer of device memory and one of host memory, both resident: memcpy, then the engine's own move of the same
   pages, in turn, every round. The move's rate is its bytes by its time less what the checksum took in it, so that what
   is compared with memcpy is the copy.
2. A worker with the real engine and two models: A works, B is next. From the swap order to B's first token, with B's
   state on disk (evicted from the page cache), brought to host memory by a prefetch, or to spare device memory.
"""

import argparse
import asyncio
import ctypes
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks.worker_process import MIB, WorkerProcess, qwen3, running
from plexrl.v1 import types_pb2 as t
from plexrl_worker.engine import device as device_module
from plexrl_worker.engine.device import Checksum, CpuDevice

LEAST_SHARE_OF_MEMCPY = 0.8
_BUFFER_BYTES = 256 * MIB


@dataclass(frozen=True)
class Figure:
    """Something measured several times."""

    name: str
    unit: str
    values: tuple[float, ...]

    @property
    def median(self) -> float:
        """Its median."""
        return statistics.median(self.values)

    def __str__(self) -> str:
        return f"{self.name:58} {self.median:8.2f} {self.unit} ({min(self.values):.2f} to {max(self.values):.2f})"


class _TimedChecksum(Checksum):
    """The engine's checksum, with the time that it takes."""

    spent_s = 0.0

    def update(self, raw: torch.Tensor) -> None:
        started_s = time.perf_counter()
        super().update(raw)
        _TimedChecksum.spent_s += time.perf_counter() - started_s

    def value(self) -> int:
        started_s = time.perf_counter()
        value = super().value()
        _TimedChecksum.spent_s += time.perf_counter() - started_s
        return value


def host_tier(rounds: int) -> tuple[list[Figure], float]:
    """The rates, in GB/s, and the move's share of memcpy: the median over rounds, the lower of both ways."""
    device = CpuDevice()
    region = device.region(_BUFFER_BYTES)
    pieces = region.pieces
    pieces[0].copy_(torch.from_numpy(np.random.default_rng(1).integers(0, 256, _BUFFER_BYTES, dtype=np.uint8)))
    fd = os.memfd_create("bench-host-image")
    os.ftruncate(fd, _BUFFER_BYTES)
    image = np.memmap(f"/proc/self/fd/{fd}", dtype=np.uint8, mode="r+", shape=(_BUFFER_BYTES,))
    rates: dict[str, list[float]] = {}
    shares: dict[str, list[float]] = {"out": [], "in": []}
    device_at, image_at = pieces[0].data_ptr(), image.ctypes.data
    device_module.Checksum = _TimedChecksum  # type: ignore[misc]
    try:
        device.park(pieces, image)
        for _ in range(rounds):
            for way, target, source, move in (
                ("out", image_at, device_at, lambda: device.park(pieces, image)),
                ("in", device_at, image_at, lambda: device.unpark(image, pieces)),
            ):
                plain_s = _seconds(lambda target=target, source=source: ctypes.memmove(target, source, _BUFFER_BYTES))  # type: ignore[misc]
                _TimedChecksum.spent_s = 0.0
                whole_s = _seconds(move)
                copy_s = whole_s - _TimedChecksum.spent_s
                shares[way].append(plain_s / copy_s)
                for name, seconds in (("memcpy", plain_s), ("move", copy_s), ("move with its checksum", whole_s)):
                    rates.setdefault(f"{name}, {_WAYS[way]}", []).append(_BUFFER_BYTES / seconds / 1e9)
                rates.setdefault("checksum alone", []).append(_BUFFER_BYTES / _TimedChecksum.spent_s / 1e9)
    finally:
        device_module.Checksum = Checksum  # type: ignore[misc]
        os.close(fd)
    figures = [Figure(name, "GB/s", tuple(values)) for name, values in rates.items()]
    return figures, min(statistics.median(values) for values in shares.values())


_WAYS = {"out": "device to host", "in": "host to device"}


def _seconds(work: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    work()
    return time.perf_counter() - started_s


async def first_token(rounds: int, hidden_size: int, layers: int, log: Path) -> list[Figure]:
    """Milliseconds from the swap order to B's first token, by where its state was."""
    config = qwen3(hidden_size, layers)
    figures: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="plexrl-bench-") as folder:
        directory = Path(folder)
        state_bytes = await _state_bytes(config, directory, log)
        flags = (
            *("--host-state-bytes", str(2 * state_bytes + MIB), "--disk-state-bytes", str(8 * state_bytes)),
            *("--device-state-bytes", str(2 * state_bytes + MIB), "--kv-cache-bytes", "64M"),
        )
        async with running(directory, *flags, log=log) as worker:
            for name in ("a", "b", "c"):
                await worker.deploy(name, config)
                await worker.swap(name, *({"a", "b", "c"} - {name}))
                await worker.train(name)
            for _ in range(rounds):
                for where, tier in _STARTS.items():
                    await _only_on_disk(worker, directory)
                    if tier is not None:
                        await worker.prefetch("b", tier)
                    figures.setdefault(where, []).append(await _first_token_s(worker) * 1e3)
            counters = (await worker.status()).tiers
    print(f"state of each model: {state_bytes / MIB:.0f} MiB; {str(counters).replace(chr(10), ' ')}")
    return [Figure(f"first token of B, {where}", "ms", tuple(values)) for where, values in figures.items()]


_STARTS: dict[str, t.Tier.ValueType | None] = {
    "state on disk, no prefetch": None,
    "prefetched to host memory": t.TIER_HOST,
    "prefetched to spare device memory": t.TIER_DEVICE,
}


async def _state_bytes(config: str, directory: Path, log: Path) -> int:
    async with running(directory, "--kv-cache-bytes", "64M", log=log) as worker:
        await worker.deploy("probe", config)
        (deployment,) = (await worker.status()).deployments
        return sum(component.size_bytes for component in deployment.residency)


async def _only_on_disk(worker: WorkerProcess, directory: Path) -> None:
    """B's state on disk and nowhere else, not in the page cache either; A on the device."""
    await worker.swap("c", "a", "b")
    await worker.swap("a", "b", "c")
    await worker.generate("a")
    status = await worker.status()
    (b,) = [deployment for deployment in status.deployments if deployment.model_id == "b"]
    assert {component.tier for component in b.residency} == {t.TIER_DISK}, b
    await asyncio.to_thread(os.sync)
    for file in (directory / "state" / "parked").glob("*.state"):
        fd = os.open(file, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


async def _first_token_s(worker: WorkerProcess) -> float:
    started_s = time.perf_counter()
    await worker.swap("b", "a")
    await worker.generate("b", max_tokens=1)
    return time.perf_counter() - started_s


def report(figures: Sequence[Figure], share: float, out: Path) -> None:
    """report.json, and the table on the terminal."""
    out.mkdir(parents=True, exist_ok=True)
    content = {"share_of_memcpy": share, "figures": [asdict(figure) | {"median": figure.median} for figure in figures]}
    (out / "report.json").write_text(json.dumps(content, indent=2) + "\n")
    for figure in figures:
        print(figure)
    print(f"the move without its checksum reaches {share:.0%} of memcpy (at least {LEAST_SHARE_OF_MEMCPY:.0%} wanted)")


def main() -> int:
    """Returns the exit status: 1 when the host tier is slower than its bar."""
    parser = argparse.ArgumentParser(prog="bench-swap", description="Times swaps between device, host memory and disk.")
    parser.add_argument(
        "--out", type=Path, default=Path("out/bench-swap"), metavar="DIR", help="default: out/bench-swap"
    )
    parser.add_argument("--rounds", type=int, default=7, help="repetitions (default: 7)")
    parser.add_argument("--hidden-size", type=int, default=512, help="of the two models (default: 512)")
    parser.add_argument(
        "--layers", type=int, default=8, help="of the two models (default: 8, with 512: 25M parameters)"
    )
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    figures, share = host_tier(arguments.rounds)
    log = arguments.out / "worker.log"
    figures += asyncio.run(first_token(arguments.rounds, arguments.hidden_size, arguments.layers, log))
    report(figures, share, arguments.out)
    return 0 if share >= LEAST_SHARE_OF_MEMCPY else 1


if __name__ == "__main__":
    sys.exit(main())
