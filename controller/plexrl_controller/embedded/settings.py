"""What the embedded cluster is told, and the folder that it keeps everything in."""

import dataclasses
import fcntl
import json
import os
import random
import secrets
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plexrl_controller.embedded.process import EmbeddedError

HOST = "127.0.0.1"
# Below the range from which the kernel takes the local ports of outgoing connections: a controller that restarts must
# find its port free.
PORTS = range(20_000, 32_768)


@dataclass(frozen=True)
class ClusterSettings:
    """One controller and `workers` workers on this machine. What is None is the worker's own default."""

    data_dir: Path = Path(".plexrl")
    workers: int = 1
    # SQLAlchemy URL of a Postgres of yours; None starts a private one in the data folder.
    database_url: str | None = None
    # "cpu", or "cuda": worker i then gets CUDA device i.
    device: str = "cpu"
    device_state_bytes: str | None = None
    host_state_bytes: str | None = None
    kv_cache_bytes: str | None = None
    # Compute threads of each worker; None shares the cores between the workers.
    threads: int | None = None
    # "vllm", or "fake": no model at all, for tests and for measuring the control path.
    engine: str = "vllm"
    # How a group chooses its next job: "fifo", or "hold", which keeps the group through every stall.
    policy: str = "hrrs"
    catalogue_file: Path | None = None
    # Whether a part that died is started again, and how long after its first death; the delay doubles up to 10 s.
    restart: bool = True
    restart_delay_s: float = 0.1
    # Further flags, passed on as they are.
    controller_flags: tuple[str, ...] = ()
    worker_flags: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise EmbeddedError(f"workers is {self.workers}: want at least 1")
        if self.threads is not None and self.threads < 1:
            raise EmbeddedError(f"threads is {self.threads}: want at least 1")
        if self.device not in ("cpu", "cuda"):
            raise EmbeddedError(f"device is {self.device!r}: want cpu or cuda")

    @property
    def worker_names(self) -> tuple[str, ...]:
        return tuple(f"worker-{index}" for index in range(self.workers))

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), default=str)

    @classmethod
    def from_json(cls, text: str) -> "ClusterSettings":
        values: dict[str, Any] = json.loads(text)
        values["data_dir"] = Path(values["data_dir"])
        if values["catalogue_file"] is not None:
            values["catalogue_file"] = Path(values["catalogue_file"])
        for name in ("controller_flags", "worker_flags"):
            values[name] = tuple(values[name])
        return cls(**values)


class DataFolder:
    """The data folder of an embedded cluster: where each thing lies in it.

    Only its owner may enter it (mode 0700): it holds the tokens and the database.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.token_file = self.path / "token"
        self.worker_token_file = self.path / "worker-token"
        self.endpoint_file = self.path / "endpoint"
        self.status_file = self.path / "status.json"
        self.port_file = self.path / "port"
        self.logs = self.path / "logs"
        self.postgres = self.path / "postgres"
        self.payloads = self.path / "payloads"
        self.checkpoints = self.path / "checkpoints"
        self.workers = self.path / "workers"
        self._lock: int | None = None

    def make(self) -> None:
        """Makes what is missing, tokens included."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path.chmod(0o700)
        for folder in (self.logs, self.payloads, self.checkpoints, self.workers):
            folder.mkdir(mode=0o700, exist_ok=True)
        for token_file in (self.token_file, self.worker_token_file):
            if not token_file.exists():
                _write_private(token_file, secrets.token_urlsafe(32))

    def lock(self) -> None:
        """Takes the folder for this process until it ends. Raises EmbeddedError when another one has it."""
        lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(lock, 32, 0).decode().strip()
            os.close(lock)
            raise EmbeddedError(
                f"another `plexrl up` (process {holder}) uses {self.path}: stop it, or give another --data-dir"
            ) from error
        os.ftruncate(lock, 0)
        os.pwrite(lock, str(os.getpid()).encode(), 0)
        self._lock = lock

    def unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def controller_address(self) -> str:
        """The controller's host:port: the same at every start, so that clients find it again, unless it is taken."""
        try:
            port = int(self.port_file.read_text())
        except (FileNotFoundError, ValueError):
            port = 0
        if port == 0 or not _is_free(port):
            port = _choose_port()
            self.port_file.write_text(f"{port}\n")
        return f"{HOST}:{port}"

    def log_file(self, part: str) -> Path:
        return self.logs / f"{part}.log"

    def write_status(self, status: dict[str, object]) -> None:
        """Replaces the status in one step: a reader sees the old or the new one."""
        unfinished = self.status_file.with_suffix(".new")
        unfinished.write_text(json.dumps(status, indent=2) + "\n")
        unfinished.rename(self.status_file)

    def read_status(self) -> dict[str, Any]:
        """The newest status; empty when there is none."""
        try:
            status: dict[str, Any] = json.loads(self.status_file.read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            # An empty one is what a power cut may leave.
            return {}
        return status


def _write_private(path: Path, text: str) -> None:
    # The name appears only when the file is whole: a kill between the two leaves no empty token.
    unfinished = path.with_suffix(".new")
    unfinished.unlink(missing_ok=True)
    with os.fdopen(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text + "\n")
    unfinished.rename(path)


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        # As servers do: connections of an earlier life that linger do not make the port taken.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def _choose_port() -> int:
    for port in random.sample(PORTS, 200):
        if _is_free(port):
            return port
    raise EmbeddedError(f"no free port on {HOST} between {PORTS.start} and {PORTS.stop - 1}")
