"""The task that is learned by reinforcement: its split, its tokens, its reward."""

import numpy as np
import pytest

from plexrl.waiting.learned import task as waiting
from plexrl.waiting.schedules import Costs, optimal_schedule


def test_held_out_tasks_are_never_trained_on() -> None:
    assert not set(waiting.HELD_OUT) & set(waiting.TRAINED_ON)
    assert len(waiting.HELD_OUT) + len(waiting.TRAINED_ON) == 512
    assert 0.08 < len(waiting.HELD_OUT) / 512 < 0.18
    drawn = waiting.draw_problems(np.random.default_rng(0), 500).tasks
    assert not set(drawn) & set(waiting.HELD_OUT)
    assert set(waiting.draw_problems(np.random.default_rng(0), 50, held_out=True).tasks) <= set(waiting.HELD_OUT)


def test_histories_hold_what_happened() -> None:
    problems = waiting.draw_problems(np.random.default_rng(3), 400)
    np.testing.assert_allclose(problems.by_s, problems.after_s * waiting.HISTORY_GROWTH)
    middle = (problems.after_s + problems.by_s) / 2
    means = np.array([task.mean_s for task in problems.tasks])
    assert (middle.mean(axis=1) / means).mean() == pytest.approx(1.0, abs=0.03)


def test_prompts_are_tokens() -> None:
    prompts = np.array(waiting.draw_problems(np.random.default_rng(0), 50).prompts())
    assert prompts.shape == (50, waiting.PROMPT_TOKENS)
    assert np.all(prompts[:, -1] == waiting.EQUALS)
    assert np.all((prompts[:, :-1] >= 1) & (prompts[:, :-1] <= waiting.BINS))


def test_times_survive_as_tokens_to_a_tenth() -> None:
    times_s = np.geomspace(1.5, 200, 300)
    back = waiting.seconds_of(waiting.token_of(times_s))
    assert np.abs(back / times_s - 1).max() < 0.1


def test_imitation_is_well_formed_and_wasteful() -> None:
    generator = np.random.default_rng(0)
    problems = waiting.draw_problems(generator, 300, held_out=True)
    completions = waiting.imitation(problems, generator)
    assert all(waiting.well_formed(completion) for completion in completions)
    assert waiting.expected_ratio(problems, completions) > 1.5


@pytest.mark.parametrize(
    "completion",
    [[], [5, 5, 5, 5], [5, 5, 5, waiting.END], [5, 5, 5, 29, waiting.END], [0, 5, 5, 5, waiting.END], [5] * 5],
)
def test_nonsense_costs_more_than_any_waiting(completion: list[int]) -> None:
    task = waiting.HELD_OUT[0]
    assert not waiting.well_formed(completion)
    assert waiting.cost(task, completion, np.array([10.0])) == waiting.COST_OF_NONSENSE


def test_the_floor_can_be_written_in_tokens() -> None:
    """Four sleeps on a scale of fifths lose a few per cent, so that 15 % is within reach."""
    problems = waiting.draw_problems(np.random.default_rng(0), 40, held_out=True)
    best = []
    for task in problems.tasks:
        looks = optimal_schedule(task.law, Costs(query=task.price), task.deadline_s)[: waiting.SLEEPS]
        best.append([*waiting.token_of(np.diff((0.0, *looks))).tolist(), waiting.END])
    assert waiting.expected_ratio(problems, best) < 1.05


def test_cost_averages_to_the_expectation() -> None:
    problems = waiting.draw_problems(np.random.default_rng(1), 1)
    completion = waiting.imitation(problems, np.random.default_rng(2))[0]
    durations_s = problems.durations_s(np.random.default_rng(5), 40_000)[0]
    found = waiting.cost(problems.tasks[0], completion, durations_s) / waiting.floor_cost(problems.tasks[0])
    assert found == pytest.approx(waiting.expected_ratio(problems, [completion]), rel=0.03)


def test_a_prompt_tells_the_intervals_and_no_more() -> None:
    """Of the same seen intervals it is the same, whatever happened within them; a longer wait shows."""
    problems = waiting.draw_problems(np.random.default_rng(0), 5)
    shown = waiting.Problems(problems.tasks, problems.after_s * 0.0, problems.by_s[:, ::-1]).prompts()
    assert shown == problems.prompts()
    longer = waiting.Problems(problems.tasks, problems.after_s, problems.by_s * waiting.HISTORY_GROWTH).prompts()
    assert all(new != old for new, old in zip(longer, shown, strict=True))
