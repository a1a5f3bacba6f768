"""`plexrl simulate`: what operators put in, and what they are told when it cannot be used."""

import csv
import json
from pathlib import Path

import pytest

from plexrl.cli.main import main
from plexrl.cli.timeline import write_recording
from plexrl.v1 import types_pb2 as t
from plexrl_controller.simulation.operator.fields import InputError
from plexrl_controller.simulation.operator.inputs import read_cluster, read_workload
from plexrl_controller.simulation.operator.trace import read_trace, recorded_jobs

EXAMPLES = Path(__file__).parents[2] / "deploy" / "simulate"
JOBS = "jobs: [{job_class: tool-8B, iterations: 5, count: 2}]"


def write(folder: Path, cluster: str, workload: str) -> tuple[Path, Path]:
    (folder / "cluster.yaml").write_text(cluster)
    (folder / "workload.yaml").write_text(workload)
    return folder / "cluster.yaml", folder / "workload.yaml"


def rows_of(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))


def test_the_examples_run_and_give_the_same_bytes_each_time(tmp_path: Path) -> None:
    for out in ("first", "second"):
        arguments = ["--cluster", str(EXAMPLES / "cluster.yaml"), "--workload", str(EXAMPLES / "workload.yaml")]
        assert main(["simulate", *arguments, "--out", str(tmp_path / out)]) == 0
    for name in ("policies.csv", "jobs.csv", "slowdowns.png"):
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()
    rows = rows_of(tmp_path / "first" / "policies.csv")
    assert [row["policy"] for row in rows] == ["B0", "plexrl"]
    assert float(rows[0]["saving"]) == pytest.approx(0.0, abs=0.005)
    assert float(rows[1]["saving"]) > 0.1


def test_a_generated_workload_reaches_its_load(tmp_path: Path) -> None:
    paths = write(tmp_path, "gpus: 64", "generate: {load: 1.0, hours: 2, mean_iterations: 10}")
    cluster = read_cluster(paths[0])
    _, jobs = read_workload(paths[1], cluster)
    offered = sum(job.busy_gpu_s for job in jobs) / (64 * 2 * 3600.0)
    assert 1.0 <= offered < 2.0


@pytest.mark.parametrize(
    ("cluster", "workload", "says"),
    [
        ("gpus: -1", JOBS, "not negative"),
        ("gpus: 0", JOBS, "want 1 or more"),
        ("gpus: many", JOBS, "want int"),
        ("gpus: true", JOBS, "want int"),
        ("node: {gpus: 8}", JOBS, "lacks gpus"),
        ("gpus: 8\ncolour: red", JOBS, "does not know colour"),
        ("gpus: 8\nnode: {link_gb_per_s: 0}", JOBS, "positive"),
        ("gpus: 8\nstate_share: 2", JOBS, "(0, 1]"),
        ("- 8", JOBS, "want a mapping"),
        ("gpus: [", JOBS, "is not YAML"),
        ("gpus: 8", "seed: 1", "either `jobs` or `generate`"),
        ("gpus: 8", f"{JOBS}\ngenerate: {{load: 1}}", "either `jobs` or `generate`"),
        ("gpus: 8", "jobs: [{job_class: tool-9B, iterations: 5}]", "no class 'tool-9B'"),
        ("gpus: 8", "jobs: [{job_class: tool-8B, iterations: 0}]", "want 1 or more"),
        ("gpus: 8", "jobs: [{job_class: swe-32B, iterations: 5}]", "needs 32 GPUs"),
        ("gpus: 4", "generate: {load: 1.0}", "smallest class"),
        ("gpus: 8", "generate: {load: 0}", "positive"),
        ("gpus: 8", "jobs: [{job_class: tool-8B, iterations: 5, colour: red}]", "jobs[0]: does not know colour"),
        (
            "gpus: 8",
            f"classes: [{{name: tool-8B, parameters_b: 1, train_gpus: 8, rollout_s: 1, train_s: 1}}]\n{JOBS}",
            "is taken",
        ),
    ],
)
def test_bad_files_are_refused_with_the_place_and_the_limit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], cluster: str, workload: str, says: str
) -> None:
    paths = write(tmp_path, cluster, workload)
    status = main(["simulate", "--cluster", str(paths[0]), "--workload", str(paths[1]), "--out", str(tmp_path / "out")])
    error = capsys.readouterr().err
    assert status == 1
    assert says in error
    assert str(tmp_path) in error
    assert not (tmp_path / "out").exists()


def test_unknown_policies_and_missing_files_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = write(tmp_path, "gpus: 8", JOBS)
    files = ["--cluster", str(paths[0]), "--workload", str(paths[1]), "--out", str(tmp_path / "out")]
    assert main(["simulate", *files, "--policy", "B77"]) == 1
    assert "no policy 'B77'; there are plexrl, B0" in capsys.readouterr().err
    assert main(["simulate", "--cluster", str(tmp_path / "none.yaml"), "--workload", str(paths[1])]) == 1
    assert "none.yaml: cannot be read" in capsys.readouterr().err
    assert main(["simulate"]) == 1
    assert main(["simulate", "--cluster", str(paths[0])]) == 1


def interval(
    job: str, function: int, start_s: float, end_s: float, kind: int = t.INTERVAL_KIND_BUSY
) -> t.DeviceInterval:
    return t.DeviceInterval(
        kind=kind,  # type: ignore[arg-type]
        worker_id="w1",
        job_id=job,
        call_kind=function,  # type: ignore[arg-type]
        start_unix_ns=int(start_s * 1e9) + 10**18,
        end_unix_ns=int(end_s * 1e9) + 10**18,
    )


def two_jobs() -> list[t.DeviceInterval]:
    """Two jobs in turn: 1 s of work and 1.5 s of stall each, the second waiting once for .5 s behind the first."""
    generate, sync = t.CALL_KIND_GENERATE, t.CALL_KIND_SYNC_WEIGHTS
    return [
        interval("a", generate, 0.0, 1.0),
        interval("b", generate, 1.0, 2.0),
        interval("a", sync, 2.5, 4.0),
        interval("b", sync, 4.0, 5.0),
        interval("a", generate, 5.5, 6.5),
        interval("a", sync, 8.0, 9.0),
    ]


def test_an_exported_recording_reads_back(tmp_path: Path) -> None:
    write_recording(tmp_path / "trace.jsonl", two_jobs(), {"w1": "worker-1"})
    intervals = read_trace(tmp_path / "trace.jsonl")
    assert len(intervals) == 6
    assert (intervals[0].worker, intervals[0].function, intervals[0].start_s) == ("worker-1", "generate", 0.0)
    assert intervals[-1].end_s == pytest.approx(9.0)


def test_stalls_are_told_from_waiting(tmp_path: Path) -> None:
    write_recording(tmp_path / "trace.jsonl", two_jobs(), {})
    a, b = recorded_jobs(read_trace(tmp_path / "trace.jsonl"))
    assert [len(iteration) for iteration in a.iterations] == [2, 2]
    assert a.guessed_stalls == 0
    assert a.iterations[0][0].stall_s == pytest.approx(1.5)
    # b came back at some time while a ran from 2.5 to 4: its stall is between .5 and 2 s.
    assert b.guessed_stalls == 1
    assert 0.5 <= b.iterations[0][0].stall_s <= 2.0


def test_a_stall_is_known_where_the_recording_says_when_calls_were_submitted(tmp_path: Path) -> None:
    """b was away for .6 s, and waited for the rest of its gap."""
    intervals = two_jobs()
    for number, interval_ in enumerate(intervals):
        interval_.call_id = str(number)
    submitted = {str(number): interval_.start_unix_ns for number, interval_ in enumerate(intervals)}
    submitted["3"] = int(2.6e9) + 10**18
    write_recording(tmp_path / "trace.jsonl", intervals, {}, submitted)
    trace = read_trace(tmp_path / "trace.jsonl")
    assert trace[3].submitted_s == pytest.approx(2.6)
    _, b = recorded_jobs(trace)
    assert b.guessed_stalls == 0
    assert b.iterations[0][0].stall_s == pytest.approx(0.6)


def test_a_recording_is_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.jsonl"
    write_recording(path, two_jobs(), {})
    assert main(["simulate", "--from-trace", str(path), "--policy", "all", "--out", str(tmp_path / "out")]) == 0
    rows = rows_of(tmp_path / "out" / "replay.csv")
    assert {row["job"] for row in rows} == {"a", "b"}
    assert all(float(row["simulated_slowdown"]) >= 1.0 - 1e-6 for row in rows)
    capsys.readouterr()


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([], "want {"),
        (['{"format": "other"}'], "want {"),
        (['{"format": "plexrl-trace", "version": 2}'], "want {"),
        (["HEADER", "nonsense"], ":2: is not JSON"),
        (["HEADER", '{"kind": "busy"}'], "worker is None"),
        (["HEADER", '{"kind": "nap", "worker": "w", "job": "j", "start_s": 0, "end_s": 1}'], "kind is 'nap'"),
        (["HEADER", '{"kind": "busy", "worker": "w", "job": "j", "start_s": 0, "end_s": 1}'], "function is ''"),
        (
            ["HEADER", '{"kind": "busy", "worker": "w", "job": "j", "function": "generate", "start_s": 2, "end_s": 1}'],
            "before its start",
        ),
        (
            [
                "HEADER",
                '{"kind":"busy","worker":"w","job":"j","function":"score","start_s":0,"end_s":1,"submitted_s":"-"}',
            ],
            "submitted_s is '-'",
        ),
        (["HEADER", '{"kind": "hold", "worker": "w", "job": "j", "start_s": 0, "end_s": 1}'], "no busy interval"),
    ],
)
def test_bad_recordings_are_refused_with_the_line(tmp_path: Path, lines: list[str], says: str) -> None:
    header = json.dumps({"format": "plexrl-trace", "version": 1})
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(header if line == "HEADER" else line for line in lines))
    with pytest.raises(InputError) as refused:
        read_trace(path)
    assert says in str(refused.value)
