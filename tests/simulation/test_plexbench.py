"""A miniature plexbench: every table, check, picture and page. Its figures mean nothing, its form is the real one."""

import json
import math
from pathlib import Path

import pytest

from plexrl_controller.simulation.plexbench import ablation, traces
from plexrl_controller.simulation.plexbench.report import COLUMNS, write_json, write_markdown
from plexrl_controller.simulation.plexbench.rows import Runner, interval, summarise
from plexrl_controller.simulation.plexbench.suite import SIZES, Size, run
from plexrl_controller.simulation.plexbench.traces import Trace

MINIATURE = Size(
    "miniature",
    reps=1,
    group_iterations=6,
    exact_iterations=2,
    traces=(Trace(64, 1.2, 2.5 * 3600.0, 5.0), Trace(64, 1.2, 3 * 3600.0, 5.0)),
    ablation=Trace(64, 1.2, 2.5 * 3600.0, 5.0),
    scales=((8, 1.0, False), (8, 1.0, True)),
)


@pytest.mark.timeout(300)
def test_a_miniature_run_has_every_table_column_and_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = (ablation.ALL_ON, "consolidated tails off")
    monkeypatch.setattr(ablation, "ON_TRACES", {name: ablation.ON_TRACES[name] for name in few})
    monkeypatch.setattr(traces, "MARGINS", (1 / 3,))
    shown: set[str] = set()
    with Runner(1, lambda table, done, total: shown.add(table)) as runner:
        report = run(MINIATURE, runner)
    assert {"T1", "T2", "T3", "T4", "T5", "T6"} <= set(report["tables"])
    for name, columns in COLUMNS.items():
        rows = report["tables"][name.split()[0]]
        assert rows
        for column in columns:
            assert any(column in row for row in rows), f"{name} has no {column}"
    names = [check["name"] for check in report["checks"]]
    assert len(names) == len(set(names)) >= 15
    # JSON has no NaN: what does not exist is null.
    path = write_json(report, tmp_path)
    assert json.loads(path.read_text(), parse_constant=pytest.fail)["checks"]
    write_markdown(report, tmp_path / "page.md", "make plexbench-docs")
    page = (tmp_path / "page.md").read_text()
    for picture in (tmp_path / "pictures").iterdir():
        assert f"(pictures/{picture.name})" in page
    assert page.count("(pictures/") == 4
    # Traces that differ in their length alone are not mixed: what the bars say is of the first.
    assert page.count("**64 GPUs, load 1.2, 2.5 hours, ") == page.count("**64 GPUs, load 1.2, 3 hours, ") == 2
    first = [row for row in report["tables"]["T1"] if row["hours"] == 2.5]
    assert len({row["policy"] for row in first}) == len(first) == len(report["tables"]["T1"]) / 2
    least = min(row["completion"] for row in first if row["policy"].startswith("B9"))
    (bar,) = [c for c in report["checks"] if c["name"].startswith("T1: completion of the trace at most .9")]
    ours = next(row["completion"] for row in first if row["policy"] == "B10")
    assert bar["value"]["ratio"] == ours / least
    # Nor are scales of as many GPUs: no rate hides behind another.
    for rates in (c["value"] for c in report["checks"] if c["name"].startswith("T5: engine")):
        assert len(rates) == 2
    assert shown


def test_the_full_run_reaches_ten_thousand_gpus_and_every_load() -> None:
    full = SIZES["full"]
    assert {trace.load for trace in full.traces} == {0.8, 1.2, 2.0}
    assert max(gpus for gpus, _, _ in full.scales) == 10_000


def test_intervals_are_those_of_student() -> None:
    mean, half = interval([1.0, 2.0, 3.0])
    assert mean == 2.0
    assert half == pytest.approx(4.303 / math.sqrt(3), rel=1e-3)
    row = summarise({"policy": "x"}, [{"saving": 0.25}])
    assert row["saving"] == 0.25
    assert math.isnan(row["saving_ci95"])
