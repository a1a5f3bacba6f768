"""Rows of tables: means and 95 % intervals over repetitions. Knows nothing of what is measured."""

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from typing import Any, Self

Row = dict[str, Any]
Progress = Callable[[str, int, int], None]
"""Table, done, of how many."""

# Two-sided 95 % quantiles of Student's t for 1 to 30 degrees of freedom (any table of the distribution).
_T95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half width of the 95 % interval; the half width is NaN for one value."""
    count = len(values)
    mean = math.fsum(values) / count
    if count < 2:
        return mean, math.nan
    variance = math.fsum((v - mean) ** 2 for v in values) / (count - 1)
    return mean, _T95[min(count - 1, len(_T95)) - 1] * math.sqrt(variance / count)


def summarise(keys: Mapping[str, Any], repetitions: Sequence[Mapping[str, float]]) -> Row:
    """One row: the keys, then for each metric its mean and, as `NAME_ci95`, the half width."""
    row: Row = dict(keys)
    for name in repetitions[0]:
        mean, half = interval([r[name] for r in repetitions])
        row[name] = mean
        row[f"{name}_ci95"] = half
    row["reps"] = len(repetitions)
    return row


def first_part(rows: Sequence[Row], keys: Sequence[str]) -> list[Row]:
    """The rows that have these keys from the first row."""
    return [row for row in rows if all(row[key] == rows[0][key] for key in keys)]


@dataclass(frozen=True, slots=True)
class Task:
    """One simulation: a module-level function and its plain arguments."""

    function: Callable[..., Mapping[str, float]]
    arguments: tuple[Any, ...]


Repetitions = list[tuple[Mapping[str, Any], list[Mapping[str, float]]]]
"""For each row its keys and what each repetition measured."""


class Runner:
    """Runs the repetitions of tables, over the same worker processes from the first table to the last."""

    def __init__(self, workers: int, progress: Progress) -> None:
        """`workers`: processes; 1 runs everything in this one."""
        self._progress = progress
        self._pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn")) if workers > 1 else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def collect(
        self, table: str, tasks: Sequence[tuple[Mapping[str, Any], Sequence[Task]]], *, alone: bool = False
    ) -> Repetitions:
        """Rows keep their order. `alone`: one after the other in this process, for what measures time."""
        total = sum(len(repetitions) for _, repetitions in tasks)
        done = 0
        rows: Repetitions = []
        waiting = [(keys, [self._submit(task, alone) for task in repetitions]) for keys, repetitions in tasks]
        for keys, outcomes in waiting:
            results = []
            for outcome in outcomes:
                results.append(outcome())
                done += 1
                self._progress(table, done, total)
            rows.append((keys, results))
        return rows

    def run_all(
        self, table: str, tasks: Sequence[tuple[Mapping[str, Any], Sequence[Task]]], *, alone: bool = False
    ) -> list[Row]:
        """The same, summarised."""
        return [summarise(keys, results) for keys, results in self.collect(table, tasks, alone=alone)]

    def _submit(self, task: Task, alone: bool) -> Callable[[], Mapping[str, float]]:
        if self._pool is None or alone:
            return partial(task.function, *task.arguments)
        return self._pool.submit(task.function, *task.arguments).result
