"""The agentic jobs of the benchmark: who waits for what, and what each rollout's agent does between its sleeps.

A job's round is an episode per rollout, at once, and then a training step. An agent thinks (one `generate`), writes a
code action that sleeps once and looks, and is asked again if it looked in vain. When it sleeps follows from its seed
alone: neither tokens nor the time that thinking takes change it, so that all runs of a job are the same run.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace

from plexrl.waiting.agents.interface import Action, History, Observation, wait_by
from plexrl.waiting.agents.learners import Learner, empirical_quantiles
from plexrl.waiting.bridge import IdleBridge, Paced, Rollout
from plexrl.waiting.cluster_world import cluster_world, measured
from plexrl.waiting.episodes import Run, Score
from plexrl.waiting.sandbox import Sandbox
from plexrl.waiting.scenarios import Scenario
from plexrl.waiting.world import Environment

MEASURED_EPISODES = 10
EARLIER_EPISODES = 6


@dataclass(frozen=True)
class AgenticJob:
    """One job. `preset`: of the simulated cluster's latencies."""

    name: str
    preset: str
    speed: float
    """How fast its cluster's time passes."""
    rollouts: int = 2


JOBS = (
    AgenticJob("deploys", "calm", speed=1.0),
    AgenticJob("saturated", "near-saturation", speed=2.0),
    AgenticJob("pulls", "image-pull", speed=6.0),
)

Think = Callable[[int], None]
"""What an agent does before it acts, by the number of its thought in this round."""


class TurnByTurn:
    """Sleeps as the empirical learner plans, one sleep and one look per action, and thinks before each."""

    name = "turn-by-turn"

    def __init__(self) -> None:
        self._plan: Learner = empirical_quantiles()
        self.think: Think = lambda thought: None
        self.thoughts = 0

    def act(self, observation: Observation, history: History) -> Action:
        self.think(self.thoughts)
        self.thoughts += 1
        elapsed_s = observation.elapsed_s or 0.0
        deadline_s = observation.operation.deadline_s
        # Code says its sleeps in six digits: what is a millionth away is now.
        due_s = [at_s for at_s in self._plan.plan(observation, history) if at_s > elapsed_s * 1.001]
        return wait_by(observation, [min(due_s, default=deadline_s)])


@dataclass
class Lives:
    """The rollouts of a job, with what their agents have learned of its operations before the benchmark."""

    job: AgenticJob
    runs: list[Run]

    def copy(self) -> "Lives":
        """To be lived from the same point again: what agents learn from now on is theirs."""
        return Lives(
            self.job,
            [replace(run, agent=copy.deepcopy(run.agent), history=copy.deepcopy(run.history)) for run in self.runs],
        )

    def episode(self, index: int, rollout: Rollout, think: Think) -> list[Score]:
        """The next round of one rollout, on the clock of `rollout`."""
        run, job = self.runs[index], self.job

        def world(scenario: Scenario, seed: int, number: int) -> Environment:
            return Paced(cluster_world(job.preset, seed, number), rollout, job.speed)

        assert isinstance(run.agent, TurnByTurn)
        run.agent.think, run.agent.thoughts, run.world = think, 0, world
        return run.run_episode()


def lives(job: AgenticJob, sandbox: Sandbox, seed: int) -> Lives:
    """Agents that have waited for each operation a few times."""
    scenario = measured(job.preset, MEASURED_EPISODES)
    found = Lives(
        job, [Run(scenario, TurnByTurn(), sandbox, seed=1000 * seed + index) for index in range(job.rollouts)]
    )
    for index in range(job.rollouts):
        for _ in range(EARLIER_EPISODES):
            found.episode(index, _Noted(), lambda thought: None)
    return found


class _Noted(Rollout):
    """Notes sleeps instead of sleeping."""

    def __init__(self) -> None:
        super().__init__(IdleBridge(lambda seconds: None, clock=lambda: 0.0))
        self.sleeps_s: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.sleeps_s.append(seconds)


Script = tuple[float, ...]
"""Seconds of the sleeps of one rollout in one round; a thought comes before each."""


def scripts(found: Lives, rounds: int) -> list[list[Script]]:
    """What the rollouts do in their next rounds, by round and rollout, as the live jobs do too."""
    own = found.copy()
    noted: list[list[Script]] = []
    for _ in range(rounds):
        notes = [_Noted() for _ in own.runs]
        for index, note in enumerate(notes):
            own.episode(index, note, lambda thought: None)
        noted.append([tuple(note.sleeps_s) for note in notes])
    return noted
