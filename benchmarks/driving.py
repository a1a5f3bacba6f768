"""Keeps calls going and times them; the same loop for ours and for every peer."""

import asyncio
import time
from dataclasses import dataclass

from benchmarks.measurement import quantile
from benchmarks.peers.peer import Call


@dataclass(frozen=True)
class Driven:
    """What a stretch of calls showed."""

    p50_ms: float
    p99_ms: float
    rate: float
    """Calls per second."""
    calls: int


async def drive(call: Call, in_flight: int, seconds: float) -> Driven:
    """Keeps `in_flight` calls going for so long, and waits for the last."""
    latencies: list[float] = []
    start = time.perf_counter()

    async def loop() -> None:
        while (begin := time.perf_counter()) - start < seconds:
            await call()
            latencies.append(time.perf_counter() - begin)

    await asyncio.gather(*(loop() for _ in range(in_flight)))
    elapsed = time.perf_counter() - start
    p50_s, p99_s = quantile(latencies, 0.5), quantile(latencies, 0.99)
    return Driven(1e3 * p50_s, 1e3 * p99_s, len(latencies) / elapsed, len(latencies))
