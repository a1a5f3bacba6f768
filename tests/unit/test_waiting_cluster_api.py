"""The API of the simulated cluster, request by request: what is stored, what is refused and how, what watches see."""

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plexrl.waiting.cluster.api.errors import ApiError
from plexrl.waiting.cluster.api.patches import merge_patch
from plexrl.waiting.cluster.api.requests import ApiRequest, ApiResponse
from plexrl.waiting.cluster.api.watch import INITIAL_EVENTS_END, Watch
from plexrl.waiting.cluster.quantities import parse_quantity
from plexrl.waiting.cluster.simulation import Simulation
from tests.support.kubernetes_cluster import deployment, job, pod

PODS = "/api/v1/namespaces/default/pods"
DEPLOYMENTS = "/apis/apps/v1/namespaces/default/deployments"
STRATEGIC = "application/strategic-merge-patch+json"
MERGE = "application/merge-patch+json"
JSON_PATCH = "application/json-patch+json"
APPLY = "application/apply-patch+yaml"


@pytest.fixture
def cluster() -> Simulation:
    return Simulation(seed=1)


def refused(cluster: Simulation, code: int, *call: Any, **more: Any) -> ApiError:
    with pytest.raises(ApiError) as error:
        cluster.call(*call, **more)
    status = error.value.to_json()
    assert (status["kind"], status["status"], status["code"]) == ("Status", "Failure", code), status
    return error.value


def causes(error: ApiError) -> dict[str, str]:
    return {cause["field"]: cause["reason"] for cause in error.details["causes"]}


# --- refusals ---


def test_what_is_not_there_is_not_found(cluster: Simulation) -> None:
    homeless = {**pod(), "metadata": {"name": "one"}}
    assert refused(cluster, 404, "GET", f"{PODS}/none").message == 'pods "none" not found'
    assert refused(cluster, 404, "GET", f"{DEPLOYMENTS}/none").message == 'deployments.apps "none" not found'
    assert refused(cluster, 404, "POST", "/api/v1/namespaces/none/pods", homeless).reason == "NotFound"
    for path in ("/api/v2/pods", "/api/v1/podz", "/apis/apps/v1/pods", f"{PODS}/x/y/z", f"{PODS}/x/logs", "/nothing"):
        refused(cluster, 404, "GET", path)


def test_what_is_there_already_is_a_conflict(cluster: Simulation) -> None:
    cluster.call("POST", PODS, pod())
    error = refused(cluster, 409, "POST", PODS, pod())
    assert (error.reason, error.message) == ("AlreadyExists", 'pods "one" already exists')


def test_an_old_resource_version_is_a_conflict(cluster: Simulation) -> None:
    first = cluster.call("POST", DEPLOYMENTS, deployment(replicas=0))
    current = cluster.call("GET", f"{DEPLOYMENTS}/web")
    assert current["metadata"]["resourceVersion"] != first["metadata"]["resourceVersion"]
    error = refused(cluster, 409, "PUT", f"{DEPLOYMENTS}/web", first)
    assert error.reason == "Conflict"
    assert "the object has been modified" in error.message
    cluster.call("PUT", f"{DEPLOYMENTS}/web", current)
    other = {**current, "metadata": {**current["metadata"], "uid": "another"}}
    assert "UID in precondition" in refused(cluster, 409, "PUT", f"{DEPLOYMENTS}/web", other).message


@pytest.mark.parametrize(
    ("change", "field", "reason"),
    [
        ({"replicas": -1}, "spec.replicas", "FieldValueInvalid"),
        ({"replicas": 10**9}, "spec.replicas", "FieldValueInvalid"),
        ({"selector": None}, "spec.selector", "FieldValueRequired"),
        ({"selector": {"matchLabels": {"app": "x"}}}, "spec.template.metadata.labels", "FieldValueInvalid"),
        ({"selector": {}}, "spec.selector", "FieldValueInvalid"),
        ({"strategy": {"type": "Sudden"}}, "spec.strategy.type", "FieldValueNotSupported"),
        (
            {"strategy": {"rollingUpdate": {"maxSurge": 0, "maxUnavailable": 0}}},
            "spec.strategy.rollingUpdate.maxUnavailable",
            "FieldValueInvalid",
        ),
        (
            {"strategy": {"rollingUpdate": {"maxSurge": "a lot"}}},
            "spec.strategy.rollingUpdate.maxSurge",
            "FieldValueInvalid",
        ),
        ({"minReadySeconds": 600}, "spec.progressDeadlineSeconds", "FieldValueInvalid"),
    ],
)
def test_an_invalid_deployment_says_which_field_is_wrong(
    cluster: Simulation, change: dict[str, Any], field: str, reason: str
) -> None:
    item = deployment()
    item["spec"] |= change
    error = refused(cluster, 422, "POST", DEPLOYMENTS, item)
    assert causes(error).get(field) == reason, error.message
    assert error.message.startswith('Deployment.apps "web" is invalid: ')
    assert cluster.call("GET", DEPLOYMENTS)["items"] == []


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"containers": []}, "spec.containers"),
        ({"containers": [{"name": "a"}]}, "spec.containers[0].image"),
        ({"containers": [{"image": "a"}]}, "spec.containers[0].name"),
        ({"containers": [{"name": "A_b", "image": "a"}]}, "spec.containers[0].name"),
        ({"containers": [{"name": "a", "image": "a"}] * 2}, "spec.containers[1].name"),
        ({"restartPolicy": "Sometimes"}, "spec.restartPolicy"),
        ({"nodeSelector": {"a b": "c"}}, "spec.nodeSelector"),
        (
            {"containers": [{"name": "a", "image": "a", "ports": [{"containerPort": 70000}]}]},
            "spec.containers[0].ports[0].containerPort",
        ),
        (
            {
                "containers": [
                    {"name": "a", "image": "a", "resources": {"requests": {"cpu": "2"}, "limits": {"cpu": "1"}}}
                ]
            },
            "spec.containers[0].resources.requests",
        ),
        (
            {"containers": [{"name": "a", "image": "a", "volumeMounts": [{"name": "v", "mountPath": "/v"}]}]},
            "spec.containers[0].volumeMounts[0].name",
        ),
    ],
)
def test_an_invalid_pod_says_which_field_is_wrong(cluster: Simulation, spec: dict[str, Any], field: str) -> None:
    item = pod()
    item["spec"] |= spec
    assert field in causes(refused(cluster, 422, "POST", PODS, item))


@pytest.mark.parametrize("name", ["", "A", "a_b", "-a", "a" * 254, "a..b", "ä"])
def test_names_are_of_dns(cluster: Simulation, name: str) -> None:
    refused(cluster, 422, "POST", PODS, pod(name))


def test_wrong_types_and_unknown_fields(cluster: Simulation) -> None:
    item = deployment()
    item["spec"]["replicas"] = "three"
    assert "spec.replicas: want an integer, not a string" in refused(cluster, 400, "POST", DEPLOYMENTS, item).message
    item = deployment()
    item["spec"]["replica"] = 3
    strict = {"fieldValidation": "Strict"}
    error = refused(cluster, 400, "POST", DEPLOYMENTS, item, query=strict)
    assert error.message == 'strict decoding error: unknown field "spec.replica"'
    answer = cluster.handle(ApiRequest("POST", DEPLOYMENTS, value=item))
    assert isinstance(answer, ApiResponse)
    assert answer.warnings == ('unknown field "spec.replica"',)
    assert isinstance(answer.body, dict)
    assert "replica" not in answer.body["spec"]
    wrong: list[Any] = [[], 3, None, "text", {"kind": "Pod", "apiVersion": "v1"}, {"metadata": 3}]
    for value in wrong:
        refused(cluster, 400, "POST", DEPLOYMENTS, value)


def test_what_is_not_simulated_is_said(cluster: Simulation) -> None:
    item = pod(initContainers=[{"name": "i", "image": "a"}], affinity={"nodeAffinity": {}})
    answer = cluster.handle(ApiRequest("POST", PODS, value=item))
    assert isinstance(answer, ApiResponse)
    assert {warning.split(" is ")[0] for warning in answer.warnings} == {"spec.affinity", "spec.initContainers"}


def test_media_types(cluster: Simulation) -> None:
    cluster.call("POST", PODS, pod())
    for content_type in ("text/plain", "application/json", ""):
        patch = ApiRequest("PATCH", f"{PODS}/one", content_type=content_type, body=b"{}")
        with pytest.raises(ApiError) as error:
            cluster.handle(patch)
        assert error.value.code == 415
    with pytest.raises(ApiError) as error:
        cluster.handle(ApiRequest("POST", PODS, content_type="application/cbor", body=b"\xa0"))
    assert error.value.code == 415
    with pytest.raises(ApiError) as error:
        cluster.handle(ApiRequest("GET", PODS, accept="application/cbor"))
    assert error.value.code == 406
    for body in (b"{", b"\xff", b"[" * 5000, b"a: " * 3000, b"k8s\x00\xff\xff"):
        for content_type in ("application/json", "application/yaml", "application/vnd.kubernetes.protobuf"):
            with pytest.raises(ApiError) as error:
                cluster.handle(ApiRequest("POST", PODS, content_type=content_type, body=body))
            assert error.value.code == 400


def test_methods_that_a_path_does_not_take(cluster: Simulation) -> None:
    cluster.call("POST", PODS, pod())
    for method, path in (("POST", f"{PODS}/one"), ("PUT", PODS), ("PATCH", PODS), ("DELETE", f"{PODS}/one/status")):
        refused(cluster, 405, method, path, {}, content_type=MERGE)


def test_bad_parameters(cluster: Simulation) -> None:
    for name, value in (
        ("limit", "-1"),
        ("limit", "x"),
        ("continue", "x"),
        ("continue", "W10="),
        ("resourceVersion", "x"),
        ("labelSelector", "a in (b"),
        ("labelSelector", "a>b"),
        ("labelSelector", "=b"),
        ("fieldSelector", "spec.containers=3"),
        ("fieldSelector", "x"),
        ("fieldValidation", "Sometimes"),
        ("dryRun", "Some"),
        ("timeoutSeconds", "1e99"),
        ("resourceVersionMatch", "Exact"),
    ):
        refused(cluster, 400, "GET", PODS, query={name: value})
    refused(cluster, 504, "GET", PODS, query={"resourceVersion": "999999"})


# --- writes ---


def test_dry_run_writes_nothing(cluster: Simulation) -> None:
    before = cluster.store.revision
    created = cluster.call("POST", PODS, pod(), query={"dryRun": "All"})
    assert created["metadata"]["uid"]
    assert cluster.store.revision == before
    cluster.call("POST", PODS, pod())
    before = cluster.store.revision
    for method, value in (("PATCH", {"metadata": {"labels": {"a": "b"}}}), ("DELETE", None)):
        cluster.call(method, f"{PODS}/one", value, content_type=MERGE, query={"dryRun": "All"})
    assert cluster.store.revision == before


def test_a_write_that_changes_nothing_is_none(cluster: Simulation) -> None:
    cluster.call("POST", PODS, pod())
    patch = {"metadata": {"labels": {"a": "b"}}}
    first = cluster.call("PATCH", f"{PODS}/one", patch, content_type=MERGE)
    assert cluster.call("PATCH", f"{PODS}/one", patch, content_type=MERGE) == first


def test_generations_follow_the_spec_alone(cluster: Simulation) -> None:
    cluster.call("POST", DEPLOYMENTS, deployment(replicas=0))
    path = f"{DEPLOYMENTS}/web"
    labelled = cluster.call("PATCH", path, {"metadata": {"labels": {"a": "b"}}}, content_type=MERGE)
    assert labelled["metadata"]["generation"] == 1
    scaled = cluster.call("PATCH", path, {"spec": {"replicas": 2}}, content_type=MERGE)
    assert scaled["metadata"]["generation"] == 2
    assert cluster.call("GET", path)["status"]["observedGeneration"] == 2


def test_a_status_has_its_own_path(cluster: Simulation) -> None:
    cluster.call("POST", PODS, pod())
    both = {"status": {"phase": "Running"}, "metadata": {"labels": {"a": "b"}}}
    cluster.call("PATCH", f"{PODS}/one", both, content_type=MERGE)
    item = cluster.call("GET", f"{PODS}/one")
    assert (item["status"]["phase"], item["metadata"]["labels"]) == ("Pending", {"a": "b"})
    both["metadata"] = {"labels": {"a": "c"}}
    cluster.call("PATCH", f"{PODS}/one/status", both, content_type=MERGE)
    item = cluster.call("GET", f"{PODS}/one")
    assert (item["status"]["phase"], item["metadata"]["labels"]) == ("Running", {"a": "b"})


def test_what_may_not_change(cluster: Simulation) -> None:
    cluster.call("POST", PODS, pod())
    error = refused(cluster, 422, "PATCH", f"{PODS}/one", {"spec": {"nodeName": "n"}}, content_type=MERGE)
    assert "pod updates may not change fields other than" in error.message
    containers = {"containers": [{"name": "main", "image": "nginx:1.28"}]}
    cluster.call("PATCH", f"{PODS}/one", {"spec": containers}, content_type=STRATEGIC)
    cluster.call("POST", DEPLOYMENTS, deployment(replicas=0))
    selector = {"spec": {"selector": {"matchLabels": {"x": "y"}}, "template": {"metadata": {"labels": {"x": "y"}}}}}
    assert "immutable" in refused(cluster, 422, "PATCH", f"{DEPLOYMENTS}/web", selector, content_type=MERGE).message
    jobs = "/apis/batch/v1/namespaces/default/jobs"
    cluster.call("POST", jobs, job())
    assert (
        "immutable"
        in refused(cluster, 422, "PATCH", f"{jobs}/sum", {"spec": {"completions": 3}}, content_type=MERGE).message
    )
    refused(cluster, 400, "PATCH", f"{PODS}/one", {"metadata": {"name": "two"}}, content_type=MERGE)


def test_strategic_patches_merge_lists_by_key(cluster: Simulation) -> None:
    item = deployment()
    containers = item["spec"]["template"]["spec"]["containers"]
    containers[0]["env"] = [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}]
    containers.append({"name": "side", "image": "proxy:1"})
    cluster.call("POST", DEPLOYMENTS, item)
    patch: Any = {
        "spec": {
            "template": {
                "spec": {
                    "$setElementOrder/containers": [{"name": "side"}, {"name": "main"}],
                    "containers": [
                        {"name": "main", "env": [{"name": "B", "$patch": "delete"}, {"name": "C", "value": "3"}]},
                        {"name": "side", "image": "proxy:2"},
                    ],
                }
            }
        }
    }
    patched = cluster.call("PATCH", f"{DEPLOYMENTS}/web", patch, content_type=STRATEGIC)
    side, main = patched["spec"]["template"]["spec"]["containers"]
    assert (side["name"], side["image"]) == ("side", "proxy:2")
    assert (main["name"], main["image"]) == ("main", "nginx:1.27")
    assert main["env"] == [{"name": "A", "value": "1"}, {"name": "C", "value": "3"}]
    patch = {"spec": {"strategy": {"$retainKeys": ["type"], "type": "Recreate"}}}
    patched = cluster.call("PATCH", f"{DEPLOYMENTS}/web", patch, content_type=STRATEGIC)
    assert patched["spec"]["strategy"] == {"type": "Recreate"}
    nameless = {"spec": {"template": {"spec": {"containers": [{"image": "x"}]}}}}
    refused(cluster, 400, "PATCH", f"{DEPLOYMENTS}/web", nameless, content_type=STRATEGIC)
    refused(cluster, 400, "PATCH", f"{DEPLOYMENTS}/web", {"$patch": "explode"}, content_type=STRATEGIC)


def test_json_patches_test_before_they_change(cluster: Simulation) -> None:
    cluster.call("POST", DEPLOYMENTS, deployment(replicas=3))
    path = f"{DEPLOYMENTS}/web"
    grow = {"op": "replace", "path": "/spec/replicas", "value": 5}
    operations = [{"op": "test", "path": "/spec/replicas", "value": 3}, grow]
    assert cluster.call("PATCH", path, operations, content_type=JSON_PATCH)["spec"]["replicas"] == 5
    refused(cluster, 422, "PATCH", path, operations, content_type=JSON_PATCH)
    wrong: list[Any] = [{}, [{"op": "leap", "path": "/spec"}], [3], [{"op": "add"}], [{"op": "add", "path": "x"}]]
    for value in wrong:
        refused(cluster, 400, "PATCH", path, value, content_type=JSON_PATCH)
    refused(cluster, 422, "PATCH", path, [{"op": "remove", "path": "/spec/none/x"}], content_type=JSON_PATCH)
    assert cluster.call("GET", path)["spec"]["replicas"] == 5


def test_server_side_apply_shares_an_object_among_managers(cluster: Simulation) -> None:
    def applied(manager: str, item: dict[str, Any], force: str = "false") -> Any:
        query = {"fieldManager": manager, "force": force}
        return cluster.call("PATCH", f"{DEPLOYMENTS}/web", item, content_type=APPLY, query=query)

    head: Any = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "web"}}
    applied("red", deployment(replicas=1))
    blue: Any = {
        **head,
        "spec": {"template": {"spec": {"containers": [{"name": "side", "image": "proxy:1"}]}}},
    }
    both = applied("blue", blue)
    assert [entry["name"] for entry in both["spec"]["template"]["spec"]["containers"]] == ["main", "side"]
    with pytest.raises(ApiError) as conflict:
        applied("blue", {**head, "spec": {"replicas": 3}})
    assert conflict.value.code == 409
    assert causes(conflict.value) == {".spec.replicas": "FieldManagerConflict"}
    # The same value is no conflict: both own it, and it stays until both let go.
    applied("blue", {**head, "spec": {**blue["spec"], "replicas": 1}})
    item = deployment()
    del item["spec"]["replicas"]
    assert applied("red", item)["spec"]["replicas"] == 1
    assert applied("green", {**head, "spec": {"replicas": 4}}, force="true")["spec"]["replicas"] == 4
    # What blue no longer applies and nobody else owns is taken away.
    left = applied("blue", {**head, "metadata": {"name": "web", "labels": {"by": "blue"}}})
    assert [entry["name"] for entry in left["spec"]["template"]["spec"]["containers"]] == ["main"]
    before = cluster.store.revision
    applied("blue", {**head, "metadata": {"name": "web", "labels": {"by": "blue"}}})
    assert cluster.store.revision == before, "an apply that asks for the same again is no write"


values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text("ab", max_size=2),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc", max_size=2), inner, max_size=3),
    max_leaves=8,
)
objects = st.dictionaries(st.text("abc", max_size=2), values, max_size=4)


def without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return value


@given(objects, objects)
@settings(max_examples=50)
def test_merge_patch_is_idempotent_and_leaves_no_nulls(item: Any, patch: Any) -> None:
    item = without_nulls(item)
    before = msgspec.json.encode(item)
    merged = merge_patch(item, patch)
    assert merge_patch(merged, patch) == merged
    assert msgspec.json.encode(item) == before, "the item itself was changed"
    assert merge_patch(item, without_nulls({})) == item


@given(
    st.binary(max_size=80),
    st.sampled_from(["application/json", "application/yaml", "application/vnd.kubernetes.protobuf"]),
)
@settings(max_examples=100)
def test_no_body_brings_the_server_down(body: bytes, content_type: str) -> None:
    cluster = _SHARED
    before = len(cluster.call("GET", DEPLOYMENTS)["items"])
    for method, path in (("POST", DEPLOYMENTS), ("PUT", f"{DEPLOYMENTS}/x"), ("DELETE", f"{DEPLOYMENTS}/x")):
        with pytest.raises(ApiError) as error:
            cluster.handle(ApiRequest(method, path, content_type=content_type, body=body))
        assert 400 <= error.value.code < 500
    assert len(cluster.call("GET", DEPLOYMENTS)["items"]) == before


_SHARED = Simulation(seed=2)


# --- lists, watches ---


def watch(cluster: Simulation, path: str = PODS, **query: str) -> Watch:
    answer = cluster.handle(ApiRequest("GET", path, {"watch": "true", **query}))
    assert isinstance(answer, Watch)
    return answer


def events(watch: Watch) -> list[tuple[str, str]]:
    found = []
    while lines := watch.read(100):
        for line in lines.splitlines():
            event = msgspec.json.decode(line)
            found.append((event["type"], event["object"]["metadata"].get("name", "")))
    return found


def test_a_watch_goes_on_where_a_list_ended(cluster: Simulation) -> None:
    cluster.call("POST", PODS, pod("a"))
    revision = cluster.call("GET", PODS)["metadata"]["resourceVersion"]
    cluster.call("POST", PODS, pod("b"))
    cluster.call("DELETE", f"{PODS}/a")
    assert events(watch(cluster, resourceVersion=revision)) == [("ADDED", "b"), ("DELETED", "a")]
    assert events(watch(cluster)) == [("ADDED", "b")]
    assert events(watch(cluster, resourceVersion="0")) == [("ADDED", "b")]


def test_initial_events_end_with_a_bookmark(cluster: Simulation) -> None:
    cluster.call("POST", PODS, pod("a"))
    options = {"sendInitialEvents": "true", "resourceVersionMatch": "NotOlderThan", "allowWatchBookmarks": "true"}
    stream = watch(cluster, **options)
    lines = [msgspec.json.decode(line) for line in (stream.read(100) + stream.read(100)).splitlines()]
    assert [line["type"] for line in lines] == ["ADDED", "BOOKMARK"]
    assert lines[1]["object"]["metadata"]["annotations"] == {INITIAL_EVENTS_END: "true"}
    assert lines[1]["object"]["metadata"]["resourceVersion"] == str(cluster.store.revision)
    cluster.call("POST", PODS, pod("b"))
    assert events(stream) == [("ADDED", "b")]
    refused(cluster, 422, "GET", PODS, query={"watch": "true", "sendInitialEvents": "true"})


def test_objects_come_and_go_as_they_match(cluster: Simulation) -> None:
    stream = watch(cluster, labelSelector="team=red")
    cluster.call("POST", PODS, pod("a"))
    for team in ("red", "red", "blue", "red"):
        patch = {"metadata": {"labels": {"team": team}, "annotations": {"n": team}}}
        cluster.call("PATCH", f"{PODS}/a", patch, content_type=MERGE)
    cluster.call("PATCH", f"{PODS}/a", {"metadata": {"labels": {"x": "y"}}}, content_type=MERGE)
    assert events(stream) == [("ADDED", "a"), ("DELETED", "a"), ("ADDED", "a"), ("MODIFIED", "a")]
    assert [line[0] for line in events(watch(cluster, fieldSelector="metadata.name=b"))] == []


def test_what_is_too_old_is_gone() -> None:
    cluster = Simulation(seed=1, history_limit=20)
    for number in range(40):
        cluster.call("POST", PODS, pod(f"pod-{number}"))
    error = refused(cluster, 410, "GET", PODS, query={"watch": "true", "resourceVersion": "3"})
    assert error.reason == "Expired"
    refused(cluster, 410, "GET", PODS, query={"resourceVersion": "3", "resourceVersionMatch": "Exact"})
    page = cluster.call("GET", PODS, query={"limit": "5"})
    slow = watch(cluster, resourceVersion=str(cluster.store.revision))
    for number in range(40):
        cluster.call("DELETE", f"{PODS}/pod-{number}")
    assert refused(cluster, 410, "GET", PODS, query={"continue": page["metadata"]["continue"]}).reason == "Expired"
    last = msgspec.json.decode(slow.read(100))
    assert (last["type"], last["object"]["code"], last["object"]["reason"]) == ("ERROR", 410, "Expired")
    assert slow.ended


def test_a_list_can_be_of_an_earlier_revision(cluster: Simulation) -> None:
    cluster.call("POST", PODS, pod("a"))
    revision = str(cluster.store.revision)
    cluster.call("DELETE", f"{PODS}/a")
    cluster.call("POST", PODS, pod("b"))
    query = {"resourceVersion": revision, "resourceVersionMatch": "Exact"}
    assert [item["metadata"]["name"] for item in cluster.call("GET", PODS, query=query)["items"]] == ["a"]


@pytest.mark.parametrize(
    ("text", "number"), [("1", 1), ("500m", 0.5), ("2Gi", 2**31), ("1e3", 1000), (".5", 0.5), ("1k", 1000), ("-1", -1)]
)
def test_quantities(text: str, number: float) -> None:
    assert float(parse_quantity(text)) == number


@pytest.mark.parametrize("text", ["", "x", "1 Gi", "1GB", "1e", "0x10", "--1", "1e999", True, None])
def test_what_is_no_quantity(text: object) -> None:
    with pytest.raises(ValueError, match="is not a quantity"):
        parse_quantity(text)
