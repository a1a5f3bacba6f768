"""`plexrl up` and LocalCluster: a part that dies is started again, and the end of the cluster leaves nothing behind."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from plexrl_controller.embedded.cluster import LocalCluster
from plexrl_controller.embedded.postgres import EmbeddedPostgres
from plexrl_controller.embedded.process import EmbeddedError, wait_until_gone
from plexrl_controller.embedded.settings import ClusterSettings, DataFolder

PARTS = ("postgres", "controller", "worker-0")


def settings(data_dir: Path, **more: object) -> ClusterSettings:
    return ClusterSettings(data_dir=data_dir, engine="fake", threads=1, **more)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(settings(tmp_path_factory.mktemp("cluster") / "plexrl", workers=2)) as cluster:
        yield cluster


def start_up(data_dir: Path) -> subprocess.Popen[str]:
    """`plexrl up`, as somebody would start it; returns when it says that it is up."""
    command = [sys.executable, "-m", "plexrl.cli.main", "up", "--engine", "fake", "--data-dir", str(data_dir)]
    up = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert up.stdout is not None
    said: list[str] = []
    while not said or "PlexRL is up" not in said[-1]:
        said.append(up.stdout.readline())
        assert said[-1], f"it ended while starting: {''.join(said)}"
    return up


def pids_of(data_dir: Path) -> list[int]:
    return [part["pid"] for part in DataFolder(data_dir).read_status()["parts"].values()]


def test_every_part_runs(cluster: LocalCluster) -> None:
    assert set(cluster.pids()) == {"supervisor", "postgres", "controller", "worker-0", "worker-1"}


@pytest.mark.parametrize("part", PARTS)
def test_a_part_that_is_killed_comes_back(cluster: LocalCluster, part: str) -> None:
    before, endpoint = cluster.pids(), cluster.endpoint
    killed = cluster.kill(part)
    cluster.wait_replaced(part, killed)
    cluster.wait_ready()
    assert cluster.endpoint == endpoint
    # Killing the database may take the controller with it, but never a worker.
    assert cluster.pid("worker-1") == before["worker-1"]


def test_logs_are_kept_for_each_part(cluster: LocalCluster) -> None:
    for part in ("supervisor", "postgres", "controller", "worker-0", "worker-1"):
        assert cluster.folder.log_file(part).stat().st_size > 0


def test_ctrl_c_stops_everything_within_seconds(tmp_path: Path) -> None:
    up = start_up(tmp_path)
    pids = pids_of(tmp_path)
    assert len(pids) == len(PARTS)
    asked_s = time.monotonic()
    up.send_signal(signal.SIGINT)
    up.communicate(timeout=30)
    assert up.returncode == 0
    assert time.monotonic() - asked_s < 10
    assert wait_until_gone(pids, 0.5) == []
    assert not (tmp_path / "endpoint").exists()


def test_killing_up_leaves_nothing_and_the_next_start_works(tmp_path: Path) -> None:
    up = start_up(tmp_path)
    address = (tmp_path / "endpoint").read_text()
    pids = pids_of(tmp_path)
    up.kill()
    up.communicate()
    assert wait_until_gone(pids, 10) == []

    with LocalCluster(settings(tmp_path)) as cluster:
        assert cluster.endpoint == address.strip()


def test_a_part_that_cannot_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(EmbeddedError, match=r"(?s)worker-0 ended while starting.*--no-such-flag"):
        LocalCluster(settings(tmp_path, worker_flags=("--no-such-flag",))).start()
    assert DataFolder(tmp_path).read_status() == {"state": "stopped"}


def test_a_database_of_ones_own_is_used(tmp_path: Path, postgres_cluster: EmbeddedPostgres) -> None:
    url = postgres_cluster.create_database("own_database")
    with LocalCluster(settings(tmp_path, database_url=url)) as cluster:
        assert "postgres" not in cluster.pids()
        tables = "SELECT count(*) FROM pg_tables WHERE schemaname = 'public'"
        assert int(postgres_cluster.execute(tables, database="own_database")) > 0
        # Whoever may list processes must not see the password of the URL.
        command_line = Path(f"/proc/{cluster.pid('controller')}/cmdline").read_text()
        assert "postgresql" not in command_line


async def test_a_part_may_stay_dead_when_told_so(tmp_path: Path) -> None:
    async with LocalCluster(settings(tmp_path, restart=False)) as cluster:
        pids = list(cluster.pids().values())
        killed = cluster.kill("worker-0")
        with pytest.raises(EmbeddedError, match="not started again"):
            cluster.wait_replaced("worker-0", killed, timeout_s=1.0)
        with pytest.raises(EmbeddedError, match="worker-0 does not run"):
            cluster.pid("worker-0")
    assert wait_until_gone(pids, 0.5) == []
