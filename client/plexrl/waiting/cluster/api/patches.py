"""The three patches that name changes: JSON patch (RFC 6902), merge patch (RFC 7386) and strategic merge patch.

Strategic merge follows the schema: lists with a merge key are merged item by item, and directives ($patch, $retainKeys,
$setElementOrder/x, $deleteFromPrimitiveList/x) say what a plain merge cannot. Server-side apply is in `apply`.
"""

from collections.abc import Callable
from typing import Any

from jsonpath import JSONPatch
from jsonpath.exceptions import JSONPatchError, JSONPatchTestFailure, JSONPointerError

from plexrl.waiting.cluster.api.errors import ApiError, bad_request
from plexrl.waiting.cluster.api.schema import Schema, merge_key_of
from plexrl.waiting.cluster.objects import Object, copy_json

OPERATIONS_LIMIT = 10_000
_ORDER = "$setElementOrder/"
_DELETE_VALUES = "$deleteFromPrimitiveList/"


def json_patch(item: Object, operations: Any) -> Object:
    """Raises ApiError: 400 for what is no patch, 422 for one that does not apply."""
    if not isinstance(operations, list) or not all(isinstance(operation, dict) for operation in operations):
        raise bad_request("a JSON patch is a list of operations")
    if len(operations) > OPERATIONS_LIMIT:
        raise bad_request(f"a JSON patch holds at most {OPERATIONS_LIMIT} operations, not {len(operations)}")
    try:
        patch = JSONPatch(operations)
    except (JSONPatchError, JSONPointerError) as error:
        raise bad_request(f"the JSON patch does not parse: {error}") from error
    try:
        patched = patch.apply(copy_json(item))
    except JSONPatchTestFailure as error:
        raise ApiError(422, "Invalid", f"the JSON patch does not apply: testing value failed: {error}") from error
    except (JSONPatchError, JSONPointerError) as error:
        raise ApiError(422, "Invalid", f"the JSON patch does not apply: {error}") from error
    if not isinstance(patched, dict):
        raise bad_request("the JSON patch leaves no object")
    return patched


def merge_patch(item: Any, patch: Any) -> Any:
    """A merge patch: objects are merged, null takes away, everything else replaces."""
    if not isinstance(patch, dict):
        return patch
    merged = dict(item) if isinstance(item, dict) else {}
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = merge_patch(merged.get(key), value)
    return merged


def strategic_merge_patch(schema: Schema, item: Object, patch: Any) -> Object:
    """Raises ApiError (400) for an unknown directive or a list item without its merge key."""
    if not isinstance(patch, dict):
        raise bad_request("a strategic merge patch is an object")
    merged = dict(item)
    match patch.get("$patch"):
        case None | "merge":
            pass
        case "replace":
            merged = {}
        case "delete":
            return {}
        case other:
            raise bad_request(f"unknown directive $patch: {other}: want merge, replace or delete")
    retained = patch.get("$retainKeys")
    if retained is not None:
        merged = {key: value for key, value in merged.items() if key in retained}
    for key, value in patch.items():
        if key.startswith(_DELETE_VALUES):
            name = key.removeprefix(_DELETE_VALUES)
            merged[name] = [entry for entry in merged.get(name) or [] if entry not in value]
        elif not key.startswith("$"):
            merged = _merged_field(schema, merged, key, value, patch.get(_ORDER + key))
    return merged


def _merged_field(schema: Schema, merged: Object, key: str, value: Any, order: Any) -> Object:
    known = schema.fields.get(key)
    below = known.schema if known else schema.items if schema.kind == "map" else None
    if value is None or (isinstance(value, dict) and value.get("$patch") == "delete"):
        return {name: entry for name, entry in merged.items() if name != key}
    if isinstance(value, dict):
        current = merged.get(key)
        base = current if isinstance(current, dict) else {}
        return {**merged, key: strategic_merge_patch(below or Schema("any"), base, value)}
    if isinstance(value, list) and below is not None and (below.merge_keys or below.is_set):
        return {**merged, key: _merged_list(below, merged.get(key) or [], value, order)}
    return {**merged, key: value}


def _merged_list(schema: Schema, current: list[Any], patch: list[Any], order: Any) -> list[Any]:
    if schema.is_set:
        return [*current, *(value for value in patch if value not in current)]
    if any(isinstance(entry, dict) and entry.get("$patch") == "replace" for entry in patch):
        return [entry for entry in patch if "$patch" not in entry]
    # Strategic merge tells items apart by the first key alone.
    key = schema.merge_keys[0]
    items = schema.items or Schema("any")
    merged = list(current)
    for entry in patch:
        if not isinstance(entry, dict) or key not in entry:
            raise bad_request(f"a list item of the patch has no {key}, by which items are told apart")
        at = next((index for index, old in enumerate(merged) if old.get(key) == entry[key]), None)
        if entry.get("$patch") == "delete":
            merged = [old for old in merged if old.get(key) != entry[key]]
        elif at is None:
            merged.append(strategic_merge_patch(items, {}, entry))
        else:
            merged[at] = strategic_merge_patch(items, merged[at], entry)
    if isinstance(order, list):
        wanted = [entry.get(key) if isinstance(entry, dict) else entry for entry in order]
        return _ordered(merged, wanted, lambda entry: entry.get(key))
    return merged


def _ordered(items: list[Any], wanted: list[Any], key_of: Callable[[Any], Any]) -> list[Any]:
    """Items in the wanted order; those that it does not name keep following what they followed."""
    groups: dict[Any, list[Any]] = {}
    leader: Any = None
    head: list[Any] = []
    for item in items:
        if key_of(item) in wanted:
            leader = key_of(item)
            groups[leader] = [item]
        elif leader is None:
            head.append(item)
        else:
            groups[leader].append(item)
    return head + [item for key in dict.fromkeys(wanted) for item in groups.get(key, [])]


def merge_applied(schema: Schema, current: Any, applied: Any) -> Any:
    """What server-side apply makes of a live value and an applied one: granular where the schema is, else replaced."""
    if schema.kind in ("object", "map") and not schema.atomic and isinstance(applied, dict):
        merged = dict(current) if isinstance(current, dict) else {}
        for key, value in applied.items():
            known = schema.fields.get(key)
            below = known.schema if known else schema.items or Schema("any")
            merged[key] = merge_applied(below, merged.get(key), value)
        return merged
    if schema.kind == "list" and isinstance(applied, list) and isinstance(current, list):
        if schema.is_set:
            return [*current, *(value for value in applied if value not in current)]
        if schema.merge_keys:
            kept = {merge_key_of(schema, entry): entry for entry in current}
            for entry in applied:
                key = merge_key_of(schema, entry)
                kept[key] = merge_applied(schema.items or Schema("any"), kept.get(key), entry)
            return list(kept.values())
    return applied
