"""What the job learns: from 32 earlier waits of an operation, write the sleeps of the next one.

A prompt is the history in five numbers: of the looks that saw the earlier waits end, the first in their order, the
quartiles and the last. Each is the end of an interval; the look in vain before it needs no number, as looks grew by one
factor. The completion is four sleeps, the last of which repeats: the code action `for t in [...]: sleep, look, stop if
done`. Its reward is minus what the wait cost, which a clock decides and nobody judges. Numbers are tokens on a
logarithmic scale.

Operations differ in how long they take on average and in how widely that varies; neither is told. One in eight is held
out, whatever the seed, and never trained on. Knows laws and prices; knows nothing of models and jobs.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from plexrl.waiting.laws import FloatArray, Gamma
from plexrl.waiting.scenarios import DEADLINE_MEANS, QUERIES_PER_MEAN, Operation, Scenario
from plexrl.waiting.schedules import Costs, expectation, optimal_schedule

IntArray: TypeAlias = npt.NDArray[np.int64]
Tokens: TypeAlias = Sequence[int] | npt.NDArray[np.integer[Any]]

HISTORY = 32
# Numbers that a history is told in: order statistics at equal distances.
SUMMARY = 5
SLEEPS = 4
# Token 0 is never used; 1 to BINS are times, each a fifth longer than the one before.
BINS = 28
SHORTEST_S = 1.5
STEP = 1.2
EQUALS, END = 29, 30
VOCABULARY_SIZE = 32
PROMPT_TOKENS = SUMMARY + 1
COMPLETION_TOKENS = SLEEPS + 1

MEANS_S = np.geomspace(6.0, 60.0, 64)
SHAPES = np.geomspace(3.0, 24.0, 8)
HELD_OUT_ONE_IN = 8
# What looking for the first time taught: looks whose times grow by this factor, from a random first one.
HISTORY_GROWTH = 1.3
# In prices of a look; more than the worst that anyone does who waits at all.
COST_OF_NONSENSE = 12.0


@dataclass(frozen=True)
class Task:
    """An operation by its law. A look costs a sixth of the mean, a second of not knowing costs 1."""

    mean_s: float
    shape: float

    @property
    def law(self) -> Gamma:
        return Gamma.of_mean(self.mean_s, self.shape)

    @property
    def price(self) -> float:
        """Of a look."""
        return self.mean_s / QUERIES_PER_MEAN

    @property
    def deadline_s(self) -> float:
        return DEADLINE_MEANS * self.mean_s

    def scenario(self) -> Scenario:
        """The same as the benchmark's agents meet it."""
        goal, arguments = "create the deployment web", ("deployment", "web")
        operation = Operation("apply", goal, "apply", arguments, self.law, self.deadline_s)
        return Scenario(f"gamma({self.shape:.3g}) of {self.mean_s:.3g} s", (operation,), Costs(query=self.price))


def is_held_out(mean_index: int, shape_index: int) -> bool:
    """The same on every machine and for every seed."""
    digest = hashlib.blake2b(f"{mean_index},{shape_index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % HELD_OUT_ONE_IN == 0


_GRID = [(i, j) for i in range(MEANS_S.size) for j in range(SHAPES.size)]
HELD_OUT = tuple(Task(float(MEANS_S[i]), float(SHAPES[j])) for i, j in _GRID if is_held_out(i, j))
TRAINED_ON = tuple(Task(float(MEANS_S[i]), float(SHAPES[j])) for i, j in _GRID if not is_held_out(i, j))


def draw_tasks(generator: np.random.Generator, count: int, *, held_out: bool = False) -> list[Task]:
    """With replacement."""
    known = HELD_OUT if held_out else TRAINED_ON
    return [known[index] for index in generator.integers(0, len(known), count)]


def token_of(times_s: FloatArray) -> IntArray:
    """The nearest time on the scale, int64 of the same shape."""
    steps = np.round(np.log(np.maximum(times_s, 1e-9) / SHORTEST_S) / np.log(STEP))
    return np.asarray(1 + np.clip(steps, 0, BINS - 1), np.int64)


def seconds_of(tokens: IntArray) -> FloatArray:
    """float64 of the same shape; tokens that are no times count as the nearest that is."""
    return np.asarray(SHORTEST_S * STEP ** (np.clip(tokens, 1, BINS) - 1), np.float64)


@dataclass(frozen=True)
class Problems:
    """Tasks with a history each. after_s, by_s: float64 [tasks, HISTORY], after < T <= by."""

    tasks: list[Task]
    after_s: FloatArray
    by_s: FloatArray

    def prompts(self) -> list[list[int]]:
        """Token ids: the SUMMARY of by_s in ascending order, EQUALS."""
        ranks = np.round(np.linspace(0, HISTORY - 1, SUMMARY)).astype(np.int64)
        return [[*row, EQUALS] for row in token_of(np.sort(self.by_s, axis=1)[:, ranks]).tolist()]

    def durations_s(self, generator: np.random.Generator, draws: int) -> FloatArray:
        """float64 [tasks, draws]: how long each task takes, several times over."""
        shape = np.array([[task.shape] for task in self.tasks])
        scale = np.array([[task.mean_s / task.shape] for task in self.tasks])
        return np.asarray(generator.gamma(np.repeat(shape, draws, axis=1)) * scale, np.float64)


def draw_problems(generator: np.random.Generator, count: int, *, held_out: bool = False) -> Problems:
    """Tasks, and HISTORY earlier waits for each, seen by looks at growing intervals."""
    tasks = draw_tasks(generator, count, held_out=held_out)
    bare = Problems(tasks, np.zeros((count, 0)), np.zeros((count, 0)))
    taken_s = bare.durations_s(generator, HISTORY)
    phase = generator.random((count, HISTORY))
    look = np.ceil(np.log(taken_s) / np.log(HISTORY_GROWTH) - phase)
    by_s = HISTORY_GROWTH ** (look + phase)
    return Problems(tasks, by_s / HISTORY_GROWTH, by_s)


def imitation(problems: Problems, generator: np.random.Generator) -> list[list[int]]:
    """Completions to begin with: well formed and of the right order of magnitude, otherwise left to chance.

    First sleep: 0.3 to 2 times the mean of the history; the others 0.1 to 1 times. So the start has read the history
    but not what to make of it.
    """
    count = len(problems.tasks)
    mean_s = ((problems.after_s + problems.by_s) / 2).mean(axis=1, keepdims=True)
    first = np.exp(generator.uniform(np.log(0.3), np.log(2.0), (count, 1)))
    others = np.exp(generator.uniform(np.log(0.1), 0.0, (count, SLEEPS - 1)))
    tokens = token_of(mean_s * np.concatenate((first, others), axis=1))
    return [[*row, END] for row in tokens.tolist()]


def well_formed(completion: Tokens) -> bool:
    """Four times and an END."""
    tokens = [int(token) for token in completion]
    return len(tokens) == COMPLETION_TOKENS and tokens[-1] == END and all(1 <= token <= BINS for token in tokens[:-1])


def schedule(completion: Tokens, deadline_s: float) -> FloatArray:
    """Times of looks before the deadline, float64; the last sleep repeats."""
    sleeps_s = seconds_of(np.asarray(completion[:SLEEPS], np.int64))
    more = int(deadline_s / sleeps_s[-1]) + 1
    looks_s = np.cumsum(np.concatenate((sleeps_s, np.full(more, sleeps_s[-1]))))
    return np.asarray(looks_s[looks_s < deadline_s], np.float64)


def cost(task: Task, completion: Tokens, durations_s: FloatArray) -> float:
    """Mean over durations (float64 [draws]), in prices of a look, so that long and short operations count alike."""
    if not well_formed(completion):
        return COST_OF_NONSENSE
    looks_s = np.append(schedule(completion, task.deadline_s), task.deadline_s)
    first = np.minimum(np.searchsorted(looks_s, durations_s, side="left"), looks_s.size - 1)
    late_s = np.maximum(looks_s[first] - durations_s, 0.0)
    return float((first + late_s / task.price).mean())


def floor_cost(task: Task) -> float:
    """What the best schedule for the law costs on average, in prices of a look; it depends on the shape alone."""
    if task.shape not in _FLOORS:
        law, costs = Gamma.of_mean(30.0, task.shape), Costs(query=30.0 / QUERIES_PER_MEAN)
        looks = optimal_schedule(law, costs, DEADLINE_MEANS * 30.0)
        _FLOORS[task.shape] = expectation(law, costs, looks, DEADLINE_MEANS * 30.0).cost / costs.query
    return _FLOORS[task.shape]


_FLOORS: dict[float, float] = {}


def expected_ratio(problems: Problems, completions: Sequence[Tokens]) -> float:
    """Expected cost of the completions under the true laws, as a multiple of the floor's."""
    spent = 0.0
    for task, completion in zip(problems.tasks, completions, strict=True):
        if not well_formed(completion):
            spent += COST_OF_NONSENSE
            continue
        looks = schedule(completion, task.deadline_s).tolist()
        spent += expectation(task.law, Costs(query=task.price), looks, task.deadline_s).cost / task.price
    return spent / sum(floor_cost(task) for task in problems.tasks)


def action(completion: Tokens, operation: Operation) -> str:
    """The completion as code; what is not well formed becomes code that does nothing."""
    if not well_formed(completion):
        return "pass"
    sleeps = ", ".join(f"{seconds:.3g}" for seconds in seconds_of(np.asarray(completion[:SLEEPS], np.int64)))
    return f"""{operation.start}
sleeps = [{sleeps}]
time.sleep(sleeps.pop(0))
while not {operation.look}:
    time.sleep(sleeps.pop(0) if len(sleeps) > 1 else sleeps[0])"""
