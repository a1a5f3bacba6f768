"""What calls that run together have had of the device: shares add up, and what was parked meanwhile had nothing."""

import pytest

from plexrl_controller.dispatch.shares import DeviceShares
from plexrl_controller.domain.ids import CallId

A, B, C = CallId("a"), CallId("b"), CallId("c")


def test_those_that_run_share_what_they_have_in_common() -> None:
    shares = DeviceShares()
    shares.note([A], 100.0)
    shares.note([A, B], 110.0)
    assert (shares.had_s(A, 120.0), shares.had_s(B, 120.0), shares.had_s(C, 120.0)) == (15.0, 5.0, 0.0)
    shares.note([A, B], 120.0)
    shares.note([B], 130.0)
    assert (shares.had_s(A, 140.0), shares.had_s(B, 140.0)) == (0.0, 20.0)


def test_what_goes_on_begins_at_nothing_and_nobody_has_the_time_between() -> None:
    shares = DeviceShares()
    shares.note([A, B], 0.0)
    shares.note([], 10.0)
    shares.note([A], 100.0)
    assert shares.had_s(A, 103.0) == pytest.approx(3.0)


def test_a_clock_that_is_set_back_takes_nothing_away() -> None:
    shares = DeviceShares()
    shares.note([A, B], 100.0)
    assert shares.had_s(A, 90.0) == 0.0
    shares.note([A, B], 90.0)
    assert shares.had_s(A, 94.0) == 2.0
