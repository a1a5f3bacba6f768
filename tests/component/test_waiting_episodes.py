"""Episodes: agents' code runs in the sandbox on the world's clock, and scores are chance and schedule alone."""

import csv
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from plexrl.cli.main import main
from plexrl.waiting.agents.fixed import Blocking, Optimal, every
from plexrl.waiting.agents.interface import Action, Agent, History, Observation
from plexrl.waiting.agents.learners import empirical_quantiles
from plexrl.waiting.bench import runs
from plexrl.waiting.episodes import End, Event, Run, Score, draw, floor_cost
from plexrl.waiting.laws import Gamma, Never
from plexrl.waiting.learned import task as waiting
from plexrl.waiting.sandbox import Limits, Sandbox
from plexrl.waiting.scenarios import SCENARIOS, rollout
from plexrl.waiting.schedules import expectation
from plexrl.waiting.world import World


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox(Limits(turn_s=0.3, run_s=0.6)) as made:
        yield made


class Coder:
    """Says what it is told to, turn after turn; keeps what it saw."""

    def __init__(self, write: Callable[[Observation], str]) -> None:
        self.name = "coder"
        self.write = write
        self.observations: list[Observation] = []

    def act(self, observation: Observation, history: History) -> Action:
        self.observations.append(observation)
        return Action(self.write(observation), prompt_tokens=100, completion_tokens=10)


STEADY = rollout("steady", Gamma.of_mean(10, 10_000), 10)  # operations that take 10, 5 and 15 s, nearly exactly


def start_then(code: str) -> Callable[[Observation], str]:
    return lambda seen: (seen.operation.start if seen.elapsed_s is None else "") + f"\n{code.format(op=seen.operation)}"


def test_one_action_can_act_sleep_and_look(sandbox: Sandbox) -> None:
    agent = Coder(lambda seen: f"{seen.operation.start}\ntime.sleep(20)\nprint({seen.operation.look})")
    run = Run(STEADY, agent, sandbox, seed=0)
    scores = run.run_episode()
    assert [score.end for score in scores] == [End.DETECTED] * 3
    assert [score.queries for score in scores] == [1, 1, 1]
    assert [score.overshoot_s for score in scores] == pytest.approx([10, 15, 5], abs=1)
    assert [score.cost for score in scores] == pytest.approx([10, 15, 5], abs=1)
    assert [score.prompt_tokens for score in scores] == [100, 100, 100]
    record = run.history["apply"][0]
    assert (record.sleeps_s, record.states, record.after_s, record.by_s) == ((20.0,), ((20.0, True),), 0.0, 20.0)


def test_looks_in_vain_are_seen_counted_and_remembered(sandbox: Sandbox) -> None:
    agent = Coder(start_then("time.sleep(6)\nprint({op.look})"))
    run = Run(STEADY, agent, sandbox, seed=0)
    first = run.run_episode()[0]
    assert (first.queries, first.turns) == (2, 2)
    assert first.cost == pytest.approx(STEADY.costs.query + 2, abs=0.5)
    assert agent.observations[1].states == ((6.0, False),)
    assert agent.observations[1].output == "False\n"
    assert agent.observations[1].elapsed_s == 6.0
    assert (run.history["apply"][0].after_s, run.history["apply"][0].by_s) == (6.0, 12.0)


BAD_CODE = {
    "does not parse": ("wait for it(", "syntax"),
    "sleeps a negative time": ("time.sleep(-5)", "bad_sleep"),
    "sleeps not a number": ("time.sleep(float('nan'))", "bad_sleep"),
    "sleeps for ever": ("time.sleep(float('inf'))", "bad_sleep"),
    "never sleeps": ("while True:\n    pass", "time_limit"),
    "sleeps tiny times": ("while True:\n    time.sleep(0.000001)", "suspension_limit"),
    "calls tools wrongly": ("kubectl.scale(3)", "error"),
}


@pytest.mark.parametrize("name", BAD_CODE)
def test_bad_code_is_an_observation_and_costs_what_it_cost(sandbox: Sandbox, name: str) -> None:
    code, reason = BAD_CODE[name]

    def write(seen: Observation) -> str:
        if seen.turn == 0:
            return f"{seen.operation.start}\n{code}" if reason != "syntax" else code
        start = "" if seen.elapsed_s is not None else seen.operation.start
        return f"{start}\ntime.sleep(20)\n{seen.operation.look}"

    agent = Coder(write)
    score = Run(STEADY, agent, sandbox, seed=0).run_episode()[0]
    assert score.complaints == (reason,)
    assert agent.observations[1].complaint.startswith(f"{reason}: ")
    assert score.end is End.DETECTED
    assert score.queries == 2
    assert score.cost == pytest.approx(STEADY.costs.query + score.overshoot_s)


def test_a_huge_sleep_ends_at_the_deadline(sandbox: Sandbox) -> None:
    score = Run(STEADY, Coder(start_then("time.sleep(3000)")), sandbox, seed=0).run_episode()[0]
    assert score.end is End.DEADLINE
    assert score.overshoot_s == pytest.approx(190, abs=1)


def test_an_operation_that_never_finishes_ends_at_its_deadline(sandbox: Sandbox) -> None:
    run = Run(rollout("never", Never(), 10), every(30), sandbox, seed=0)
    score = run.run_episode()[0]
    assert (score.end, score.queries, score.overshoot_s) == (End.DEADLINE, 7, 0.0)
    assert score.cost == pytest.approx(6 * 10 / 6)
    assert (run.history["apply"][0].after_s, run.history["apply"][0].by_s) == (200.0, np.inf)


def test_an_agent_that_does_nothing_gives_up_in_bounded_time(sandbox: Sandbox) -> None:
    scores = Run(STEADY, Coder(lambda seen: "pass"), sandbox, seed=0).run_episode()
    assert scores[0].end is End.GAVE_UP
    assert scores[0].overshoot_s == pytest.approx(200)
    assert scores[0].queries > 20


def test_blocking_is_told_and_held(sandbox: Sandbox) -> None:
    score = Run(STEADY, Blocking(), sandbox, seed=0).run_episode()[0]
    assert (score.queries, score.end) == (1, End.DETECTED)
    assert score.overshoot_s == pytest.approx(0)
    assert score.held_s == pytest.approx(10, abs=1)


@pytest.mark.parametrize("make", [Optimal, lambda: every(10)])
def test_scores_average_to_the_expectation(sandbox: Sandbox, make: Callable[[], Agent]) -> None:
    scenario = replace(SCENARIOS["gamma-4"], operations=SCENARIOS["gamma-4"].operations[:1])
    run = Run(scenario, make(), sandbox, seed=3)
    scores = [run.run_episode()[0] for _ in range(80)]
    operation = scenario.operations[0]
    agent = make()
    if isinstance(agent, Optimal):
        looks: tuple[float, ...] = agent.schedule(Observation(operation, scenario.costs, 0, 0, None, (), "", "", ""))
        assert all(score.cost == pytest.approx(score.floor_cost, abs=1e-3) for score in scores)
    else:
        looks = tuple(np.arange(10.0, operation.deadline_s, 10.0))
    wanted = expectation(operation.law.at(0), scenario.costs, looks, operation.deadline_s)
    found = np.array([(score.queries, score.overshoot_s, score.cost) for score in scores])
    apart = np.abs(found.mean(axis=0) - (wanted.queries, wanted.overshoot_s, wanted.cost))
    assert np.all(apart <= 4 * found.std(axis=0) / np.sqrt(len(scores)) + 1e-9)


def test_all_agents_meet_the_same_durations(sandbox: Sandbox) -> None:
    ours = [Run(SCENARIOS["lognormal"], make(), sandbox, seed=5).run_episode() for make in (Blocking, lambda: every(7))]
    assert [score.duration_s for score in ours[0]] == [score.duration_s for score in ours[1]]
    assert draw(SCENARIOS["lognormal"], 5, 0)["apply"] == ours[0][0].duration_s
    assert draw(SCENARIOS["lognormal"], 6, 0)["apply"] != ours[0][0].duration_s


def test_the_floor_follows_a_drift() -> None:
    scenario = SCENARIOS["drift-up"]
    operation = scenario.operations[0]
    assert floor_cost(scenario, operation, 29, 90.0) > floor_cost(scenario, operation, 30, 90.0)


def test_the_learner_learns_through_the_sandbox(sandbox: Sandbox) -> None:
    run = Run(SCENARIOS["gamma-16"], empirical_quantiles(), sandbox, seed=1)
    scores = [run.run_episode() for _ in range(30)]

    def ratio(episodes: list[list[Score]]) -> float:
        return sum(s.cost for e in episodes for s in e) / sum(s.floor_cost for e in episodes for s in e)

    assert ratio(scores[:6]) > 1.3
    # It still looks to find out now and then.
    assert ratio(scores[-12:]) < 1.3


def test_events_tell_the_story(sandbox: Sandbox) -> None:
    events: list[Event] = []
    Run(STEADY, every(6), sandbox, seed=0, watch=events.append).run_episode()
    assert [event.what for event in events[:4]] == ["code", "sleep", "sleep", "detected"]
    assert events[3].at_s == 12.0
    assert "2 queries" in events[3].text


def test_the_world_is_what_a_cluster_is() -> None:
    world = World(lambda verb, kind, name: 5.0)
    assert world.apply("deployment", "web", 2) == {"kind": "deployment", "name": "web", "result": "created"}
    assert world.apply("deployment", "web", 2) == {"kind": "deployment", "name": "web", "result": "unchanged"}
    world.advance_to(5.0)
    assert world.get("deployment", "web") == {
        "kind": "deployment", "name": "web", "ready": True, "replicas": 2, "ready_replicas": 2,
    }  # fmt: skip
    world.scale("web", 3)
    assert world.get("deployment", "web") == {
        "kind": "deployment", "name": "web", "ready": False, "replicas": 3, "ready_replicas": 2,
    }  # fmt: skip
    with pytest.raises(ValueError, match="does not go back"):
        world.advance_to(1.0)


def test_bench_writes_its_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "waiting"
    arguments = [
        "--laws",
        "gamma-4",
        "--agents",
        "every-10s,optimal",
        "--episodes",
        "4",
        "--seeds",
        "1",
        "--processes",
        "1",
    ]
    assert main(["waiting", "bench", "--out", str(out), *arguments]) == 0
    shown = capsys.readouterr().out
    assert "gamma-4" in shown
    report = json.loads((out / "report.json").read_text())
    rows = report["rows"]
    assert {"agent", "law", "queries", "overshoot_s", "cost", "floor_cost", "ratio", "seed", "episode"} <= set(rows[0])
    assert len(rows) == 2 * (4 + 1)
    totals = [row for row in rows if row["episode"] is None]
    for total in totals:
        own = [r for r in rows if r["episode"] is not None and all(r[k] == total[k] for k in ("agent", "law", "seed"))]
        assert total["cost"] == pytest.approx(sum(r["cost"] for r in own))
        assert total["queries"] == sum(r["queries"] for r in own)
    assert all(t["ratio"] == pytest.approx(1, abs=1e-3) for t in totals if t["agent"] == "optimal")
    with (out / "rows.csv").open() as file:
        assert len(list(csv.DictReader(file))) == len(rows)
    assert (out / "curves.png").stat().st_size > 10_000


def test_run_tells_what_happens(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["waiting", "run", "--agent", "bayes-gamma", "--episodes", "2", "--speed", "inf"]) == 0
    shown = capsys.readouterr().out
    assert "kubectl.apply" in shown
    assert "detected" in shown
    assert "episode 1" in shown


def test_unknown_names_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["waiting", "bench", "--laws", "gamma-5"]) == 1
    assert "there are gamma-1, gamma-4" in capsys.readouterr().err
    assert main(["waiting", "run", "--agent", "nobody"]) == 1
    assert set(runs.AGENTS) >= {"blocking", "doubling", "empirical", "bayes-gamma", "optimal", "mean-then-5s"}


def test_the_reward_of_training_is_the_clocks(sandbox: Sandbox) -> None:
    """What a completion costs by arithmetic is what its code costs in the sandbox, draw by draw."""
    generator = np.random.default_rng(0)
    problems = waiting.draw_problems(generator, 10, held_out=True)
    for index, (task, completion) in enumerate(
        zip(problems.tasks, waiting.imitation(problems, generator), strict=True)
    ):
        agent = Coder(lambda seen, completion=completion: waiting.action(completion, seen.operation))  # type: ignore[misc]
        score = Run(task.scenario(), agent, sandbox, seed=index).run_episode()[0]
        by_arithmetic = waiting.cost(task, completion, np.array([score.duration_s]))
        # The code says its sleeps with three digits.
        assert score.cost / task.price == pytest.approx(by_arithmetic, abs=0.15)
