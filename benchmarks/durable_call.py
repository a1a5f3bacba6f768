"""A durable call without work, beside its peers: latency at 1 and 64 in flight, calls per second, processor time.

Ours is a real `generate` through every hop: SDK → controller → commit → order stream → worker daemon → engine child →
commit → result. Only the engine is the numpy double, so that nothing is computed. All are driven by the same loop, each
peer's in a process of its own, in turn within each repetition, so that the machine's drift drops out of the ratios.

Everything is bounded: a peer that does not start or answer in time is left out, and the run ends by its deadline.
"""

import asyncio
import os
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

import plexrl
from benchmarks.driving import Driven, drive
from benchmarks.measurement import Measurement, Spread
from benchmarks.peers.peer import Call, Peer
from benchmarks.peers.process import PeerFailed, PeerProcess
from benchmarks.processes import ProcessorTime, descendants
from plexrl_controller.embedded.cluster import LocalCluster
from plexrl_controller.embedded.settings import ClusterSettings

IN_FLIGHT = (1, 64)
WARM_UP_S = 1.0
START_LIMIT_S, ALL_STARTS_LIMIT_S = 75.0, 150.0
CALLS_LIMIT_S = 20.0
"""How much longer than told a stretch of calls may take."""
DEADLINE_S = 300.0
"""From here on no further repetition begins, where there is one of each."""
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
    """Peers that could not be measured here, and why."""
    cut_short: str = ""
    """Why there are fewer repetitions than asked for."""


def run(peers: dict[str, Peer], runs: int, seconds: float, console: Console) -> DurableCalls:
    """Measures everything; rows in the order of IN_FLIGHT and of the peers, which are given by their drivers' names."""
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
            return asyncio.run(_Run(local, lambda: _generate(model), peers, console).measure(runs, seconds))


async def _generate(model: plexrl.Model) -> None:
    await model.generate.submit([[1, 2, 3, 4, 5, 6, 7, 8]], max_tokens=1, temperature=0.0, seed=1)


class _Run:
    """One run of ours and the peers."""

    def __init__(self, local: LocalCluster, ours: Call, peers: dict[str, Peer], console: Console) -> None:
        self._local = local
        self._ours = ours
        self._peers = peers
        self._console = console
        self._ends_s = time.monotonic() + DEADLINE_S
        self._found = DurableCalls(promises={"PlexRL": PROMISE})
        self._running: dict[str, PeerProcess] = {}
        self._times: dict[tuple[str, int], list[Driven]] = {}

    async def measure(self, runs: int, seconds: float) -> DurableCalls:
        try:
            await self._start_peers()
            with Progress(console=self._console) as progress:
                task = progress.add_task("durable call", total=runs * len(IN_FLIGHT))
                for in_flight in IN_FLIGHT:
                    await self._each(in_flight, WARM_UP_S, warm_up=True)
                    for done in range(runs):
                        if done and time.monotonic() > self._ends_s:
                            self._found.cut_short = f"{DEADLINE_S:.0f} s were over: the machine is busy"
                            break
                        await self._each(in_flight, seconds)
                        progress.advance(task)
            self._found.processor_us = await self._processor_us(seconds)
        finally:
            await asyncio.gather(*(peer.close() for peer in self._running.values()))
        self._found.promises |= {name: self._peer_of(name).promise for name in self._running}
        self._found.measurements = [m for in_flight in IN_FLIGHT for m in self._rows(in_flight)]
        return self._found

    async def _start_peers(self) -> None:
        starts_end_s = time.monotonic() + ALL_STARTS_LIMIT_S
        for driver, peer in self._peers.items():
            limit_s = min(START_LIMIT_S, starts_end_s - time.monotonic())
            try:
                if limit_s <= 0:
                    raise PeerFailed(f"no time was left: the others took {ALL_STARTS_LIMIT_S:.0f} s to start")
                self._running[peer.name] = await PeerProcess.start(driver, limit_s)
            except PeerFailed as error:
                self._found.left_out[peer.name] = str(error)

    async def _each(self, in_flight: int, seconds: float, *, warm_up: bool = False) -> None:
        """Ours and every peer once, in turn."""
        async with asyncio.timeout(seconds + 3 * CALLS_LIMIT_S):
            self._note("PlexRL", in_flight, await drive(self._ours, in_flight, seconds), warm_up)
        for name, peer in list(self._running.items()):
            try:
                driven = await peer.drive(in_flight, seconds, seconds + CALLS_LIMIT_S)
            except PeerFailed as error:
                self._found.left_out[name] = str(error)
                await self._running.pop(name).close()
            else:
                self._note(name, in_flight, driven, warm_up)

    def _note(self, name: str, in_flight: int, driven: Driven, warm_up: bool) -> None:
        if not warm_up:
            self._times.setdefault((name, in_flight), []).append(driven)

    def _peer_of(self, name: str) -> Peer:
        return next(peer for peer in self._peers.values() if peer.name == name)

    def _rows(self, in_flight: int) -> list[Measurement]:
        ours = self._times["PlexRL", in_flight]
        return [
            Measurement(
                f"durable call {title}, {in_flight} in flight",
                unit,
                Spread(tuple(getattr(driven, value) for driven in ours)),
                Spread(tuple(getattr(driven, value) for driven in self._times[name, in_flight])),
                name,
            )
            for title, unit, value in (("p50", "ms", "p50_ms"), ("p99", "ms", "p99_ms"), ("rate", "calls/s", "rate"))
            for name in self._running
        ]

    async def _processor_us(self, seconds: float) -> dict[str, float]:
        pids = self._local.pids()
        used = ProcessorTime(
            {
                "client": [os.getpid()],
                "controller": [pids["controller"]],
                "Postgres": [pids["postgres"], *descendants(pids["postgres"])],
                "worker daemon": [pids["worker-0"]],
                "engine child": descendants(pids["worker-0"]),
            }
        )
        calls = (await drive(self._ours, max(IN_FLIGHT), seconds)).calls
        return {name: 1e6 * spent_s / calls for name, spent_s in used.spent_s().items()}
