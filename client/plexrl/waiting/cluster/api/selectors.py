"""Label and field selectors: the little query language of lists and watches.

Grammar of label selectors: `a=b`, `a==b`, `a!=b`, `a in (b,c)`, `a notin (b,c)`, `a`, `!a`, `a>1`, `a<1`, with commas
between.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from plexrl.waiting.cluster.api.errors import bad_request
from plexrl.waiting.cluster.objects import Object, labels_of, look_up
from plexrl.waiting.cluster.resources import (
    CLAIMS,
    EVENTS,
    JOBS,
    NAMESPACES,
    NODES,
    PODS,
    REPLICA_SETS,
    ResourceType,
)

Test: TypeAlias = Callable[[Object], bool]
_LabelTest: TypeAlias = Callable[[Mapping[str, str]], bool]

_KEY = r"[A-Za-z0-9]([\w./-]*[A-Za-z0-9])?"
_VALUE = r"([A-Za-z0-9]([\w.-]*[A-Za-z0-9])?)?"
_SET = re.compile(rf"^(?P<key>{_KEY})\s+(?P<operator>in|notin)\s*\((?P<values>[^()]*)\)$")
_EQUALITY = re.compile(rf"^(?P<key>{_KEY})\s*(?P<operator>==|=|!=|>|<)\s*(?P<value>{_VALUE})$")
_EXISTS = re.compile(rf"^(?P<absent>!?)\s*(?P<key>{_KEY})$")

# What can be selected by, beside metadata.name and metadata.namespace.
_FIELDS: Mapping[ResourceType, tuple[str, ...]] = {
    PODS: (
        "spec.nodeName",
        "spec.restartPolicy",
        "spec.schedulerName",
        "spec.serviceAccountName",
        "spec.hostNetwork",
        "status.phase",
        "status.podIP",
        "status.nominatedNodeName",
    ),
    NODES: ("spec.unschedulable",),
    NAMESPACES: ("status.phase",),
    REPLICA_SETS: ("status.replicas",),
    JOBS: ("status.successful",),
    CLAIMS: (),
    EVENTS: (
        "involvedObject.kind",
        "involvedObject.namespace",
        "involvedObject.name",
        "involvedObject.uid",
        "involvedObject.apiVersion",
        "involvedObject.resourceVersion",
        "involvedObject.fieldPath",
        "reason",
        "reportingComponent",
        "source",
        "type",
    ),
}


def parse_label_selector(text: str) -> _LabelTest:
    """A test of labels. Raises ApiError (400) for what does not parse."""
    tests = [_requirement(part.strip()) for part in _split(text) if part.strip()]
    return lambda labels: all(test(labels) for test in tests)


def parse_field_selector(text: str, kind: ResourceType) -> Test:
    """A test of objects. Raises ApiError (400) for a field that this kind cannot be selected by."""
    tests: list[Test] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        match = re.match(r"^(?P<field>[\w.]+)\s*(?P<operator>==|=|!=)(?P<value>.*)$", part)
        if match is None:
            raise bad_request(f'unable to parse field selector "{text}": "{part}" is not field=value or field!=value')
        field = match["field"]
        if field not in ("metadata.name", "metadata.namespace", *_FIELDS.get(kind, ())):
            raise bad_request(
                f'Unable to find "{kind.api_version}, Resource={kind.plural}" that match '
                f'field selector "{part}": field label not supported: {field}'
            )
        tests.append(_field_test(field, match["value"], match["operator"] == "!="))
    return lambda item: all(test(item) for test in tests)


def selector_test(label_selector: str, field_selector: str, kind: ResourceType) -> Test | None:
    """Both selectors as one test; None if both are empty."""
    if not label_selector and not field_selector:
        return None
    labels = parse_label_selector(label_selector)
    fields = parse_field_selector(field_selector, kind)
    return lambda item: labels(labels_of(item)) and fields(item)


def matches(selector: Mapping[str, Any] | None, labels: Mapping[str, str]) -> bool:
    """Whether labels satisfy a LabelSelector object. None selects nothing, {} everything."""
    if selector is None:
        return False
    for key, value in (selector.get("matchLabels") or {}).items():
        if labels.get(key) != value:
            return False
    return all(_expression(entry, labels) for entry in selector.get("matchExpressions") or ())


def selector_text(selector: Mapping[str, Any]) -> str:
    """A LabelSelector object in the query language, e.g. "app=web,tier in (a,b)"."""
    parts = [f"{key}={value}" for key, value in sorted((selector.get("matchLabels") or {}).items())]
    for entry in selector.get("matchExpressions") or ():
        values = ",".join(sorted(entry.get("values") or ()))
        match entry["operator"]:
            case "In":
                parts.append(f"{entry['key']} in ({values})")
            case "NotIn":
                parts.append(f"{entry['key']} notin ({values})")
            case "Exists":
                parts.append(entry["key"])
            case _:
                parts.append(f"!{entry['key']}")
    return ",".join(parts)


def _split(text: str) -> list[str]:
    """Parts between commas that stand outside parentheses."""
    return re.split(r",(?![^(]*\))", text)


def _requirement(part: str) -> _LabelTest:
    if match := _SET.match(part):
        key, values = match["key"], {value.strip() for value in match["values"].split(",")}
        if match["operator"] == "in":
            return lambda labels: key in labels and labels[key] in values
        return lambda labels: labels.get(key) not in values
    if match := _EQUALITY.match(part):
        return _equality(match["key"], match["operator"], match["value"])
    if match := _EXISTS.match(part):
        key, absent = match["key"], bool(match["absent"])
        return lambda labels: (key in labels) is not absent
    raise bad_request(f'unable to parse requirement: "{part}" is not a label selector')


def _equality(key: str, operator: str, value: str) -> _LabelTest:
    if operator == "!=":
        return lambda labels: labels.get(key) != value
    if operator in ("=", "=="):
        return lambda labels: labels.get(key) == value
    if not re.fullmatch(r"\d+", value):
        raise bad_request(f'unable to parse requirement: values: Invalid value: "{value}": for >, < want an integer')
    bound = int(value)

    def compares(labels: Mapping[str, str]) -> bool:
        found = labels.get(key, "")
        if not re.fullmatch(r"-?\d+", found):
            return False
        return int(found) > bound if operator == ">" else int(found) < bound

    return compares


def _expression(entry: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    key, values = entry["key"], entry.get("values") or ()
    match entry["operator"]:
        case "In":
            return labels.get(key) in values
        case "NotIn":
            return labels.get(key) not in values
        case "Exists":
            return key in labels
        case _:
            return key not in labels


def _field_test(field: str, value: str, negated: bool) -> Test:
    path = ("source", "component") if field == "source" else tuple(field.split("."))
    if field == "status.successful":
        path = ("status", "succeeded")
    absent = "false" if field in ("spec.unschedulable", "spec.hostNetwork") else ""
    if field == "status.successful" or field == "status.replicas":
        absent = "0"

    def equals(item: Object) -> bool:
        found = look_up(item, *path, default=absent)
        text = str(found).lower() if isinstance(found, bool) else str(found)
        return (text == value) is not negated

    return equals
