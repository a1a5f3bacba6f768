"""What agents are asked to do: operations that take time, one after the other, and the laws of how long they take.

Knows laws and prices; knows nothing of agents. The operations and laws are ours; Gamma latencies are the paper's
(arXiv 2512.16262, abstract).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from plexrl.waiting.laws import PRESETS, AnyLaw, Drift, Gamma, LogNormal, Mixture, Never, scaled
from plexrl.waiting.schedules import Costs

Verb = Literal["apply", "scale", "restart"]

DEADLINE_MEANS = 20.0
QUERIES_PER_MEAN = 6.0


@dataclass(frozen=True)
class Operation:
    """A request whose effect comes later, and how to see it."""

    name: str
    """The key of its history."""
    goal: str
    """In words, for agents that read."""
    verb: Verb
    arguments: tuple[str | int, ...]
    """Of the verb."""
    law: AnyLaw
    deadline_s: float
    """After the request; then the agent is told the state without looking, like a rollout's progress deadline."""
    kind: str = "deployment"
    object_name: str = "web"
    """What shows that it has finished."""

    @property
    def start(self) -> str:
        """The code that requests it."""
        return f"kubectl.{self.verb}({', '.join(json.dumps(argument) for argument in self.arguments)})"

    @property
    def look(self) -> str:
        """The code of one look: True once it has finished."""
        return f'kubectl.get("{self.kind}", "{self.object_name}")["ready"]'


@dataclass(frozen=True)
class Scenario:
    """Operations that depend on each other: the next is asked for once the one before has been seen to finish."""

    name: str
    operations: tuple[Operation, ...]
    costs: Costs


def rollout(name: str, law: AnyLaw, mean_s: float) -> Scenario:
    """Create a deployment, scale it up (half as long), restart it (half as long again), under one law.

    mean_s sets the scale of prices and deadlines: a look costs as much as a sixth of it spent not knowing, which is the
    proportion of the known points (a look for 5 s, a mean of 30 s).
    """

    def operation(verb: Verb, goal: str, arguments: tuple[str | int, ...], factor: float) -> Operation:
        return Operation(verb, goal, verb, arguments, scaled(law, factor), DEADLINE_MEANS * mean_s * factor)

    return Scenario(
        name,
        (
            operation("apply", "create the deployment web", ("deployment", "web"), 1.0),
            operation("scale", "scale the deployment web to 5 replicas", ("web", 5), 0.5),
            operation("restart", "restart the pods of the deployment web", ("web",), 1.5),
        ),
        Costs(query=mean_s / QUERIES_PER_MEAN),
    )


DRIFT_AT = 30

_FOUR = Gamma.of_mean(30, 4)
_LAWS: Mapping[str, tuple[AnyLaw, float]] = MappingProxyType(
    {
        "gamma-1": (Gamma.of_mean(30, 1), 30),
        "gamma-4": (_FOUR, 30),
        "gamma-16": (Gamma.of_mean(30, 16), 30),
        "lognormal": (LogNormal.of_moments(30, 20), 30),
        "two-humps": (Mixture((0.6, 0.4), (Gamma.of_mean(12, 25), Gamma.of_mean(57, 25))), 30),
        **{name: (law, law.mean_s) for name, law in PRESETS.items()},
        "drift-up": (Drift(((0, _FOUR), (DRIFT_AT, Gamma.of_mean(90, 4)))), 30),
        "drift-down": (Drift(((0, _FOUR), (DRIFT_AT, Gamma.of_mean(10, 4)))), 30),
        "sometimes-never": (Mixture((0.95, 0.05), (_FOUR, Never())), 30),
    }
)
STATIONARY = tuple(name for name in _LAWS if not name.startswith(("drift", "sometimes")))

SCENARIOS: Mapping[str, Scenario] = MappingProxyType(
    {name: rollout(name, law, mean_s) for name, (law, mean_s) in _LAWS.items()}
)
