"""What must hold after the kills: from the histories that the clients of a fault rig heard, and from its database.

Knows not which kills there were. Everything is checked at the end, with the clients gone, and ends their jobs.
"""

import asyncio
import json
import subprocess
import sys
from typing import Any

import grpc

import plexrl
from plexrl.v1 import worker_pb2, worker_pb2_grpc
from plexrl_controller.lifecycle.calls import TERMINAL
from tests.support import fault_guest
from tests.support.fault_points import FaultDatabase
from tests.support.fault_rig import JOB, RECOVERY_LIMIT_S, ROLLOUTS_JOB, ROOT, Rig
from tests.support.fault_rollouts import TOGETHER


async def check(made: Rig) -> None:
    """The promises, from the histories that the clients heard and from the rows and transitions in the database."""
    made.stop_clients()
    with plexrl.connect(made.local.endpoint, token=made.local.token) as cluster:
        await asyncio.to_thread(end_guest, cluster, len(made.visits.lines()))
        job = await asyncio.to_thread(cluster.attach, JOB)
        for future in job.unacknowledged:
            await asyncio.to_thread(future.result, RECOVERY_LIMIT_S)
        history = made.trained.lines()
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
        await check_rollouts(made, cluster)
    await check_guest(made)
    await check_nothing_is_left(made)
    steps = max(line["step"] for line in history) + 1
    undisturbed = await asyncio.to_thread(alone, made, "fault_client", steps)
    by_step = {(line["model"], line["step"]): line for line in undisturbed}
    for line in history:
        assert line == by_step[line["model"], line["step"]], "the state is that of an undisturbed run"
    rounds = made.whole_rounds()
    by_round = {
        line["round"]: line
        for line in await asyncio.to_thread(
            alone, made, "fault_rollouts", max(line["round"] for line in rounds) + 1, "alone"
        )
    }
    for line in rounds:
        told = {name: line[name] for name in by_round[line["round"]]}
        assert told == by_round[line["round"]], "tokens and state are those of calls that nobody was beside"


def end_guest(cluster: plexrl.Cluster, number: int) -> None:
    """The visit that was cut off is over."""
    try:
        job = cluster.attach(f"{fault_guest.JOB}-{number}")
    except plexrl.errors.NotFound:
        return
    job.finish()


def alone(made: Rig, client: str, number: int, *more: str) -> list[dict[str, Any]]:
    """The same steps or rounds, with nobody in the way."""
    history = made.folder / f"{client}-alone.jsonl"
    arguments = (
        made.local.endpoint,
        str(made.local.folder.token_file),
        f"{client}-alone",
        str(history),
        str(number),
        "0",
    )
    subprocess.run([sys.executable, "-m", f"tests.support.{client}", *arguments, *more], cwd=ROOT, check=True)
    return [json.loads(line) for line in history.read_text().splitlines()]


async def check_rollouts(made: Rig, cluster: plexrl.Cluster) -> None:
    """The promises to a client with sessions. Its job then ends in the middle of one."""
    job = await asyncio.to_thread(cluster.attach, ROLLOUTS_JOB)
    for future in job.unacknowledged:
        await asyncio.to_thread(future.result, RECOVERY_LIMIT_S)
    calls = await calls_of(made.database, job.job_id)
    assert {call["state"] for call in calls} == {"SUCCEEDED"}
    check_numbers([call for call in calls if call["sequence"]])
    heard = made.whole_rounds()
    assert [line["optim"] for line in heard] == [line["round"] + 1 for line in heard], "a step applied once"
    await check_sessions(made, job.job_id)
    session = await asyncio.to_thread(job.models["policy"].session, max_concurrent=TOGETHER)
    for seed in range(2 * TOGETHER):
        session.generate.submit([[1, 2]], n=fault_guest.ENDLESS, max_tokens=4, seed=seed)
    async with asyncio.timeout(RECOVERY_LIMIT_S):
        while session.state != "GRANTED":  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await asyncio.to_thread(job.finish)
    connection = made.database.connection
    async with asyncio.timeout(RECOVERY_LIMIT_S):
        while await connection.fetchval("SELECT state FROM jobs WHERE job_id = $1", job.job_id) == "FINISHING":  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    assert {call["state"] for call in await calls_of(made.database, job.job_id)} == {"SUCCEEDED", "CANCELLED"}
    left = await connection.fetchval("SELECT count(*) FROM sessions WHERE job_id = $1 AND state = 'OPEN'", job.job_id)
    assert left == 0, "the job's end is that of its sessions"


async def check_sessions(made: Rig, job_id: str) -> None:
    """Each session is one, ended once, as its client was told, and never had more calls with the engine than it may."""
    connection = made.database.connection
    rows = await connection.fetch("SELECT session_id, state FROM sessions WHERE job_id = $1", job_id)
    states = {row["session_id"]: row["state"] for row in rows}
    rounds = made.whole_rounds()
    told = {line["session"]: line["ended"] for line in rounds}
    assert len(told) == len(rounds), "no session is opened for two"
    told |= {line["expired"]: "EXPIRED" for line in made.rounds.lines() if "expired" in line}
    assert {session_id: states[session_id] for session_id in told} == told
    unknown = set(states) - set(told)
    assert len(unknown) <= 2 * made.lives, "of those that nobody was told of, each life of the client left two at most"
    events = await connection.fetch("SELECT record_id, event FROM events WHERE machine = 'session' ORDER BY event_id")
    for session_id, state in states.items():
        mine = [event["event"] for event in events if event["record_id"] == session_id]
        assert mine == {"OPEN": ["CREATE"], "CLOSED": ["CREATE", "CLOSE"], "EXPIRED": ["CREATE", "EXPIRE"]}[state]
    most = 0
    in_flight: dict[str, set[str]] = {}
    for event in await connection.fetch(EVENTS_IN_SESSIONS, job_id):
        here = in_flight.setdefault(event["session_id"], set())
        (here.add if event["target"] in ("DISPATCHED", "RUNNING") else here.discard)(event["record_id"])
        most = max(most, len(here))
    assert most == TOGETHER, "as many run together as may, and no more"


EVENTS_IN_SESSIONS = (
    "SELECT record_id, session_id, target FROM events JOIN calls ON call_id = record_id"
    " WHERE machine = 'call' AND job_id = $1 AND session_id IS NOT NULL ORDER BY event_id"
)


async def check_nothing_is_left(made: Rig) -> None:
    """All jobs are finished: the worker has nothing of them, and nothing runs on it."""
    token = made.local.folder.worker_token_file.read_text().strip()
    address = await made.database.connection.fetchval("SELECT address FROM workers ORDER BY incarnation DESC LIMIT 1")
    async with asyncio.timeout(RECOVERY_LIMIT_S), grpc.aio.insecure_channel(address) as channel:
        worker = worker_pb2_grpc.WorkerServiceStub(channel)
        while True:
            status = await worker.GetStatus(
                worker_pb2.GetStatusRequest(), metadata=(("authorization", f"Bearer {token}"),), wait_for_ready=True
            )
            if not status.deployments and not status.attempts and not status.device_used_bytes:
                return
            await asyncio.sleep(0.05)


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
