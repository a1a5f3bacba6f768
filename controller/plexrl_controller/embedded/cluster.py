"""A local cluster as a context manager, for demos, benchmarks and tests: the same that `plexrl up` runs, in a process
of its own, with a handle to see and to kill each part."""

import asyncio
import signal
import subprocess
import sys
import time
from types import TracebackType
from typing import Self

from plexrl_controller.embedded.process import (
    EmbeddedError,
    children,
    die_with_parent,
    is_running,
    send_signal,
    spawn,
    tail,
    wait_until_gone,
)
from plexrl_controller.embedded.readiness import wait_until_ready
from plexrl_controller.embedded.settings import ClusterSettings, DataFolder

START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 60.0


class LocalCluster:
    """A controller, its workers and (unless a database URL is given) its Postgres, as processes of this machine.

    Parts are named `postgres`, `controller`, `worker-0`, `worker-1`, …; `supervisor` is the process that watches them.

    >>> with LocalCluster(ClusterSettings(data_dir=folder, engine="fake")) as cluster:  # doctest: +SKIP
    ...     client = plexrl.connect(cluster.endpoint, token=cluster.token)
    """

    def __init__(self, settings: ClusterSettings) -> None:
        self.settings = settings
        self.folder = DataFolder(settings.data_dir)
        self._supervisor: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    async def __aenter__(self) -> Self:
        self._spawn()
        try:
            await asyncio.to_thread(self._wait_started)
        except BaseException:
            await asyncio.to_thread(self.stop)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.stop)

    def start(self) -> None:
        """Returns when the controller serves and all workers are ready. Raises EmbeddedError with the reason."""
        self._spawn()
        try:
            self._wait_started()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stops every part in order; does nothing when stopped already."""
        supervisor, self._supervisor = self._supervisor, None
        if supervisor is None:
            return
        supervisor.terminate()
        try:
            supervisor.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            # Its parts go with it.
            supervisor.kill()
            supervisor.wait()

    @property
    def endpoint(self) -> str:
        """host:port of the controller; the same after each restart."""
        endpoint = self.folder.read_status().get("endpoint")
        if not endpoint:
            raise EmbeddedError("the cluster is not started")
        return str(endpoint)

    @property
    def token(self) -> str:
        """The token of an administrator of tenant `default`."""
        return self.folder.token_file.read_text().strip()

    def pids(self) -> dict[str, int]:
        """Process id of each part that runs now, `supervisor` included."""
        status = self.folder.read_status()
        pids = {name: int(part["pid"]) for name, part in status.get("parts", {}).items()}
        if "supervisor" in status:
            pids["supervisor"] = int(status["supervisor"])
        return {name: pid for name, pid in pids.items() if is_running(pid)}

    def pid(self, part: str) -> int:
        """Process id of one part. Raises EmbeddedError while it does not run."""
        try:
            return self.pids()[part]
        except KeyError:
            raise EmbeddedError(f"{part} does not run now") from None

    def engine_pids(self, worker: str) -> list[int]:
        """Process ids of the engine children of a worker."""
        return children(self.pid(worker))

    def kill(self, part: str, signum: signal.Signals = signal.SIGKILL) -> int:
        """Sends `signum` to a part and returns its process id; after SIGKILL, waits until it is gone."""
        pid = self.pid(part)
        send_signal(pid, signum)
        if signum is signal.SIGKILL and wait_until_gone([pid], 10.0):
            raise EmbeddedError(f"{part} (process {pid}) does not end")
        return pid

    def wait_replaced(self, part: str, pid: int, timeout_s: float = 30.0) -> int:
        """Waits until the supervisor has started `part` again after process `pid`; returns the new process id."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if (now := self.pids().get(part, pid)) != pid:
                return now
            time.sleep(0.02)
        raise EmbeddedError(f"{part} was not started again within {timeout_s:.0f} s")

    def wait_ready(self, timeout_s: float = 60.0) -> None:
        """Waits until the controller serves and all workers are READY, as at the start."""
        wait_until_ready(self.endpoint, self.token, self.settings.worker_names, timeout_s, self._check_supervisor)

    def _spawn(self) -> None:
        if self._supervisor is not None:
            raise EmbeddedError("the cluster is started already")
        self.folder.make()
        argv = [sys.executable, "-m", "plexrl_controller.embedded", self.settings.to_json()]
        # SIGTERM, not SIGKILL: the supervisor of a parent that was killed still stops its parts in order.
        self._supervisor = spawn(die_with_parent(signal.SIGTERM, argv), log_file=self.folder.log_file("supervisor"))

    def _wait_started(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            self._check_supervisor()
            status = self.folder.read_status()
            if status.get("state") == "ready" and self._supervisor and status["supervisor"] == self._supervisor.pid:
                return
            time.sleep(0.02)
        raise EmbeddedError(f"the cluster in {self.folder.path} is not ready after {START_TIMEOUT_S:.0f} s")

    def _check_supervisor(self) -> None:
        if self._supervisor is not None and self._supervisor.poll() is not None:
            raise EmbeddedError(
                f"the cluster in {self.folder.path} ended:\n{tail(self.folder.log_file('supervisor'), lines=30)}"
            )
