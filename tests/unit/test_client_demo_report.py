"""What the demo says of its runs: the arithmetic of its figures, and a table that fits a terminal."""

import json
from pathlib import Path

import pytest
from rich.console import Console

from plexrl.demo import figures
from plexrl.demo.report import Report
from plexrl.demo.runs import Stalls


def row(name: str, slowdown: float, rise: float = 0.4, swaps: int = 80, drift: float = 1.02) -> figures.JobFigures:
    return figures.JobFigures(
        name=name,
        reward_before=0.25,
        reward_after=0.25 + rise,
        steps=42,
        busy_share=0.36,
        busy_s=37.2,
        swap_s=1.31,
        idle_s=68.1,
        swaps=swaps,
        drift=drift,
        slowdown=figures.Slowdown(slowdown, slowdown - 0.05, slowdown + 0.05, 15),
        saving=figures.saving(slowdown, 2),
        weights_equal_alone=True,
        logprob_gap=2e-5,
    )


def report(*jobs: figures.JobFigures, hold_saving: float = 0.0) -> Report:
    return Report(
        jobs=list(jobs),
        hold_saving=hold_saving,
        bound_saving=0.5,
        device_state_bytes=7_500_000,
        larger_state_bytes=6_017_024,
        stall_mean_s=1.5,
        seconds=312.0,
        timeline=Path("timeline.png"),
        trace=Path("trace.json"),
    )


def test_slowdown_pairs_the_same_steps() -> None:
    alone = [1.0, 2.0, 3.0]
    measured = figures.slowdown([1.1, 2.2, 3.3, 99.0], alone)
    assert measured.value == pytest.approx(1.1)
    assert (measured.low, measured.high) == pytest.approx((1.1, 1.1))
    assert measured.steps == 3


def test_two_that_share_without_delay_save_half() -> None:
    assert figures.saving(1.0, 2) == 0.5
    assert figures.saving(2.0, 2) == 0.0
    assert figures.bound(2, 0.36) == 0.5
    assert figures.bound(4, 0.36) == pytest.approx(0.64)


@pytest.mark.parametrize(
    "broken",
    [
        report(row("a", 1.2), row("b", 1.4)),
        report(row("a", 1.06), row("b", 1.06, rise=0.2)),
        report(row("a", 1.06), row("b", 1.06, swaps=10)),
        report(row("a", 1.06), row("b", 1.06), hold_saving=0.4),
    ],
    ids=["slow", "did not learn", "did not swap", "holding saves as much"],
)
def test_a_run_that_misses_a_bar_says_so(broken: Report) -> None:
    assert all(expectation.holds for expectation in report(row("a", 1.06), row("b", 1.1)).expectations())
    assert not all(expectation.holds for expectation in broken.expectations())


def test_the_table_fits_80_columns(tmp_path: Path) -> None:
    console = Console(width=80, record=True, file=(tmp_path / "out").open("w"))
    report(row("reverse", 1.058), row("interleave", 1.135)).show(console)
    text = console.export_text()
    console.file.close()
    assert "…" not in text
    assert "interleave 0.25→0.65" in text


@pytest.mark.parametrize(("drift", "said"), [(1.3, True), (0.7, True), (1.1, False)])
def test_a_machine_that_changed_between_the_phases_is_named(tmp_path: Path, drift: float, said: bool) -> None:
    console = Console(width=80, record=True, file=(tmp_path / "out").open("w"))
    report(row("reverse", 1.4, drift=drift), row("interleave", 1.4, drift=drift)).show(console)
    assert ("The machine changed" in console.export_text()) is said
    console.file.close()


def test_the_report_has_the_keys_that_programs_read(tmp_path: Path) -> None:
    report(row("reverse", 1.058), row("interleave", 1.135)).write(tmp_path / "report.json")
    written = json.loads((tmp_path / "report.json").read_text())
    assert {"mean_saving", "mean_slowdown", "hold_saving", "bound_saving", "timeline", "trace"} <= written.keys()
    job_keys = (
        "name reward_before reward_after steps busy_share busy_s swap_s swaps slowdown saving weights_equal_alone"
    )
    assert set(job_keys.split()) <= written["jobs"][0].keys()


def test_stalls_follow_what_the_device_takes_and_are_the_same_again_afterwards() -> None:
    stalls = Stalls(0.4)
    stalls.set_next(0.8, 1)
    assert 0.8 / (0.8 + stalls.mean_s(1)) == pytest.approx(0.4)
    # The machine turns out to be twice as slow.
    for steps in (1, 2, 3):
        stalls.set_next(1.6 * steps, steps)
    assert [stalls.mean_s(step) for step in (1, 2, 4, 9)] == pytest.approx([1.2, 2.4, 2.4, 2.4])
