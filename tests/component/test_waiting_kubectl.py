"""The real kubectl on the simulated cluster: what people type, with the outcome that a real cluster gives."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from plexrl.waiting.cluster.thread import ServerThread, serve_in_thread
from plexrl.waiting.latency.local import simulate
from tests.support.kubernetes_cluster import Kubectl, deployment


@pytest.fixture
def cluster() -> Iterator[ServerThread]:
    """A cluster whose time passes when a test says so."""
    with serve_in_thread(lambda: simulate("calm", seed=7)) as server:
        yield server


@pytest.fixture
def kubectl(cluster: ServerThread, tmp_path: Path) -> Kubectl:
    return Kubectl(cluster.url, tmp_path)


def manifest(directory: Path, item: Mapping[str, Any], name: str = "manifest.yaml") -> str:
    path = directory / name
    path.write_text(yaml.safe_dump(dict(item)))
    return str(path)


def test_create_get_describe_and_delete(cluster: ServerThread, kubectl: Kubectl) -> None:
    created = kubectl("create", "deployment", "web", "--image=nginx:1.27", "--replicas=2", "--port=80")
    assert created == "deployment.apps/web created\n"
    header, row = kubectl("get", "deployments").splitlines()
    assert header.split() == ["NAME", "READY", "UP-TO-DATE", "AVAILABLE", "AGE"]
    assert row.split() == ["web", "0/2", "2", "0", "0s"]
    cluster.advance(60)
    assert kubectl("get", "deployments").splitlines()[1].split() == ["web", "2/2", "2", "2", "60s"]
    pods = [line.split() for line in kubectl("get", "pods", "-o", "wide").splitlines()[1:]]
    assert [row[1:5] for row in pods] == [["1/1", "Running", "0", "60s"]] * 2
    assert all(row[6].startswith("node-") for row in pods)
    described = kubectl("describe", "deployment", "web")
    assert "2 desired | 2 updated | 2 total | 2 available | 0 unavailable" in described
    assert "Scaled up replica set" in described
    described = kubectl("describe", "pod", pods[0][0])
    assert [word for word in ("Scheduled", "Pulled", "Started") if word in described] == [
        "Scheduled",
        "Pulled",
        "Started",
    ]
    assert "deleted" in kubectl("delete", "deployment", "web")
    cluster.advance(60)
    assert "No resources found" in kubectl("get", "all")
    assert "not found" in kubectl("get", "deployment", "web", status=1)


def test_apply_is_validated_by_the_server(kubectl: Kubectl, tmp_path: Path) -> None:
    item = deployment()
    path = manifest(tmp_path, item)
    assert kubectl("apply", "-f", path) == "deployment.apps/web created\n"
    assert kubectl("apply", "-f", path) == "deployment.apps/web unchanged\n"
    item["spec"]["replicas"] = 4
    assert kubectl("apply", "-f", manifest(tmp_path, item)) == "deployment.apps/web configured\n"
    assert kubectl("get", "deployment", "web", "-o", "jsonpath={.spec.replicas}") == "4"
    item["spec"]["replica"] = 5
    refused = kubectl("apply", "-f", manifest(tmp_path, item), status=1)
    assert 'strict decoding error: unknown field "spec.replica"' in refused
    del item["spec"]["replica"]
    item["spec"]["replicas"] = -1
    refused = kubectl("apply", "-f", manifest(tmp_path, item), status=1)
    assert "spec.replicas: Invalid value: -1: must be greater than or equal to 0" in refused
    item["spec"]["replicas"] = "many"
    assert "spec.replicas: want an integer" in kubectl("apply", "-f", manifest(tmp_path, item), status=1)
    assert kubectl("get", "deployment", "web", "-o", "jsonpath={.spec.replicas}") == "4"


def test_server_side_apply_finds_conflicts_and_takes_back(kubectl: Kubectl, tmp_path: Path) -> None:
    item = deployment(replicas=2)
    item["metadata"]["labels"] = {"team": "red"}
    path = manifest(tmp_path, item)
    assert "serverside-applied" in kubectl("apply", "--server-side", "-f", path)
    kubectl("scale", "deployment/web", "--replicas=5")
    refused = kubectl("apply", "--server-side", "-f", path, status=1)
    assert 'conflict with "kubectl"' in refused
    assert ".spec.replicas" in refused
    kubectl("apply", "--server-side", "--force-conflicts", "-f", path)
    assert kubectl("get", "deployment", "web", "-o", "jsonpath={.spec.replicas}") == "2"
    # What its manager no longer applies goes away, what others own stays.
    kubectl("label", "deployment", "web", "owner=blue")
    del item["metadata"]["labels"]
    kubectl("apply", "--server-side", "-f", manifest(tmp_path, item))
    labels = json.loads(kubectl("get", "deployment", "web", "-o", "json"))["metadata"]["labels"]
    assert labels == {"owner": "blue"}


def test_rollout_status_tells_how_far_a_rollout_is(cluster: ServerThread, kubectl: Kubectl, tmp_path: Path) -> None:
    kubectl("apply", "-f", manifest(tmp_path, deployment(replicas=3)))
    cluster.advance(30)
    kubectl("rollout", "restart", "deployment/web")
    watching = kubectl.start("rollout", "status", "deployment/web")
    assert watching.stdout is not None
    lines = [watching.stdout.readline()]
    assert lines[0].startswith('Waiting for deployment "web" rollout to finish: 1 out of 3 new replicas')
    while watching.poll() is None:
        cluster.advance(0.5)
    lines += watching.communicate()[0].splitlines()
    assert any("1 old replicas are pending termination" in line for line in lines)
    assert lines[-1] == 'deployment "web" successfully rolled out'


def test_watch_shows_every_state_in_order(cluster: ServerThread, kubectl: Kubectl) -> None:
    watching = kubectl.start("get", "pods", "--watch", "--no-headers")
    try:
        while cluster.call(lambda server: server.watches) == 0:
            assert watching.poll() is None
        kubectl("run", "one", "--image=nginx:1.27")
        cluster.advance(10)
        kubectl("delete", "pod", "one", "--wait=false")
        cluster.advance(40)
        assert watching.stdout is not None
        states: list[tuple[str, ...]] = []
        while len(states) < 7 and (line := watching.stdout.readline()):
            states.append(tuple(line.split()[1:3]))
    finally:
        watching.terminate()
        watching.communicate()
    assert states == [
        ("0/1", "Pending"),
        ("0/1", "Pending"),
        ("0/1", "Pending"),
        ("0/1", "ContainerCreating"),
        ("0/1", "Running"),
        ("1/1", "Running"),
        ("1/1", "Terminating"),
    ]


def test_explain_and_discovery(kubectl: Kubectl) -> None:
    explained = kubectl("explain", "deployment.spec.strategy.rollingUpdate")
    assert "maxSurge" in explained
    assert "KIND:       Deployment" in explained
    assert "does not exist" in kubectl("explain", "deployment.spec.strategie", status=1)
    resources = kubectl("api-resources", "--no-headers")
    assert {line.split()[0] for line in resources.splitlines()} >= {"pods", "deployments", "jobs", "nodes", "events"}
    assert "Server Version: v1." in kubectl("version")


def test_namespaces_come_and_go_with_what_is_in_them(cluster: ServerThread, kubectl: Kubectl, tmp_path: Path) -> None:
    kubectl("create", "namespace", "lab")
    item = deployment()
    item["metadata"]["namespace"] = "lab"
    kubectl("create", "-f", manifest(tmp_path, item))
    cluster.advance(10)
    kubectl("delete", "namespace", "lab", "--wait=false")
    assert kubectl("get", "namespace", "lab", "--no-headers").split()[1] == "Terminating"
    assert "being terminated" in kubectl("create", "-f", manifest(tmp_path, item), status=1)
    cluster.advance(60)
    assert "NotFound" in kubectl("get", "namespace", "lab", status=1)
    assert "No resources found" in kubectl("get", "pods", "--all-namespaces")


def test_nodes_are_cordoned_and_drained(cluster: ServerThread, kubectl: Kubectl, tmp_path: Path) -> None:
    kubectl("create", "-f", manifest(tmp_path, deployment(replicas=20)))
    cluster.advance(30)
    nodes = kubectl("get", "pods", "-o", "jsonpath={.items[*].spec.nodeName}").split()
    assert len(set(nodes)) == 10
    kubectl("drain", "node-1", "--timeout=1s", "--force", status=1)
    assert "SchedulingDisabled" in kubectl("get", "node", "node-1")
    cluster.advance(60)
    nodes = kubectl("get", "pods", "-o", "jsonpath={.items[*].spec.nodeName}").split()
    assert len(nodes) == 20
    assert "node-1" not in nodes
    assert "drained" in kubectl("drain", "node-1")
