"""Whether an object means something: what the API refuses with 422, field by field, and what it accepts with a warning.

A warning names a field that is stored and shown but that nothing in this cluster acts on.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from plexrl.waiting.cluster.api.errors import Cause, duplicate, forbidden_field, invalid, required, unsupported
from plexrl.waiting.cluster.api.schema import Schema, schema_of
from plexrl.waiting.cluster.api.selectors import matches
from plexrl.waiting.cluster.objects import Object, is_deleting, look_up
from plexrl.waiting.cluster.quantities import parse_quantity
from plexrl.waiting.cluster.resources import (
    CLAIMS,
    CONFIG_MAPS,
    DEPLOYMENTS,
    EVENTS,
    JOBS,
    NAMESPACES,
    NODES,
    PODS,
    REPLICA_SETS,
    ResourceType,
)

CAUSES_LIMIT = 20
REPLICAS_LIMIT = 100_000

_LABEL = re.compile(r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$")
_SUBDOMAIN = re.compile(r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$")
_QUALIFIED = re.compile(r"^([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([\w.-]{0,61}[A-Za-z0-9])?$")
_LABEL_VALUE = re.compile(r"^([A-Za-z0-9]([\w.-]{0,61}[A-Za-z0-9])?)?$")
_PERCENT = re.compile(r"^\d+%$")
_LABEL_RULE = "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', at most 63"
_SUBDOMAIN_RULE = (
    "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', at most 253"
)
_KEY_RULE = "name part must consist of alphanumeric characters, '-', '_' or '.'"
_VALUE_RULE = "a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.'"
_PROBES = ("livenessProbe", "readinessProbe", "startupProbe")
_PROBE_NUMBERS = ("initialDelaySeconds", "timeoutSeconds", "periodSeconds", "successThreshold", "failureThreshold")
_SELECTOR_OPERATORS = ("In", "NotIn", "Exists", "DoesNotExist")
_ACCESS_MODES = ("ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany", "ReadWriteOncePod")
# What a pod may change once it exists.
_POD_MUTABLE = ("activeDeadlineSeconds", "containers", "initContainers", "terminationGracePeriodSeconds", "tolerations")

_NOT_SIMULATED_IN_PODS: Mapping[str, str] = MappingProxyType(
    {
        "affinity": "pods are placed by nodeSelector, taints and resources alone",
        "initContainers": "pods start their containers at once",
        "preemptionPolicy": "pods do not preempt others",
        "priorityClassName": "pods do not preempt others",
        "topologySpreadConstraints": "pods are placed by nodeSelector, taints and resources alone",
    }
)


def validate(kind: ResourceType, item: Object, previous: Object | None = None) -> list[Cause]:
    """What is wrong with an object, or with its change from a previous version; empty if nothing."""
    causes = list(_metadata(kind, item))
    missing = list(_missing(schema_of(kind.model), item, ""))
    causes += missing
    if not missing and (check := _CHECKS.get(kind)):
        causes += check(item, previous)
    return causes[:CAUSES_LIMIT]


def warnings_of(kind: ResourceType, item: Object) -> list[str]:
    """Fields that this cluster stores and does not act on."""
    at, spec = ("spec", look_up(item, "spec", default={}))
    if kind in (DEPLOYMENTS, REPLICA_SETS, JOBS):
        at, spec = ("spec.template.spec", look_up(item, "spec", "template", "spec", default={}))
    elif kind is not PODS:
        return []
    found = [f"{at}.{name} is not simulated: {why}" for name, why in _NOT_SIMULATED_IN_PODS.items() if spec.get(name)]
    if kind is JOBS and look_up(item, "spec", "podFailurePolicy"):
        found.append("spec.podFailurePolicy is not simulated: every failed pod counts against backoffLimit")
    return found


def validate_scale(scale: Object) -> list[Cause]:
    return list(_count("spec.replicas", look_up(scale, "spec", "replicas", default=0), REPLICAS_LIMIT))


def is_percent(value: object) -> bool:
    return isinstance(value, str) and bool(_PERCENT.match(value))


def _missing(schema: Schema, value: Any, path: str) -> Iterator[Cause]:
    """Required fields that are absent, at any depth."""
    if isinstance(value, dict) and schema.kind == "object":
        for name, known in schema.fields.items():
            below = f"{path}.{name}" if path else name
            # A status is only as complete as its writers have made it.
            if name in value and below != "status":
                yield from _missing(known.schema, value[name], below)
            elif known.required and below != "status":
                yield required(below)
    elif isinstance(value, list) and schema.items is not None:
        for index, entry in enumerate(value):
            yield from _missing(schema.items, entry, f"{path}[{index}]")


def _metadata(kind: ResourceType, item: Object) -> Iterator[Cause]:
    metadata = item["metadata"]
    name = metadata.get("name", "")
    pattern, rule, limit = (_SUBDOMAIN, _SUBDOMAIN_RULE, 253)
    if kind is NAMESPACES:
        pattern, rule, limit = (_LABEL, _LABEL_RULE, 63)
    if not pattern.match(name) or len(name) > limit:
        yield invalid("metadata.name", name, rule)
    yield from _labels("metadata.labels", metadata.get("labels") or {})
    for key in metadata.get("annotations") or {}:
        if not _QUALIFIED.match(key.lower()):
            yield invalid("metadata.annotations", key, _KEY_RULE)


def _labels(at: str, labels: Mapping[str, str]) -> Iterator[Cause]:
    for key, value in labels.items():
        if not _QUALIFIED.match(key):
            yield invalid(at, key, _KEY_RULE)
        if not _LABEL_VALUE.match(value):
            yield invalid(
                at,
                value,
                _VALUE_RULE,
            )


def _count(at: str, value: Any, limit: int | None = None) -> Iterator[Cause]:
    if value is None:
        return
    if value < 0:
        yield invalid(at, value, "must be greater than or equal to 0")
    elif limit is not None and value > limit:
        yield invalid(at, value, f"must be less than or equal to {limit} in this cluster")


def _selector(at: str, selector: Object) -> Iterator[Cause]:
    yield from _labels(f"{at}.matchLabels", selector.get("matchLabels") or {})
    for index, entry in enumerate(selector.get("matchExpressions") or ()):
        below = f"{at}.matchExpressions[{index}]"
        if entry["operator"] not in _SELECTOR_OPERATORS:
            yield unsupported(f"{below}.operator", entry["operator"], _SELECTOR_OPERATORS)
        elif entry["operator"] in ("In", "NotIn") and not entry.get("values"):
            yield required(f"{below}.values", "must be specified when `operator` is 'In' or 'NotIn'")


def _workload_template(item: Object, restart_policies: tuple[str, ...]) -> Iterator[Cause]:
    spec = item["spec"]
    template = spec["template"]
    labels = look_up(template, "metadata", "labels", default={})
    selector = spec.get("selector")
    if selector is not None:
        yield from _selector("spec.selector", selector)
        if not selector.get("matchLabels") and not selector.get("matchExpressions"):
            yield invalid("spec.selector", "{}", "empty selector is invalid for a workload")
        elif not matches(selector, labels):
            yield invalid("spec.template.metadata.labels", str(labels), "`selector` does not match template `labels`")
    yield from _labels("spec.template.metadata.labels", labels)
    if not template.get("spec"):
        yield required("spec.template.spec")
        return
    yield from _pod_spec("spec.template.spec", template["spec"])
    policy = template["spec"].get("restartPolicy")
    if policy not in restart_policies:
        yield unsupported("spec.template.spec.restartPolicy", policy, restart_policies)


def _deployment(item: Object, previous: Object | None) -> Iterator[Cause]:
    spec = item["spec"]
    yield from _workload_template(item, ("Always",))
    yield from _count("spec.replicas", spec.get("replicas"), REPLICAS_LIMIT)
    yield from _count("spec.minReadySeconds", spec.get("minReadySeconds"))
    yield from _count("spec.revisionHistoryLimit", spec.get("revisionHistoryLimit"))
    if (spec.get("progressDeadlineSeconds") or 1) <= (spec.get("minReadySeconds") or 0):
        yield invalid(
            "spec.progressDeadlineSeconds", spec.get("progressDeadlineSeconds"), "must be greater than minReadySeconds"
        )
    strategy = spec["strategy"]
    if strategy["type"] not in ("RollingUpdate", "Recreate"):
        yield unsupported("spec.strategy.type", strategy["type"], ("Recreate", "RollingUpdate"))
    elif strategy["type"] == "Recreate" and strategy.get("rollingUpdate"):
        yield forbidden_field("spec.strategy.rollingUpdate", "may not be specified when strategy `type` is 'Recreate'")
    elif strategy["type"] == "RollingUpdate":
        yield from _rolling_update(strategy["rollingUpdate"])
    if previous is not None and previous["spec"]["selector"] != spec["selector"]:
        yield invalid("spec.selector", str(spec["selector"]), "field is immutable")


def _rolling_update(rolling: Object) -> Iterator[Cause]:
    zero = []
    for name in ("maxUnavailable", "maxSurge"):
        at, value = f"spec.strategy.rollingUpdate.{name}", rolling[name]
        if isinstance(value, str) and not is_percent(value):
            yield invalid(at, value, "must be an integer or percentage (e.g '5%%')".replace("%%", "%"))
        elif isinstance(value, int):
            yield from _count(at, value)
        elif name == "maxUnavailable" and int(value[:-1]) > 100:
            yield invalid(at, value, "must not be greater than 100%")
        zero.append(value in (0, "0%"))
    if all(zero):
        yield invalid("spec.strategy.rollingUpdate.maxUnavailable", 0, "may not be 0 when `maxSurge` is 0")


def _replica_set(item: Object, previous: Object | None) -> Iterator[Cause]:
    yield from _workload_template(item, ("Always",))
    yield from _count("spec.replicas", item["spec"].get("replicas"), REPLICAS_LIMIT)
    yield from _count("spec.minReadySeconds", item["spec"].get("minReadySeconds"))
    if previous is not None and previous["spec"]["selector"] != item["spec"]["selector"]:
        yield invalid("spec.selector", str(item["spec"]["selector"]), "field is immutable")


def _job(item: Object, previous: Object | None) -> Iterator[Cause]:
    spec = item["spec"]
    yield from _workload_template(item, ("OnFailure", "Never"))
    for name in ("parallelism", "completions"):
        yield from _count(f"spec.{name}", spec.get(name), REPLICAS_LIMIT)
    for name in ("backoffLimit", "activeDeadlineSeconds", "ttlSecondsAfterFinished"):
        yield from _count(f"spec.{name}", spec.get(name))
    if spec.get("completionMode") != "NonIndexed":
        yield unsupported("spec.completionMode", spec.get("completionMode"), ("NonIndexed",))
    if previous is None:
        return
    for name in ("selector", "completions"):
        if previous["spec"].get(name) != spec.get(name):
            yield invalid(f"spec.{name}", str(spec.get(name)), "field is immutable")
    if previous["spec"]["template"] != spec["template"]:
        yield invalid("spec.template", "…", "field is immutable")


def _pod(item: Object, previous: Object | None) -> Iterator[Cause]:
    yield from _pod_spec("spec", item["spec"])
    if previous is None or is_deleting(item):
        return
    before, after = _frozen_part(previous["spec"]), _frozen_part(item["spec"])
    if before != after:
        changed = ", ".join(sorted(key for key in before | after if before.get(key) != after.get(key)))
        yield forbidden_field(
            "spec",
            "pod updates may not change fields other than `spec.containers[*].image`, `spec.activeDeadlineSeconds`, "
            f"`spec.tolerations` and `spec.terminationGracePeriodSeconds`: {changed}",
        )


def _frozen_part(spec: Object) -> Object:
    """What of a pod's spec may not change."""
    kept = {key: value for key, value in spec.items() if key not in _POD_MUTABLE}
    for name in ("containers", "initContainers"):
        kept[name] = [{key: value for key, value in entry.items() if key != "image"} for entry in spec.get(name) or ()]
    return kept


def _pod_spec(at: str, spec: Object) -> Iterator[Cause]:
    if not spec["containers"]:
        yield required(f"{at}.containers")
    if spec.get("restartPolicy") not in ("Always", "OnFailure", "Never"):
        yield unsupported(f"{at}.restartPolicy", spec.get("restartPolicy"), ("Always", "OnFailure", "Never"))
    yield from _count(f"{at}.terminationGracePeriodSeconds", spec.get("terminationGracePeriodSeconds"))
    yield from _labels(f"{at}.nodeSelector", spec.get("nodeSelector") or {})
    volumes = [volume["name"] for volume in spec.get("volumes") or ()]
    yield from _unique(f"{at}.volumes", "name", volumes)
    for list_name in ("initContainers", "containers"):
        containers = spec.get(list_name) or ()
        for index, container in enumerate(containers):
            yield from _container(f"{at}.{list_name}[{index}]", container, volumes)
        yield from _unique(f"{at}.{list_name}", "name", [container["name"] for container in containers])


def _unique(at: str, key: str, values: list[str]) -> Iterator[Cause]:
    for index, value in enumerate(values):
        if value in values[:index]:
            yield duplicate(f"{at}[{index}].{key}", value)


def _container(at: str, container: Object, volumes: list[str]) -> Iterator[Cause]:
    if not _LABEL.match(container["name"]):
        yield invalid(f"{at}.name", container["name"], _LABEL_RULE)
    image = container.get("image", "")
    if not image:
        yield required(f"{at}.image")
    elif image != image.strip():
        yield invalid(f"{at}.image", image, "must not have leading or trailing whitespace")
    policies = ("Always", "IfNotPresent", "Never")
    if container.get("imagePullPolicy") not in policies:
        yield unsupported(f"{at}.imagePullPolicy", container.get("imagePullPolicy"), policies)
    for index, port in enumerate(container.get("ports") or ()):
        if not 0 < port["containerPort"] < 65536:
            yield invalid(
                f"{at}.ports[{index}].containerPort", port["containerPort"], "must be between 1 and 65535, inclusive"
            )
    for index, mount in enumerate(container.get("volumeMounts") or ()):
        if mount["name"] not in volumes:
            yield Cause("FieldValueNotFound", f'Not found: "{mount["name"]}"', f"{at}.volumeMounts[{index}].name")
    yield from _resources(f"{at}.resources", container.get("resources") or {})
    for name in _PROBES:
        probe = container.get(name) or {}
        for number in (
            "initialDelaySeconds",
            "timeoutSeconds",
            "periodSeconds",
            "successThreshold",
            "failureThreshold",
        ):
            yield from _count(f"{at}.{name}.{number}", probe.get(number))


def _resources(at: str, resources: Object) -> Iterator[Cause]:
    limits, requests = resources.get("limits") or {}, resources.get("requests") or {}
    for name, quantities in (("limits", limits), ("requests", requests)):
        for resource, quantity in quantities.items():
            if parse_quantity(quantity) < 0:
                yield invalid(f"{at}.{name}[{resource}]", quantity, "must be greater than or equal to 0")
    for resource in limits.keys() & requests.keys():
        if parse_quantity(requests[resource]) > parse_quantity(limits[resource]):
            yield invalid(
                f"{at}.requests",
                requests[resource],
                f"must be less than or equal to {resource} limit of {limits[resource]}",
            )


def _claim(item: Object, previous: Object | None) -> Iterator[Cause]:
    spec = item["spec"]
    modes = spec.get("accessModes") or []
    if not modes:
        yield required("spec.accessModes", "at least 1 access mode is required")
    for mode in modes:
        if mode not in _ACCESS_MODES:
            yield unsupported("spec.accessModes", mode, _ACCESS_MODES)
    storage = look_up(spec, "resources", "requests", "storage")
    if storage is None:
        yield required("spec.resources[storage]")
    elif parse_quantity(storage) <= 0:
        yield invalid("spec.resources[storage]", storage, "must be greater than zero")
    if previous is None:
        return
    # The binder writes the volume's name, once.
    before = {key: value for key, value in previous["spec"].items() if key != "volumeName"}
    after = {key: value for key, value in spec.items() if key != "volumeName"}
    name = previous["spec"].get("volumeName")
    if before != after or (name and name != spec.get("volumeName")):
        yield forbidden_field("spec", "spec is immutable after creation, and this cluster does not expand volumes")


def _node(item: Object, previous: Object | None) -> Iterator[Cause]:
    for index, taint in enumerate(look_up(item, "spec", "taints", default=[])):
        effects = ("NoSchedule", "PreferNoSchedule", "NoExecute")
        if taint["effect"] not in effects:
            yield unsupported(f"spec.taints[{index}].effect", taint["effect"], effects)


def _event(item: Object, previous: Object | None) -> Iterator[Cause]:
    at, namespace = "involvedObject.namespace", item["metadata"].get("namespace")
    involved = item["involvedObject"].get("namespace") or "default"
    if involved != namespace:
        yield invalid(at, involved, "does not match event.namespace")


def _config_map(item: Object, previous: Object | None) -> Iterator[Cause]:
    if previous is not None and previous.get("immutable") and previous.get("data") != item.get("data"):
        yield forbidden_field("data", "field is immutable when `immutable` is set")


_CHECKS: Mapping[ResourceType, Callable[[Object, Object | None], Iterable[Cause]]] = MappingProxyType(
    {
        CLAIMS: _claim,
        CONFIG_MAPS: _config_map,
        DEPLOYMENTS: _deployment,
        EVENTS: _event,
        JOBS: _job,
        NODES: _node,
        PODS: _pod,
        REPLICA_SETS: _replica_set,
    }
)
