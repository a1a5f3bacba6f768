"""The cluster on a socket: many watches without loss or growth, who may come in, and what a bad client can do."""

import asyncio
import functools
import gc
import io
import ssl
import zlib
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from plexrl.waiting.cluster.access import new_access, write_kubeconfig
from plexrl.waiting.cluster.http import BODY_LIMIT_BYTES, CLOCK_PATH, ClusterServer
from plexrl.waiting.cluster.simulation import Simulation
from plexrl.waiting.latency.kubeconfig import read_credentials
from plexrl.waiting.latency.local import LocalLatency, simulate
from plexrl.waiting.latency.presets import PRESETS
from plexrl.waiting.latency.stages import StageEngine
from tests.support.kubernetes_cluster import deployment, job, pod

PODS = "/api/v1/namespaces/default/pods"
MERGE = "application/merge-patch+json"
FOR_EVER = aiohttp.ClientTimeout(total=None)


async def crc_of_watch(session: aiohttp.ClientSession, events: int) -> int:
    """Reads a watch until it has given so many events; returns a checksum over all of them."""
    crc = 0
    async with session.get(PODS, params={"watch": "true"}, timeout=FOR_EVER) as response:
        assert response.status == 200
        while events > 0:
            chunk = await response.content.readany()
            assert chunk, f"the watch ended with {events} events to come"
            crc = zlib.crc32(chunk, crc)
            events -= chunk.count(b"\n")
    assert events == 0
    return crc


async def settled(server: ClusterServer, watches: int) -> None:
    while server.watches != watches:  # noqa: ASYNC110 (the server learns of it in its own time)
        await asyncio.sleep(0.005)


@pytest.mark.timeout(300)
async def test_thousands_of_pods_and_a_hundred_watches() -> None:
    pods, watches = 2000, 100
    simulation = Simulation(seed=1)
    server = ClusterServer(simulation)
    connector = aiohttp.TCPConnector(limit=0)
    async with server.serving(), aiohttp.ClientSession(server.url, connector=connector) as session:
        tasks = [asyncio.create_task(crc_of_watch(session, 3 * pods)) for _ in range(watches)]
        await settled(server, watches)
        for number in range(pods):
            simulation.call("POST", PODS, pod(f"pod-{number}"))
            if number % 100 == 0:
                await asyncio.sleep(0)
        async with session.get(PODS, params={"limit": "1"}) as response:
            assert (await response.json())["metadata"]["remainingItemCount"] == pods - 1
        for number in range(pods):
            patch = {"metadata": {"labels": {"n": str(number)}}}
            simulation.call("PATCH", f"{PODS}/pod-{number}", patch, content_type=MERGE)
            if number % 100 == 0:
                await asyncio.sleep(0)
        async with session.delete(PODS) as response:
            assert len((await response.json())["items"]) == pods
        sums = await asyncio.gather(*tasks)
        assert len(set(sums)) == 1, "the watches have not seen the same"
        await settled(server, 0)


async def test_nothing_grows_with_what_comes_and_goes() -> None:
    simulation = Simulation(seed=1, history_limit=20)
    LocalLatency(simulation, StageEngine(PRESETS["image-pull"]))
    server = ClusterServer(simulation)
    deployments, jobs = "/apis/apps/v1/namespaces/default/deployments", "/apis/batch/v1/namespaces/default/jobs"

    async def round_of_work() -> int:
        simulation.call("POST", deployments, deployment(replicas=20))
        for number in range(10):
            annotations = {"latency.plexrl.dev/exit-code": str(number % 2)}
            simulation.call("POST", jobs, job(f"job-{number}", annotations, backoffLimit=0))
        await server.advance(300)
        simulation.call("DELETE", f"{deployments}/web")
        simulation.call("DELETE", jobs)
        async with session.get(PODS, params={"watch": "true", "timeoutSeconds": "0"}) as response:
            await response.read()
        await server.advance(2 * 3600)
        gc.collect()
        return len(gc.get_objects())

    async with server.serving(), aiohttp.ClientSession(server.url) as session:
        sizes = [await round_of_work() for _ in range(6)]
        assert server.watches == 0
    assert simulation.next_due_s() is None
    assert [len(simulation.call("GET", path)["items"]) for path in (PODS, deployments, jobs, "/api/v1/events")] == [
        0
    ] * 4
    # A leak of one dict for each of the thirty pods of a round would show.
    assert max(sizes[3:]) <= sizes[2] + 60, sizes


async def test_a_watch_that_does_not_read_holds_nobody_up_and_loses_its_place() -> None:
    simulation = Simulation(seed=1, history_limit=100)
    server = ClusterServer(simulation)
    async with server.serving(), aiohttp.ClientSession(server.url, read_bufsize=2**18) as session:
        slow = await session.get(PODS, params={"watch": "true"}, timeout=FOR_EVER)
        async with slow:
            note = {"metadata": {"annotations": {"note": "x" * 100_000}}}
            simulation.call("POST", PODS, pod())
            for number in range(400):
                note["metadata"]["annotations"]["number"] = str(number)
                simulation.call("PATCH", f"{PODS}/one", note, content_type=MERGE)
                if number % 20 == 0:
                    await asyncio.sleep(0)
            async with session.get(f"{PODS}/one") as response:
                assert (await response.json())["metadata"]["annotations"]["number"] == "399"
            last = b""
            async for line in slow.content:
                last = line
            assert b'"code":410' in last
            assert b'"ERROR"' in last


async def test_advancing_waits_for_watches_to_keep_up() -> None:
    """An hour of happenings far beyond the history, and a watch that reads sees them all."""
    simulation = Simulation(seed=1, history_limit=100)
    server = ClusterServer(simulation)
    path, seen = f"{PODS}/one", 0

    def change(number: int) -> None:
        patch = {"metadata": {"annotations": {"number": str(number)}}}
        simulation.call("PATCH", path, patch, content_type=MERGE)

    simulation.call("POST", PODS, pod())
    for number in range(2000):
        simulation.clock.call_at(number * 1.8, functools.partial(change, number))
    async with server.serving(), aiohttp.ClientSession(server.url) as session:
        query = {"watch": "true", "resourceVersion": str(simulation.store.revision)}
        async with session.get(PODS, params=query, timeout=FOR_EVER) as watch:
            advancing = asyncio.create_task(server.advance(3600))
            async for line in watch.content:
                assert f'"number":"{seen}"'.encode() in line
                seen += 1
                if seen == 2000:
                    break
            await advancing


async def test_a_token_is_asked_for_and_nobody_else_reads_it(tmp_path: Path) -> None:
    access = new_access("127.0.0.1")
    server = ClusterServer(simulate("calm"), token=access.token, tls=access.tls)
    async with server.serving():
        kubeconfig = write_kubeconfig(tmp_path / "access", server.url, access)
        assert [path.stat().st_mode & 0o777 for path in sorted(kubeconfig.parent.iterdir())] == [0o600] * 3
        assert kubeconfig.parent.stat().st_mode & 0o777 == 0o700
        credentials = read_credentials(kubeconfig)
        assert access.token not in kubeconfig.read_text()
        async with aiohttp.ClientSession(server.url) as session:
            assert credentials.tls is not None
            for token, status in ((credentials.token, 200), ("guess", 401), ("", 401)):
                headers = {"Authorization": f"Bearer {token}"} if token else {}
                async with session.get(PODS, headers=headers, ssl=credentials.tls) as response:
                    assert response.status == status
                    body = await response.json()
                    assert body["kind"] == ("PodList" if status == 200 else "Status")
            with pytest.raises(aiohttp.ClientConnectorCertificateError):
                await session.get(PODS)


@pytest.mark.parametrize(
    ("user", "cluster", "why"),
    [
        ({"exec": {"command": "aws", "apiVersion": "v1"}}, {}, "want a token or a client certificate"),
        ({"username": "a", "password": "b"}, {}, "want a token or a client certificate"),
        ({}, {"insecure-skip-tls-verify": True}, "insecure-skip-tls-verify is not offered"),
    ],
)
def test_kubeconfigs_that_cannot_be_used(tmp_path: Path, user: Any, cluster: Any, why: str) -> None:
    path = tmp_path / "kubeconfig"
    config = {
        "clusters": [{"name": "c", "cluster": {"server": "https://127.0.0.1:1", **cluster}}],
        "users": [{"name": "u", "user": user}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    path.write_text(yaml.safe_dump(config))
    with pytest.raises(ValueError, match=why):
        read_credentials(path)


async def test_the_clock_over_http() -> None:
    server = ClusterServer(simulate("calm"))
    async with server.serving(), aiohttp.ClientSession(server.url) as session:
        async with session.post(CLOCK_PATH, json={"advanceSeconds": 90.5}) as response:
            told = await response.json()
        assert (told["nowSeconds"], told["speed"]) == (90.5, 0.0)
        assert told["timestamp"].startswith("2026-01-01T00:01:30.5")
        for body in (
            "{}",
            "x",
            '{"advanceSeconds": -1}',
            '{"advanceSeconds": "NaN"}',
            '{"advanceSeconds": 1e999}',
            "[]",
        ):
            async with session.post(CLOCK_PATH, data=body) as response:
                assert response.status == 400
                assert (await response.json())["kind"] == "Status"
        async with session.get(CLOCK_PATH) as response:
            assert (await response.json())["nowSeconds"] == 90.5


async def test_bodies_have_a_limit() -> None:
    server = ClusterServer(Simulation())
    async with server.serving(), aiohttp.ClientSession(server.url) as session:
        async with session.post(PODS, data=io.BytesIO(b" " * (BODY_LIMIT_BYTES + 1))) as response:
            assert response.status == 413
            assert (await response.json())["reason"] == "RequestEntityTooLarge"
        async with session.post(PODS, json=pod()) as response:
            assert response.status == 201


def test_the_certificate_is_for_one_server() -> None:
    first, second = new_access("127.0.0.1"), new_access("127.0.0.1")
    assert first.token != second.token
    assert len(first.token) >= 32
    assert isinstance(first.tls, ssl.SSLContext)
    assert first.authority_pem != second.authority_pem
