"""The commands against a controller in memory: what they print, and how they exit."""

import json
from pathlib import Path

import pytest

import plexrl
from plexrl.cli.main import main
from plexrl.cluster import Cluster
from plexrl.v1 import types_pb2 as t
from tests.support.client import cluster_fixture, controller_fixture  # noqa: F401
from tests.support.fake_controller import FakeController


@pytest.fixture(autouse=True)
def here(controller: FakeController, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    Path(".plexrl").mkdir()
    Path(".plexrl/endpoint").write_text(controller.endpoint)
    Path(".plexrl/token").write_text(controller.token)


@pytest.fixture
def work(cluster: Cluster) -> list[str]:
    """Three jobs with a call each; their ids."""
    ids = []
    for name in ("reverse", "interleave", "swap"):
        with cluster.job(name) as job:
            job.model("policy", base=plexrl.Catalogue("tiny")).optim_step(lr=0.1)
            ids.append(job.job_id)
    return ids


def test_jobs_reads_all_pages(work: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["jobs"]) == 0
    printed = capsys.readouterr().out
    assert "BUSY S" in printed
    assert all(name in printed for name in ("reverse", "interleave", "swap", "finished"))
    assert main(["jobs", "--json", "--limit", "2"]) == 0
    assert [job["name"] for job in json.loads(capsys.readouterr().out)] == ["reverse", "interleave"]


def test_workers_and_calls(work: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["workers"]) == 0
    assert "here-0" in capsys.readouterr().out
    assert main(["calls", "--job", work[1]]) == 0
    printed = capsys.readouterr().out
    assert "optim_step" in printed
    assert printed.count("call-") == 1


def test_explain(work: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "call-1"]) == 0
    assert "optim_step call-1 is succeeded: it waits for 1 earlier call" in capsys.readouterr().out
    assert main(["explain", "call-99"]) == 1
    assert capsys.readouterr().err == "plexrl: no call call-99\n"


def test_tokens_prints_the_secret_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tokens", "create", "alice", "--tenant", "research"]) == 0
    printed = capsys.readouterr()
    assert printed.out == "research-secret\n"
    assert "token-1" in printed.err


def test_tokens_can_be_found_again(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tokens", "list"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split() == ["token-1", "alice", "research", "tenant"]


@pytest.mark.parametrize("worker", ["here-0", "worker-1"])
def test_a_worker_is_cordoned_by_name_or_id(worker: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cordon", worker]) == 0
    assert capsys.readouterr().out == "here-0 is cordoned\n"
    assert main(["uncordon", worker]) == 0
    assert capsys.readouterr().out == "here-0 is ready\n"


def test_cordon_of_a_worker_that_is_not_there_lists_those_that_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cordon", "here-9"]) == 1
    assert capsys.readouterr().err == "plexrl: no worker 'here-9': there are here-0\n"


def test_timeline_has_a_process_per_worker_and_a_track_per_job(
    controller: FakeController, work: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    start_ns = 1_700_000_000_000_000_000
    for index, job_id in enumerate(work[:2]):
        kind = t.INTERVAL_KIND_SWAP_IN if index else t.INTERVAL_KIND_BUSY
        controller.intervals.append(
            t.DeviceInterval(
                kind=kind,
                worker_id="worker-1",
                job_id=job_id,
                call_kind=t.CALL_KIND_GENERATE,
                start_unix_ns=start_ns + index * 2_000_000,
                end_unix_ns=start_ns + index * 2_000_000 + 1_500_000,
            )
        )
    assert main(["timeline", "-o", "trace.json"]) == 0
    assert "perfetto" in capsys.readouterr().out
    events = json.loads(Path("trace.json").read_text())["traceEvents"]
    names = {(event["name"], event["args"]["name"]) for event in events if event["ph"] == "M"}
    assert names == {
        ("process_name", "worker here-0"),
        ("thread_name", "device"),
        ("thread_name", "job reverse"),
        ("thread_name", "job interleave"),
    }
    spans = [event for event in events if event["ph"] == "X"]
    on_device = [event for event in spans if event["tid"] == 0]
    assert [(event["name"], event["ts"], event["dur"]) for event in on_device] == [
        ("reverse", 0.0, 1500.0),
        ("interleave", 2000.0, 1500.0),
    ]
    assert [event["name"] for event in spans if event["tid"] != 0] == ["generate", "swap_in"]


def test_errors_are_one_line_and_exit_1(
    controller: FakeController, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(".plexrl/token").write_text("wrong")
    assert main(["jobs"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("plexrl: ")
    assert error.count("\n") == 1


def test_a_file_that_cannot_be_written_is_an_error_of_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    Path("folder").mkdir()
    assert main(["timeline", "-o", "folder"]) == 1
    assert capsys.readouterr().err == "plexrl: folder: Is a directory\n"


def test_tables_lose_nothing_where_there_is_little_room(
    work: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert main(["jobs"]) == 0
    header, *rows = capsys.readouterr().out.splitlines()
    assert {"JOB", "NAME", "CALLS", "BUSY", "MESSAGE"} <= set(header.split())
    assert {row.split()[0] for row in rows} == set(work)
    assert main(["calls"]) == 0
    assert capsys.readouterr().out.count("optim_step") == 3


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["timeline"], ["tokens"]])
def test_wrong_usage_exits_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    assert "usage: plexrl" in capsys.readouterr().err
