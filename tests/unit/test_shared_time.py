"""Whose time it was when several functions ran at once: shares add up, and their stretches lie end to end."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from plexrl_worker.engine.concurrent import SharedTime


def test_two_that_overlap_share_what_they_have_in_common() -> None:
    time = SharedTime(100)
    time.join(1, 100)
    time.join(2, 200)
    assert time.leave(1, 400) == (100, 300)
    assert time.leave(2, 500) == (300, 500)


def test_a_clock_that_is_set_back_takes_nothing_away() -> None:
    time = SharedTime(1000)
    time.join(1, 1000)
    time.join(2, 1100)
    assert time.leave(1, 500) == (1000, 1100)
    assert time.leave(2, 700) == (1100, 1300)


@given(st.lists(st.tuples(st.integers(0, 1000), st.integers(1, 1000)), min_size=1, max_size=20))
def test_stretches_cover_the_time_in_which_something_ran_once(spans: list[tuple[int, int]]) -> None:
    """Any functions, of which one that begins first and ends last holds the stretch together."""
    end = max(start + length for start, length in spans)
    whole = [(0, end, 0), *((start, start + length, number) for number, (start, length) in enumerate(spans, 1))]
    begins, ends = [(start, 0, n) for start, _, n in whole], [(stop, 1, n) for _, stop, n in whole]
    events = sorted(begins + ends)
    time, stretches = SharedTime(0), []
    for at, leaves, number in events:
        if leaves:
            stretches.append(time.leave(number, at))
        else:
            time.join(number, at)
    assert stretches[0][0] == 0
    assert all(before[1] == after[0] for before, after in itertools.pairwise(stretches))
    assert abs(stretches[-1][1] - end) <= 1
    for (start, stop), number in zip(stretches, [n for _, leaves, n in events if leaves], strict=True):
        lived = next(stop - start for start, stop, n in whole if n == number)
        assert 0 <= stop - start <= lived + 1
