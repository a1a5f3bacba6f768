"""Reads YAML into frozen dataclasses, field by field, and says plainly what is wrong with it."""

from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

T = TypeVar("T")


class InputError(Exception):
    """A file that cannot be used; the message names the file, the place in it, the limit and what to do."""


def load_yaml(path: Path) -> Mapping[str, Any]:
    """The mapping that a YAML file holds.

    Raises:
        InputError: no such file, no YAML, or no mapping.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from error
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InputError(f"{path}: is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(value, dict):
        raise InputError(f"{path}: holds {_kind(value)}, want a mapping such as `gpus: 64`")
    return value


def read(where: str, values: Any, into: type[T]) -> T:
    """`into` with the mapping's values; unknown keys, missing keys, other types and negative numbers are refused."""
    if not isinstance(values, Mapping):
        raise InputError(f"{where}: is {_kind(values)}, want a mapping")
    hints = get_type_hints(into)
    known = {f.name: f for f in fields(into)}  # type: ignore[arg-type]
    if unknown := [str(key) for key in values if key not in known]:
        raise InputError(f"{where}: does not know {', '.join(sorted(unknown))}; it may have {', '.join(sorted(known))}")
    found = {}
    for name, field in known.items():
        if name in values:
            found[name] = _value(f"{where}.{name}", values[name], hints[name])
        elif field.default is MISSING and field.default_factory is MISSING:
            raise InputError(f"{where}: lacks {name}")
    return into(**found)


def _value(where: str, value: Any, hint: Any) -> Any:
    if get_origin(hint) in (Union, UnionType):
        if value is None and type(None) in get_args(hint):
            return None
        hint = next(option for option in get_args(hint) if option is not type(None))
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        return _not_negative(where, float(value))
    if hint is int and isinstance(value, int) and not isinstance(value, bool):
        return _not_negative(where, value)
    if hint is str and isinstance(value, str):
        return value
    if get_origin(hint) is tuple and isinstance(value, list):
        return tuple(_value(f"{where}[{i}]", item, get_args(hint)[0]) for i, item in enumerate(value))
    if isinstance(hint, type) and hasattr(hint, "__dataclass_fields__"):
        return read(where, value, hint)
    raise InputError(f"{where}: is {_kind(value)}, want {getattr(hint, '__name__', hint)}")


N = TypeVar("N", int, float)


def _not_negative(where: str, value: N) -> N:
    if not 0 <= value < float("inf"):
        raise InputError(f"{where}: is {value}, want a number that is not negative")
    return value


def _kind(value: Any) -> str:
    return "nothing" if value is None else f"{type(value).__name__} {value!r}"[:80]
