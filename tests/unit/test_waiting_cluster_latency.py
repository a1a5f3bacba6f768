"""Virtual time and latencies: what takes how long, the same history for the same seed, and what never ends."""

import math
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plexrl.waiting.cluster.clock import VirtualClock
from plexrl.waiting.cluster.simulation import Simulation
from plexrl.waiting.latency.draws import Draws
from plexrl.waiting.latency.local import LocalLatency, simulate
from plexrl.waiting.latency.presets import PRESETS, NodePool, Preset
from plexrl.waiting.latency.stages import StageEngine
from plexrl.waiting.laws import Drift, Gamma, Never
from tests.support.kubernetes_cluster import deployment, job, pod

PODS = "/api/v1/namespaces/default/pods"
DEPLOYMENTS = "/apis/apps/v1/namespaces/default/deployments"
JOBS = "/apis/batch/v1/namespaces/default/jobs"
MERGE = "application/merge-patch+json"


def busy_hour(log: list[bytes], seed: int = 5) -> Simulation:
    """An hour with a bit of everything."""
    simulation = Simulation(seed=seed, log=log.append)
    LocalLatency(simulation, StageEngine(PRESETS["image-pull"], seed=seed))
    simulation.call("POST", DEPLOYMENTS, deployment(replicas=8))
    simulation.advance(120)
    simulation.call("PATCH", f"{DEPLOYMENTS}/web", {"spec": {"replicas": 12}}, content_type=MERGE)
    simulation.call("POST", JOBS, job(completions=6, parallelism=3))
    simulation.advance(300)
    image = {"spec": {"template": {"metadata": {"labels": {"v": "2"}}}}}
    simulation.call("PATCH", f"{DEPLOYMENTS}/web", image, content_type=MERGE)
    simulation.advance(600)
    simulation.call("DELETE", f"{DEPLOYMENTS}/web")
    simulation.advance(3600 - simulation.now_s)
    return simulation


def test_the_same_seed_gives_the_same_history_to_the_byte() -> None:
    first: list[bytes] = []
    second: list[bytes] = []
    other: list[bytes] = []
    assert busy_hour(first).history_digest == busy_hour(second).history_digest
    assert b"".join(first) == b"".join(second)
    busy_hour(other, seed=6)
    assert b"".join(first) != b"".join(other)
    assert len(first) > 300


def test_an_hour_passes_in_under_a_second() -> None:
    simulation = simulate("calm", seed=1)
    simulation.call("POST", DEPLOYMENTS, deployment(replicas=50))
    began_s = time.process_time()
    simulation.advance(3600)
    assert time.process_time() - began_s < 1.0
    assert simulation.call("GET", f"{DEPLOYMENTS}/web")["status"]["availableReplicas"] == 50


def test_how_time_is_cut_changes_nothing() -> None:
    whole: list[bytes] = []
    pieces: list[bytes] = []
    for log, step_s in ((whole, 100.0), (pieces, 0.37)):
        simulation = Simulation(seed=3, log=log.append)
        LocalLatency(simulation, StageEngine(PRESETS["near-saturation"], seed=3))
        simulation.call("POST", DEPLOYMENTS, deployment(replicas=20))
        while simulation.now_s < 100:
            simulation.advance_to(min(100.0, simulation.now_s + step_s))
    assert whole == pieces


START_STAGES = ("schedule", "start", "probe")


@pytest.mark.parametrize(("name", "median_s", "p99_s"), [("calm", 2.0, 3.1), ("near-saturation", 2.7, 16.3)])
def test_pods_start_as_published(name: str, median_s: float, p99_s: float) -> None:
    preset, generator = PRESETS[name], np.random.default_rng(1)
    times = sum(getattr(preset, stage).samples(generator, 40_000) for stage in START_STAGES)
    assert preset.pull is None
    assert np.quantile(times, 0.5) == pytest.approx(median_s, rel=0.06)
    assert np.quantile(times, 0.99) == pytest.approx(p99_s, rel=0.06)


def test_cold_starts_are_as_published() -> None:
    preset, generator = PRESETS["cold-start"], np.random.default_rng(1)
    times = sum(getattr(preset, stage).samples(generator, 400_000) for stage in START_STAGES)
    assert np.mean(times) == pytest.approx(3.24, rel=0.05)
    assert np.std(times) == pytest.approx(7.10, rel=0.2)


@pytest.mark.parametrize("name", ["calm", "near-saturation", "cold-start"])
def test_a_pod_takes_the_sum_of_its_stages(name: str) -> None:
    ready: dict[str, float] = {}
    simulation = simulate(name, seed=11)

    def note(kind: Any, change: Any) -> None:
        conditions = change.item.get("status", {}).get("conditions", [])
        if kind.kind == "Pod" and any(c["type"] == "Ready" and c["status"] == "True" for c in conditions):
            ready.setdefault(change.item["metadata"]["name"], simulation.now_s)

    simulation.store.listen(note)
    names = [f"pod-{number}" for number in range(40)]
    for pod_name in names:
        simulation.call("POST", PODS, pod(pod_name))
    simulation.advance(3600)
    draws, preset = Draws(11), PRESETS[name]
    for pod_name in names:
        stages = [draws.latency_s(getattr(preset, stage), stage, "default", pod_name, 0) for stage in START_STAGES]
        assert ready[pod_name] == pytest.approx(sum(stages), abs=1e-9)


def test_images_are_pulled_once_for_each_node() -> None:
    preset = Preset("pulls", "", schedule=None, pull=Gamma(4, 5), start=None, probe=None, pool=NodePool(1, 1))
    simulation = simulate(preset, seed=4)
    simulation.call("POST", PODS, pod("first"))
    simulation.advance(0.001)
    assert simulation.call("GET", f"{PODS}/first")["status"]["phase"] == "Pending"
    simulation.advance(300)
    assert simulation.call("GET", f"{PODS}/first")["status"]["phase"] == "Running"
    simulation.call("POST", PODS, pod("second"))
    simulation.advance(0.001)
    assert simulation.call("GET", f"{PODS}/second")["status"]["phase"] == "Running"
    simulation.call("POST", PODS, pod("third", containers=[{"name": "a", "image": "other:1"}]))
    simulation.advance(0.001)
    assert simulation.call("GET", f"{PODS}/third")["status"]["phase"] == "Pending"


def test_what_never_ends_goes_on_for_ever() -> None:
    preset = replace(PRESETS["calm"], start=Never())
    simulation = simulate(preset, seed=1)
    simulation.call("POST", DEPLOYMENTS, deployment(replicas=2))
    simulation.advance(30 * 86400)
    found = simulation.call("GET", f"{DEPLOYMENTS}/web")
    assert "readyReplicas" not in found["status"]
    progressing = {entry["type"]: entry for entry in found["status"]["conditions"]}["Progressing"]
    assert (progressing["status"], progressing["reason"]) == ("False", "ProgressDeadlineExceeded")
    statuses = [item["status"]["containerStatuses"][0]["state"] for item in simulation.call("GET", PODS)["items"]]
    assert statuses == [{"waiting": {"reason": "ContainerCreating"}}] * 2


def test_an_object_may_say_how_long_it_takes() -> None:
    simulation = simulate("instant", seed=1)
    item = pod()
    item["metadata"]["annotations"] = {"latency.plexrl.dev/start": "12.5"}
    simulation.call("POST", PODS, item)
    simulation.advance(12.4)
    assert simulation.call("GET", f"{PODS}/one")["status"]["phase"] == "Pending"
    simulation.advance(0.2)
    assert simulation.call("GET", f"{PODS}/one")["status"]["phase"] == "Running"
    item = pod("two")
    item["metadata"]["annotations"] = {"latency.plexrl.dev/pull": "never"}
    simulation.call("POST", PODS, item)
    simulation.advance(1e6)
    state = simulation.call("GET", f"{PODS}/two")["status"]["containerStatuses"][0]["state"]
    assert state["waiting"]["reason"] == "ImagePullBackOff"
    for text in ("soon", "-3", "nan", "inf", ""):
        item = pod(f"pod-{text.strip('-') or 'empty'}")
        item["metadata"]["annotations"] = {"latency.plexrl.dev/start": text}
        simulation.call("POST", PODS, item)
        simulation.advance(1)
        assert simulation.call("GET", f"{PODS}/{item['metadata']['name']}")["status"]["phase"] == "Running"


def test_laws_drift_between_episodes() -> None:
    law = Drift(((0, Gamma.of_mean(1.0, 400)), (3, Gamma.of_mean(60.0, 400))))
    for episode, fast in ((0, True), (2, True), (3, False), (9, False)):
        preset = Preset("drift", "", schedule=None, start=law, probe=None)
        simulation = simulate(preset, seed=1, episode=episode)
        simulation.call("POST", PODS, pod())
        simulation.advance(10)
        assert (simulation.call("GET", f"{PODS}/one")["status"]["phase"] == "Running") is fast


def test_nodes_come_when_pods_find_no_place() -> None:
    pool = NodePool(count=1, limit=3, cpu="4", memory="8Gi", pods=10)
    simulation = simulate(replace(PRESETS["node-provisioning"], pool=pool), seed=2)
    spec = {"containers": [{"name": "a", "image": "a:1", "resources": {"requests": {"cpu": "1"}}}]}
    item = deployment(replicas=11)
    item["spec"]["template"]["spec"] = spec
    simulation.call("POST", DEPLOYMENTS, item)
    simulation.advance(20)
    assert simulation.call("GET", f"{DEPLOYMENTS}/web")["status"]["readyReplicas"] == 4
    waiting = [p for p in simulation.call("GET", PODS)["items"] if "nodeName" not in p["spec"]]
    messages = {p["status"]["conditions"][0]["message"] for p in waiting}
    assert messages == {"0/1 nodes are available: 1 Insufficient cpu."}
    simulation.advance(1200)
    assert len(simulation.call("GET", "/api/v1/nodes")["items"]) == 3
    assert simulation.call("GET", f"{DEPLOYMENTS}/web")["status"]["readyReplicas"] == 11
    simulation.call("PATCH", f"{DEPLOYMENTS}/web", {"spec": {"replicas": 14}}, content_type=MERGE)
    simulation.advance(3600)
    assert simulation.call("GET", f"{DEPLOYMENTS}/web")["status"]["readyReplicas"] == 12
    assert len(simulation.call("GET", "/api/v1/nodes")["items"]) == 3


def test_pods_go_where_they_may() -> None:
    simulation = simulate("instant", seed=1)
    taint = {"spec": {"taints": [{"key": "gpu", "value": "yes", "effect": "NoSchedule"}]}}
    simulation.call("PATCH", "/api/v1/nodes/node-3", {"metadata": {"labels": {"disk": "ssd"}}}, content_type=MERGE)
    simulation.call("PATCH", "/api/v1/nodes/node-4", taint, content_type=MERGE)
    simulation.call("POST", PODS, pod("picky", nodeSelector={"disk": "ssd"}))
    simulation.call("POST", PODS, pod("choosy", nodeSelector={"disk": "tape"}))
    host = {"kubernetes.io/hostname": "node-4"}
    simulation.call("POST", PODS, pod("repelled", nodeSelector=host))
    tolerations = [{"key": "gpu", "operator": "Exists"}]
    simulation.call("POST", PODS, pod("tolerant", nodeSelector=host, tolerations=tolerations))
    simulation.advance(10)
    placed = {p["metadata"]["name"]: p["spec"].get("nodeName") for p in simulation.call("GET", PODS)["items"]}
    assert placed == {"picky": "node-3", "choosy": None, "repelled": None, "tolerant": "node-4"}
    simulation.call("PATCH", "/api/v1/nodes/node-4", {"spec": {"taints": None}}, content_type=MERGE)
    simulation.advance(10)
    assert simulation.call("GET", f"{PODS}/repelled")["spec"]["nodeName"] == "node-4"


def test_grace_bounds_how_long_a_pod_stops() -> None:
    preset = replace(PRESETS["instant"], stop=Never())
    simulation = simulate(preset, seed=1)
    simulation.call("POST", PODS, pod("patient"))
    simulation.call("POST", PODS, pod("hasty", terminationGracePeriodSeconds=5))
    simulation.advance(1)
    for name in ("patient", "hasty"):
        deleted = simulation.call("DELETE", f"{PODS}/{name}")
        assert deleted["metadata"]["deletionTimestamp"]
    simulation.advance(5.5)
    assert [p["metadata"]["name"] for p in simulation.call("GET", PODS)["items"]] == ["patient"]
    simulation.advance(25)
    assert simulation.call("GET", PODS)["items"] == []


def test_jobs_fail_after_their_limit() -> None:
    simulation = simulate("instant", seed=1)
    simulation.call("POST", JOBS, job(annotations={"latency.plexrl.dev/exit-code": "3"}, backoffLimit=2))
    simulation.advance(3600)
    found = simulation.call("GET", f"{JOBS}/sum")
    assert found["status"]["failed"] == 3
    failed = {entry["type"]: entry for entry in found["status"]["conditions"]}["Failed"]
    assert (failed["status"], failed["reason"]) == ("True", "BackoffLimitExceeded")
    codes = [
        p["status"]["containerStatuses"][0]["state"]["terminated"]["exitCode"]
        for p in simulation.call("GET", PODS)["items"]
    ]
    assert codes == [3, 3, 3]


def test_jobs_end_at_their_deadline_and_go_after_their_time() -> None:
    simulation = simulate(replace(PRESETS["instant"], run=Never()), seed=1)
    simulation.call("POST", JOBS, job(activeDeadlineSeconds=60, ttlSecondsAfterFinished=100))
    simulation.advance(59)
    assert simulation.call("GET", f"{JOBS}/sum")["status"]["active"] == 1
    simulation.advance(2)
    found = simulation.call("GET", f"{JOBS}/sum")
    assert {entry["type"]: entry for entry in found["status"]["conditions"]}["Failed"]["reason"] == "DeadlineExceeded"
    simulation.advance(101)
    assert simulation.call("GET", JOBS)["items"] == []
    assert simulation.call("GET", PODS)["items"] == []


def test_containers_that_fail_are_started_again_ever_later() -> None:
    simulation = simulate("instant", seed=1)
    item = deployment(replicas=1)
    item["spec"]["template"]["metadata"]["annotations"] = {
        "latency.plexrl.dev/exit-code": "1",
        "latency.plexrl.dev/run": "1",
    }
    simulation.call("POST", DEPLOYMENTS, item)
    restarts: list[int] = []
    status: Any = None
    for _ in range(4):
        simulation.advance(60)
        status = simulation.call("GET", PODS)["items"][0]["status"]["containerStatuses"][0]
        restarts.append(status["restartCount"])
    # It fails after 1 s and rests 10, 20, 40, 80 … s: at 1, 12, 33, 74, 155, 316 s.
    assert restarts == [3, 4, 5, 5]
    assert status["state"]["waiting"]["reason"] == "CrashLoopBackOff"


@pytest.mark.parametrize("seconds", [-1, math.nan, math.inf, -math.inf])
def test_time_cannot_go_astray(seconds: float) -> None:
    simulation = simulate("calm")
    with pytest.raises(ValueError, match="seconds: want a finite number"):
        simulation.advance(seconds)


def test_draws_do_not_depend_on_their_order() -> None:
    draws, law = Draws(3), Gamma(2, 1)
    first = [draws.latency_s(law, "start", "default", name) for name in "abc"]
    again = [Draws(3).latency_s(law, "start", "default", name) for name in "cba"]
    assert first == again[::-1]
    assert len(set(first)) == 3
    assert draws.latency_s(law, "start", "default", "a") != Draws(3, episode=1).latency_s(law, "start", "default", "a")


@given(st.lists(st.floats(0, 100), max_size=20))
def test_timers_run_in_order_and_at_their_time(times: list[float]) -> None:
    clock = VirtualClock()
    ran: list[tuple[float, int]] = []
    for number, due_s in enumerate(times):

        def note(due_s: float = due_s, number: int = number) -> None:
            assert clock.now_s == due_s
            ran.append((due_s, number))

        clock.call_at(due_s, note)
    while clock.next_due_s() is not None:
        clock.run_next()
    assert ran == sorted(ran)
    assert len(ran) == len(times)
