"""Kubernetes objects as plain JSON values, and the few things that everybody asks of them.

Objects are never changed once they are stored: a new version is a new dict that shares what did not change.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

Object: TypeAlias = dict[str, Any]


def copy_json(value: Any) -> Any:
    """A deep copy of a JSON value."""
    if isinstance(value, dict):
        return {key: copy_json(item) for key, item in value.items()}
    if isinstance(value, list):
        return [copy_json(item) for item in value]
    return value


def name_of(item: Mapping[str, Any]) -> str:
    name: str = item["metadata"]["name"]
    return name


def namespace_of(item: Mapping[str, Any]) -> str:
    """The namespace, "" for what lives in none."""
    namespace: str = item["metadata"].get("namespace") or ""
    return namespace


def uid_of(item: Mapping[str, Any]) -> str:
    uid: str = item["metadata"]["uid"]
    return uid


def labels_of(item: Mapping[str, Any]) -> dict[str, str]:
    labels: dict[str, str] = item["metadata"].get("labels") or {}
    return labels


def annotations_of(item: Mapping[str, Any]) -> dict[str, str]:
    annotations: dict[str, str] = item["metadata"].get("annotations") or {}
    return annotations


def is_deleting(item: Mapping[str, Any]) -> bool:
    return bool(item["metadata"].get("deletionTimestamp"))


def look_up(item: Any, *path: str | int, default: Any = None) -> Any:
    """The value at a path of keys and indices; the default where something on the way is missing or null."""
    for step in path:
        if isinstance(step, int):
            if not isinstance(item, list) or not -len(item) <= step < len(item):
                return default
            item = item[step]
        elif isinstance(item, dict):
            item = item.get(step)
        else:
            return default
        if item is None:
            return default
    return item


def with_value(item: Object, path: Sequence[str], value: Any) -> Object:
    """A version of the object with this value at the path; None takes the key away."""
    key, *rest = path
    changed = dict(item)
    if rest:
        changed[key] = with_value(item.get(key) or {}, rest, value)
    elif value is None:
        changed.pop(key, None)
    else:
        changed[key] = value
    return changed


def with_metadata(item: Object, **values: Any) -> Object:
    """A version of the object with these metadata; None takes one away."""
    metadata = {**item["metadata"], **values}
    return {**item, "metadata": {key: value for key, value in metadata.items() if value is not None}}


def controller_of(item: Mapping[str, Any]) -> Object | None:
    """The owner reference of the one controller, or None."""
    for reference in item["metadata"].get("ownerReferences") or ():
        if reference.get("controller"):
            owner: Object = reference
            return owner
    return None


def owner_reference(owner: Object) -> Object:
    """A reference that makes `owner` the controller of another object."""
    return {
        "apiVersion": owner["apiVersion"],
        "kind": owner["kind"],
        "name": name_of(owner),
        "uid": uid_of(owner),
        "controller": True,
        "blockOwnerDeletion": True,
    }


def condition(item: Mapping[str, Any], kind: str) -> Object | None:
    """The status condition of this type, or None."""
    found: Iterable[Object] = look_up(item, "status", "conditions", default=[])
    return next((entry for entry in found if entry.get("type") == kind), None)


def condition_is(item: Mapping[str, Any], kind: str, status: str = "True") -> bool:
    found = condition(item, kind)
    return found is not None and found.get("status") == status


def with_condition(conditions: Sequence[Object], new: Object, now: str) -> list[Object]:
    """Conditions with one set by type. Its transition time moves only when its status does."""
    previous = next((entry for entry in conditions if entry["type"] == new["type"]), None)
    moved = previous is None or previous.get("status") != new["status"]
    since = now if moved or previous is None else previous.get("lastTransitionTime", now)
    entry = {**new, "lastTransitionTime": since}
    if previous is None:
        return [*conditions, entry]
    return [entry if old["type"] == new["type"] else old for old in conditions]


def where(items: Iterable[Object], test: Callable[[Object], bool]) -> list[Object]:
    return [item for item in items if test(item)]
