"""Runs the same work for several things at once, each in a thread of its own.

Knows threads and nothing of jobs.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from threading import Barrier, BrokenBarrierError, Thread
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def at_once(work: Callable[[T], R], items: Sequence[T], *, barrier: Barrier | None = None) -> list[R]:
    """Results in the order of the items. What one raises is raised here, once all have ended.

    An interrupt ends the wait at once, and the threads with the process: what they ask a cluster for may take long.

    barrier: where they wait for each other; it is broken when one of them fails, so that nobody waits for ever.
    """

    def body(item: T, outcome: "Future[R]") -> None:
        try:
            result = work(item)
        except BaseException as error:  # noqa: BLE001 - raised below, in the caller's thread
            if barrier is not None:
                barrier.abort()
            outcome.set_exception(error)
        else:
            outcome.set_result(result)

    outcomes: list[Future[R]] = [Future() for _ in items]
    for item, outcome in zip(items, outcomes, strict=True):
        Thread(target=body, args=(item, outcome), daemon=True).start()
    wait(outcomes)
    failures = [error for outcome in outcomes if (error := outcome.exception()) is not None]
    if failures:
        # That the barrier broke follows from another's failure.
        raise next((error for error in failures if not isinstance(error, BrokenBarrierError)), failures[0])
    return [outcome.result() for outcome in outcomes]
