"""The discrete-event engine: a heap on float time with ties broken by insertion, and processes written as generators.

A process yields what it waits for: a float (seconds), or a `Waitable` that calls `Simulation.resume` when it is over.
Knows nothing of jobs, groups or policies. No wall clock, no randomness: the same inputs give the same events.
"""

from collections.abc import Callable, Generator
from heapq import heappop, heappush
from typing import Any, Protocol

Process = Generator["float | Waitable", None, None]


class Waitable(Protocol):
    """Something that a process can wait for."""

    def wait(self, process: Process) -> None:
        """Takes the process, to be resumed once."""
        ...


class Simulation:
    """Time, and what happens next."""

    __slots__ = ("_heap", "_sequence", "events", "now")

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        self._heap: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._sequence = 0

    def at(self, time: float, action: Callable[[Any], None], argument: Any) -> None:
        """Calls `action(argument)` at `time`, which is not in the past."""
        heappush(self._heap, (time, self._sequence, action, argument))
        self._sequence += 1

    def start(self, process: Process) -> None:
        """Runs a process up to its first wait."""
        self.resume(process)

    def resume(self, process: Process) -> None:
        """Runs a process up to its next wait."""
        wait = next(process, None)
        if wait is None:
            return
        if isinstance(wait, float):
            heappush(self._heap, (self.now + wait, self._sequence, self.resume, process))
            self._sequence += 1
        else:
            wait.wait(process)

    def run(self, until: float = float("inf")) -> None:
        """Runs events up to and including time `until`, or until none is left."""
        heap, events = self._heap, 0
        while heap and heap[0][0] <= until:
            self.now, _, action, argument = heappop(heap)
            events += 1
            action(argument)
        self.events += events
        if until != float("inf"):
            self.now = max(self.now, until)


class Counter:
    """A number that only grows, and processes that wait until it has reached a value."""

    __slots__ = ("_simulation", "_waiting", "value")

    def __init__(self, simulation: Simulation) -> None:
        self.value = 0
        self._simulation = simulation
        self._waiting: list[tuple[int, Process]] = []

    def increment(self) -> None:
        """Adds one and resumes who waited for it, in the order in which they came."""
        self.value += 1
        due = [process for value, process in self._waiting if value <= self.value]
        self._waiting = [entry for entry in self._waiting if entry[0] > self.value]
        for process in due:
            self._simulation.resume(process)

    def reaches(self, value: int) -> "Reaches":
        """What a process yields to wait for `value`."""
        return Reaches(self, value)

    def wait_for(self, value: int, process: Process) -> None:
        """Resumes `process` once the number is at least `value`."""
        if self.value >= value:
            self._simulation.resume(process)
        else:
            self._waiting.append((value, process))


class Reaches:
    """A wait for a counter."""

    __slots__ = ("_counter", "_value")

    def __init__(self, counter: Counter, value: int) -> None:
        self._counter = counter
        self._value = value

    def wait(self, process: Process) -> None:
        """Takes the process."""
        self._counter.wait_for(self._value, process)
