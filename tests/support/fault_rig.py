"""A cluster of real processes under its clients, which is struck at named points of its commits.

Knows no test: which part is killed where, and how often, is the caller's business.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from plexrl_controller.embedded.cluster import LocalCluster
from plexrl_controller.embedded.postgres import EmbeddedPostgres
from plexrl_controller.embedded.process import EmbeddedError
from plexrl_controller.embedded.settings import ClusterSettings
from tests.support import fault_evidence, fault_scenes
from tests.support.fault_points import FaultDatabase, Moment
from tests.support.fault_scenes import WITHOUT_END, ClientProcess, Kill, Scene, cells
from tests.support.fault_transfers import all_here, coming, standing_still

RECOVERY_LIMIT_S = 240.0
"""Longer is a hang."""
ROOT = Path(__file__).parents[2]
EVIDENCE = ROOT / "out" / "faults"
"""A folder for each cluster that failed."""


class History:
    """The lines that a client writes, one for everything whole that it heard."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._heard: list[dict[str, Any]] = []
        self._read_bytes = 0

    def lines(self) -> list[dict[str, Any]]:
        """What the client heard; a line that its death cut off was not heard."""
        if self.file.exists():
            with self.file.open("rb") as file:
                file.seek(self._read_bytes)
                whole = file.read().rpartition(b"\n")[0]
            self._read_bytes += len(whole) + bool(whole)
            self._heard += [json.loads(line) for line in whole.split(b"\n") if line.startswith(b"{")]
        return self._heard


Heard = Mapping[ClientProcess, int]
"""How much each client heard: whole lines of its history."""


@dataclass
class Rig:
    """A cluster, its database with points, and the client processes under it."""

    scene: Scene
    local: LocalCluster
    database: FaultDatabase
    folder: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    lives: int = 0
    """How often the clients were started."""

    def __post_init__(self) -> None:
        self.histories = {client: History(self.folder / client.history) for client in self.scene.clients}

    def start_clients(self) -> None:
        """All of them, each where it was."""
        self.lives += 1
        for client in self.scene.clients:
            job = (client.job,) if client.job else ()
            number = (WITHOUT_END,) if client.job else ()
            self._start(client.module, *job, self.folder / client.history, *number, client.pause_s)

    def _start(self, module: str, *arguments: object) -> None:
        address = (self.local.endpoint, str(self.local.folder.token_file))
        with (self.folder / f"{module}.log").open("ab") as log:
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", f"tests.support.{module}", *address, *map(str, arguments)],
                    cwd=ROOT, stdout=log, stderr=log,
                )
            )  # fmt: skip

    def stop_clients(self) -> None:
        """Kill -9."""
        processes, self.processes = self.processes, []
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()

    async def progress(self, more: Heard, limit_s: float = RECOVERY_LIMIT_S) -> None:
        """Waits until the clients heard of so much more. Raises when one ended, or hangs."""
        wanted = {client: count + more[client] for client, count in self.heard().items()}
        deadline = time.monotonic() + limit_s
        while not _reaches(self.heard(), wanted):
            ended = [process for process in self.processes if process.poll() is not None]
            assert not ended, "\n".join(log.read_text()[-2000:] for log in self.folder.glob("fault_*.log"))
            assert time.monotonic() < deadline, f"{_told(self.heard())} of {_told(wanted)} within {limit_s:.0f} s"
            await asyncio.sleep(0.02)

    def heard(self) -> Heard:
        """What the clients heard so far."""
        return {client: len(self.whole(client)) for client in self.scene.clients}

    def whole(self, client: ClientProcess) -> list[dict[str, Any]]:
        """The lines of a client that count: a session that expired in the middle of a round, say, does not."""
        return [line for line in self.histories[client].lines() if client.counted in line]

    def to_go_on(self) -> Heard:
        """What shows that all clients are well."""
        return {client: client.to_go_on for client in self.scene.clients}

    async def kill(self, kill: Kill) -> float:
        """Kills at the point, and waits until the clients go on. Returns the seconds that this took."""
        if kill.moment is Moment.DURING:
            async with self._transfer(kill.point):
                began = await self._strike(kill.part)
            # A database that died took the connection with it.
            await self.database.release()
        else:
            async with self.database.held(kill.point, self._provoking(kill.point)) as commit:
                if kill.moment is Moment.AFTER:
                    await commit.let_land()
                    began = await self._strike(kill.part)
                else:
                    began = await self._strike(kill.part)
                    if kill.moment is Moment.UNDONE:
                        await commit.undo()
        if kill.part == "client":
            self.start_clients()
        await self.progress(self.to_go_on())
        return time.monotonic() - began

    def _provoking(self, point: str) -> Callable[[], Awaitable[None]]:
        """Kills the part that brings the point about, or holds it up; where that was of no consequence, again once all
        clients went on: a call that is killed time and again ends.
        """
        provocation = self.scene.provoked_by.get(point)
        wanted: Heard = dict.fromkeys(self.scene.clients, 0)

        async def provoke() -> None:
            nonlocal wanted
            if provocation is None or not _reaches(self.heard(), wanted):
                return
            if provocation.once and not await self.database.connection.fetchval(provocation.once):
                return
            if provocation.still_s:
                pids = self._worker_pids(await self._worker_of(self.scene.models[provocation.part]))
                async with standing_still(pids()):
                    await asyncio.sleep(provocation.still_s)
                return
            async with self._transfer(provocation.during):
                await self._strike(provocation.part)
            # Counted from here: a transfer may have been long in coming, and the point is reached in a moment.
            wanted = {client: count + client.to_go_on for client, count in self.heard().items()}

        return provoke

    @asynccontextmanager
    async def _transfer(self, point: str) -> AsyncIterator[None]:
        """Within the block weights are on their way so far; with no point, whatever is."""
        match point:
            case "":
                yield
            case fault_scenes.ASKED:
                async with self.database.held("pull dispatched") as commit:
                    source = self._worker_pids(await self._worker_of("policy"))
                    async with standing_still(source()):
                        await commit.let_land()
                        await self._until(PULL_RUNS)
                        yield
            case fault_scenes.COMING:
                source = self._worker_pids(await self._worker_of("policy"))
                async with coming(self._worker_pids(await self._worker_of("rollouts")), source):
                    yield
            case fault_scenes.ALL_HERE:
                worker = await self._worker_of("rollouts")
                async with all_here(self._worker_pids(worker), lambda: self._engine_pids(worker)):
                    yield
            case _:
                raise AssertionError(point)

    async def _until(self, query: str, limit_s: float = 30.0) -> None:
        async with asyncio.timeout(limit_s):
            while not await self.database.connection.fetchval(query):  # noqa: ASYNC110
                await asyncio.sleep(0.005)

    async def _worker_of(self, model: str) -> str:
        name: str = await self.database.connection.fetchval(WORKER_OF, model)
        return name

    def _worker_pids(self, worker: str) -> Callable[[], list[int]]:
        return lambda: [pid for name, pid in self.local.pids().items() if name == worker]

    def _engine_pids(self, worker: str) -> list[int]:
        with suppress(EmbeddedError):  # that its worker is not there now
            return self.local.engine_pids(worker)
        return []

    async def _strike(self, part: str) -> float:
        model = self.scene.models.get(part)
        worker = await self._worker_of(model) if model is not None else "worker-0"
        began = time.monotonic()
        if part == "client":
            self.stop_clients()
        elif part.endswith("engine"):
            for pid in self._engine_pids(worker):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        else:
            with suppress(EmbeddedError):  # that it is not there now: it is still starting after the last kill
                self.local.kill(worker if model is not None else part)
        return began


PULL_RUNS = "SELECT count(*) > 0 FROM calls WHERE source_model_id IS NOT NULL AND state = 'RUNNING'"
WORKER_OF = """
SELECT workers.name FROM workers JOIN models USING (worker_id) WHERE models.name = $1 AND models.live
ORDER BY models.create_time DESC LIMIT 1
"""


def _reaches(heard: Heard, wanted: Heard) -> bool:
    return all(heard[client] >= count for client, count in wanted.items())


def _told(heard: Heard) -> str:
    return ", ".join(f"{count} of {client.module}" for client, count in heard.items())


@asynccontextmanager
async def rig(folder: Path, scene: Scene) -> AsyncIterator[Rig]:
    """A fresh cluster, with all clients at work."""
    settings = ClusterSettings(
        data_dir=folder / "plexrl",
        engine="fake",
        workers=scene.workers,
        threads=1,
        device_state_bytes=scene.device_state_bytes,
        kv_cache_bytes="1M",
        # What is timed is how long the parts take, not how patient their supervisor is with one that dies often.
        restart_delay_s=0.0,
        controller_flags=("--snapshot-replay-s", str(scene.snapshot_replay_s), "--chunk-s", "0.1"),
    )
    async with LocalCluster(settings) as local:
        postgres = EmbeddedPostgres(local.folder.postgres)
        database = FaultDatabase(str(postgres.socket_folder), "plexrl")
        await database.connect()
        await database.install()
        made = Rig(scene, local, database, folder)
        made.start_clients()
        try:
            await made.progress(made.to_go_on())
            yield made
        except Exception:
            await fault_evidence.keep(made, EVIDENCE / f"{scene.name.replace(' ', '-')}-{folder.name}")
            raise
        finally:
            made.stop_clients()
            database.close()


def table(scene: Scene, recovered_s: Mapping[Kill, float], failed: Collection[Kill]) -> str:
    """Point by part: seconds until the clients went on, killed before the commit (undone / landing) / after it, or
    while it lasted.
    """
    lines = [f"{'':22}" + "".join(f"{part:>24}" for part in scene.parts)]
    every = cells(scene)
    for point in scene.points:
        row = f"{point:22}"
        for part in scene.parts:
            tried = [kill for kill in every if (kill.point, kill.part) == (point, part)]
            row += f"{' / '.join(_cell(kill, recovered_s, failed) for kill in tried):>24}"
        lines.append(row)
    return "\n".join(lines)


def _cell(kill: Kill, recovered_s: Mapping[Kill, float], failed: Collection[Kill]) -> str:
    if kill in failed:
        return "FAILED"
    return f"{recovered_s[kill]:.1f}" if kill in recovered_s else "-"


def summary(scene: Scene, recovered_s: Mapping[Kill, float], failed: Mapping[Kill, str]) -> str:
    """How many, and how long a kill of each part cost."""
    lines = [f"{len(recovered_s)} cells CHECKED, {len(failed)} failed"]
    for part in scene.parts:
        seconds = sorted(s for kill, s in recovered_s.items() if kill.part == part)
        if seconds:
            middle, late = _at(seconds, 0.5), _at(seconds, 0.95)
            lines.append(f"{part:>16}: median {middle:.1f} s, p95 {late:.1f} s, most {seconds[-1]:.1f} s")
    return "\n".join([*lines, *(f"FAILED {kill}: {why}" for kill, why in failed.items())])


def _at(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
