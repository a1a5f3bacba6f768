"""What each kind's objects may hold: types, required fields, descriptions and how lists are merged.

Read from the models of `lightkube`, which are generated from the OpenAPI document of Kubernetes; the merge keys, which
they leave out, are listed here (source: the patchMergeKey and listMapKey markers in the Go types of Kubernetes).
"""

import datetime
import functools
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import msgspec

# Model and field -> keys by which the items of a list are told apart. The first is the key of strategic merge patches.
MERGE_KEYS: Mapping[tuple[str, str], tuple[str, ...]] = {
    ("Container", "env"): ("name",),
    ("Container", "ports"): ("containerPort", "protocol"),
    ("Container", "volumeDevices"): ("devicePath",),
    ("Container", "volumeMounts"): ("mountPath",),
    ("DeploymentStatus", "conditions"): ("type",),
    ("JobStatus", "conditions"): ("type",),
    ("NamespaceStatus", "conditions"): ("type",),
    ("NodeStatus", "addresses"): ("type",),
    ("NodeStatus", "conditions"): ("type",),
    ("ObjectMeta", "ownerReferences"): ("uid",),
    ("PersistentVolumeClaimStatus", "conditions"): ("type",),
    ("PodSpec", "containers"): ("name",),
    ("PodSpec", "ephemeralContainers"): ("name",),
    ("PodSpec", "evictionResponders"): ("name",),
    ("PodSpec", "hostAliases"): ("ip",),
    ("PodSpec", "imagePullSecrets"): ("name",),
    ("PodSpec", "initContainers"): ("name",),
    ("PodSpec", "resourceClaims"): ("name",),
    ("PodSpec", "schedulingGates"): ("name",),
    ("PodSpec", "topologySpreadConstraints"): ("topologyKey", "whenUnsatisfiable"),
    ("PodSpec", "volumes"): ("name",),
    ("PodStatus", "conditions"): ("type",),
    ("PodStatus", "hostIPs"): ("ip",),
    ("PodStatus", "podIPs"): ("ip",),
    ("ReplicaSetStatus", "conditions"): ("type",),
    ("ResourceRequirements", "claims"): ("name",),
}
# Lists of plain values that are merged as sets.
SETS = frozenset({("ObjectMeta", "finalizers"), ("PersistentVolumeSpec", "accessModes"), ("NodeSpec", "podCIDRs")})
# Maps and structs that a server-side apply owns as a whole.
ATOMIC = frozenset({"LabelSelector", "ObjectReference", "LocalObjectReference", "SecretKeySelector", "NodeSelector"})
# A patch that names some keys of these takes the others away.
RETAIN_KEYS = frozenset({("DeploymentSpec", "strategy"), ("PodSpec", "volumes")})

_QUANTITY_MAPS = frozenset({"limits", "requests", "capacity", "allocatable", "allocatedResources"})
_DEFAULTED_KEYS = {"protocol": "TCP"}


@dataclass(frozen=True, eq=False)
class Schema:
    """The type of a JSON value. `kind` is one of string, integer, number, boolean, time, quantity, int-or-string, any,
    object, list and map; `items` belongs to the last two.
    """

    kind: str
    model: str = ""
    module: str = ""
    items: "Schema | None" = None
    merge_keys: tuple[str, ...] = ()
    is_set: bool = False
    retain_keys: bool = False
    atomic: bool = False

    @property
    def fields(self) -> "Mapping[str, Field]":
        """The fields of an object by JSON name; empty for other types."""
        return _fields(self.module, self.model) if self.model else types.MappingProxyType({})

    @property
    def description(self) -> str:
        return _descriptions(self.module, self.model)[""] if self.model else ""


@dataclass(frozen=True)
class Field:
    name: str
    schema: Schema
    required: bool
    description: str


def merge_key_of(schema: Schema, item: Any) -> tuple[Any, ...]:
    """What tells an item of a merged list from the others."""
    if not isinstance(item, dict):
        return (item,)
    return tuple(item.get(key, _DEFAULTED_KEYS.get(key)) for key in schema.merge_keys)


@functools.cache
def schema_of(model: str) -> Schema:
    """The schema of a model such as "apps_v1.Deployment"."""
    module, _, name = model.partition(".")
    return Schema("object", name, module, atomic=name in ATOMIC)


@functools.cache
def _fields(module: str, model: str) -> Mapping[str, Field]:
    cls = getattr(import_module(f"lightkube.models.{module}"), model)
    descriptions = _descriptions(module, model)
    found = {
        info.encode_name: Field(
            info.encode_name,
            _schema_of_type(info.type, model, info.encode_name),
            info.required,
            descriptions.get(info.encode_name, ""),
        )
        for info in msgspec.structs.fields(cls)
    }
    return types.MappingProxyType(found)


def _schema_of_type(hint: Any, model: str, name: str) -> Schema:
    arguments = [argument for argument in typing.get_args(hint) if argument is not types.NoneType]
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        if set(arguments) == {int, str}:
            return Schema("int-or-string")
        return _schema_of_type(arguments[0], model, name)
    if origin is list:
        keys = MERGE_KEYS.get((model, name), ())
        items = _schema_of_type(arguments[0], model, "")
        return Schema(
            "list",
            items=items,
            merge_keys=keys,
            is_set=(model, name) in SETS,
            retain_keys=(model, name) in RETAIN_KEYS,
            atomic=not keys and (model, name) not in SETS,
        )
    if hint is dict or origin is dict:
        if name == "fieldsV1":
            return Schema("any")
        return Schema(
            "map", items=Schema("quantity" if name in _QUANTITY_MAPS else "string"), atomic=name == "nodeSelector"
        )
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        module = hint.__module__.rpartition(".")[2]
        retain = (model, name) in RETAIN_KEYS
        return Schema("object", hint.__name__, module, retain_keys=retain, atomic=hint.__name__ in ATOMIC)
    names = {str: "string", int: "integer", float: "number", bool: "boolean", datetime.datetime: "time"}
    return Schema(names.get(hint, "any"))


@functools.cache
def _descriptions(module: str, model: str) -> Mapping[str, str]:
    """Descriptions of fields by JSON name, and of the model under ""; empty where docstrings are stripped."""
    cls = getattr(import_module(f"lightkube.models.{module}"), model)
    head, _, parameters = (cls.__doc__ or "").partition("**parameters**")
    found = {"": _flowed(head)}
    for part in re.split(r"^\s*\* \*\*", parameters, flags=re.MULTILINE)[1:]:
        name, _, rest = part.partition("**")
        found[name.rstrip("_")] = _flowed(rest.partition(" - ")[2])
    return types.MappingProxyType(found)


def _flowed(text: str) -> str:
    """Text with single line breaks taken out."""
    paragraphs = re.split(r"\n\s*\n", text.strip())
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
