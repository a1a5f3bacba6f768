"""The form that a model's functions share: `model.f(...)` waits, `model.f.submit(...)` returns a future.

Knows methods and futures; knows nothing of what the functions do.
"""

from collections.abc import Callable
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload

from plexrl import progress
from plexrl.futures import CallFuture

P = ParamSpec("P")
OwnerT = TypeVar("OwnerT")
ResultT = TypeVar("ResultT")


class BoundFunction(Generic[P, ResultT]):
    """A function of one model."""

    def __init__(self, name: str, submit: Callable[P, CallFuture[ResultT]]) -> None:
        self.__name__ = name
        self.__doc__ = submit.__doc__
        self._submit = submit

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> ResultT:
        """Executes the function and waits for its result."""
        return progress.wait(self._submit(*args, **kwargs), self.__name__)

    def submit(self, *args: P.args, **kwargs: P.kwargs) -> CallFuture[ResultT]:
        """Requests the function and returns at once with a future."""
        return self._submit(*args, **kwargs)


class CallFunction(Generic[OwnerT, P, ResultT]):
    """Makes a method that submits into a function with both forms."""

    def __init__(self, method: Callable[Concatenate[OwnerT, P], CallFuture[ResultT]]) -> None:
        self._method = method
        self.__name__ = method.__name__
        self.__doc__ = method.__doc__
        self.__wrapped__ = method

    @overload
    def __get__(self, owner: None, owner_type: type[OwnerT]) -> "CallFunction[OwnerT, P, ResultT]": ...

    @overload
    def __get__(self, owner: OwnerT, owner_type: type[OwnerT]) -> BoundFunction[P, ResultT]: ...

    def __get__(
        self, owner: OwnerT | None, owner_type: type[OwnerT]
    ) -> "CallFunction[OwnerT, P, ResultT] | BoundFunction[P, ResultT]":
        if owner is None:
            return self
        bound: Any = self._method.__get__(owner, owner_type)
        function: BoundFunction[P, ResultT] = BoundFunction(self.__name__, bound)
        # Found before this descriptor from now on.
        vars(owner)[self.__name__] = function
        return function
