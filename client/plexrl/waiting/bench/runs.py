"""Runs every agent through every scenario, with the same draws for all, and keeps one row per episode.

Knows which agents exist by name; knows nothing of how results are shown.
"""

import functools
import multiprocessing
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from types import MappingProxyType

from plexrl import errors
from plexrl.waiting.agents.fixed import Blocking, Optimal, doubling, every, known_mean_s, mean_then
from plexrl.waiting.agents.interface import Agent
from plexrl.waiting.agents.learners import bayesian_gamma, empirical_quantiles
from plexrl.waiting.episodes import Run, Score, light_world
from plexrl.waiting.sandbox import Sandbox
from plexrl.waiting.scenarios import SCENARIOS, Scenario
from plexrl.waiting.world import Environment

AGENTS: Mapping[str, Callable[[], Agent]] = MappingProxyType(
    {
        "blocking": Blocking,
        "every-2s": lambda: every(2.0),
        "every-10s": lambda: every(10.0),
        "doubling": doubling,
        "mean-then-5s": lambda: mean_then(5.0, known_mean_s),
        "bayes-gamma": bayesian_gamma,
        "empirical": empirical_quantiles,
        "optimal": Optimal,
    }
)


@dataclass(frozen=True)
class Row:
    """One agent's episode (sums over its operations), or, with episode None, all episodes of one seed."""

    agent: str
    law: str
    seed: int
    episode: int | None
    operations: int
    queries: int
    overshoot_s: float
    cost: float
    floor_cost: float
    held_s: float
    not_detected: int
    """Operations whose end the agent learned from the deadline or not at all."""
    stopped: int
    """Actions that were stopped."""
    prompt_tokens: int
    completion_tokens: int

    @property
    def ratio(self) -> float | None:
        """cost / floor_cost; None where the floor is 0."""
        return self.cost / self.floor_cost if self.floor_cost > 0 else None


def row(agent: str, law: str, seed: int, episode: int | None, scores: Sequence[Score]) -> Row:
    """Sums scores."""
    return Row(
        agent=agent,
        law=law,
        seed=seed,
        episode=episode,
        operations=len(scores),
        queries=sum(score.queries for score in scores),
        overshoot_s=sum(score.overshoot_s for score in scores),
        cost=sum(score.cost for score in scores),
        floor_cost=sum(score.floor_cost for score in scores),
        held_s=sum(score.held_s for score in scores),
        not_detected=sum(score.end != "detected" for score in scores),
        stopped=sum(len(score.complaints) for score in scores),
        prompt_tokens=sum(score.prompt_tokens for score in scores),
        completion_tokens=sum(score.completion_tokens for score in scores),
    )


CLUSTER = "cluster/"
"""Before the name of a preset of the latency engine: the same operations on the simulated Kubernetes cluster."""


def scenario_of(law: str) -> Scenario:
    """By the law's name; a cluster's is measured first, once per process."""
    return _measured(law.removeprefix(CLUSTER)) if law.startswith(CLUSTER) else SCENARIOS[law]


def world_of(law: str) -> Callable[[Scenario, int, int], Environment]:
    """Makes the worlds of a law's episodes."""
    if not law.startswith(CLUSTER):
        return light_world
    from plexrl.waiting.cluster_world import cluster_world

    return lambda scenario, seed, episode: cluster_world(law.removeprefix(CLUSTER), seed, episode)


@functools.cache
def _measured(preset: str) -> Scenario:
    from plexrl.waiting.cluster_world import measured

    return measured(preset)


def check_names(laws: Sequence[str], agents: Sequence[str]) -> None:
    """Raises ConfigurationError that lists what exists."""
    from plexrl.waiting.latency.presets import PRESETS

    known_laws = (*SCENARIOS, *(CLUSTER + preset for preset in PRESETS))
    for what, names, known in (("law", laws, known_laws), ("agent", agents, tuple(AGENTS))):
        for name in names:
            if name not in known:
                raise errors.ConfigurationError(f"{what} {name!r} is unknown; there are {', '.join(known)}")


def run_one(law: str, agent: str, seed: int, episodes: int, sandbox: Sandbox) -> list[Row]:
    """One agent's life under one law: a row per episode and, last, their total."""
    run = Run(scenario_of(law), AGENTS[agent](), sandbox, seed, world=world_of(law))
    scores = [run.run_episode() for _ in range(episodes)]
    rows = [row(agent, law, seed, episode, some) for episode, some in enumerate(scores)]
    return [*rows, row(agent, law, seed, None, [score for some in scores for score in some])]


def run_all(
    laws: Sequence[str], agents: Sequence[str], *, episodes: int, seeds: int, processes: int
) -> Iterator[list[Row]]:
    """Yields the rows of one life after the other, as they come; their order is that of completion."""
    check_names(laws, agents)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        futures = [pool.submit(_in_worker, law, seed, tuple(agents), episodes) for law in laws for seed in range(seeds)]
        for future in as_completed(futures):
            yield from future.result()


def _in_worker(law: str, seed: int, agents: tuple[str, ...], episodes: int) -> list[list[Row]]:
    with Sandbox(processes=1) as sandbox:
        return [run_one(law, agent, seed, episodes, sandbox) for agent in agents]
