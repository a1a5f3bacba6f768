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
from tests.support import fault_guest, fault_scenes
from tests.support.fault_points import FaultDatabase
from tests.support.fault_rig import RECOVERY_LIMIT_S, ROOT, Rig
from tests.support.fault_rollouts import TOGETHER
from tests.support.fault_scenes import CONVERSED, GUEST, PULLED, TRAINED, ClientProcess


async def check(made: Rig) -> None:
    """The promises, from the histories that the clients heard and from the rows and transitions in the database."""
    made.stop_clients()
    with plexrl.connect(made.local.endpoint, token=made.local.token) as cluster:
        await asyncio.to_thread(end_guest, cluster, len(made.histories[GUEST].lines()))
        for client in made.scene.clients:
            match client:
                case fault_scenes.TRAINED:
                    await check_trained(made, cluster)
                case fault_scenes.CONVERSED:
                    await check_rollouts(made, cluster)
                case fault_scenes.PULLED:
                    await check_pulls(made, cluster)
    await check_guest(made)
    await check_nothing_is_left(made)
    for client, key in ((TRAINED, ("model", "step")), (CONVERSED, ("round",)), (PULLED, ("round",))):
        if client in made.scene.clients:
            await check_as_alone(made, client, key)


async def check_trained(made: Rig, cluster: plexrl.Cluster) -> None:
    """The promises to the client that trains two models."""
    job = await asyncio.to_thread(cluster.attach, TRAINED.job)
    for future in job.unacknowledged:
        await asyncio.to_thread(future.result, RECOVERY_LIMIT_S)
    history = made.whole(TRAINED)
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


async def check_pulls(made: Rig, cluster: plexrl.Cluster) -> None:
    """The promises to a client that samples on another worker than it trains on."""
    job = await asyncio.to_thread(cluster.attach, PULLED.job)
    for future in job.unacknowledged:
        await asyncio.to_thread(future.exception, RECOVERY_LIMIT_S)
    calls = await calls_of(made.database, job.job_id)
    check_numbers([call for call in calls if call["sequence"]])
    ended = {
        name: {(call["state"], call["reason"]) for call in calls if call["model_id"] == model.model_id}
        for name, model in job.models.items()
    }
    assert ended["policy"] == {("SUCCEEDED", "NONE")}, "what it is asked for depends on no other worker"
    assert ended["rollouts"] <= ENDS_OF_ROLLOUTS, (
        "a version that is gone, a state that is lost: nothing else may end one"
    )
    history = made.whole(PULLED)
    assert [line["optim"] for line in history] == [line["round"] + 1 for line in history], "a step applied once"
    for line in history:
        assert line["source"] == line["sampled"] >= line["version"], "what is pulled is the newest version"
        assert line["elsewhere"] == line["pulled"], "what was pulled is what is sampled"
        assert line["tokens"] == line["at_source"], "the weights elsewhere are those of the version, and of no other"
        sampled = [line["pulled"], line["tokens"]]
        assert line["again"] == sampled, "the rollouts stay what they are, whoever died meanwhile"
        assert line.get("later", sampled) == sampled or line["later"][0] > line["pulled"], "so they do when left behind"
    for name in ("version", "source", "pulled"):
        assert [line[name] for line in history] == sorted({line[name] for line in history}), f"{name}: versions go up"
    await asyncio.to_thread(job.finish)


ENDS_OF_ROLLOUTS = {
    ("SUCCEEDED", "NONE"),
    ("CANCELLED", "VERSION_REPLACED"),
    ("FAILED", "VERSION_GONE"),
    ("FAILED", "STATE_LOST"),
    ("FAILED", "PREDECESSOR_FAILED"),
    ("CANCELLED", "STATE_LOST"),
}


async def check_as_alone(made: Rig, client: ClientProcess, key: tuple[str, ...]) -> None:
    """What the client heard is what it hears when nobody is beside it and nothing dies."""
    heard = made.whole(client)
    number = max(line[key[-1]] for line in heard) + 1
    undisturbed = {
        tuple(line[name] for name in key): line
        for line in await asyncio.to_thread(alone, made, client.module, number, *ALONE.get(client, ()))
    }
    for line in heard:
        expected = undisturbed[tuple(line[name] for name in key)]
        told = {name: line[name] for name in expected}
        assert told == expected, "tokens and state are those of calls that nobody disturbed"


ALONE = {CONVERSED: ("alone",), PULLED: ("alone",)}
"""Of clients that then ask for less: without sessions, without another worker."""


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
    job = await asyncio.to_thread(cluster.attach, CONVERSED.job)
    for future in job.unacknowledged:
        await asyncio.to_thread(future.result, RECOVERY_LIMIT_S)
    calls = await calls_of(made.database, job.job_id)
    assert {call["state"] for call in calls} == {"SUCCEEDED"}
    check_numbers([call for call in calls if call["sequence"]])
    heard = made.whole(CONVERSED)
    assert [line["optim"] for line in heard] == [line["round"] + 1 for line in heard], "a step applied once"
    await check_sessions(made, job.job_id)
    session = await asyncio.to_thread(job.models["policy"].session, max_concurrent=TOGETHER)
    endless = [
        session.generate.submit([[1, 2]], n=fault_guest.ENDLESS, max_tokens=4, seed=seed)
        for seed in range(2 * TOGETHER)
    ]
    async with asyncio.timeout(RECOVERY_LIMIT_S):
        while [call.state for call in endless].count("RUNNING") < TOGETHER:  # noqa: ASYNC110
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
    rounds = made.whole(CONVERSED)
    told = {line["session"]: line["ended"] for line in rounds}
    assert len(told) == len(rounds), "no session is opened for two"
    told |= {line["expired"]: "EXPIRED" for line in made.histories[CONVERSED].lines() if "expired" in line}
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
    """All jobs are finished: the workers have nothing of them, and nothing runs there."""
    newest = "SELECT DISTINCT ON (name) address FROM workers ORDER BY name, incarnation DESC"
    workers = await made.database.connection.fetch(newest)
    assert len(workers) == made.scene.workers
    for worker in workers:
        await check_worker_has_nothing(made, worker["address"])


async def check_worker_has_nothing(made: Rig, address: str) -> None:
    """One of them."""
    token = made.local.folder.worker_token_file.read_text().strip()
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
    whole = [line["tokens"] for line in made.histories[GUEST].lines() if line["whole"]]
    assert all(tokens == whole[0] for tokens in whole), "the same seeds make the same tokens, whoever died meanwhile"


LEFT_OF_GUEST = "SELECT count(*) FROM jobs WHERE name LIKE 'guest-%' AND state IN ('ACTIVE', 'FINISHING')"


async def calls_of(database: FaultDatabase, job_id: str) -> list[Any]:
    """A job's calls. Each ended once, in its present attempt; no term or attempt goes backwards."""
    terminal = [state.name for state in TERMINAL]
    calls: list[Any] = await database.connection.fetch(
        "SELECT call_id, model_id, sequence, state, reason, attempt FROM calls WHERE job_id = $1", job_id
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
