"""Runs an agent through an episode: code actions in the sandbox, sleeps on the world's clock, and the score.

Knows sandbox, world and agents' interface; knows no particular agent.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from plexrl.waiting.agents.interface import Agent, Observation, Record
from plexrl.waiting.sandbox import Outcome, Sandbox, Sleeping, Stopped
from plexrl.waiting.scenarios import Operation, Scenario
from plexrl.waiting.schedules import optimal_schedule
from plexrl.waiting.world import Environment, World

MAX_TURNS = 24


class End(StrEnum):
    """How an operation ended for its agent."""

    DETECTED = "detected"
    """A look saw it finished."""
    DEADLINE = "deadline"
    """The agent learned the state from the deadline: it slept past it, or the operation did not finish in time."""
    GAVE_UP = "gave_up"
    """The agent's turns were used up; the rest of the time until the deadline passed unused."""


@dataclass(frozen=True)
class Score:
    """One operation of one episode. `floor_cost`: what the best schedule for the true law cost on the same draw."""

    operation: str
    episode: int
    end: End
    duration_s: float
    """T; inf if it never finishes."""
    queries: int
    """Looks, and actions that ended without one: they fill the context just so."""
    overshoot_s: float
    cost: float
    floor_cost: float
    held_s: float
    turns: int
    sleeps_s: tuple[float, ...]
    complaints: tuple[str, ...]
    """Reasons why actions were stopped."""
    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True)
class Event:
    """For watching live: what happens at a moment of the episode."""

    at_s: float
    operation: str
    what: str
    text: str


Watch = Callable[[Event], None]


def light_world(scenario: Scenario, seed: int, episode: int) -> World:
    """One in which the scenario's operations take what `draw` says, and everything else no time."""
    durations = draw(scenario, seed, episode)
    by_request: dict[tuple[str, str, str], float] = {
        (operation.verb, operation.kind, operation.object_name): durations[operation.name]
        for operation in scenario.operations
    }
    return World(lambda verb, kind, name: by_request.get((verb, kind, name), 0.0))


def draw(scenario: Scenario, seed: int, episode: int) -> dict[str, float]:
    """Durations of an episode's operations, by name; inf for what never finishes."""
    return {
        operation.name: operation.law.at(episode).sample(np.random.default_rng([seed, episode, index]))
        for index, operation in enumerate(scenario.operations)
    }


@dataclass
class Run:
    """An agent's life: episode after episode over one scenario, with its history.

    Durations are drawn from (seed, episode, operation), so that all agents meet the same ones.
    """

    scenario: Scenario
    agent: Agent
    sandbox: Sandbox
    seed: int
    watch: Watch = lambda event: None
    exact_history: bool = False
    world: Callable[[Scenario, int, int], Environment] = light_world
    """Makes an episode's world from scenario, seed and episode."""
    history: dict[str, list[Record]] = field(default_factory=dict)
    episode: int = 0

    def run_episode(self) -> list[Score]:
        """The scenario's operations, one after the other; their records join the history."""
        world = self.world(self.scenario, self.seed, self.episode)
        scores = []
        for operation in self.scenario.operations:
            score, record = _Attempt(self, world, operation).run()
            scores.append(score)
            self.history.setdefault(operation.name, []).append(record)
        self.episode += 1
        return scores


class _Attempt:
    """One operation: turn after turn until it is seen to have finished or its deadline passes."""

    def __init__(self, run: Run, world: Environment, operation: Operation) -> None:
        self._run = run
        self._world = world
        self._operation = operation
        self._asked_at_s = world.now_s
        self._first_look = len(world.looks)
        self._sleeps: list[float] = []
        self._idle_turns = 0

    def run(self) -> tuple[Score, Record]:
        output, complaint, complaints = "", "", []
        prompt_tokens = completion_tokens = turn = 0
        held_s = self._world.held_s
        end: End | None = None
        while end is None and turn < MAX_TURNS:
            looked = len(self._world.looks)
            observation = self._observation(turn, output, complaint)
            action = self._run.agent.act(observation, self._run.history)
            prompt_tokens += action.prompt_tokens
            completion_tokens += action.completion_tokens
            turn += 1
            self._tell("code", action.code)
            outcome, output, passed = self._execute(action.code)
            complaint = ""
            if isinstance(outcome, Stopped):
                complaint = f"{outcome.reason}: {outcome.message}"
                complaints.append(str(outcome.reason))
                self._tell("stopped", complaint)
            if self._detected_at_s() is not None:
                end = End.DETECTED
            elif passed:
                end = End.DEADLINE
            elif len(self._world.looks) == looked:
                self._idle_turns += 1
        if end is None:
            end = End.GAVE_UP
            self._world.advance_to(max(self._deadline_at_s(), self._world.now_s))
        return self._score(end, turn, self._world.held_s - held_s, tuple(complaints), prompt_tokens, completion_tokens)

    def _execute(self, code: str) -> tuple[Outcome, str, bool]:
        """Runs an action to its end, to a stop, or to the deadline; says what it printed and whether the last."""
        world, tools = self._world, self._world.tools
        outcome = self._run.sandbox.start(code, tools, lambda: world.now_s)
        printed = [outcome.output]
        while isinstance(outcome, Sleeping):
            until_s = world.now_s + outcome.seconds
            self._sleeps.append(outcome.seconds)
            self._tell("sleep", f"{outcome.seconds:.3g} s")
            if until_s >= self._deadline_at_s() and self._detected_at_s() is None:
                world.advance_to(max(self._deadline_at_s(), world.now_s))
                return outcome, "".join(printed), True
            world.advance_to(until_s)
            outcome = self._run.sandbox.resume(outcome.program, tools, lambda: world.now_s)
            printed.append(outcome.output)
        return outcome, "".join(printed), world.now_s >= self._deadline_at_s()

    def _started_at_s(self) -> float | None:
        operation = self._operation
        return self._world.started_at_s.get((operation.verb, operation.kind, operation.object_name))

    def _deadline_at_s(self) -> float:
        started_at_s = self._started_at_s()
        return (self._asked_at_s if started_at_s is None else started_at_s) + self._operation.deadline_s

    def _looks(self) -> list[tuple[float, bool]]:
        """Of this operation since its request: seconds since then, and what was seen."""
        started_at_s = self._started_at_s()
        if started_at_s is None:
            return []
        return [
            (look.at_s - started_at_s, look.ready)
            for look in self._world.looks[self._first_look :]
            if (look.kind, look.name) == (self._operation.kind, self._operation.object_name)
            and look.at_s >= started_at_s
        ]

    def _detected_at_s(self) -> float | None:
        """Seconds since the request of the look that saw it finished."""
        return next((at_s for at_s, ready in self._looks() if ready), None)

    def _observation(self, turn: int, output: str, complaint: str) -> Observation:
        started_at_s = self._started_at_s()
        return Observation(
            operation=self._operation,
            costs=self._run.scenario.costs,
            episode=self._run.episode,
            turn=turn,
            elapsed_s=None if started_at_s is None else self._world.now_s - started_at_s,
            states=tuple(self._looks()),
            output=output,
            complaint=complaint,
            manual=self._world.tools.manual(),
        )

    def _score(
        self, end: End, turns: int, held_s: float, complaints: tuple[str, ...], prompt: int, completion: int
    ) -> tuple[Score, Record]:
        looks, operation = self._looks(), self._operation
        request = (operation.verb, operation.kind, operation.object_name)
        # Of what was never asked for, all the time until the deadline is lost.
        duration_s = self._world.took_s(*request) if self._started_at_s() is not None else 0.0
        detected_s = self._detected_at_s()
        told_s = operation.deadline_s if detected_s is None else detected_s
        in_vain = [at_s for at_s, ready in looks if not ready]
        queries = len(in_vain) + self._idle_turns + 1
        overshoot_s = max(told_s - duration_s, 0.0)
        costs = self._run.scenario.costs
        score = Score(
            operation=operation.name,
            episode=self._run.episode,
            end=end,
            duration_s=duration_s,
            queries=queries,
            overshoot_s=overshoot_s,
            cost=costs.of(queries, overshoot_s),
            floor_cost=floor_cost(self._run.scenario, operation, self._run.episode, duration_s),
            held_s=held_s,
            turns=turns,
            sleeps_s=tuple(self._sleeps),
            complaints=complaints,
            prompt_tokens=prompt,
            completion_tokens=completion,
        )
        self._tell(str(end), f"took {duration_s:.3g} s, found out {overshoot_s:.3g} s late after {queries} queries")
        finished = duration_s <= told_s
        record = Record(
            episode=self._run.episode,
            sleeps_s=score.sleeps_s,
            queries=queries,
            states=tuple(looks),
            after_s=max(in_vain, default=0.0) if finished else told_s,
            by_s=told_s if finished else float("inf"),
            exact_s=duration_s if self._run.exact_history else None,
        )
        return score, record

    def _tell(self, what: str, text: str) -> None:
        self._run.watch(Event(self._world.now_s, self._operation.name, what, text))


_SCHEDULES: dict[tuple[object, ...], tuple[float, ...]] = {}


def floor_cost(scenario: Scenario, operation: Operation, episode: int, duration_s: float) -> float:
    """What the best schedule for the law in force costs when the operation takes `duration_s`."""
    key = (operation.law.at(episode), scenario.costs, operation.deadline_s)
    if key not in _SCHEDULES:
        _SCHEDULES[key] = optimal_schedule(operation.law.at(episode), scenario.costs, operation.deadline_s)
    return schedule_cost(_SCHEDULES[key], scenario, operation, duration_s)


def schedule_cost(schedule: Sequence[float], scenario: Scenario, operation: Operation, duration_s: float) -> float:
    """Of following a schedule on one draw."""
    in_vain = sum(1 for at_s in schedule if at_s < min(duration_s, operation.deadline_s))
    told_s = next((at_s for at_s in schedule if at_s >= duration_s), operation.deadline_s)
    return scenario.costs.of(in_vain + 1, max(min(told_s, operation.deadline_s) - duration_s, 0.0))
