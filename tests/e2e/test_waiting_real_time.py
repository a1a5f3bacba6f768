"""The simulated cluster in real time, as people use it: the command, kubectl that waits, latencies over HTTP."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import yaml

from plexrl.cli.main import main
from plexrl.waiting.cluster.http import ClusterServer, RealTime
from plexrl.waiting.cluster.simulation import Simulation
from plexrl.waiting.cluster.thread import serve_in_thread
from plexrl.waiting.latency.kubeconfig import Credentials
from plexrl.waiting.latency.local import LocalLatency, simulate
from plexrl.waiting.latency.presets import PRESETS, NodePool, Preset
from plexrl.waiting.latency.remote import RemoteLatency
from plexrl.waiting.latency.stages import Role, StageEngine
from plexrl.waiting.laws import Gamma
from tests.support.kubernetes_cluster import KUBECTL, Kubectl, deployment, job, pod

PODS = "/api/v1/namespaces/default/pods"
DEPLOYMENTS = "/apis/apps/v1/namespaces/default/deployments"


@pytest.fixture
def quick(tmp_path: Path) -> Iterator[Kubectl]:
    """kubectl on a cluster whose time passes by itself, fifty times as fast as on the wall."""
    with serve_in_thread(lambda: simulate("calm", seed=7), real_time=RealTime(speed=50)) as server:
        yield Kubectl(server.url, tmp_path)


def manifest(directory: Path, item: dict[str, Any]) -> str:
    path = directory / "manifest.yaml"
    path.write_text(yaml.safe_dump(item))
    return str(path)


def test_rollouts_are_watched_to_their_end(quick: Kubectl, tmp_path: Path) -> None:
    quick("apply", "-f", manifest(tmp_path, deployment(replicas=3)))
    assert 'deployment "web" successfully rolled out' in quick("rollout", "status", "deployment/web")
    assert quick("scale", "deployment/web", "--replicas=6") == "deployment.apps/web scaled\n"
    assert 'deployment "web" successfully rolled out' in quick("rollout", "status", "deployment/web")
    before = set(quick("get", "pods", "-o", "name").split())
    assert len(before) == 6
    assert quick("rollout", "restart", "deployment/web") == "deployment.apps/web restarted\n"
    assert 'deployment "web" successfully rolled out' in quick("rollout", "status", "deployment/web")
    running = set(quick("get", "pods", "-o", "name", "--field-selector=status.phase=Running").split())
    assert len(running - before) == 6
    quick("set", "image", "deployment/web", "main=nginx:1.28")
    quick("rollout", "status", "deployment/web")
    assert quick("get", "deployment", "web", "-o", "jsonpath={.spec.template.spec.containers[0].image}") == "nginx:1.28"
    history = quick("rollout", "history", "deployment/web").splitlines()
    assert [line.split()[0] for line in history if line[:1].isdigit()] == ["1", "2", "3"]
    quick("rollout", "undo", "deployment/web")
    quick("rollout", "status", "deployment/web")
    assert quick("get", "deployment", "web", "-o", "jsonpath={.spec.template.spec.containers[0].image}") == "nginx:1.27"


def test_wait_for_conditions_and_for_deletion(quick: Kubectl, tmp_path: Path) -> None:
    quick("apply", "-f", manifest(tmp_path, pod()))
    assert quick("wait", "pod/one", "--for=condition=Ready", "--timeout=60s") == "pod/one condition met\n"
    quick("apply", "-f", manifest(tmp_path, job()))
    assert quick("wait", "job/sum", "--for=condition=complete", "--timeout=60s") == "job.batch/sum condition met\n"
    assert quick("get", "jobs").splitlines()[1].split()[:3] == ["sum", "Complete", "1/1"]
    # The deletion of a pod takes its time, and kubectl waits for it.
    assert 'pod "one" deleted' in quick("delete", "pod", "one")
    assert "not found" in quick("get", "pod", "one", status=1)
    quick("wait", "pod/two", "--for=condition=Ready", "--timeout=1s", status=1)


async def test_real_time_gives_the_history_of_virtual_time() -> None:
    """Latencies are the same to the microsecond, and what is due happens no earlier and at most late by the machine."""
    speed, tick_s = 20.0, 0.02
    virtual, real = list[tuple[str, float]](), list[tuple[str, float]]()
    late: list[float] = []

    def ready_after(simulation: Simulation, found: list[tuple[str, float]]) -> None:
        began: dict[str, float] = {}

        def note(kind: Any, change: Any) -> None:
            if kind.kind != "Pod":
                return
            name = change.item["metadata"]["name"]
            began.setdefault(name, simulation.now_s)
            conditions = change.item["status"].get("conditions", [])
            ready = any(entry["type"] == "Ready" and entry["status"] == "True" for entry in conditions)
            if ready and name not in {known for known, _ in found}:
                found.append((name, simulation.now_s - began[name]))

        simulation.store.listen(note)

    names = [f"pod-{number}" for number in range(10)]
    simulation = simulate("near-saturation", seed=3)
    ready_after(simulation, virtual)
    for name in names:
        simulation.call("POST", PODS, pod(name))
    simulation.advance(60)

    simulation = simulate("near-saturation", seed=3)
    ready_after(simulation, real)
    server = ClusterServer(simulation, real_time=RealTime(speed, tick_s))
    began_s = time.monotonic()
    async with server.serving(), aiohttp.ClientSession(server.url) as session:
        for name in names:
            async with session.post(PODS, json=pod(name)) as response:
                assert response.status == 201
        # A busy machine is late now and then, but not for ever.
        while len(real) < len(names) or (min(late) > 3 * tick_s * speed and len(late) < 1000):
            await asyncio.sleep(tick_s)
            late.append((time.monotonic() - began_s) * speed - simulation.now_s)
    assert dict(real) == pytest.approx(dict(virtual), abs=1e-6)
    # The clock never runs ahead of the wall, and is behind by no more than a tick whenever the machine has time.
    assert min(late) >= 0
    assert min(late) <= 3 * tick_s * speed


async def test_latencies_come_over_http_as_they_do_in_process() -> None:
    """The same engine, once as a client in the process and once on a socket: the same pods end in the same states."""
    preset = Preset("quick", "", start=Gamma.of_mean(0.3, 4), run=Gamma.of_mean(0.5, 4), pool=NodePool(3, 3))
    simulation = Simulation(seed=1)
    server = ClusterServer(simulation, real_time=RealTime(speed=1))
    async with server.serving(), aiohttp.ClientSession(server.url) as session:
        latency = RemoteLatency(Credentials(server.url, "", None), StageEngine(preset, seed=1))
        working = asyncio.create_task(latency.run())
        async with session.post(DEPLOYMENTS, json=deployment(replicas=5)) as response:
            assert response.status == 201
        async with session.post("/apis/batch/v1/namespaces/default/jobs", json=job()) as response:
            assert response.status == 201

        async def until(path: str, test: Any) -> Any:
            for _ in range(1200):
                async with session.get(path) as response:
                    item = msgspec.json.decode(await response.read())
                if test(item):
                    return item
                assert not working.done(), working.exception()
                await asyncio.sleep(0.05)
            raise TimeoutError(path)

        await until(f"{DEPLOYMENTS}/web", lambda item: item["status"].get("availableReplicas") == 5)
        await until("/apis/batch/v1/namespaces/default/jobs/sum", lambda item: item["status"].get("succeeded") == 1)
        async with session.delete(f"{DEPLOYMENTS}/web") as response:
            assert response.status == 200
        await until(PODS, lambda found: len(found["items"]) == 1)
        working.cancel()
        with pytest.raises(asyncio.CancelledError):
            await working


async def test_simulated_nodes_leave_other_nodes_alone() -> None:
    """On a cluster with a scheduler and nodes of its own, only pods on the added nodes are touched."""
    simulation = Simulation(seed=1)
    # Everything of the cluster takes no time, but its nodes have no agents: pods stay as they were placed.
    schedule_only = Preset("cluster", "", None, Gamma.of_mean(1e6, 4), *(None,) * 6, pool=NodePool(1, 1, name="own"))
    LocalLatency(simulation, StageEngine(schedule_only))
    simulation.settle()
    server = ClusterServer(simulation, real_time=RealTime(speed=1))
    path = "/api/v1/nodes/own-1"
    simulation.call("PATCH", path, {"metadata": {"annotations": None}}, content_type="application/merge-patch+json")
    added = Preset("added", "", *(None,) * 8, pool=NodePool(2, 2, name="simulated"))
    async with server.serving(), aiohttp.ClientSession(server.url) as session:
        engine = StageEngine(added, role=Role.NODES)
        working = asyncio.create_task(RemoteLatency(Credentials(server.url, "", None), engine).run())
        phases: dict[str, str] = {}
        async with session.post(DEPLOYMENTS, json=deployment(replicas=9)) as response:
            assert response.status == 201
        for _ in range(600):
            items = simulation.call("GET", PODS)["items"]
            phases = {item["spec"].get("nodeName", ""): item["status"]["phase"] for item in items}
            if {"own-1", "simulated-1", "simulated-2"} <= phases.keys() and phases["simulated-2"] == "Running":
                break
            assert not working.done(), working.exception()
            if len(phases) < 3:
                # The scheduler has placed all on its own node before the others came: let it choose again.
                simulation.call("DELETE", PODS, query={"gracePeriodSeconds": "0"})
            await asyncio.sleep(0.05)
        working.cancel()
        with pytest.raises(asyncio.CancelledError):
            await working
    assert phases == {"own-1": "Pending", "simulated-1": "Running", "simulated-2": "Running"}


def test_the_command_serves_until_it_is_stopped(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "plexrl.cli.main",
        "waiting",
        "serve",
        "--speed",
        "20",
        "--dir",
        str(tmp_path / "d"),
    ]
    with contextlib.ExitStack() as stack:
        process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path))
        stack.callback(process.terminate)
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(5)]
        assert "serves a simulated cluster: preset calm, seed 0" in lines[0]
        kubeconfig = lines[2].removeprefix("kubeconfig: ").strip()
        # The line that is printed is one that works.
        typed = lines[3].removeprefix("try: ").split()
        assert typed[0] == f"KUBECONFIG={kubeconfig}"
        environment = {"KUBECONFIG": kubeconfig, "HOME": str(tmp_path), "PATH": os.environ["PATH"]}

        def kubectl(*arguments: str) -> str:
            done = subprocess.run(
                [KUBECTL, *arguments], env=environment, capture_output=True, text=True, timeout=120, check=True
            )
            return done.stdout

        kubectl(*typed[2:])
        assert "successfully rolled out" in kubectl("rollout", "status", "deployment/web")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["serve", "--preset", "none"], "preset: want one of instant, calm"),
        (["serve", "--speed", "-1"], "speed: want a number above 0"),
        (["latency", "--kubeconfig", "/none"], "/none"),
    ],
)
def test_what_cannot_be_served_is_said(arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["waiting", *arguments]) == 1
    told = capsys.readouterr().err
    assert told.startswith("plexrl: ")
    assert why in told


def test_presets_are_described() -> None:
    assert all(preset.name == name and preset.description for name, preset in PRESETS.items())
