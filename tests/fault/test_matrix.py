"""Kill -9 of each part at each named point of a running cluster, before the commit, through it and after it.

Two models train on one device under a client, while another client's jobs come, give way, cancel and go; all processes
and the database are real, the engine is the numpy double. What must hold is checked from what the clients heard and
from the database, at the end: nothing accepted is lost, done twice or hangs, and the training state is that of a run
that nobody disturbed. `make faults` runs the whole matrix; here a sample.
"""

import asyncio
import itertools
import json
import os
import random
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import plexrl
from plexrl_controller.lifecycle.calls import TERMINAL
from tests.support import fault_guest
from tests.support.fault_points import POINTS, PROVOKED_BY, FaultDatabase, Moment
from tests.support.fault_rig import JOB, PARTS, RECOVERY_LIMIT_S, ROOT, Kill, Rig, cells, rig, summary, table

CELLS_PER_CLUSTER = 15
"""Then it is checked, and a fresh one goes on: a promise that was broken is known to be so within so many kills."""

CELLS = slice(*(int(end) if end else None for end in os.environ.get("PLEXRL_FAULT_CELLS", ":").split(":")))
"""Of the whole matrix, in its shuffled order: all, or those that are to be run once more."""

SAMPLE = (
    Kill("call dispatched", "controller", Moment.UNDONE),
    Kill("call gave way", "client", Moment.LANDS),
    Kill("call cancelled", "engine", Moment.LANDS),
    Kill("recovery begun", "worker-0", Moment.AFTER),
    Kill("job finishing", "postgres", Moment.AFTER),
)
"""Every part once, each at another point."""


async def check(made: Rig) -> None:
    """The promises, from the histories that the clients heard and from the rows and transitions in the database."""
    made.stop_clients()
    with plexrl.connect(made.local.endpoint, token=made.local.token) as cluster:
        await asyncio.to_thread(end_guest, cluster, len(made.visits.lines()))
        job = await asyncio.to_thread(cluster.attach, JOB)
        for future in job.unacknowledged:
            await asyncio.to_thread(future.result, RECOVERY_LIMIT_S)
        history = made.trained.lines()
        steps = max(line["step"] for line in history) + 1
        calls = await calls_of(made.database, job.job_id)
        assert {call["state"] for call in calls} == {"SUCCEEDED"}
        check_numbers(calls)
        for name, model in job.models.items():
            heard = [line for line in history if line["model"] == name]
            assert [line["optim"] for line in heard] == [line["step"] + 1 for line in heard], "a step applied once"
            versions = [line["version"] for line in heard]
            assert versions == sorted(versions)
            assert all(line["sampled"] == line["version"] for line in heard)
            assert model.name == name
        await asyncio.to_thread(job.finish)
    await check_guest(made)
    undisturbed = await asyncio.to_thread(reference, made, steps)
    for line in history:
        assert line == undisturbed[line["model"], line["step"]], "the state is that of an undisturbed run"


def end_guest(cluster: plexrl.Cluster, number: int) -> None:
    """The visit that was cut off is over."""
    try:
        job = cluster.attach(f"{fault_guest.JOB}-{number}")
    except plexrl.errors.NotFound:
        return
    job.finish()


def reference(made: Rig, steps: int) -> dict[tuple[str, int], dict[str, Any]]:
    """The same steps, with nobody in the way."""
    alone = made.folder / "undisturbed.jsonl"
    arguments = (made.local.endpoint, str(made.local.folder.token_file), "undisturbed", str(alone), str(steps), "0")
    subprocess.run([sys.executable, "-m", "tests.support.fault_client", *arguments], cwd=ROOT, check=True)
    lines = [json.loads(line) for line in alone.read_text().splitlines()]
    return {(line["model"], line["step"]): line for line in lines}


async def check_guest(made: Rig) -> None:
    """Every job of the guest's is finished and has left nothing; every whole visit was the same."""
    connection = made.database.connection
    async with asyncio.timeout(RECOVERY_LIMIT_S):
        while await connection.fetchval(LEFT_OF_GUEST):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    jobs = await connection.fetch("SELECT job_id, state FROM jobs WHERE name LIKE 'guest-%'")
    assert {job["state"] for job in jobs} == {"FINISHED"}
    for job in jobs:
        calls = await calls_of(made.database, job["job_id"])
        assert {call["state"] for call in calls} <= {"SUCCEEDED", "CANCELLED"}, calls
        models = await connection.fetch("SELECT state FROM models WHERE job_id = $1", job["job_id"])
        assert {model["state"] for model in models} <= {"DELETED"}
    whole = [line["tokens"] for line in made.visits.lines() if line["whole"]]
    assert all(tokens == whole[0] for tokens in whole), "the same seeds make the same tokens, whoever died meanwhile"


LEFT_OF_GUEST = "SELECT count(*) FROM jobs WHERE name LIKE 'guest-%' AND state IN ('ACTIVE', 'FINISHING')"


async def calls_of(database: FaultDatabase, job_id: str) -> list[Any]:
    """A job's calls. Each ended once, in its present attempt; no term or attempt goes backwards."""
    terminal = [state.name for state in TERMINAL]
    calls: list[Any] = await database.connection.fetch(
        "SELECT call_id, model_id, sequence, state, attempt FROM calls WHERE job_id = $1", job_id
    )
    events = await database.connection.fetch(
        "SELECT record_id, event, target, attempt, leader_term FROM events"
        " WHERE machine = 'call' AND record_id = ANY($1) ORDER BY event_id",
        [call["call_id"] for call in calls],
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
    return calls


def check_numbers(calls: list[Any]) -> None:
    """Each number of a model's sequence is one call."""
    assert calls
    for model_id in {call["model_id"] for call in calls}:
        numbers = sorted(call["sequence"] for call in calls if call["model_id"] == model_id and call["sequence"])
        assert numbers == list(range(1, len(numbers) + 1))


@dataclass
class Tried:
    """What became of the cells."""

    checked_s: dict[Kill, float] = field(default_factory=dict)
    """Seconds until the clients went on, in clusters whose promises then held."""
    failed: dict[Kill, str] = field(default_factory=dict)


async def run_cells(folder: Path, kills: list[Kill]) -> Tried:
    """Tries the cells, so many on one cluster; a fresh one takes over what a cluster that failed leaves untold."""
    tried, left = Tried(), list(kills)
    for number in itertools.count():
        batch, left = left[:CELLS_PER_CLUSTER], left[CELLS_PER_CLUSTER:]
        if not batch:
            return tried
        seconds: dict[Kill, float] = {}
        try:
            async with rig(folder / f"cluster-{number}") as made:
                for kill in batch:
                    seconds[kill] = await made.kill(kill)
                    print(f"cluster {number}: {kill}: {seconds[kill]:.1f} s", flush=True)
                await check(made)
        except (AssertionError, TimeoutError, plexrl.PlexRLError) as error:
            hung = batch[len(seconds)] if len(seconds) < len(batch) else None
            tried.failed |= {kill: repr(error)[:600] for kill in ([hung] if hung is not None else batch)}
            if hung is not None:
                left = [kill for kill in batch if kill is not hung] + left
            print(f"cluster {number}: FAILED{f' at {hung}' if hung is not None else ''}: {error!r}", flush=True)
        else:
            tried.checked_s |= seconds
    raise AssertionError("there is always a next number")


async def run_matrix(folder: Path, kills: list[Kill]) -> None:
    tried = await run_cells(folder, kills)
    print(table(tried.checked_s, tried.failed))
    print(summary(tried.checked_s, tried.failed))
    assert not tried.failed, "\n".join(f"{kill}: {why}" for kill, why in tried.failed.items())


def test_the_whole_matrix_has_every_part_at_every_point() -> None:
    whole = cells()
    assert {(k.point, k.part) for k in whole} == {(point, part) for point in POINTS for part in PARTS}
    assert set(SAMPLE) <= set(whole)
    assert {k.part for k in SAMPLE} == set(PARTS)
    assert {k.moment for k in whole if k.part == "controller"} == set(Moment)
    assert set(PROVOKED_BY) <= set(POINTS)


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
    await run_matrix(tmp_path, kills[CELLS])
