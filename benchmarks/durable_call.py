"""A durable call without work, beside a Ray actor call: latency at 1 and 64 in flight, and calls per second.

Ours is the whole path with every process real: SDK → controller → commit → order stream → daemon → engine child →
commit → result. Only the engine is the numpy double, so that nothing is computed. The peer keeps nothing: a Ray actor
call survives no crash. Both are driven from one asyncio loop, in turn, in the same run.
"""

import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

import plexrl
from benchmarks.measurement import Measurement, Spread, quantile
from plexrl_controller.embedded.cluster import LocalCluster
from plexrl_controller.embedded.settings import ClusterSettings

IN_FLIGHT = (1, 64)
WARM_UP_S = 1.0
CONFIG = {"architectures": ["Qwen3ForCausalLM"], "vocab_size": 32, "max_position_embeddings": 64}

Call = Callable[[], Awaitable[Any]]


def run(runs: int, seconds: float, console: Console) -> list[Measurement]:
    """Measures everything; rows in the order of IN_FLIGHT."""
    with tempfile.TemporaryDirectory(prefix="plexrl-bench-") as folder:
        settings = ClusterSettings(
            data_dir=Path(folder) / "plexrl", engine="fake", workers=1, device_state_bytes="16M", kv_cache_bytes="1M"
        )
        with (
            LocalCluster(settings) as local,
            plexrl.connect(local.endpoint, token=local.token) as cluster,
            cluster.job("bench") as job,
        ):
            model = job.model("policy", base=plexrl.Init(CONFIG, seed=1))
            model.wait_until_placed()
            return asyncio.run(_measure(lambda: _plexrl_call(model), _ray_call(), runs, seconds, console))


async def _plexrl_call(model: plexrl.Model) -> None:
    # About 100 bytes each way: one prompt of eight tokens, one token back.
    await model.generate.submit([[1, 2, 3, 4, 5, 6, 7, 8]], max_tokens=1, seed=1)


def _ray_call() -> Call:
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)

    @ray.remote
    class Echo:
        def call(self, payload: bytes) -> bytes:
            return payload

    actor, payload = Echo.remote(), bytes(100)  # type: ignore[attr-defined]

    async def call() -> None:
        await actor.call.remote(payload)

    return call


async def _measure(ours: Call, peer: Call, runs: int, seconds: float, console: Console) -> list[Measurement]:
    found: dict[tuple[str, int], list[tuple[float, float, float]]] = {}
    with Progress(console=console) as progress:
        task = progress.add_task("durable call", total=runs * len(IN_FLIGHT) * 2)
        for in_flight in IN_FLIGHT:
            for call in (ours, peer):
                await _drive(call, in_flight, WARM_UP_S)
            for _ in range(runs):
                for name, call in (("ours", ours), ("peer", peer)):
                    found.setdefault((name, in_flight), []).append(await _drive(call, in_flight, seconds))
                    progress.advance(task)
    rows = []
    for in_flight in IN_FLIGHT:
        for index, (name, unit) in enumerate((("p50", "ms"), ("p99", "ms"), ("rate", "calls/s"))):
            mine, theirs = (Spread(tuple(v[index] for v in found[who, in_flight])) for who in ("ours", "peer"))
            rows.append(
                Measurement(f"durable call {name}, {in_flight} in flight", unit, mine, theirs, "Ray actor call")
            )
    return rows


async def _drive(call: Call, in_flight: int, seconds: float) -> tuple[float, float, float]:
    """Keeps `in_flight` calls going; returns p50 ms, p99 ms, calls per second."""
    latencies: list[float] = []
    start = time.perf_counter()

    async def loop() -> None:
        while (begin := time.perf_counter()) - start < seconds:
            await call()
            latencies.append(time.perf_counter() - begin)

    await asyncio.gather(*(loop() for _ in range(in_flight)))
    elapsed = time.perf_counter() - start
    return 1e3 * quantile(latencies, 0.5), 1e3 * quantile(latencies, 0.99), len(latencies) / elapsed
