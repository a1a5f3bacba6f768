"""A durable call without work, beside its peers: latency at 1 and 64 in flight, calls per second, processor time.

Ours is a real `generate` through every hop: SDK → controller → commit → order stream → worker daemon → engine child →
commit → result. Only the engine is the numpy double, so that nothing is computed. All are driven from one asyncio loop,
in turn within each repetition, so that the machine's drift drops out of the ratios.
"""

import asyncio
import contextlib
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

import plexrl
from benchmarks.measurement import Measurement, Spread, quantile
from benchmarks.peers.peer import Call, Peer
from benchmarks.processes import ProcessorTime, descendants
from plexrl_controller.embedded.cluster import LocalCluster
from plexrl_controller.embedded.settings import ClusterSettings

IN_FLIGHT = (1, 64)
WARM_UP_S, WARM_UP_LIMIT_S = 1.0, 60.0
CONFIG = {"architectures": ["Qwen3ForCausalLM"], "vocab_size": 32, "max_position_embeddings": 64}
WHAT_RUNS = "generate, 8 tokens in, 1 out, executed by the engine child of a worker daemon (numpy double of the engine)"
PROMISE = "call, dispatch and result are in Postgres, with fsync, before each is told; a death anywhere costs only time"


@dataclass
class DurableCalls:
    """What was found. `processor_us` is processor time per call by process, at 64 in flight."""

    measurements: list[Measurement] = field(default_factory=list)
    processor_us: dict[str, float] = field(default_factory=dict)
    promises: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    """Peers that did not start here, and why."""


def run(peers: Sequence[Peer], runs: int, seconds: float, console: Console) -> DurableCalls:
    """Measures everything; rows in the order of IN_FLIGHT and of the peers."""
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
            return asyncio.run(_measure(local, lambda: _generate(model), peers, runs, seconds, console))


async def _generate(model: plexrl.Model) -> None:
    await model.generate.submit([[1, 2, 3, 4, 5, 6, 7, 8]], max_tokens=1, temperature=0.0, seed=1)


async def _measure(
    local: LocalCluster, ours: Call, peers: Sequence[Peer], runs: int, seconds: float, console: Console
) -> DurableCalls:
    found = DurableCalls(promises={"PlexRL": PROMISE})
    times: dict[tuple[str, int], list[tuple[float, float, float]]] = {}
    async with contextlib.AsyncExitStack() as opened:
        systems: dict[str, Call] = {"PlexRL": ours}
        for peer in peers:
            try:
                systems[peer.name] = await opened.enter_async_context(peer.open())
                found.promises[peer.name] = peer.promise
            except Exception as error:  # noqa: BLE001 - a peer that cannot run here is left out, and the report says so
                found.left_out[peer.name] = f"{type(error).__name__}: {error}"
        with Progress(console=console) as progress:
            task = progress.add_task("durable call", total=runs * len(IN_FLIGHT) * len(systems))
            for in_flight in IN_FLIGHT:
                for name, call in list(systems.items()):
                    try:
                        async with asyncio.timeout(WARM_UP_LIMIT_S):
                            await _drive(call, in_flight, WARM_UP_S)
                    except Exception as error:
                        if name == "PlexRL":
                            raise
                        found.left_out[name] = f"{in_flight} in flight: {type(error).__name__}: {error}"
                        del systems[name]
                for _ in range(runs):
                    for name, call in systems.items():
                        times.setdefault((name, in_flight), []).append(await _drive(call, in_flight, seconds))
                        progress.advance(task)
        found.processor_us = await _processor_us(local, ours, seconds)
    found.promises = {name: promise for name, promise in found.promises.items() if name in systems}
    for in_flight in IN_FLIGHT:
        for index, (name, unit) in enumerate((("p50", "ms"), ("p99", "ms"), ("rate", "calls/s"))):
            mine = Spread(tuple(values[index] for values in times["PlexRL", in_flight]))
            for peer_name in systems:
                if peer_name != "PlexRL":
                    theirs = Spread(tuple(values[index] for values in times[peer_name, in_flight]))
                    title = f"durable call {name}, {in_flight} in flight"
                    found.measurements.append(Measurement(title, unit, mine, theirs, peer_name))
    return found


async def _processor_us(local: LocalCluster, call: Call, seconds: float) -> dict[str, float]:
    pids = local.pids()
    used = ProcessorTime(
        {
            "client": [os.getpid()],
            "controller": [pids["controller"]],
            "Postgres": [pids["postgres"], *descendants(pids["postgres"])],
            "worker daemon": [pids["worker-0"]],
            "engine child": descendants(pids["worker-0"]),
        }
    )
    calls = await _drive_counted(call, max(IN_FLIGHT), seconds)
    return {name: 1e6 * spent_s / calls for name, spent_s in used.spent_s().items()}


async def _drive(call: Call, in_flight: int, seconds: float) -> tuple[float, float, float]:
    """Keeps `in_flight` calls going; returns p50 ms, p99 ms, calls per second."""
    latencies: list[float] = []
    start = time.perf_counter()
    await _loops(call, in_flight, seconds, latencies)
    elapsed = time.perf_counter() - start
    return 1e3 * quantile(latencies, 0.5), 1e3 * quantile(latencies, 0.99), len(latencies) / elapsed


async def _drive_counted(call: Call, in_flight: int, seconds: float) -> int:
    latencies: list[float] = []
    await _loops(call, in_flight, seconds, latencies)
    return len(latencies)


async def _loops(call: Call, in_flight: int, seconds: float, latencies: list[float]) -> None:
    start = time.perf_counter()

    async def loop() -> None:
        while (begin := time.perf_counter()) - start < seconds:
            await call()
            latencies.append(time.perf_counter() - begin)

    await asyncio.gather(*(loop() for _ in range(in_flight)))
