"""A cluster of real processes under three clients, which is struck at named points of its commits.

Knows no test: which part is killed where, and how often, is the caller's business.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from plexrl_controller.embedded.cluster import LocalCluster
from plexrl_controller.embedded.postgres import EmbeddedPostgres
from plexrl_controller.embedded.process import EmbeddedError
from plexrl_controller.embedded.settings import ClusterSettings
from tests.support.fault_points import POINTS, PROVOKED_BY, FaultDatabase, Moment

PARTS = ("client", "controller", "worker-0", "engine", "postgres")
RECOVERY_LIMIT_S = 240.0
"""Longer is a hang."""
PAUSE_S = 0.1
"""Between two steps of the disturbed run: what is repeated undisturbed must not be long."""
GUEST_PAUSE_S = 0.5
STEPS = ROUNDS = 1_000_000
JOB, ROLLOUTS_JOB = "matrix", "rollouts"
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Kill:
    """One cell of the matrix."""

    point: str
    part: str
    moment: Moment

    def __str__(self) -> str:
        return f"{self.point}, {self.part}, {self.moment.value}"


def cells() -> list[Kill]:
    """Every point, part and moment. A commit can only land without the process that asked for it."""
    return [
        Kill(point, part, moment)
        for point in POINTS
        for part in PARTS
        for moment in Moment
        if moment is not Moment.UNDONE or part == "controller"
        if moment is not Moment.LANDS or part != "postgres"
    ]


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


@dataclass(frozen=True)
class Heard:
    """How much the clients heard: lines of their histories."""

    steps: int
    visits: int
    rounds: int

    def __add__(self, more: "Heard") -> "Heard":
        return Heard(self.steps + more.steps, self.visits + more.visits, self.rounds + more.rounds)

    def __ge__(self, other: "Heard") -> bool:
        return self.steps >= other.steps and self.visits >= other.visits and self.rounds >= other.rounds


@dataclass
class Rig:
    """A cluster, its database with points, and the client processes under it."""

    local: LocalCluster
    database: FaultDatabase
    folder: Path
    clients: list[subprocess.Popen[bytes]] = field(default_factory=list)
    lives: int = 0
    """How often the clients were started."""

    def __post_init__(self) -> None:
        self.trained = History(self.folder / "history.jsonl")
        self.visits = History(self.folder / "guest.jsonl")
        self.rounds = History(self.folder / "rollouts.jsonl")

    def start_clients(self) -> None:
        """All three, each where it was."""
        self.lives += 1
        self._start("fault_client", JOB, self.trained.file, STEPS, PAUSE_S)
        self._start("fault_guest", self.visits.file, GUEST_PAUSE_S)
        self._start("fault_rollouts", ROLLOUTS_JOB, self.rounds.file, ROUNDS, PAUSE_S)

    def _start(self, module: str, *arguments: object) -> None:
        address = (self.local.endpoint, str(self.local.folder.token_file))
        with (self.folder / f"{module}.log").open("ab") as log:
            self.clients.append(
                subprocess.Popen(
                    [sys.executable, "-m", f"tests.support.{module}", *address, *map(str, arguments)],
                    cwd=ROOT, stdout=log, stderr=log,
                )
            )  # fmt: skip

    def stop_clients(self) -> None:
        """Kill -9."""
        clients, self.clients = self.clients, []
        for client in clients:
            client.kill()
        for client in clients:
            client.wait()

    async def progress(self, more: Heard, limit_s: float = RECOVERY_LIMIT_S) -> None:
        """Waits until the clients heard of so much more. Raises when one ended, or hangs."""
        wanted = self.heard() + more
        deadline = time.monotonic() + limit_s
        while not self.heard() >= wanted:
            ended = [client for client in self.clients if client.poll() is not None]
            assert not ended, "\n".join(log.read_text()[-2000:] for log in self.folder.glob("fault_*.log"))
            assert time.monotonic() < deadline, f"{self.heard()} of {wanted} within {limit_s:.0f} s"
            await asyncio.sleep(0.02)

    def heard(self) -> Heard:
        """What the clients heard so far."""
        return Heard(len(self.trained.lines()), len(self.visits.lines()), len(self.whole_rounds()))

    def whole_rounds(self) -> list[dict[str, Any]]:
        """The rounds of rollouts that the client heard, without the sessions that expired in the middle of one."""
        return [line for line in self.rounds.lines() if "round" in line]

    async def kill(self, kill: Kill) -> float:
        """Kills at the point, and waits until the clients go on. Returns the seconds that this took."""
        async with self.database.held(kill.point, self._provoking(kill.point)) as commit:
            if kill.moment is Moment.AFTER:
                await commit.let_land()
                began = self._strike(kill.part)
            else:
                began = self._strike(kill.part)
                if kill.moment is Moment.UNDONE:
                    await commit.undo()
        if kill.part == "client":
            self.start_clients()
        await self.progress(Heard(steps=4, visits=1, rounds=1))
        return time.monotonic() - began

    def _provoking(self, point: str) -> Callable[[], None]:
        """Kills the part that brings the point about; where that was of no consequence, again once all clients went
        on: a call that is killed time and again ends.
        """
        part, wanted = PROVOKED_BY.get(point), Heard(0, 0, 0)

        def provoke() -> None:
            nonlocal wanted
            if part is not None and (here := self.heard()) >= wanted:
                self._strike(part)
                wanted = here + Heard(steps=2, visits=1, rounds=1)

        return provoke

    def _strike(self, part: str) -> float:
        began = time.monotonic()
        match part:
            case "client":
                self.stop_clients()
            case "engine":
                with suppress(EmbeddedError):  # that its worker is not there now
                    for pid in self.local.engine_pids("worker-0"):
                        with suppress(ProcessLookupError):
                            os.kill(pid, signal.SIGKILL)
            case _:
                with suppress(EmbeddedError):  # that it is not there now: it is still starting after the last kill
                    self.local.kill(part)
        return began


@asynccontextmanager
async def rig(folder: Path) -> AsyncIterator[Rig]:
    """A fresh cluster, with all clients at work."""
    settings = ClusterSettings(
        data_dir=folder / "plexrl",
        engine="fake",
        workers=1,
        threads=1,
        device_state_bytes="24K",
        kv_cache_bytes="1M",
        # What is timed is how long the parts take, not how patient their supervisor is with one that dies often.
        restart_delay_s=0.0,
        controller_flags=("--snapshot-replay-s", "0.02", "--chunk-s", "0.1"),
    )
    async with LocalCluster(settings) as local:
        postgres = EmbeddedPostgres(local.folder.postgres)
        database = FaultDatabase(str(postgres.socket_folder), "plexrl")
        await database.connect()
        await database.install()
        made = Rig(local, database, folder)
        made.start_clients()
        try:
            await made.progress(Heard(steps=2, visits=1, rounds=1))
            yield made
        finally:
            made.stop_clients()
            database.close()


def table(recovered_s: dict[Kill, float], failed: dict[Kill, str]) -> str:
    """Point by part: seconds until the clients went on, killed before the commit (undone / landing) / after it."""
    lines = [f"{'':22}" + "".join(f"{part:>24}" for part in PARTS)]
    for point in POINTS:
        row = f"{point:22}"
        for part in PARTS:
            row += f"{' / '.join(_cell(Kill(point, part, moment), recovered_s, failed) for moment in Moment):>24}"
        lines.append(row)
    return "\n".join(lines)


def _cell(kill: Kill, recovered_s: dict[Kill, float], failed: dict[Kill, str]) -> str:
    if kill in failed:
        return "FAILED"
    return f"{recovered_s[kill]:.1f}" if kill in recovered_s else "-"


def summary(recovered_s: dict[Kill, float], failed: dict[Kill, str]) -> str:
    """How many, and how long a kill of each part cost."""
    lines = [f"{len(recovered_s)} cells CHECKED, {len(failed)} failed"]
    for part in PARTS:
        seconds = sorted(s for kill, s in recovered_s.items() if kill.part == part)
        if seconds:
            middle, late = _at(seconds, 0.5), _at(seconds, 0.95)
            lines.append(f"{part:>12}: median {middle:.1f} s, p95 {late:.1f} s, most {seconds[-1]:.1f} s")
    return "\n".join([*lines, *(f"FAILED {kill}: {why}" for kill, why in failed.items())])


def _at(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
