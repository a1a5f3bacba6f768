"""The files of deploy/ are what systemd, Postgres and openssl take without a word of complaint."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from plexrl_controller.embedded.postgres import EmbeddedPostgres
from plexrl_controller.embedded.process import EmbeddedError

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
GUIDE = DEPLOY / "README.md"
INSTALLED_PYTHON = "/opt/plexrl/bin/python"
# The exposure that systemd computes, in tenths; a worker needs GPU devices and writable, executable memory.
MOST_EXPOSED = {"plexrl-controller.service": 15, "plexrl-worker@0.service": 20}

needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is missing: apt-get install systemd"
)
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="files of other owners are made by root only")


@pytest.fixture(params=MOST_EXPOSED)
def unit(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A unit as installed, an instance where it is a template, with a Python that this machine has."""
    name: str = request.param
    source = DEPLOY / "systemd" / re.sub(r"@\w+", "@", name)
    text = source.read_text()
    assert INSTALLED_PYTHON in text
    installed = tmp_path / name
    installed.write_text(text.replace(INSTALLED_PYTHON, sys.executable))
    return installed


def run(*argv: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, capture_output=True, text=True, cwd=ROOT, env={**os.environ, **environment})


@needs_systemd
class TestUnits:
    def test_systemd_finds_nothing_to_say(self, unit: Path) -> None:
        """The exit code alone says little: it is 0 for unknown keys and bad values too."""
        result = run("systemd-analyze", "verify", "--man=no", "--recursive-errors=no", unit)
        assert (result.returncode, result.stderr) == (0, "")

    def test_a_wrong_key_would_be_found(self, unit: Path) -> None:
        unit.write_text(unit.read_text().replace("WatchdogSec=", "WatchdogSeconds="))
        result = run("systemd-analyze", "verify", "--man=no", "--recursive-errors=no", unit)
        assert "WatchdogSeconds" in result.stderr

    def test_a_workers_gpu_has_its_device_files_first(self, tmp_path: Path) -> None:
        for name in ("plexrl-worker@.service", "plexrl-device@.service"):
            text = (DEPLOY / "systemd" / name).read_text().replace(INSTALLED_PYTHON, sys.executable)
            (tmp_path / name).write_text(text.replace("/usr/bin/nvidia-modprobe", "/bin/true"))
        worker = tmp_path / "plexrl-worker@3.service"
        worker.symlink_to("plexrl-worker@.service")
        result = run(
            "systemd-analyze", "verify", "--man=no", "--recursive-errors=yes", worker, SYSTEMD_UNIT_PATH=f"{tmp_path}:"
        )
        assert [line for line in result.stderr.splitlines() if "plexrl" in line] == []
        wanted = re.findall(r"^(?:Wants|After)=.*", (tmp_path / "plexrl-worker@.service").read_text(), re.MULTILINE)
        assert ["plexrl-device@%i.service" in line for line in wanted] == [True, True]
        # It is the unit that is looked at, not its name alone.
        (tmp_path / "plexrl-device@.service").write_text("[Service]\nTipe=oneshot\nExecStart=/bin/true\n")
        result = run("systemd-analyze", "verify", "--man=no", worker, SYSTEMD_UNIT_PATH=f"{tmp_path}:")
        assert "Tipe" in result.stderr

    def test_the_services_are_closed_to_what_they_do_not_need(self, unit: Path) -> None:
        threshold = MOST_EXPOSED[unit.name]
        result = run("systemd-analyze", "security", "--offline=yes", "--no-pager", f"--threshold={threshold}", unit)
        assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("unit_name", ["plexrl-controller.service", "plexrl-worker@.service"])
def test_units_come_back_by_themselves_and_are_watched(unit_name: str) -> None:
    settings = dict(
        line.split("=", 1) for line in (DEPLOY / "systemd" / unit_name).read_text().splitlines() if "=" in line
    )
    assert settings["Type"] == "notify"
    assert settings["Restart"] == "on-failure"
    assert int(settings["WatchdogSec"]) > 0


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A file system of its own, with our configuration where a package would put it and our user made."""
    for kind in ("sysusers.d", "tmpfiles.d"):
        shutil.copytree(DEPLOY / kind, tmp_path / "usr/lib" / kind)
    (tmp_path / "etc/plexrl").mkdir(parents=True)
    result = run("systemd-sysusers", f"--root={tmp_path}", "plexrl.conf")
    assert result.returncode == 0, result.stderr
    return tmp_path


@needs_systemd
class TestSystemFiles:
    def test_sysusers_makes_the_user_of_the_units(self, root: Path) -> None:
        users = (root / "etc/passwd").read_text()
        assert re.search(r"^plexrl:.*:/var/lib/plexrl:/usr/sbin/nologin$", users, re.MULTILINE)

    @needs_root
    def test_tmpfiles_keeps_secrets_from_everybody_but_root(self, root: Path) -> None:
        token = root / "etc/plexrl/worker-token"
        token.write_text("secret\n")
        result = run("systemd-tmpfiles", "--create", f"--root={root}", "plexrl.conf")
        assert (result.returncode, result.stderr) == (0, "")
        user = next(line.split(":") for line in (root / "etc/passwd").read_text().splitlines() if "plexrl" in line)
        assert ((root / "etc/plexrl").stat().st_mode & 0o777, token.stat().st_mode & 0o777) == (0o750, 0o600)
        assert (root / "var/lib/plexrl").stat().st_uid == int(user[2])


def test_the_role_script_runs_twice_as_the_guide_says_and_makes_a_database_of_its_own(tmp_path: Path) -> None:
    command = re.search(r"^(\{ echo .*role\.sql; \}) \| su postgres -c '(psql .*)'$", GUIDE.read_text(), re.MULTILINE)
    assert command is not None
    (tmp_path / "password").write_text("0123abcd\n")
    told = run("sh", "-c", command[1].replace("/etc/plexrl/database-password", str(tmp_path / "password")))
    assert told.stdout.startswith("\\set password 0123abcd\n"), told.stderr
    with EmbeddedPostgres(tmp_path / "postgres", fsync=False) as postgres:
        # The embedded superuser is called plexrl too, so here the script makes another name.
        script = tmp_path / "role.sql"
        script.write_text(told.stdout.replace("plexrl", "plexrl_service"))
        for _ in range(2):
            postgres.psql(*command[2].split()[1:], "--file", str(script))
        assert (
            postgres.execute("SELECT rolpassword LIKE 'SCRAM-%' FROM pg_authid WHERE rolname = 'plexrl_service'") == "t"
        )
        assert postgres.execute("SELECT rolsuper FROM pg_roles WHERE rolname = 'plexrl_service'") == "f"
        assert postgres.psql("--command", "CREATE TABLE t ()", database="plexrl_service", user="plexrl_service") == ""
        postgres.execute("CREATE ROLE stranger LOGIN")
        with pytest.raises(EmbeddedError, match="permission denied for database"):
            postgres.psql("--command", "SELECT 1", database="plexrl_service", user="stranger")


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is missing")
def test_issued_certificates_are_good_for_both_sides_and_the_named_hosts_only(tmp_path: Path) -> None:
    issue = DEPLOY / "tls" / "issue.sh"
    for name in ("controller", "worker"):
        result = run(issue, tmp_path, name, "localhost", "127.0.0.1")
        assert result.returncode == 0, result.stderr
    for name in ("controller", "worker"):
        certificate = tmp_path / f"{name}.pem"
        for purpose in ("sslserver", "sslclient"):
            checked: list[str | Path] = ["openssl", "verify", "-CAfile", tmp_path / "ca.pem", "-purpose", purpose]
            assert run(*checked, "-verify_hostname", "localhost", certificate).returncode == 0
            assert run(*checked, "-verify_hostname", "example.org", certificate).returncode != 0
        assert (tmp_path / f"{name}.key").stat().st_mode & 0o077 == 0
