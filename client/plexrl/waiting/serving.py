"""`plexrl waiting serve`: a simulated cluster on a loopback port until it is interrupted, and a kubeconfig for it."""

import asyncio
import contextlib
import datetime
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from plexrl.waiting.cluster.access import new_access, write_kubeconfig
from plexrl.waiting.cluster.http import CLOCK_PATH, ClusterServer, RealTime
from plexrl.waiting.cluster.simulation import LogSink, Simulation
from plexrl.waiting.latency.local import LocalLatency
from plexrl.waiting.latency.presets import PRESETS
from plexrl.waiting.latency.stages import StageEngine

HOST = "127.0.0.1"


@dataclass(frozen=True)
class ServeOptions:
    """What to serve. A `speed` of 0 means virtual time: it passes only when a client asks for it.

    Files go to `directory`; with `log`, every change of the cluster goes to that file, one JSON line each.
    """

    preset: str = "calm"
    seed: int = 0
    speed: float = 1.0
    port: int = 0
    directory: Path = Path(".plexrl/waiting")
    log: Path | None = None


def serve(options: ServeOptions, say: Callable[[str], None] = print) -> None:
    """Serves until SIGINT or SIGTERM. Raises KeyError for an unknown preset, ValueError for a bad speed, OSError."""
    asyncio.run(_serve(options, say))


async def _serve(options: ServeOptions, say: Callable[[str], None]) -> None:
    real_time = RealTime(options.speed) if options.speed else None
    access = new_access(HOST)
    with _log(options.log) as log:
        simulation = Simulation(seed=options.seed, epoch=_now(), log=log)
        LocalLatency(simulation, StageEngine(PRESETS[options.preset], seed=options.seed))
        simulation.settle()
        server = ClusterServer(
            simulation, real_time=real_time, token=access.token, tls=access.tls, host=HOST, port=options.port
        )
        async with server.serving():
            kubeconfig = write_kubeconfig(options.directory, server.url, access)
            for line in _introduction(server, options, kubeconfig):
                say(line)
            await _interrupted()


def _introduction(server: ClusterServer, options: ServeOptions, kubeconfig: Path) -> Iterator[str]:
    yield f"{server.url} serves a simulated cluster: preset {options.preset}, seed {options.seed}"
    if server.real_time is None:
        yield f'time stands still; this lets 30 s pass: POST {{"advanceSeconds": 30}} to {CLOCK_PATH}'
    else:
        yield f"time passes {options.speed:g} times as fast as on the wall"
    yield f"kubeconfig: {kubeconfig}"
    yield f"try: KUBECONFIG={kubeconfig} kubectl create deployment web --image=nginx --replicas=3"
    yield "stop with Ctrl-C"


@contextlib.contextmanager
def _log(path: Path | None) -> Iterator[LogSink | None]:
    if path is None:
        yield None
        return
    with path.open("wb") as file:
        yield file.write


async def _interrupted() -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    await stop.wait()


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC).replace(microsecond=0)
