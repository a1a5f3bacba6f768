"""Work for several things at once ends for all of them, whatever one of them does."""

import threading

import pytest

from plexrl.at_once import at_once


def test_they_run_at_once_and_results_keep_the_order() -> None:
    meeting = threading.Barrier(3)

    def work(number: int) -> int:
        meeting.wait(10)
        return 2 * number

    assert at_once(work, (3, 1, 2)) == [6, 2, 4]
    assert at_once(work, ()) == []


def test_a_failure_is_raised_once_all_have_ended() -> None:
    ended = []

    def work(number: int) -> None:
        if number == 1:
            raise ValueError("one")
        ended.append(number)

    with pytest.raises(ValueError, match="one"):
        at_once(work, (1, 2, 3))
    assert sorted(ended) == [2, 3]


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_nobody_waits_for_one_that_failed_and_its_own_error_is_told(failing: int) -> None:
    start = threading.Barrier(3)

    def work(number: int) -> None:
        if number == failing:
            raise ValueError(f"number {number}")
        start.wait(60)

    with pytest.raises(ValueError, match=f"number {failing}"):
        at_once(work, (0, 1, 2), barrier=start)
