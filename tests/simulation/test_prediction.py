"""The second half of a recording, foretold from its first half: on recordings of a world that is known."""

import random
from dataclasses import replace

import pytest

from plexrl_controller.scheduling.policy import Policy
from plexrl_controller.simulation.operator.fields import InputError
from plexrl_controller.simulation.operator.prediction import iterations_of, predict_second_half, stretches
from plexrl_controller.simulation.operator.trace import Interval

SETUP_S = 0.05
DISPATCH_S = 0.01
LENGTH_S = 400.0


def recording(works: dict[str, tuple[float, float]], slow_after_s: float = LENGTH_S) -> list[Interval]:
    """What a worker does that serves whoever came first, but keeps the device for a job that is back within the time of
    a swap: jobs sample, stall, train and sync for ever.

    works: by job, mean seconds of a sample and of the stall after it; it trains for as long as it samples. From
    `slow_after_s` on the worker takes its time: a second at every change of job.
    """
    intervals: list[Interval] = []
    draws = {name: random.Random(name) for name in works}
    submitted = dict.fromkeys(works, 0.0)
    trains = dict.fromkeys(works, False)
    free_s, resident = 0.0, ""
    while free_s < LENGTH_S:
        job = min(submitted, key=lambda name: (submitted[name], name))
        if resident and submitted[resident] < free_s + SETUP_S:
            job = resident
        busy_s, stall_s = works[job]
        start_s = max(free_s, submitted[job] + DISPATCH_S)
        if resident != job:
            setup_s = SETUP_S if start_s < slow_after_s else 1.0
            intervals.append(Interval("swap_in", "w", job, "", start_s, start_s + setup_s))
            start_s += setup_s
        resident = job
        functions = ("forward_backward", "optim_step", "sync_weights") if trains[job] else ("generate",)
        at_s = start_s
        for function in functions:
            service_s = busy_s * draws[job].uniform(0.7, 1.3) / len(functions)
            intervals.append(Interval("busy", "w", job, function, at_s, at_s + service_s, submitted[job]))
            at_s += service_s
        pause_s = 0.002 if trains[job] else stall_s * draws[job].uniform(0.5, 1.5)
        submitted[job], trains[job], free_s = at_s + pause_s, not trains[job], at_s
    return intervals


THREE = {"long": (0.9, 4.0), "short": (0.4, 2.0), "often": (0.2, 0.8)}


def test_a_world_that_stays_as_it_is_is_foretold() -> None:
    found = predict_second_half(recording(THREE), Policy(), start_s=0.0, end_s=LENGTH_S, lengths=8)
    assert {row.job for row in found} == set(THREE)
    for row in found:
        assert row.measured > 1.03
        assert abs(row.error) < 0.1, row
        assert row.low <= row.predicted <= row.high


def test_what_changes_in_the_second_half_is_not_foretold() -> None:
    """Nothing of the second half goes into the prediction: else this would be right as well."""
    steady = predict_second_half(recording(THREE), Policy(), start_s=0.0, end_s=LENGTH_S, lengths=8)
    slowed = predict_second_half(recording(THREE, LENGTH_S / 2), Policy(), start_s=0.0, end_s=LENGTH_S, lengths=8)
    for before, after in zip(sorted(steady, key=_job), sorted(slowed, key=_job), strict=True):
        assert after.predicted == pytest.approx(before.predicted)
        assert after.error < -0.1


def _job(row: object) -> str:
    return str(getattr(row, "job", ""))


def test_a_job_alone_is_not_slowed() -> None:
    (row,) = predict_second_half(recording({"alone": (0.5, 1.0)}), Policy(), start_s=0.0, end_s=LENGTH_S, lengths=8)
    assert row.measured == pytest.approx(1.0)
    assert row.predicted == pytest.approx(1.0)
    assert row.setup_s == 0.0


def test_waiting_is_told_from_stalls_swaps_and_dispatch() -> None:
    """b asks at 2 for what a has until 4; the swap and the way of the orders take until 4.3."""
    intervals = [
        Interval("busy", "w", "b", "generate", 0.0, 1.0, -0.1),
        Interval("busy", "w", "b", "sync_weights", 1.3, 1.4, 1.2),
        Interval("busy", "w", "a", "generate", 1.5, 4.0, 1.0),
        Interval("swap_in", "w", "b", "", 4.05, 4.2),
        Interval("busy", "w", "b", "forward_backward", 4.3, 5.0, 2.0),
        Interval("busy", "w", "b", "optim_step", 5.01, 5.1, 2.0),
        Interval("busy", "w", "b", "sync_weights", 5.1, 5.2, 2.0),
        Interval("busy", "w", "b", "generate", 5.5, 6.0, 5.4),
    ]
    found = stretches("b", intervals)
    assert [(s.start_s, s.end_s, s.took_over) for s in found] == [
        (0.0, 1.0, False),
        (1.3, 1.4, False),
        (4.3, 5.2, True),
        (5.5, 6.0, False),
    ]
    assert found[2].ready_s == pytest.approx(2.1)
    assert found[2].setup_s == pytest.approx(0.3)
    (iteration,) = iterations_of(found)
    assert iteration.alone_s == pytest.approx(0.9 + 0.3)
    assert iteration.next_ready_s - iteration.ready_s == pytest.approx(5.5 - 2.1)


def test_recordings_that_say_too_little_are_refused() -> None:
    whole = recording(THREE)
    with pytest.raises(InputError, match="record it anew"):
        predict_second_half(
            [replace(i, submitted_s=None) for i in whole], Policy(), start_s=0.0, end_s=LENGTH_S, lengths=8
        )
    with pytest.raises(InputError, match="record for longer"):
        predict_second_half(whole, Policy(), start_s=0.0, end_s=20.0)
    with pytest.raises(InputError, match="2 workers"):
        predict_second_half([*whole, replace(whole[0], worker="v")], Policy(), start_s=0.0, end_s=LENGTH_S, lengths=8)
