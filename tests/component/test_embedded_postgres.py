"""The private Postgres: data outlives every kind of end, and nothing of it outlives its parent."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from plexrl_controller.embedded.postgres import MAX_SOCKET_FOLDER_BYTES, EmbeddedPostgres, RunAs
from plexrl_controller.embedded.process import EmbeddedError, is_running, wait_until_gone

AS_ROOT = os.geteuid() == 0
WAYS = [RunAs.USER_NAMESPACE, RunAs.NOBODY] if AS_ROOT else [RunAs.SELF]

# What `plexrl up` is to its Postgres: a parent that may be killed.
PARENT = """
import sys, time
from pathlib import Path
from plexrl_controller.embedded.postgres import EmbeddedPostgres
postgres = EmbeddedPostgres(Path(sys.argv[1]))
postgres.start()
postgres.execute("CREATE TABLE IF NOT EXISTS lives (pid int)")
postgres.execute(f"INSERT INTO lives VALUES ({postgres.pid})")
print(postgres.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    return tmp_path / "postgres"


def start_parent(data_dir: Path, *, prefix: Sequence[str] = ()) -> tuple[subprocess.Popen[str], int]:
    command = [*prefix, sys.executable, "-c", PARENT, str(data_dir)]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd="/")
    assert parent.stdout is not None
    return parent, int(parent.stdout.readline())


def end(parent: subprocess.Popen[str]) -> None:
    parent.kill()
    parent.communicate()


@pytest.mark.parametrize("run_as", WAYS)
def test_a_second_start_finds_the_data_of_the_first(data_dir: Path, run_as: RunAs) -> None:
    with EmbeddedPostgres(data_dir, run_as=run_as) as postgres:
        postgres.execute("CREATE TABLE kept (n int)")
        postgres.execute("INSERT INTO kept VALUES (7)")
        pid = postgres.pid
    assert not is_running(pid)
    with EmbeddedPostgres(data_dir, run_as=run_as) as postgres:
        assert postgres.execute("SELECT n FROM kept") == "7"


@pytest.mark.skipif(not AS_ROOT, reason="only root has more than one way to run it")
def test_the_way_it_runs_may_change_between_two_starts(data_dir: Path) -> None:
    for run_as in (RunAs.USER_NAMESPACE, RunAs.NOBODY, RunAs.USER_NAMESPACE):
        with EmbeddedPostgres(data_dir, run_as=run_as) as postgres:
            postgres.execute("CREATE TABLE IF NOT EXISTS starts (n int)")
            postgres.execute("INSERT INTO starts VALUES (1)")
    with EmbeddedPostgres(data_dir) as postgres:
        assert postgres.execute("SELECT sum(n) FROM starts") == "3"


def test_a_commit_is_on_disk_before_it_is_acknowledged(data_dir: Path) -> None:
    with EmbeddedPostgres(data_dir) as postgres:
        assert postgres.execute("SHOW fsync") == "on"
        assert postgres.execute("SHOW synchronous_commit") == "on"


def test_nothing_listens_on_tcp(data_dir: Path) -> None:
    with EmbeddedPostgres(data_dir) as postgres:
        assert postgres.execute("SHOW listen_addresses") == ""
        assert postgres.socket_folder.stat().st_mode & 0o077 == 0


def test_killing_the_parent_ends_the_server_and_the_next_start_finds_its_data(data_dir: Path) -> None:
    parent, first = start_parent(data_dir)
    end(parent)
    assert wait_until_gone([first], 5) == []

    parent, second = start_parent(data_dir)
    end(parent)
    assert wait_until_gone([second], 5) == []
    with EmbeddedPostgres(data_dir) as postgres:
        assert postgres.execute("SELECT pid FROM lives").split() == [str(first), str(second)]


def test_killing_the_server_itself_is_recovered_by_the_next_start(data_dir: Path) -> None:
    with EmbeddedPostgres(data_dir) as postgres:
        postgres.execute("CREATE TABLE kept (n int)")
        postgres.execute("INSERT INTO kept VALUES (7)")
        os.kill(postgres.pid, signal.SIGKILL)
        assert wait_until_gone([postgres.pid], 5) == []
        assert not postgres.running
        postgres.start()
        assert postgres.execute("SELECT n FROM kept") == "7"


def test_a_server_that_an_earlier_parent_left_behind_is_ended_first(data_dir: Path) -> None:
    with EmbeddedPostgres(data_dir) as left_behind:
        left_behind.execute("CREATE TABLE kept (n int)")
        with EmbeddedPostgres(data_dir) as postgres:
            assert not is_running(left_behind.pid)
            assert postgres.execute("SELECT count(*) FROM kept") == "0"


def test_a_lock_file_that_names_a_stranger_does_not_stop_it(data_dir: Path) -> None:
    with EmbeddedPostgres(data_dir) as postgres:
        lock_file = (data_dir / "postmaster.pid").read_text()
        stale = lock_file.replace(str(postgres.pid), str(os.getpid()), 1)
    (data_dir / "postmaster.pid").write_text(stale)
    with EmbeddedPostgres(data_dir) as postgres:
        assert postgres.execute("SELECT 1") == "1"


def test_a_cluster_half_made_is_made_anew(data_dir: Path) -> None:
    unfinished = data_dir.with_name("postgres.new")
    unfinished.mkdir()
    (unfinished / "PG_VERSION").write_text("18\n")
    with EmbeddedPostgres(data_dir) as postgres:
        assert postgres.execute("SELECT 1") == "1"
    assert not unfinished.exists()


def test_data_of_another_version_is_refused_with_what_to_do(data_dir: Path) -> None:
    data_dir.mkdir()
    (data_dir / "PG_VERSION").write_text("12\n")
    with pytest.raises(EmbeddedError, match=r"made by Postgres 12, the installed wheel is Postgres \d+.*pg_dump"):
        EmbeddedPostgres(data_dir).start()


def test_a_start_that_fails_shows_the_end_of_the_log(data_dir: Path) -> None:
    with EmbeddedPostgres(data_dir):
        pass
    (data_dir / "postgresql.conf").write_text("no_such_setting = 1\n")
    with pytest.raises(EmbeddedError, match="no_such_setting"):
        EmbeddedPostgres(data_dir).start()


def test_a_long_path_gets_a_short_socket(tmp_path: Path) -> None:
    data_dir = tmp_path / ("d" * MAX_SOCKET_FOLDER_BYTES) / "postgres"
    with EmbeddedPostgres(data_dir, fsync=False) as postgres:
        assert postgres.execute("SELECT 1") == "1"
        folder = postgres.socket_folder
        assert folder != data_dir
        assert folder.stat().st_mode & 0o077 == 0
    assert not folder.exists()


@pytest.mark.skipif(not AS_ROOT, reason="needs root to become somebody else")
def test_an_ordinary_user_can_run_it() -> None:
    # The interpreter may lie in a folder of root's, so this user may read everything; it may write only its own.
    nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    reader = ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
    home = Path(f"/tmp/plexrl-test-{os.getpid()}-{time.time_ns()}")
    home.mkdir(mode=0o700)
    os.chown(home, 65534, 65534)
    try:
        parent, pid = start_parent(home / "postgres", prefix=[*nobody, *reader])
        owner = (home / "postgres").stat().st_uid
        end(parent)
        assert wait_until_gone([pid], 5) == []
        assert owner == 65534
    finally:
        subprocess.run(["rm", "-r", str(home)], check=True)


class TestOneClusterForManyTests:
    @pytest.fixture
    def template(self, postgres_cluster: EmbeddedPostgres) -> Iterator[str]:
        postgres_cluster.create_database("embedded_template")
        postgres_cluster.execute("CREATE TABLE kept (n int)", database="embedded_template")
        yield "embedded_template"
        postgres_cluster.drop_database("embedded_template")

    def test_a_database_copies_its_template(self, postgres_cluster: EmbeddedPostgres, template: str) -> None:
        url = postgres_cluster.create_database("embedded_copy", template=template)
        assert url.startswith("postgresql+asyncpg://")
        assert postgres_cluster.execute("SELECT count(*) FROM kept", database="embedded_copy") == "0"
        postgres_cluster.drop_database("embedded_copy")
        assert not postgres_cluster.has_database("embedded_copy")

    def test_a_name_that_is_not_one_is_refused(self, postgres_cluster: EmbeddedPostgres) -> None:
        with pytest.raises(EmbeddedError, match="not a database name"):
            postgres_cluster.create_database("x; DROP DATABASE postgres")
