"""The simulated Kubernetes cluster as a world to wait in: the same agents, the same tools, nobody knows the law."""

from collections.abc import Iterator

import numpy as np
import pytest

from plexrl.cli.main import main
from plexrl.waiting.agents.fixed import Blocking, Optimal, every
from plexrl.waiting.agents.interface import Agent
from plexrl.waiting.cluster_world import cluster_world, measured
from plexrl.waiting.episodes import End, Run, Score
from plexrl.waiting.sandbox import Finished, Sandbox, Stopped
from plexrl.waiting.scenarios import Scenario
from plexrl.waiting.world import Environment


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox() as made:
        yield made


@pytest.fixture(scope="module")
def calm() -> Scenario:
    return measured("calm", episodes=12)


def calm_world(scenario: Scenario, seed: int, episode: int) -> Environment:
    return cluster_world("calm", seed, episode)


def live(scenario: Scenario, agent: Agent, sandbox: Sandbox, episodes: int) -> list[Score]:
    run = Run(scenario, agent, sandbox, seed=1, world=calm_world)
    return [score for _ in range(episodes) for score in run.run_episode()]


def test_code_drives_the_cluster(sandbox: Sandbox) -> None:
    world = cluster_world("calm", 3, 0)
    code = """
print(kubectl.apply("deployment", "web", 2)["result"], kubectl.apply("deployment", "web", 2)["result"])
print(kubectl.get("deployment", "web")["ready"])
print(kubectl.wait("deployment", "web", 60.0), kubectl.get("deployment", "web")["ready_replicas"])
print(kubectl.scale("web", 4)["result"], kubectl.get("deployment", "web")["ready"])
"""
    assert sandbox.start(code, world.tools) == Finished("created unchanged\nFalse\nTrue 2\nchanged False\n")
    assert 0.5 < world.took_s("apply", "deployment", "web") < 10
    assert world.took_s("apply", "deployment", "web") == pytest.approx(world.now_s)
    assert world.took_s("scale", "deployment", "web") == np.inf
    world.advance_to(world.now_s + 60)
    assert 0.5 < world.took_s("scale", "deployment", "web") < 10


def test_what_is_not_there_is_said(sandbox: Sandbox) -> None:
    outcome = sandbox.start('kubectl.scale("nothing", 3)', cluster_world("calm", 3, 0).tools)
    assert isinstance(outcome, Stopped)
    assert "not found" in outcome.message


def test_agents_wait_on_the_cluster(calm: Scenario, sandbox: Sandbox) -> None:
    blocked = live(calm, Blocking(), sandbox, 2)
    assert [score.end for score in blocked] == [End.DETECTED] * 6
    assert max(score.overshoot_s for score in blocked) < 1e-6
    optimal, polling = live(calm, Optimal(), sandbox, 8), live(calm, every(0.1), sandbox, 8)
    assert sum(score.cost for score in optimal) == pytest.approx(sum(score.floor_cost for score in optimal), rel=1e-3)
    assert sum(score.cost for score in polling) > 2 * sum(score.cost for score in optimal)
    assert [score.duration_s for score in optimal[::3]] == [score.duration_s for score in polling[::3]]


def test_measuring_finds_the_law(calm: Scenario) -> None:
    """A deployment's first pod is ready after what `calm` says of one pod's start, and a little scheduling."""
    assert calm.operations[0].law.at(0).quantile(0.5) == pytest.approx(2.0, rel=0.15)
    assert calm.operations[2].law.at(0).mean_s > calm.operations[0].law.at(0).mean_s


def test_run_on_the_cluster(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plexrl.waiting.cluster_world.MEASURED_EPISODES", 3)
    assert (
        main(["waiting", "run", "--law", "cluster/calm", "--agent", "optimal", "--episodes", "1", "--speed", "inf"])
        == 0
    )
    assert "detected" in capsys.readouterr().out
    assert main(["waiting", "run", "--law", "cluster/stormy"]) == 1
    assert "cluster/near-saturation" in capsys.readouterr().err
