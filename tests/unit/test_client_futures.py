"""Outcomes that one thread sets and others wait for, and the futures of calls above them."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from plexrl import errors
from plexrl.futures import CallFuture, Outcome
from tests.unit.test_client_progress import Handle


class AtTheLastMoment(Outcome[int]):
    """Comes right after the wait for it was given up."""

    def exception(self, timeout: float | None = None) -> BaseException | None:
        try:
            return super().exception(timeout)
        except TimeoutError:
            self.set_result(7)
            raise


def test_whoever_waits_is_told_and_whoever_comes_later_too() -> None:
    for _ in range(200):
        outcome: Outcome[int] = Outcome()
        together = threading.Barrier(4)

        def wait(outcome: Outcome[int] = outcome, together: threading.Barrier = together) -> int:
            together.wait()
            return outcome.result()

        with ThreadPoolExecutor(3) as threads:
            waiting = [threads.submit(wait) for _ in range(3)]
            together.wait()
            outcome.set_result(7)
            assert [future.result() for future in waiting] == [7, 7, 7]
        assert (outcome.done(), outcome.result(0), outcome.exception(0)) == (True, 7, None)


def test_an_error_is_raised_by_result_and_returned_by_exception() -> None:
    outcome: Outcome[int] = Outcome()
    with pytest.raises(TimeoutError):
        outcome.exception(0)
    lost = errors.PlexRLError("lost")
    outcome.set_exception(lost)
    assert outcome.exception() is lost
    with pytest.raises(errors.PlexRLError, match="lost"):
        outcome.result()


def test_an_outcome_at_the_last_moment_is_no_timeout() -> None:
    """Nor is the timeout taken for the error that the call ended with."""
    late, later = AtTheLastMoment(), AtTheLastMoment()
    assert CallFuture(Handle(late), late).exception(0) is None
    assert CallFuture(Handle(later), later).result(0) == 7


def test_while_the_call_goes_on_a_wait_that_is_given_up_says_so() -> None:
    outcome: Outcome[int] = Outcome()
    future = CallFuture(Handle(outcome), outcome)
    for wait in (future.result, future.exception):
        with pytest.raises(TimeoutError, match="it goes on"):
            wait(0)
