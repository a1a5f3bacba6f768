"""What an object holds that its author left out: the defaults of the Kubernetes API for the kinds served here."""

from typing import Any

from plexrl.waiting.cluster.objects import Object
from plexrl.waiting.cluster.resources import (
    CLAIMS,
    DEPLOYMENTS,
    EVENTS,
    JOBS,
    PODS,
    REPLICA_SETS,
    ResourceType,
)

DEFAULT_STORAGE_CLASS = "standard"


def with_defaults(kind: ResourceType, item: Object) -> Object:
    """The object with defaults filled in. Parts of the wrong shape are left to validation."""
    spec = item.get("spec")
    if not isinstance(spec, dict):
        spec = {}
    if kind is PODS:
        return {**item, "spec": _pod_spec(spec)}
    if kind is DEPLOYMENTS:
        return {**item, "spec": _deployment_spec(spec)}
    if kind is REPLICA_SETS:
        return {**item, "spec": _with_template({"replicas": 1, **spec})}
    if kind is JOBS:
        return {**item, "spec": _job_spec(spec)}
    if kind is CLAIMS:
        return {**item, "spec": {"volumeMode": "Filesystem", "storageClassName": DEFAULT_STORAGE_CLASS, **spec}}
    if kind is EVENTS:
        return {"type": "Normal", **item}
    return item


def _deployment_spec(spec: Object) -> Object:
    spec = _with_template({"replicas": 1, "revisionHistoryLimit": 10, "progressDeadlineSeconds": 600, **spec})
    strategy = {"type": "RollingUpdate", **(spec.get("strategy") or {})}
    if strategy["type"] == "RollingUpdate":
        strategy["rollingUpdate"] = {
            "maxSurge": "25%",
            "maxUnavailable": "25%",
            **(strategy.get("rollingUpdate") or {}),
        }
    return {**spec, "strategy": strategy}


def _job_spec(spec: Object) -> Object:
    spec = {"backoffLimit": 6, "completionMode": "NonIndexed", "suspend": False, **spec}
    spec.setdefault("podReplacementPolicy", "TerminatingOrFailed")
    if "completions" not in spec and "parallelism" not in spec:
        spec["completions"] = 1
    spec.setdefault("parallelism", 1)
    return _with_template(spec)


def _with_template(spec: Object) -> Object:
    template = spec.get("template")
    if not isinstance(template, dict) or not isinstance(template.get("spec"), dict):
        return spec
    return {**spec, "template": {"metadata": {}, **template, "spec": _pod_spec(template["spec"])}}


def _pod_spec(spec: Object) -> Object:
    filled = {
        "restartPolicy": "Always",
        "dnsPolicy": "ClusterFirst",
        "schedulerName": "default-scheduler",
        "securityContext": {},
        "terminationGracePeriodSeconds": 30,
        **spec,
    }
    for name in ("containers", "initContainers"):
        if isinstance(filled.get(name), list):
            filled[name] = [_container(entry) for entry in filled[name]]
    return filled


def _container(entry: Any) -> Any:
    if not isinstance(entry, dict):
        return entry
    filled = {
        "terminationMessagePath": "/dev/termination-log",
        "terminationMessagePolicy": "File",
        "imagePullPolicy": _pull_policy(entry.get("image") or ""),
        "resources": {},
        **entry,
    }
    if isinstance(filled.get("ports"), list):
        filled["ports"] = [{"protocol": "TCP", **port} if isinstance(port, dict) else port for port in filled["ports"]]
    limits = filled["resources"].get("limits")
    if limits:
        requests = {**limits, **(filled["resources"].get("requests") or {})}
        filled["resources"] = {**filled["resources"], "requests": requests}
    for name in ("livenessProbe", "readinessProbe", "startupProbe"):
        if isinstance(filled.get(name), dict):
            filled[name] = _probe(filled[name])
    return filled


def _probe(probe: Object) -> Object:
    filled = {"timeoutSeconds": 1, "periodSeconds": 10, "successThreshold": 1, "failureThreshold": 3, **probe}
    if isinstance(filled.get("httpGet"), dict):
        filled["httpGet"] = {"path": "/", "scheme": "HTTP", **filled["httpGet"]}
    return filled


def _pull_policy(image: str) -> str:
    tag = image.rpartition("/")[2].partition(":")[2]
    return "Always" if tag in ("", "latest") and "@" not in image else "IfNotPresent"
