"""Tools that code actions may call: a name, typed functions, and the check of what model-written code passes to them.

Knows signatures; knows nothing of sandboxes and clusters. A tool's arguments are text, numbers and truth values; its
result is plain data (dicts, lists, text, numbers, truth values, None).
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

Plain: TypeAlias = "bool | int | float | str | list[Plain] | dict[str, Plain] | None"
Function: TypeAlias = Callable[..., Plain]

MAX_TEXT = 1000
_KINDS: Mapping[type, str] = MappingProxyType(
    {str: "text", int: "a whole number", float: "a number", bool: "True or False"}
)


class ToolError(Exception):
    """What a tool tells the code that called it wrongly or asked for what is not there; code may catch it."""


@dataclass(frozen=True)
class Tools:
    """One module of tools, as code actions see it: `import kubectl` is done for them, `kubectl.get(...)` calls.

    Every parameter of every function must be annotated as str, int, float or bool.
    """

    name: str
    functions: Mapping[str, Function]

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise ValueError(f"name: want a Python name, not {self.name!r}")
        for name, function in self.functions.items():
            for parameter in inspect.signature(function, eval_str=True).parameters.values():
                if parameter.annotation not in _KINDS:
                    raise TypeError(f"{self.name}.{name}: {parameter.name} must be annotated str, int, float or bool")

    def call(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Plain:
        """Calls a function after checking names and types. Raises ToolError with a message that says what to do."""
        function = self.functions.get(name)
        if function is None:
            raise ToolError(f"{self.name} has no {name!r}; it has {', '.join(sorted(self.functions))}")
        signature = inspect.signature(function, eval_str=True)
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise ToolError(f"{self.name}.{name}{self.parameters(name)}: {error}") from None
        checked = {
            key: self._checked(f"{self.name}.{name}: {key}", value, signature.parameters[key].annotation)
            for key, value in bound.arguments.items()
        }
        return function(**checked)

    def parameters(self, name: str) -> str:
        """The signature as code would write it: "(kind: str, name: str)"."""
        signature = inspect.signature(self.functions[name], eval_str=True)
        return str(signature.replace(return_annotation=inspect.Signature.empty))

    def manual(self) -> str:
        """One line per function, for prompts."""
        lines = []
        for name, function in self.functions.items():
            summary = (inspect.getdoc(function) or "").partition("\n")[0]
            lines.append(f"{self.name}.{name}{self.parameters(name)}  # {summary}")
        return "\n".join(lines)

    def _checked(self, where: str, value: Any, kind: type) -> Plain:
        # bool is an int to Python, and a float that is whole is not one to us.
        right = isinstance(value, kind) and not (kind is int and isinstance(value, bool))
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value, right = float(value), True
        if not right:
            raise ToolError(f"{where}: want {_KINDS[kind]}, not {type(value).__name__}")
        if isinstance(value, str) and len(value) > MAX_TEXT:
            raise ToolError(f"{where}: want at most {MAX_TEXT} characters, not {len(value)}")
        plain: Plain = value
        return plain
