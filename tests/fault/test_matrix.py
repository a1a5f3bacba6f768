"""Kill -9 of each part at each named point of a running cluster, before the commit, through it and after it.

Two models train on one device under a client that is a process of its own; all processes and the database are real, the
engine is the numpy double. What must hold is checked from what the client heard and from the database, at the end:
nothing accepted is lost, done twice or hangs, and the training state is that of a run that nobody disturbed.
`make faults` runs the whole matrix; here a sample.
"""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import plexrl
from plexrl_controller.embedded.cluster import LocalCluster
from plexrl_controller.embedded.postgres import EmbeddedPostgres
from plexrl_controller.embedded.process import EmbeddedError
from plexrl_controller.embedded.settings import ClusterSettings
from plexrl_controller.lifecycle.calls import TERMINAL
from tests.support.fault_points import POINTS, FaultDatabase, Moment

PARTS = ("client", "controller", "worker-0", "engine", "postgres")
RECOVERY_LIMIT_S = 240.0
"""Longer is a hang."""
PAUSE_S = 0.1
"""Between two steps of the disturbed run: what is repeated undisturbed must not be long."""
STEPS = 1_000_000
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Kill:
    """One cell of the matrix."""

    point: str
    part: str
    moment: Moment


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


SAMPLE = (
    Kill("call dispatched", "controller", Moment.UNDONE),
    Kill("call accepted", "client", Moment.LANDS),
    Kill("call succeeded", "engine", Moment.LANDS),
    Kill("snapshot committed", "worker-0", Moment.AFTER),
    Kill("swap ended", "postgres", Moment.AFTER),
)
"""Every part once, each at another point."""


@dataclass
class Rig:
    """A cluster, its database with points, and the client process under it."""

    local: LocalCluster
    database: FaultDatabase
    folder: Path
    recovered_s: dict[Kill, float] = field(default_factory=dict)
    client: subprocess.Popen[bytes] | None = None
    _heard: list[dict[str, Any]] = field(default_factory=list)
    _read_bytes: int = 0

    @property
    def history_file(self) -> Path:
        return self.folder / "history.jsonl"

    def history(self) -> list[dict[str, Any]]:
        """What the client heard; a line that its death cut off was not heard."""
        if self.history_file.exists():
            with self.history_file.open("rb") as file:
                file.seek(self._read_bytes)
                whole = file.read().rpartition(b"\n")[0]
            self._read_bytes += len(whole) + bool(whole)
            self._heard += [json.loads(line) for line in whole.split(b"\n") if line.startswith(b"{")]
        return self._heard

    def start_client(self) -> None:
        arguments = (self.local.endpoint, str(self.local.folder.token_file), "matrix", str(self.history_file))
        with (self.folder / "client.log").open("ab") as log:
            self.client = subprocess.Popen(
                [sys.executable, "-m", "tests.support.fault_client", *arguments, str(STEPS), str(PAUSE_S)],
                cwd=ROOT, stdout=log, stderr=log,
            )  # fmt: skip

    def stop_client(self) -> None:
        client, self.client = self.client, None
        if client is not None:
            client.kill()
            client.wait()

    async def progress(self, steps: int, limit_s: float = RECOVERY_LIMIT_S) -> None:
        """Waits until the client heard of so many more steps. Raises when it ended, or hangs."""
        wanted, deadline = len(self.history()) + steps, time.monotonic() + limit_s
        while len(self.history()) < wanted:
            assert self.client is not None
            assert self.client.poll() is None, (self.folder / "client.log").read_text()[-2000:]
            assert time.monotonic() < deadline, f"no progress within {limit_s:.0f} s"
            await asyncio.sleep(0.02)

    async def kill(self, kill: Kill) -> None:
        """Kills at the point, and waits until the client goes on."""
        async with self.database.held(kill.point) as commit:
            if kill.moment is Moment.AFTER:
                await commit.let_land()
                began = self._strike(kill.part)
            else:
                began = self._strike(kill.part)
                if kill.moment is Moment.UNDONE:
                    await commit.undo()
        if kill.part == "client":
            self.start_client()
        await self.progress(4)
        self.recovered_s[kill] = time.monotonic() - began

    def _strike(self, part: str) -> float:
        began = time.monotonic()
        match part:
            case "client":
                self.stop_client()
            case "engine":
                for pid in self.local.engine_pids("worker-0"):
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            case _:
                with suppress(EmbeddedError):  # that it is not there now: it is still starting after the last kill
                    self.local.kill(part)
        return began


@asynccontextmanager
async def rig(folder: Path) -> AsyncIterator[Rig]:
    settings = ClusterSettings(
        data_dir=folder / "plexrl",
        engine="fake",
        workers=1,
        threads=1,
        device_state_bytes="24K",
        kv_cache_bytes="1M",
        controller_flags=("--snapshot-replay-s", "0.02"),
    )
    async with LocalCluster(settings) as local:
        postgres = EmbeddedPostgres(local.folder.postgres)
        database = FaultDatabase(str(postgres.socket_folder), "plexrl")
        await database.connect()
        await database.install()
        made = Rig(local, database, folder)
        made.start_client()
        try:
            await made.progress(2)
            yield made
        finally:
            made.stop_client()
            database.close()


async def check(made: Rig) -> None:
    """The promises, from the history that the client heard and from the rows and transitions in the database."""
    made.stop_client()
    with plexrl.connect(made.local.endpoint, token=made.local.token) as cluster:
        job = await asyncio.to_thread(cluster.attach, "matrix")
        for future in job.unacknowledged:
            await asyncio.to_thread(future.result, RECOVERY_LIMIT_S)
        history, steps = made.history(), max(line["step"] for line in made.history()) + 1
        await check_database(made.database, job.job_id)
        for name, model in job.models.items():
            heard = [line for line in history if line["model"] == name]
            assert [line["optim"] for line in heard] == [line["step"] + 1 for line in heard], "a step applied once"
            versions = [line["version"] for line in heard]
            assert versions == sorted(versions)
            assert all(line["sampled"] == line["version"] for line in heard)
            assert model.name == name
        await asyncio.to_thread(job.finish)
    undisturbed = await asyncio.to_thread(reference, made, steps)
    for line in history:
        assert line == undisturbed[line["model"], line["step"]], "the state is that of an undisturbed run"


def reference(made: Rig, steps: int) -> dict[tuple[str, int], dict[str, Any]]:
    """The same steps, with nobody in the way."""
    alone = made.folder / "undisturbed.jsonl"
    arguments = (made.local.endpoint, str(made.local.folder.token_file), "undisturbed", str(alone), str(steps), "0")
    subprocess.run([sys.executable, "-m", "tests.support.fault_client", *arguments], cwd=ROOT, check=True)
    lines = [json.loads(line) for line in alone.read_text().splitlines()]
    return {(line["model"], line["step"]): line for line in lines}


async def check_database(database: FaultDatabase, job_id: str) -> None:
    """Every call ended once, as SUCCEEDED, in its present attempt; no term or attempt goes backwards."""
    terminal = [state.name for state in TERMINAL]
    calls = await database.connection.fetch(
        "SELECT call_id, model_id, sequence, state, attempt FROM calls WHERE job_id = $1", job_id
    )
    assert calls
    assert {call["state"] for call in calls} == {"SUCCEEDED"}
    for model_id in {call["model_id"] for call in calls}:
        numbers = sorted(call["sequence"] for call in calls if call["model_id"] == model_id and call["sequence"])
        assert numbers == list(range(1, len(numbers) + 1)), "each number is one call"
    events = await database.connection.fetch(
        "SELECT record_id, event, target, attempt, leader_term FROM events WHERE machine = 'call' ORDER BY event_id"
    )
    of_call: dict[str, list[Any]] = {}
    for event in events:
        of_call.setdefault(event["record_id"], []).append(event)
    for call in calls:
        mine = of_call[call["call_id"]]
        ends = [event for event in mine if event["target"] in terminal]
        assert [event["attempt"] for event in ends] == [call["attempt"]], "one outcome, of the attempt that counts"
        assert [event["event"] for event in mine].count("CREATE") == 1
        for name in ("attempt", "leader_term"):
            assert [event[name] for event in mine] == sorted(event[name] for event in mine), f"an older {name} wrote"


def table(recovered_s: dict[Kill, float]) -> str:
    """Point by part: seconds from the kill to the client's next steps, before / landing / after the commit."""
    lines = [f"{'':22}" + "".join(f"{part:>20}" for part in PARTS)]
    for point in POINTS:
        row = f"{point:22}"
        for part in PARTS:
            seconds = [recovered_s.get(Kill(point, part, moment)) for moment in Moment]
            row += f"{' / '.join('-' if s is None else f'{s:.1f}' for s in seconds):>20}"
        lines.append(row)
    return "\n".join(lines)


async def run_matrix(folder: Path, kills: list[Kill]) -> None:
    async with rig(folder) as made:
        for number, kill in enumerate(kills, start=1):
            try:
                await made.kill(kill)
            except (AssertionError, TimeoutError) as error:
                raise AssertionError(f"{kill.part} killed at '{kill.point}', {kill.moment.value}: {error!r}") from error
            print(f"{number}/{len(kills)} {kill.point}, {kill.part}, {kill.moment.value}: "
                  f"{made.recovered_s[kill]:.1f} s", flush=True)  # fmt: skip
        await check(made)
        print(table(made.recovered_s))


def test_the_whole_matrix_has_every_part_at_every_point() -> None:
    whole = cells()
    assert {(k.point, k.part) for k in whole} == {(point, part) for point in POINTS for part in PARTS}
    assert set(SAMPLE) <= set(whole)
    assert {k.part for k in SAMPLE} == set(PARTS)
    assert {k.moment for k in whole if k.part == "controller"} == set(Moment)


@pytest.mark.timeout(1200)
async def test_a_kill_at_a_named_point_loses_nothing(tmp_path: Path) -> None:
    """G01, G03, G14, G20, G21."""
    await run_matrix(tmp_path, list(SAMPLE))


@pytest.mark.long
@pytest.mark.timeout(7200)
async def test_a_kill_of_any_part_at_any_point_loses_nothing(tmp_path: Path) -> None:
    """G01, G03, G14, G20, G21: the whole matrix."""
    kills = cells()
    random.Random(0).shuffle(kills)
    await run_matrix(tmp_path, kills)
