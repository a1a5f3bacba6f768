"""Server-side apply: who owns which field, conflicts between owners, and what is taken away when nobody asks any more.

Ownership is kept in `metadata.managedFields`, in the FieldsV1 form of Kubernetes. Writes by ordinary updates own what
they change. Statuses are not tracked: only controllers write them here.
"""

from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

import msgspec

from plexrl.waiting.cluster.api.errors import ApiError
from plexrl.waiting.cluster.api.patches import merge_applied
from plexrl.waiting.cluster.api.schema import Schema, merge_key_of
from plexrl.waiting.cluster.objects import Object

Path: TypeAlias = tuple[str, ...]
"""Steps in FieldsV1 form: 'f:spec', 'k:{"name":"web"}', 'v:"value"', '.'."""

_UNTRACKED = frozenset(
    {
        ("f:apiVersion",),
        ("f:kind",),
        ("f:status",),
        *(
            ("f:metadata", f"f:{name}")
            for name in (
                "creationTimestamp",
                "deletionGracePeriodSeconds",
                "deletionTimestamp",
                "generateName",
                "generation",
                "managedFields",
                "name",
                "namespace",
                "resourceVersion",
                "selfLink",
                "uid",
            )
        ),
    }
)


def leaves(schema: Schema, value: Any) -> dict[Path, Any]:
    """The fields of an object that can be owned, with their values."""
    return {path: leaf for path, leaf in _leaves(schema, value, ()) if not _is_untracked(path)}


def apply(schema: Schema, current: Object, applied: Object, manager: str, force: bool, now: str) -> Object:
    """The object after an apply by `manager`. Raises ApiError (409) for fields that others own and hold otherwise."""
    wanted = leaves(schema, applied)
    live = leaves(schema, current)
    entries = managed_entries(current)
    conflicts: list[tuple[Path, str]] = []
    others: set[Path] = set()
    for entry in entries:
        if _is_applier(entry, manager):
            continue
        owned = set(_paths(entry["fieldsV1"]))
        disputed = {path for path in owned & wanted.keys() if live.get(path, _MISSING) != wanted[path]}
        conflicts += [(path, entry["manager"]) for path in sorted(disputed)]
        others |= owned - disputed
    if conflicts and not force:
        raise _conflict(conflicts)
    before = {path for entry in entries if _is_applier(entry, manager) for path in _paths(entry["fieldsV1"])}
    merged = merge_applied(schema, current, applied)
    # Deep before shallow, and an entry of a list as a whole (".") before the key by which it is found.
    for path in sorted(before - wanted.keys() - others, key=lambda path: (-len(path), path)):
        merged = _without(schema, merged, path)
    taken = {path for path, _ in conflicts}
    mine = _entry(manager, "Apply", current.get("apiVersion", applied.get("apiVersion")), set(wanted), now)
    after: list[Object] = []
    for entry in entries:
        if not _is_applier(entry, manager):
            after.append(_reduced(entry, taken))
        elif entry["fieldsV1"] == mine["fieldsV1"]:
            # An apply that asks for the same again is not news.
            mine = entry
    return _with_entries(merged, sorted([*after, mine], key=lambda entry: str(entry.get("time"))))


def own_changes(schema: Schema, previous: Object | None, item: Object, manager: str, now: str) -> Object:
    """The object after an ordinary write: the writer owns what it set or changed, and nobody owns what is gone."""
    before = leaves(schema, previous) if previous is not None else {}
    after = leaves(schema, item)
    changed = {path for path, value in after.items() if before.get(path, _MISSING) != value}
    gone = before.keys() - after.keys()
    # Who changes managedFields by hand has the last word; an empty list resets them.
    entries = managed_entries(item)
    if not changed and not gone:
        return item
    kept: list[Object] = []
    mine = set(changed)
    for entry in entries:
        if entry["manager"] == manager and entry["operation"] == "Update":
            mine |= set(_paths(entry["fieldsV1"])) - gone
        else:
            kept.append(_reduced(entry, changed | gone))
    return _with_entries(item, [*kept, _entry(manager, "Update", item["apiVersion"], mine, now)])


def managed_entries(item: Object) -> list[Object]:
    entries: list[Object] = item.get("metadata", {}).get("managedFields") or []
    return [entry for entry in entries if entry.get("fieldsV1") and entry.get("manager")]


_MISSING = object()


def _leaves(schema: Schema, value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    if schema.kind in ("object", "map") and not schema.atomic and isinstance(value, dict) and value:
        for key, entry in value.items():
            known = schema.fields.get(key)
            yield from _leaves(known.schema if known else schema.items or Schema("any"), entry, (*path, f"f:{key}"))
    elif schema.kind == "list" and schema.merge_keys and isinstance(value, list) and value:
        for entry in value:
            step = (*path, _key_step(schema, entry))
            yield (*step, "."), None
            yield from _leaves(schema.items or Schema("any"), entry, step)
    elif schema.is_set and isinstance(value, list) and value:
        for entry in value:
            yield (*path, f"v:{_text(entry)}"), entry
    elif path:
        yield path, value


def _is_untracked(path: Path) -> bool:
    return path[:1] in _UNTRACKED or path[:2] in _UNTRACKED


def _key_step(schema: Schema, entry: Any) -> str:
    keys = dict(zip(schema.merge_keys, merge_key_of(schema, entry), strict=True))
    return f"k:{_text({key: value for key, value in sorted(keys.items()) if value is not None})}"


def _text(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _is_applier(entry: Object, manager: str) -> bool:
    return bool(entry["manager"] == manager and entry["operation"] == "Apply")


def _entry(manager: str, operation: str, api_version: Any, paths: set[Path], now: str) -> Object:
    return {
        "manager": manager,
        "operation": operation,
        "apiVersion": api_version,
        "time": now,
        "fieldsType": "FieldsV1",
        "fieldsV1": _fields_v1(paths),
    }


def _with_entries(item: Object, entries: list[Object]) -> Object:
    kept = [entry for entry in entries if entry["fieldsV1"]]
    return {**item, "metadata": {**item["metadata"], "managedFields": kept}}


def _reduced(entry: Object, taken: Iterable[Path]) -> Object:
    return {**entry, "fieldsV1": _fields_v1(set(_paths(entry["fieldsV1"])) - set(taken))}


def _fields_v1(paths: Iterable[Path]) -> Object:
    tree: Object = {}
    for path in sorted(paths):
        node = tree
        for step in path:
            node = node.setdefault(step, {})
    return tree


def _paths(tree: Object, path: Path = ()) -> Iterator[Path]:
    for step, below in tree.items():
        if below:
            yield from _paths(below, (*path, step))
        else:
            yield (*path, step)


def _without(schema: Schema, value: Any, path: Path) -> Any:
    """The value without what is at a path."""
    step, *rest = path
    if step == ".":
        return value
    if step.startswith("f:") and isinstance(value, dict):
        key = step[2:]
        if key not in value:
            return value
        known = schema.fields.get(key)
        below = known.schema if known else schema.items or Schema("any")
        reduced = dict(value)
        if rest:
            reduced[key] = _without(below, value[key], tuple(rest))
        if not rest or reduced[key] in ({}, []):
            del reduced[key]
        return reduced
    if step.startswith("v:") and isinstance(value, list):
        return [entry for entry in value if f"v:{_text(entry)}" != step]
    if step.startswith("k:") and isinstance(value, list):
        if rest in ([], ["."]):
            return [entry for entry in value if _key_step(schema, entry) != step]
        below = schema.items or Schema("any")
        return [_without(below, entry, tuple(rest)) if _key_step(schema, entry) == step else entry for entry in value]
    return value


def _conflict(conflicts: list[tuple[Path, str]]) -> ApiError:
    causes = [
        {"reason": "FieldManagerConflict", "message": f'conflict with "{manager}"', "field": dotted(path)}
        for path, manager in conflicts
    ]
    listed = ", ".join(f'conflict with "{manager}": {dotted(path)}' for path, manager in conflicts)
    count = f"{len(conflicts)} conflict{'s' if len(conflicts) > 1 else ''}"
    message = f"Apply failed with {count}: {listed}"
    return ApiError(409, "Conflict", message, {"causes": causes})


def dotted(path: Path) -> str:
    """A path as people read it: .spec.template.spec.containers[name="web"].image."""
    text = ""
    for step in path:
        if step.startswith("f:"):
            text += f".{step[2:]}"
        elif step.startswith("k:"):
            keys = msgspec.json.decode(step[2:])
            text += "[" + ",".join(f"{key}={_text(value)}" for key, value in keys.items()) + "]"
        elif step.startswith("v:"):
            text += f"[={step[2:]}]"
    return text
