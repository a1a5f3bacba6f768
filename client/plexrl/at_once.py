"""Runs the same work for several things at once, each in a thread of its own; used by demonstrations and benchmarks.

Knows threads and nothing of jobs.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, BrokenBarrierError
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def at_once(work: Callable[[T], R], items: Sequence[T], *, barrier: Barrier | None = None) -> list[R]:
    """Results in the order of the items. What one raises is raised here, once all have ended.

    barrier: where they wait for each other; it is broken when one of them fails, so that nobody waits for ever.
    """

    def body(item: T) -> R:
        try:
            return work(item)
        except BaseException:
            if barrier is not None:
                barrier.abort()
            raise

    with ThreadPoolExecutor(max(1, len(items))) as threads:
        ended = [threads.submit(body, item) for item in items]
    failures = [error for future in ended if (error := future.exception()) is not None]
    if failures:
        # That the barrier broke follows from another's failure.
        raise next((error for error in failures if not isinstance(error, BrokenBarrierError)), failures[0])
    return [future.result() for future in ended]
