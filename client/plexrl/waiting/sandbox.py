"""Runs code actions: Python that a model wrote, in a Monty interpreter that has no access to the host.

`time.sleep(t)` suspends the program and comes back as `Sleeping(t, program)` before any time has passed. The program is
then a value: bytes that can be stored, and resumed in another process or never. Whatever the code does, the call
returns a typed outcome within its limits.

Knows Monty, limits and tools; knows nothing of clusters, laws or agents, and has no clock but the one it is given.
"""

import json
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from enum import StrEnum
from types import TracebackType
from typing import Any, TypeAlias

import pydantic_monty as monty

from plexrl.waiting.tools import Plain, ToolError, Tools

_MAGIC = b"plexrl-program-1\n"
_MESSAGE_CHARACTERS = 1000
# Monty's own words for what time.sleep refuses; a test holds them to the installed version.
_REFUSED_SLEEPS = (
    "sleep length must be non-negative",
    "Invalid value NaN (not a number)",
    "timestamp out of range for C PyTime_t",
)
_CLOCKS = frozenset({"time.time", "time.monotonic", "time.perf_counter"})


@dataclass(frozen=True)
class Limits:
    """Of one code action, over all its parts and processes. A program that is resumed keeps to its new host's."""

    code_bytes: int = 16 * 1024
    turn_s: float = 1.0
    """Interpreter time between two suspensions."""
    run_s: float = 5.0
    """Interpreter time in all; a turn that begins within it may finish."""
    memory_bytes: int = 16 * 2**20
    recursion_depth: int = 200
    suspensions: int = 1000
    """Sleeps, tool calls, and whatever else has to ask the host: imports, unknown names, readings of the clock."""
    sleep_s: float = 3600.0
    """In all. A sleep that would exceed it is not begun."""
    output_bytes: int = 16 * 1024
    worker_bytes: int = 1 * 2**30
    """Address space of the interpreter's process, should its own accounting miss something (Linux)."""


class Reason(StrEnum):
    """Why a code action was stopped."""

    SYNTAX = "syntax"
    """It does not parse."""
    ERROR = "error"
    """It raised an exception that it did not catch."""
    BAD_SLEEP = "bad_sleep"
    """It asked to sleep for a time that is negative, not a number, or infinite."""
    SLEEP_LIMIT = "sleep_limit"
    TIME_LIMIT = "time_limit"
    MEMORY_LIMIT = "memory_limit"
    RECURSION_LIMIT = "recursion_limit"
    SUSPENSION_LIMIT = "suspension_limit"
    OUTPUT_LIMIT = "output_limit"
    CODE_LIMIT = "code_limit"
    """Its text is too long."""
    CRASHED = "crashed"
    """The interpreter's process died or had to be killed."""


@dataclass(frozen=True)
class Used:
    """What a program has used of its limits so far; it travels with the program."""

    suspensions: int = 0
    sleep_s: float = 0.0
    run_s: float = 0.0
    output_bytes: int = 0


@dataclass(frozen=True)
class Program:
    """A suspended program. Opaque; a value that outlives the process that made it.

    It carries what it has used of its limits: store it where code actions cannot write.
    """

    state: bytes
    used: Used

    def to_bytes(self) -> bytes:
        """For storing; `from_bytes` reads it in any process with the same Monty version."""
        head = json.dumps(asdict(self.used)).encode()
        return _MAGIC + len(head).to_bytes(4, "big") + head + self.state

    @classmethod
    def from_bytes(cls, stored: bytes) -> "Program":
        """Raises ValueError if these are not a stored program."""
        body = stored.removeprefix(_MAGIC)
        length = int.from_bytes(body[:4], "big")
        try:
            head = json.loads(body[4 : 4 + length])
            return cls(body[4 + length :], Used(**{field.name: head[field.name] for field in fields(Used)}))
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"not a stored program: {error}") from None


@dataclass(frozen=True)
class Sleeping:
    """The code asked to sleep `seconds` >= 0, which nobody has done yet. `resume(program)` is its waking."""

    seconds: float
    program: Program
    output: str
    """What it printed since it was started or resumed."""


@dataclass(frozen=True)
class Finished:
    """The code ran to its end."""

    output: str


@dataclass(frozen=True)
class Stopped:
    """The code failed or met a limit. `message` is for whoever wrote it."""

    reason: Reason
    message: str
    output: str


Outcome: TypeAlias = Sleeping | Finished | Stopped


class Sandbox:
    """A pool of interpreter processes. A context manager; safe to use from several threads.

    >>> with Sandbox() as sandbox:
    ...     outcome = sandbox.start("time.sleep(30); print('awake')", Tools("kubectl", {}))
    ...     print(outcome.seconds)
    ...     print(sandbox.resume(outcome.program, Tools("kubectl", {})).output, end="")
    30.0
    awake
    """

    def __init__(self, limits: Limits | None = None, *, processes: int = 2) -> None:
        self.limits = limits or Limits()
        self._pool = monty.Monty(
            max_processes=processes,
            request_timeout=self.limits.turn_s + 2.0,
            max_checkouts_per_worker=1000,
        )

    def __enter__(self) -> "Sandbox":
        self._pool.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.__exit__(kind, error, trace)

    def start(self, code: str, tools: Tools, now_s: Callable[[], float] = lambda: 0.0) -> Outcome:
        """Runs code until it sleeps, ends or is stopped; `time` and the tools' module are already imported.

        now_s: what `time.time()` says. Exceptions of tools other than ToolError are raised here, for they are no fault
        of the code.
        """
        size = len(code.encode(errors="replace"))
        if size > self.limits.code_bytes:
            message = f"the code has {size} bytes, at most {self.limits.code_bytes} are allowed"
            return Stopped(Reason.CODE_LIMIT, message, "")
        return self._run(code, None, tools, now_s)

    def resume(self, program: Program, tools: Tools, now_s: Callable[[], float] = lambda: 0.0) -> Outcome:
        """Wakes a suspended program. The same program may be resumed again, from the same point: it is a value."""
        return self._run("", program, tools, now_s)

    def _run(self, code: str, program: Program | None, tools: Tools, now_s: Callable[[], float]) -> Outcome:
        limits = self.limits
        turns = _Turns(limits, program.used if program else Used(), tools, now_s)
        modules = {tools.name: monty.ExternalModule(dict.fromkeys(tools.functions, _never_called))}
        try:
            with self._pool.checkout(
                limits={
                    "max_turn_duration_secs": limits.turn_s,
                    "max_memory": limits.memory_bytes,
                    "max_recursion_depth": limits.recursion_depth,
                    # Counted here too, since Monty's count starts anew with each resumption.
                    "max_suspensions": limits.suspensions + 100,
                },
                os_policy={"sleep": "call_host", "datetime": "call_host", "random_start": {"seed": 0}},
                external_modules=modules,
            ) as session:
                _confine(session.worker_pid, limits.worker_bytes)
                if program is None:
                    session.feed_run(f"import time, {tools.name}")
                    return turns.drive(lambda: session.feed_start(code, print_callback=turns.printed))
                try:
                    suspended = session.load_snapshot(program.state, print_callback=turns.printed)
                except monty.MontyRuntimeError as error:
                    raise ValueError(f"not a program that this version of Monty can resume: {error}") from None
                return turns.drive(lambda: suspended, waking=True)
        except monty.MontyError as error:
            return turns.stopped(error)


def _never_called(*args: Any, **kwargs: Any) -> None:
    raise AssertionError("tools are called by name, through Tools.call")


def _confine(pid: int | None, worker_bytes: int) -> None:
    """Bounds the interpreter's process: address space, and no files or core dumps written."""
    if pid is None or sys.platform != "linux":
        return
    try:
        resource.prlimit(pid, resource.RLIMIT_AS, (worker_bytes, worker_bytes))
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, 0))
        resource.prlimit(pid, resource.RLIMIT_CORE, (0, 0))
    except ProcessLookupError:
        pass  # it died just now; the next request to it says so


class _LimitReached(Exception):
    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class _Turns:
    """Answers a program's suspensions, one after the other, and keeps count."""

    def __init__(self, limits: Limits, used: Used, tools: Tools, now_s: Callable[[], float]) -> None:
        self._limits = limits
        self._used = used
        self._tools = tools
        self._now_s = now_s
        self._output: list[str] = []

    def printed(self, stream: str, text: str) -> None:
        """Takes printed text up to the limit; past it an error ends the program, which cannot catch it."""
        left = self._limits.output_bytes - self._used.output_bytes
        data = text.encode(errors="replace")
        self._used = replace(self._used, output_bytes=self._used.output_bytes + len(data))
        if left > 0:
            self._output.append(data[:left].decode(errors="ignore"))
        if len(data) > left:
            raise _LimitReached(*self._too_much_output())

    def drive(self, begin: Callable[[], monty.SyncSnapshot], *, waking: bool = False) -> Outcome:
        """Runs until the program sleeps or ends; raises MontyError where `stopped` is to be asked."""
        try:
            snapshot = self._timed(begin)
            if waking and isinstance(snapshot, monty.FunctionSnapshot):
                snapshot = self._answer(snapshot, {"return_value": None})
            while not isinstance(snapshot, monty.MontyComplete):
                self._suspend()
                if isinstance(snapshot, monty.FunctionSnapshot):
                    if snapshot.function_name == "time.sleep":
                        return self._sleep(snapshot)
                    snapshot = self._call(snapshot)
                elif isinstance(snapshot, monty.NameLookupSnapshot):
                    snapshot = self._timed(snapshot.resume_auto)
                else:  # a FutureSnapshot
                    raise _LimitReached(Reason.ERROR, "asynchronous code is not supported; use time.sleep")
        except _LimitReached as limit:
            return Stopped(limit.reason, str(limit), self._text())
        return Finished(self._text())

    def stopped(self, error: monty.MontyError) -> Stopped:
        """What an error of the interpreter means."""
        if self._used.output_bytes > self._limits.output_bytes:
            return Stopped(*self._too_much_output(), self._text())
        if isinstance(error, monty.MontyCrashedError):
            message = "the interpreter ran out of its time" if error.timed_out else "the interpreter died"
            return Stopped(Reason.CRASHED, message, self._text())
        message = str(error)[:_MESSAGE_CHARACTERS]
        if isinstance(error, monty.MontySyntaxError):
            return Stopped(Reason.SYNTAX, message, self._text())
        return Stopped(_reason(error.exception()), self._described(error), self._text())

    def _sleep(self, snapshot: monty.FunctionSnapshot) -> Sleeping:
        seconds = float(snapshot.args[0])
        slept_s = self._used.sleep_s + seconds
        if slept_s > self._limits.sleep_s:
            raise _LimitReached(
                Reason.SLEEP_LIMIT, f"would sleep for {slept_s:.6g} s in all, at most {self._limits.sleep_s:g} s"
            )
        self._used = replace(self._used, sleep_s=slept_s)
        return Sleeping(seconds, Program(snapshot.dump(), self._used), self._text())

    def _call(self, snapshot: monty.FunctionSnapshot) -> monty.SyncSnapshot:
        name = snapshot.function_name
        if name == "import":
            return self._timed(snapshot.resume_auto)
        if name in _CLOCKS:
            return self._answer(snapshot, {"return_value": self._now_s()})
        module, _, function = name.partition(".")
        if snapshot.is_os_function or snapshot.object_id is not None or module != self._tools.name:
            return self._timed(snapshot.resume_not_handled if snapshot.is_os_function else snapshot.resume_auto)
        try:
            result: Plain = self._tools.call(function, snapshot.args, snapshot.kwargs)
        except ToolError as error:
            return self._answer(snapshot, {"exc_type": "RuntimeError", "message": str(error)[:_MESSAGE_CHARACTERS]})
        return self._answer(snapshot, {"return_value": result})

    def _answer(self, snapshot: monty.FunctionSnapshot, result: monty.ExternalResult) -> monty.SyncSnapshot:
        return self._timed(lambda: snapshot.resume(result))

    def _timed(self, turn: Callable[[], monty.SyncSnapshot]) -> monty.SyncSnapshot:
        if self._used.run_s > self._limits.run_s:
            raise _LimitReached(Reason.TIME_LIMIT, f"computed for more than {self._limits.run_s:g} s in all")
        start = time.perf_counter()
        try:
            return turn()
        finally:
            self._used = replace(self._used, run_s=self._used.run_s + time.perf_counter() - start)

    def _too_much_output(self) -> tuple[Reason, str]:
        return Reason.OUTPUT_LIMIT, f"printed more than {self._limits.output_bytes} bytes"

    def _suspend(self) -> None:
        self._used = replace(self._used, suspensions=self._used.suspensions + 1)
        if self._used.suspensions > self._limits.suspensions:
            raise _LimitReached(
                Reason.SUSPENSION_LIMIT, f"slept or asked the host more than {self._limits.suspensions} times"
            )

    def _text(self) -> str:
        return "".join(self._output)

    def _described(self, error: monty.MontyError) -> str:
        """The exception and the line of the code that raised it."""
        message = str(error)[:_MESSAGE_CHARACTERS]
        frames = error.traceback() if isinstance(error, monty.MontyRuntimeError) else []
        return f"line {frames[-1].line}: {message}" if frames else message


def _reason(cause: BaseException) -> Reason:
    match cause:
        case TimeoutError():
            return Reason.TIME_LIMIT
        case MemoryError():
            return Reason.MEMORY_LIMIT
        case RecursionError():
            return Reason.RECURSION_LIMIT
        case ValueError() | OverflowError() if str(cause) in _REFUSED_SLEEPS:
            return Reason.BAD_SLEEP
        case _:
            return Reason.ERROR
