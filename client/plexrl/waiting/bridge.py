"""The bridge from waits to the scheduler: a job whose rollouts all sleep is idle until the first of them wakes.

Every suspended sleep of a live rollout is noted here; what follows for the job is told as its idle hint (`Job.idle`),
anew whenever it changes. Hints are advice: a wrong one costs the cluster time and the job nothing but time.

Knows rollouts, sleeps and a clock; knows nothing of models, schedulers and what anybody waits for.
"""

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator

from plexrl.waiting.tools import Function, Plain, Tools
from plexrl.waiting.world import Environment, Look

LEAST_S = 0.05
"""A statement that differs by less from the last one is not worth a message."""


class IdleBridge:
    """Of one job. Safe to use from one thread per rollout.

    >>> told = []
    >>> bridge = IdleBridge(told.append, clock=lambda: 0.0)
    >>> with bridge.rollout() as first, bridge.rollout() as second:
    ...     with first.sleeping(30):  # the second is awake: the job is not idle
    ...         with second.sleeping(10):
    ...             pass
    >>> told
    [10.0, 0.0]
    """

    def __init__(self, hint: Callable[[float], None], *, clock: Callable[[], float] = time.monotonic) -> None:
        """`hint`: usually `job.idle`; takes seconds from now, 0 withdraws an earlier statement."""
        self._hint = hint
        self._clock = clock
        self._lock = threading.Lock()
        self._wakes_at: dict[Rollout, float | None] = {}
        self._told_until = float("-inf")

    @contextlib.contextmanager
    def rollout(self) -> Iterator["Rollout"]:
        """A rollout that lives as long as the block; awake at first."""
        rollout = Rollout(self)
        self._note(rollout, None)
        try:
            yield rollout
        finally:
            with self._lock:
                del self._wakes_at[rollout]
                self._tell()

    def _note(self, rollout: "Rollout", sleep_s: float | None) -> None:
        with self._lock:
            self._wakes_at[rollout] = None if sleep_s is None else self._clock() + sleep_s
            self._tell()

    def _tell(self) -> None:
        now = self._clock()
        wakes_at = [now if at is None else at for at in self._wakes_at.values()]
        until = max(min(wakes_at, default=now), now)
        # What was told and is over by now speaks for itself.
        if abs(until - max(self._told_until, now)) >= LEAST_S:
            self._told_until = until
            self._hint(until - now)


class Rollout:
    """One rollout of a job."""

    def __init__(self, bridge: IdleBridge) -> None:
        self._bridge = bridge

    @contextlib.contextmanager
    def sleeping(self, seconds: float) -> Iterator[None]:
        """Around a sleep of that many seconds, however it is slept and whether or not it is cut short."""
        self._bridge._note(self, seconds)
        try:
            yield
        finally:
            self._bridge._note(self, None)

    def sleep(self, seconds: float) -> None:
        """Sleeps on the wall's clock."""
        with self.sleeping(seconds):
            time.sleep(seconds)


class Paced:
    """An environment whose time passes on the wall's clock, `speed` times as fast: `Run(..., world=...)` takes it.

    Only sleeping, and the time for which a blocking tool holds its caller, pass. What the agent needs to think does not
    count, so that an episode goes the same way however long its model has to wait for a device. A sleep is the
    rollout's; while a tool blocks, nobody has said for how long, so nothing is told.
    """

    def __init__(self, environment: Environment, rollout: Rollout, speed: float = 1.0) -> None:
        if not 0 < speed < float("inf"):
            raise ValueError(f"speed: want a positive number, not {speed}")
        self._environment = environment
        self._rollout = rollout
        self._speed = speed
        self.looks: list[Look] = environment.looks
        self.started_at_s = environment.started_at_s
        tools = environment.tools
        self.tools = Tools(tools.name, {name: self._held(tool) for name, tool in tools.functions.items()})

    @property
    def now_s(self) -> float:
        return self._environment.now_s

    @property
    def held_s(self) -> float:
        return self._environment.held_s

    def advance_to(self, at_s: float) -> None:
        """A sleep: takes its time, then it has passed for the environment too."""
        self._rollout.sleep(max(at_s - self.now_s, 0.0) / self._speed)
        self._environment.advance_to(at_s)

    def took_s(self, verb: str, kind: str, name: str) -> float:
        return self._environment.took_s(verb, kind, name)

    def _held(self, tool: Function) -> Function:
        @functools.wraps(tool)
        def timed(*args: Plain, **kwargs: Plain) -> Plain:
            before_s = self.now_s
            result = tool(*args, **kwargs)
            time.sleep((self.now_s - before_s) / self._speed)
            return result

        return timed
