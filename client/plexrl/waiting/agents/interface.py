"""What an agent sees and what it answers.

Knows nothing of how episodes are run; agents know nothing of each other.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from plexrl.waiting.scenarios import Operation
from plexrl.waiting.schedules import Costs

LOOKS_PER_ACTION = 250


@dataclass(frozen=True)
class Record:
    """How an agent's wait for one operation went, as far as the agent could see."""

    episode: int
    sleeps_s: tuple[float, ...]
    queries: int
    states: tuple[tuple[float, bool], ...]
    """Of each look: seconds since the request, and whether it had finished."""
    after_s: float
    """The operation finished later than this, counted from the request ..."""
    by_s: float
    """... and no later than this; inf if it had not finished at the deadline."""
    exact_s: float | None = None
    """The time it took, where the experiment gives it away."""


History: TypeAlias = Mapping[str, Sequence[Record]]
"""Records by operation name, oldest first."""


@dataclass(frozen=True)
class Observation:
    """What an agent knows when it is asked for an action."""

    operation: Operation
    costs: Costs
    episode: int
    turn: int
    """0 for the first action towards this operation."""
    elapsed_s: float | None
    """Since the request; None while nothing has been requested."""
    states: tuple[tuple[float, bool], ...]
    """Of each look so far: seconds since the request, and whether it had finished."""
    output: str
    """What the last action printed."""
    complaint: str
    """Why the last action was stopped; empty if it was not."""
    manual: str
    """The tools, one line each."""


@dataclass(frozen=True)
class Action:
    """Code to run, and the tokens that it took to ask for it and write it (0 for agents without a model)."""

    code: str
    prompt_tokens: int = 0
    completion_tokens: int = 0


class Agent(Protocol):
    """Anything that waits."""

    @property
    def name(self) -> str:
        """For tables."""
        ...

    def act(self, observation: Observation, history: History) -> Action:
        """The next action. It is asked again if the action ends without having seen the operation finished."""
        ...


def wait_by(observation: Observation, looks_s: Sequence[float]) -> Action:
    """Code that requests the operation if nobody has, and looks at the given times (seconds since the request)."""
    operation = observation.operation
    lines = [] if observation.elapsed_s is not None else [operation.start]
    at_s = observation.elapsed_s or 0.0
    sleeps: list[str] = []
    for look_s in looks_s:
        if look_s > at_s and len(sleeps) < LOOKS_PER_ACTION:
            sleeps.append(f"{look_s - at_s:.6g}")
            at_s = look_s
    listed = ", ".join(sleeps)
    lines += [f"for t in [{listed}]:", "    time.sleep(t)", f"    if {operation.look}:", "        break"]
    return Action("\n".join(lines))
