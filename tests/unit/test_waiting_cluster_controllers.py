"""The controllers under random histories: rollouts keep their bounds, everything converges, nothing is left over."""

import math
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from plexrl.waiting.cluster.api.errors import ApiError
from plexrl.waiting.cluster.api.requests import ApiRequest
from plexrl.waiting.cluster.api.watch import Watch
from plexrl.waiting.cluster.simulation import Simulation
from plexrl.waiting.latency.local import simulate
from tests.support.kubernetes_cluster import deployment, pod

PODS = "/api/v1/namespaces/default/pods"
DEPLOYMENTS = "/apis/apps/v1/namespaces/default/deployments"
REPLICA_SETS = "/apis/apps/v1/namespaces/default/replicasets"
MERGE = "application/merge-patch+json"


class Rollouts(RuleBasedStateMachine):
    """Deployments are created, scaled, changed, paused, undone and deleted while time passes.

    A watch follows along: what it has seen must at all times be what a list shows.
    """

    def __init__(self) -> None:
        super().__init__()
        self.wanted: dict[str, int] = {}
        self.paused: set[str] = set()
        self.seen: dict[str, Any] = {}

    @initialize(seed=st.integers(0, 3), preset=st.sampled_from(["calm", "near-saturation", "instant"]))
    def begin(self, seed: int, preset: str) -> None:
        self.cluster = simulate(preset, seed=seed)
        answer = self.cluster.handle(ApiRequest("GET", PODS, {"watch": "true"}))
        assert isinstance(answer, Watch)
        self.watch = answer

    @rule(
        name=st.sampled_from("ab"),
        replicas=st.integers(0, 7),
        surge=st.sampled_from([1, 2, "25%", "100%", 0]),
        unavailable=st.sampled_from([1, 2, "25%", "50%", 0]),
        recreate=st.booleans(),
        min_ready_s=st.sampled_from([0, 0, 5]),
    )
    def create(self, name: str, replicas: int, surge: Any, unavailable: Any, recreate: bool, min_ready_s: int) -> None:
        rolling = {"maxSurge": surge, "maxUnavailable": unavailable}
        strategy = {"type": "Recreate"} if recreate else {"type": "RollingUpdate", "rollingUpdate": rolling}
        item = deployment(name, replicas, strategy=strategy, minReadySeconds=min_ready_s)
        valid = recreate or not (surge == 0 and unavailable == 0)
        if valid and name not in self.wanted:
            self.cluster.call("POST", DEPLOYMENTS, item)
            self.wanted[name] = replicas
            return
        with pytest.raises(ApiError) as refused:
            self.cluster.call("POST", DEPLOYMENTS, item)
        assert refused.value.code == (409 if valid else 422)

    @precondition(lambda self: self.wanted)
    @rule(data=st.data(), replicas=st.integers(0, 9))
    def scale(self, data: Any, replicas: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.wanted)))
        patch = {"spec": {"replicas": replicas}}
        self.cluster.call("PATCH", f"{DEPLOYMENTS}/{name}/scale", patch, content_type=MERGE)
        self.wanted[name] = replicas

    @precondition(lambda self: self.wanted)
    @rule(data=st.data(), version=st.integers(0, 3))
    def change(self, data: Any, version: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.wanted)))
        patch = {"spec": {"template": {"metadata": {"annotations": {"version": str(version)}}}}}
        self.cluster.call("PATCH", f"{DEPLOYMENTS}/{name}", patch, content_type=MERGE)

    @precondition(lambda self: self.wanted)
    @rule(data=st.data(), paused=st.booleans())
    def pause(self, data: Any, paused: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.wanted)))
        self.cluster.call("PATCH", f"{DEPLOYMENTS}/{name}", {"spec": {"paused": paused}}, content_type=MERGE)
        (self.paused.add if paused else self.paused.discard)(name)

    @precondition(lambda self: self.wanted)
    @rule(data=st.data(), policy=st.sampled_from(["Background", "Foreground"]))
    def delete(self, data: Any, policy: str) -> None:
        name = data.draw(st.sampled_from(sorted(self.wanted)))
        self.cluster.call("DELETE", f"{DEPLOYMENTS}/{name}", query={"propagationPolicy": policy})
        # In the foreground the name stays taken until all pods are gone.
        self.cluster.advance(60)
        del self.wanted[name]
        self.paused.discard(name)

    @rule(data=st.data())
    def kill_a_pod(self, data: Any) -> None:
        names = sorted(item["metadata"]["name"] for item in self.cluster.call("GET", PODS)["items"])
        if names:
            name = data.draw(st.sampled_from(names))
            self.cluster.call("DELETE", f"{PODS}/{name}", query={"gracePeriodSeconds": "0"})

    @rule(seconds=st.sampled_from([0.0, 0.1, 1.0, 5.0, 30.0]))
    def wait(self, seconds: float) -> None:
        self.cluster.advance(seconds)

    @invariant()
    def a_watch_has_seen_what_a_list_shows(self) -> None:
        while lines := self.watch.read(50):
            for line in lines.splitlines():
                event = msgspec.json.decode(line)
                item = event["object"]
                if event["type"] == "DELETED":
                    del self.seen[item["metadata"]["name"]]
                else:
                    self.seen[item["metadata"]["name"]] = item
        listed = self.cluster.call("GET", PODS)["items"]
        assert {item["metadata"]["name"]: item for item in listed} == self.seen

    @invariant()
    def no_rollout_has_more_pods_than_it_may(self) -> None:
        for item in self.cluster.call("GET", DEPLOYMENTS)["items"]:
            spec, status = item["spec"], item["status"]
            rolling = spec["strategy"].get("rollingUpdate")
            surge = rolling["maxSurge"] if rolling else 0
            if isinstance(surge, str):
                surge = math.ceil(int(surge[:-1]) * spec["replicas"] / 100)
            assert status.get("replicas", 0) <= spec["replicas"] + surge
            assert status["observedGeneration"] == item["metadata"]["generation"]
            assert status.get("availableReplicas", 0) <= status.get("readyReplicas", 0) <= status.get("replicas", 0)

    def teardown(self) -> None:
        if not hasattr(self, "cluster"):
            return
        for name in sorted(self.paused):
            self.cluster.call("PATCH", f"{DEPLOYMENTS}/{name}", {"spec": {"paused": False}}, content_type=MERGE)
        self.cluster.advance(1200)
        for name, replicas in self.wanted.items():
            status = self.cluster.call("GET", f"{DEPLOYMENTS}/{name}")["status"]
            assert status.get("availableReplicas", 0) == status.get("replicas", 0) == replicas
            assert status.get("updatedReplicas", 0) == replicas
        assert len(self.cluster.call("GET", PODS)["items"]) == sum(self.wanted.values())
        owners = {item["metadata"]["ownerReferences"][0]["name"] for item in self.cluster.call("GET", PODS)["items"]}
        sets = {item["metadata"]["name"] for item in self.cluster.call("GET", REPLICA_SETS)["items"]}
        assert owners <= sets
        for name in list(self.wanted):
            self.cluster.call("DELETE", f"{DEPLOYMENTS}/{name}")
        self.cluster.advance(7200)
        for path in (PODS, REPLICA_SETS, DEPLOYMENTS, "/api/v1/events"):
            assert self.cluster.call("GET", path)["items"] == []


Rollouts.TestCase.settings = settings(
    max_examples=15, stateful_step_count=15, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestRollouts = Rollouts.TestCase


def names(cluster: Simulation, path: str) -> list[str]:
    return [item["metadata"]["name"] for item in cluster.call("GET", path)["items"]]


def test_a_rolling_update_never_has_fewer_pods_available_than_it_must() -> None:
    cluster = simulate("near-saturation", seed=9)
    strategy = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 1}}
    cluster.call("POST", DEPLOYMENTS, deployment(replicas=10, strategy=strategy))
    cluster.advance(300)
    patch = {"spec": {"template": {"metadata": {"annotations": {"v": "2"}}}}}
    cluster.call("PATCH", f"{DEPLOYMENTS}/web", patch, content_type=MERGE)
    least, most, status = 10, 0, dict[str, Any]()
    for _ in range(600):
        cluster.advance(0.5)
        status = cluster.call("GET", f"{DEPLOYMENTS}/web")["status"]
        least, most = min(least, status.get("availableReplicas", 0)), max(most, status["replicas"])
    assert (least, most) == (9, 11)
    assert status["updatedReplicas"] == status["availableReplicas"] == 10


def test_deletion_in_the_foreground_waits_and_orphans_are_left() -> None:
    cluster = simulate("calm", seed=1)
    cluster.call("POST", DEPLOYMENTS, deployment(replicas=2))
    cluster.advance(30)
    cluster.call("DELETE", f"{DEPLOYMENTS}/web", {"kind": "DeleteOptions", "propagationPolicy": "Foreground"})
    assert cluster.call("GET", f"{DEPLOYMENTS}/web")["metadata"]["finalizers"] == ["foregroundDeletion"]
    assert len(names(cluster, PODS)) == 2
    cluster.advance(60)
    assert names(cluster, DEPLOYMENTS) == names(cluster, REPLICA_SETS) == names(cluster, PODS) == []
    cluster.call("POST", DEPLOYMENTS, deployment(replicas=2))
    cluster.advance(30)
    cluster.call("DELETE", f"{DEPLOYMENTS}/web", {"kind": "DeleteOptions", "propagationPolicy": "Orphan"})
    cluster.advance(60)
    assert names(cluster, DEPLOYMENTS) == []
    assert len(names(cluster, PODS)) == 2
    (left,) = cluster.call("GET", REPLICA_SETS)["items"]
    assert "ownerReferences" not in left["metadata"]


def test_old_versions_are_kept_up_to_the_limit() -> None:
    cluster = simulate("instant", seed=1)
    cluster.call("POST", DEPLOYMENTS, deployment(replicas=1, revisionHistoryLimit=2))
    for version in range(6):
        patch = {"spec": {"template": {"metadata": {"annotations": {"v": str(version)}}}}}
        cluster.call("PATCH", f"{DEPLOYMENTS}/web", patch, content_type=MERGE)
        cluster.advance(60)
    revisions = sorted(
        int(item["metadata"]["annotations"]["deployment.kubernetes.io/revision"])
        for item in cluster.call("GET", REPLICA_SETS)["items"]
    )
    assert revisions == [5, 6, 7]


def test_finalizers_hold_an_object_until_they_are_gone() -> None:
    cluster = Simulation(seed=1)
    item = pod()
    item["metadata"]["finalizers"] = ["example.com/hold"]
    cluster.call("POST", PODS, item)
    cluster.call("DELETE", f"{PODS}/one")
    assert cluster.call("GET", f"{PODS}/one")["metadata"]["deletionTimestamp"]
    cluster.call("PATCH", f"{PODS}/one", {"metadata": {"finalizers": None}}, content_type=MERGE)
    with pytest.raises(ApiError):
        cluster.call("GET", f"{PODS}/one")


def test_a_lost_node_takes_its_pods_along() -> None:
    cluster = simulate("calm", seed=1)
    cluster.call("POST", DEPLOYMENTS, deployment(replicas=10))
    cluster.advance(30)
    lost = cluster.call("GET", PODS)["items"][0]["spec"]["nodeName"]
    cluster.call("DELETE", f"/api/v1/nodes/{lost}")
    cluster.advance(30)
    pods = cluster.call("GET", PODS)["items"]
    assert len(pods) == 10
    assert lost not in {item["spec"]["nodeName"] for item in pods}


def test_permanent_namespaces_stay() -> None:
    cluster = Simulation(seed=1)
    with pytest.raises(ApiError) as error:
        cluster.call("DELETE", "/api/v1/namespaces/default")
    assert error.value.code == 403
