"""The Python clients of Kubernetes on the simulated cluster, unmodified."""

import contextlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightkube
import pytest
import yaml
from kubernetes import client as official
from kubernetes import watch as official_watch
from lightkube.config.kubeconfig import KubeConfig
from lightkube.core.exceptions import ApiError
from lightkube.models.autoscaling_v1 import ScaleSpec
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.apps_v1 import Deployment
from lightkube.resources.core_v1 import Node, PersistentVolumeClaim, Pod

from plexrl.waiting.cluster.thread import ServerThread, serve_in_thread
from plexrl.waiting.latency.local import simulate
from tests.support.kubernetes_cluster import deployment, pod

ROOT = Path(__file__).parents[2]


@pytest.fixture
def cluster() -> Iterator[ServerThread]:
    with serve_in_thread(lambda: simulate("calm", seed=7)) as server:
        yield server


@pytest.fixture
def kubeconfig(cluster: ServerThread, tmp_path: Path) -> Path:
    """Names the server, without a user."""
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": cluster.url}}],
        "users": [{"name": "u", "user": {}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u", "namespace": "default"}}],
        "current-context": "x",
    }
    path = tmp_path / "kubeconfig"
    path.write_text(yaml.safe_dump(config))
    return path


# --- kubernetes, the official client ---


@pytest.fixture
def official_client(cluster: ServerThread) -> Iterator[official.ApiClient]:
    with official.ApiClient(official.Configuration(host=cluster.url)) as api_client:
        yield api_client


def test_official_client_creates_scales_patches_and_deletes(
    cluster: ServerThread, official_client: official.ApiClient
) -> None:
    apps: Any = official.AppsV1Api(official_client)
    core: Any = official.CoreV1Api(official_client)
    created = apps.create_namespaced_deployment("default", deployment(replicas=2))
    assert created.status.ready_replicas is None
    cluster.advance(30)
    found = apps.read_namespaced_deployment_status("web", "default")
    assert (found.status.ready_replicas, found.status.observed_generation) == (2, 1)
    scale = apps.patch_namespaced_deployment_scale("web", "default", {"spec": {"replicas": 4}})
    assert (scale.spec.replicas, scale.status.selector) == (4, "app=web")
    cluster.advance(30)
    pods = core.list_namespaced_pod("default", label_selector="app=web", field_selector="status.phase=Running")
    assert len(pods.items) == 4
    apps.patch_namespaced_deployment("web", "default", {"spec": {"template": {"metadata": {"labels": {"v": "2"}}}}})
    cluster.advance(60)
    pods = core.list_namespaced_pod("default", label_selector="v in (2),app")
    assert len(pods.items) == 4
    apps.delete_namespaced_deployment("web", "default")
    cluster.advance(60)
    assert core.list_namespaced_pod("default").items == []
    with pytest.raises(official.ApiException) as refused:
        apps.read_namespaced_deployment("web", "default")
    assert refused.value.status == 404


def test_official_client_pages_through_a_list_of_one_revision(
    cluster: ServerThread, official_client: official.ApiClient
) -> None:
    core: Any = official.CoreV1Api(official_client)
    for number in range(7):
        core.create_namespaced_pod("default", pod(f"pod-{number}"))
    page = core.list_namespaced_pod("default", limit=3)
    assert page.metadata.remaining_item_count == 4
    core.delete_namespaced_pod("pod-6", "default", grace_period_seconds=0)
    core.create_namespaced_pod("default", pod("pod-5b"))
    names = [item.metadata.name for item in page.items]
    while page.metadata._continue:
        page = core.list_namespaced_pod("default", limit=3, _continue=page.metadata._continue)
        names += [item.metadata.name for item in page.items]
    assert names == [f"pod-{number}" for number in range(7)]


def test_official_client_watches(cluster: ServerThread, official_client: official.ApiClient) -> None:
    core: Any = official.CoreV1Api(official_client)
    seen: list[tuple[str, str]] = []

    def follow() -> None:
        watch: Any = official_watch
        with contextlib.closing(
            watch.Watch().stream(core.list_namespaced_pod, "default", timeout_seconds=60)
        ) as stream:
            for event in stream:
                seen.append((event["type"], event["object"].status.phase))
                if event["type"] == "DELETED":
                    return

    thread = threading.Thread(target=follow)
    thread.start()
    while cluster.call(lambda server: server.watches) == 0:
        assert thread.is_alive()
    core.create_namespaced_pod("default", pod())
    cluster.advance(10)
    core.delete_namespaced_pod("one", "default")
    cluster.advance(60)
    thread.join(30)
    assert [kind for kind, _ in seen] == ["ADDED", *["MODIFIED"] * (len(seen) - 2), "DELETED"]
    assert list(dict.fromkeys(phase for _, phase in seen)) == ["Pending", "Running"]


# --- lightkube ---


@pytest.fixture
def light(kubeconfig: Path) -> Iterator[Any]:
    with lightkube.Client(config=KubeConfig.from_file(kubeconfig), field_manager="tests") as found:
        yield found


def test_lightkube_applies_scales_waits_and_deletes(cluster: ServerThread, light: Any) -> None:
    item = _typed(Deployment, deployment(replicas=2))
    light.apply(item)
    cluster.advance(30)
    light.wait(Deployment, "web", for_conditions=["Available"])
    scale = Deployment.Scale(metadata=ObjectMeta(name="web", namespace="default"), spec=ScaleSpec(replicas=3))
    light.replace(scale)
    with pytest.raises(ApiError) as refused:
        light.apply(item)
    assert refused.value.status.code == 409
    light.apply(item, force=True)
    cluster.advance(60)
    assert len(list(light.list(Pod, labels={"app": "web"}))) == 2
    light.delete(Deployment, "web")
    cluster.advance(60)
    assert list(light.list(Pod)) == []


def test_lightkube_claims_a_volume(cluster: ServerThread, light: Any) -> None:
    claim: dict[str, Any] = {
        "metadata": {"name": "data", "namespace": "default"},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}},
    }
    light.create(_typed(PersistentVolumeClaim, claim))
    volumes = [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}]
    light.create(_typed(Pod, pod(volumes=volumes)))
    cluster.advance(5)
    waiting = light.get(Pod, "one")
    assert waiting.status is not None
    assert waiting.status.phase == "Pending"
    cluster.advance(600)
    bound = light.get(PersistentVolumeClaim, "data")
    assert bound.status is not None
    assert (bound.status.phase, bound.status.capacity) == ("Bound", {"storage": "1Gi"})
    running = light.get(Pod, "one")
    assert running.status is not None
    assert running.status.phase == "Running"


def test_lightkube_sees_nodes(light: Any) -> None:
    nodes = list(light.list(Node))
    assert len(nodes) == 10
    assert all(node.status is not None and node.status.capacity is not None for node in nodes)


def _typed(model: Any, item: dict[str, Any]) -> Any:
    return model.from_dict(item)


# --- kr8s ---


def test_kr8s_works_and_watches(cluster: ServerThread, kubeconfig: Path) -> None:
    program = [sys.executable, "-m", "tests.support.kr8s_session", cluster.url, str(kubeconfig)]
    done = subprocess.run(program, capture_output=True, text=True, cwd=ROOT, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
