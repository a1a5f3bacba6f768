"""Agents that do not learn: those found in practice, and the one that knows the law.

Knows the interface and schedules; keeps no state.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from plexrl.waiting.agents.interface import LOOKS_PER_ACTION, Action, History, Observation, wait_by
from plexrl.waiting.laws import AnyLaw
from plexrl.waiting.schedules import optimal_schedule


@dataclass(frozen=True)
class Blocking:
    """Calls a wrapper that returns when the operation has finished.

    It costs no looks and no overshoot, so it is below the floor: it is not waiting but being told. In exchange somebody
    must write such a wrapper for each operation, and the agent is held for all that time (`held_s`) without having said
    for how long.
    """

    name: str = "blocking"

    def act(self, observation: Observation, history: History) -> Action:
        operation = observation.operation
        start = "" if observation.elapsed_s is not None else operation.start + "\n"
        wait = f'kubectl.wait("{operation.kind}", "{operation.object_name}", {operation.deadline_s:.6g})'
        return Action(start + wait)


@dataclass(frozen=True)
class Polling:
    """Looks at the times of an endless schedule, whatever the operation."""

    name: str
    times_s: Callable[[Observation], Iterator[float]] = field(repr=False)

    def act(self, observation: Observation, history: History) -> Action:
        now_s = observation.elapsed_s or 0.0
        ahead = itertools.dropwhile(lambda at_s: at_s <= now_s, self.times_s(observation))
        looks_s = itertools.takewhile(lambda at_s: at_s < observation.operation.deadline_s, ahead)
        # The deadline speaks for itself: the last sleep only has to reach it.
        return wait_by(observation, [*itertools.islice(looks_s, LOOKS_PER_ACTION), observation.operation.deadline_s])


def every(interval_s: float) -> Polling:
    """Fixed polling."""
    return Polling(f"every-{interval_s:g}s", lambda observation: _steps(interval_s, interval_s))


def doubling(first_s: float = 1.0) -> Polling:
    """Exponential backoff: sleeps of 1, 2, 4, ... seconds."""
    return Polling("doubling", lambda observation: (first_s * (2.0**k - 1) for k in itertools.count(1)))


def mean_then(interval_s: float, mean_s: Callable[[Observation], float]) -> Polling:
    """One sleep for the mean, which it knows, then fixed polling."""
    return Polling(f"mean-then-{interval_s:g}s", lambda observation: _steps(mean_s(observation), interval_s))


class Optimal:
    """Knows the law in force and follows its best schedule: the floor."""

    def __init__(self, name: str = "optimal") -> None:
        self.name = name
        self._schedules: dict[tuple[AnyLaw, float, float, float], tuple[float, ...]] = {}

    def act(self, observation: Observation, history: History) -> Action:
        return wait_by(observation, [*self.schedule(observation), observation.operation.deadline_s])

    def schedule(self, observation: Observation) -> tuple[float, ...]:
        """Times of looks, seconds since the request."""
        operation, costs = observation.operation, observation.costs
        law = operation.law.at(observation.episode)
        key = (law, operation.deadline_s, costs.query, costs.delay)
        if key not in self._schedules:
            self._schedules[key] = optimal_schedule(law, costs, operation.deadline_s)
        return self._schedules[key]


def known_mean_s(observation: Observation) -> float:
    """Of the law in the first episode, as documentation would state it; of those runs that finish, if some do not."""
    law = observation.operation.law.at(0)
    return law.mean_s if law.mass == 1 else float(law.quantile(law.mass / 2))


def _steps(first_s: float, interval_s: float) -> Iterator[float]:
    return (first_s + interval_s * k for k in itertools.count())
