"""`plexrl waiting serve` and `latency`: a simulated cluster on a loopback port, or simulated nodes for a real cluster.

Both run until they are interrupted.
"""

import asyncio
import contextlib
import datetime
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import aiohttp

from plexrl.errors import InvalidArgument, Unavailable
from plexrl.waiting.cluster.access import new_access, write_kubeconfig
from plexrl.waiting.cluster.http import CLOCK_PATH, ClusterServer, RealTime
from plexrl.waiting.cluster.simulation import LogSink, Simulation
from plexrl.waiting.latency.kubeconfig import read_credentials
from plexrl.waiting.latency.local import LocalLatency
from plexrl.waiting.latency.presets import PRESETS, Preset
from plexrl.waiting.latency.remote import CallRefused, RemoteLatency
from plexrl.waiting.latency.stages import Role, StageEngine

HOST = "127.0.0.1"


@dataclass(frozen=True)
class ServeOptions:
    """What to serve. A `speed` of 0 means virtual time: it passes only when a client asks for it.

    Files go to `directory`; with `log`, every change of the cluster goes to that file, one JSON line each.
    """

    preset: Preset = PRESETS["calm"]
    seed: int = 0
    speed: float = 1.0
    port: int = 0
    directory: Path = Path(".plexrl/waiting")
    log: Path | None = None


def serve(options: ServeOptions, say: Callable[[str], None] = print) -> None:
    """Serves until SIGINT or SIGTERM. Raises InvalidArgument for a bad speed, Unavailable e.g. for a port in use."""
    try:
        real_time = RealTime(options.speed) if options.speed else None
    except ValueError as error:
        raise InvalidArgument(str(error)) from error
    try:
        asyncio.run(_serve(options, real_time, say))
    except OSError as error:
        raise Unavailable(f"cannot serve: {error}") from error


def add_latency(kubeconfig: Path, preset: Preset, *, nodes: int, seed: int, say: Callable[[str], None] = print) -> None:
    """Adds simulated nodes to a cluster and runs them until SIGINT or SIGTERM.

    Raises InvalidArgument for a kubeconfig that cannot be used, and Unavailable when the cluster is not there.
    """
    try:
        credentials = read_credentials(kubeconfig)
    except (ValueError, OSError) as error:
        raise InvalidArgument(str(error)) from error
    pool = replace(preset.pool, count=nodes, limit=nodes, name="simulated")
    engine = StageEngine(replace(preset, pool=pool), seed=seed, role=Role.NODES)
    asyncio.run(_add_latency(RemoteLatency(credentials, engine), credentials.url, say))


def checked_preset(name: str) -> Preset:
    """A preset by its name. Raises InvalidArgument."""
    if name not in PRESETS:
        raise InvalidArgument(f"preset: want one of {', '.join(PRESETS)}, not {name!r}")
    return PRESETS[name]


async def _add_latency(latency: RemoteLatency, url: str, say: Callable[[str], None]) -> None:
    say(f"simulated nodes for {url}; stop with Ctrl-C")
    working = asyncio.create_task(latency.run())
    interrupted = asyncio.create_task(_interrupted())
    done, _ = await asyncio.wait((working, interrupted), return_when=asyncio.FIRST_COMPLETED)
    interrupted.cancel()
    if working in done:
        try:
            await working
        except (aiohttp.ClientError, CallRefused) as error:
            raise Unavailable(f"{url}: {error}") from error
    working.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await working


async def _serve(options: ServeOptions, real_time: RealTime | None, say: Callable[[str], None]) -> None:
    access = new_access(HOST)
    with _log(options.log) as log:
        simulation = Simulation(seed=options.seed, epoch=_now(), log=log)
        LocalLatency(simulation, StageEngine(options.preset, seed=options.seed))
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
    yield f"{server.url} serves a simulated cluster: preset {options.preset.name}, seed {options.seed}"
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
