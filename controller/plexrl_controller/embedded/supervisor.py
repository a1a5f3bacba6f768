"""Starts the parts of an embedded cluster, watches them, starts again what died, and stops all of them in order.

One thread, one loop; every part is a child of this process and dies with it. Knows how parts are started and how they
end, not what they do.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from plexrl_controller.embedded.postgres import EmbeddedPostgres
from plexrl_controller.embedded.process import (
    EmbeddedError,
    die_with_parent,
    is_running,
    send_signal,
    spawn,
    start_ticks,
    tail,
    wait_until_gone,
)
from plexrl_controller.embedded.readiness import wait_until_ready
from plexrl_controller.embedded.settings import ClusterSettings, DataFolder

DATABASE = "plexrl"
READY_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 10.0
POLL_S = 0.05
MOST_RESTART_DELAY_S = 10.0
# A part that ran this long starts over with the shortest delay.
STEADY_S = 30.0


@dataclass
class Part:
    """A controller or worker process, and when it may be started again."""

    name: str
    argv: list[str]
    log_file: Path
    environment: Mapping[str, str]
    process: subprocess.Popen[bytes] | None = None
    started_s: float = 0.0
    deaths: int = 0
    restart_at_s: float = field(default=0.0)

    def start(self) -> None:
        self.process = spawn(die_with_parent(signal.SIGKILL, self.argv), log_file=self.log_file, env=self.environment)
        self.started_s = time.monotonic()

    def exit_code(self) -> int | None:
        return None if self.process is None else self.process.poll()


class Supervisor:
    """Runs one embedded cluster. `say` gets a plain line for whoever watches; `stop` ends `run` when it is set."""

    def __init__(self, settings: ClusterSettings, say: Callable[[str], None], stop: threading.Event) -> None:
        self._settings = settings
        self._say = say
        self._stop = stop
        self._folder = DataFolder(settings.data_dir)
        self._postgres: EmbeddedPostgres | None = None
        self._postgres_started_s = 0.0
        self._postgres_deaths = 0
        self._postgres_restart_at_s = 0.0
        self._parts: list[Part] = []
        self._endpoint = ""

    def run(self, on_ready: Callable[[str], None]) -> None:
        """Starts everything, calls `on_ready` with the endpoint, supervises until `stop` is set, and stops everything.

        Raises EmbeddedError when something cannot be started at all; a part that dies later is started again instead.
        """
        self._folder.make()
        self._folder.lock()
        try:
            self._end_earlier_life()
            self._start()
            if not self._stop.is_set():
                self._write_status("ready")
                on_ready(self._endpoint)
            while not self._stop.wait(POLL_S):
                self._look_after_all()
        finally:
            self._stop_all()
            self._folder.unlock()

    def _start(self) -> None:
        database_url = self._settings.database_url or self._start_postgres()
        self._migrate(database_url)
        self._endpoint = self._folder.controller_address()
        self._folder.endpoint_file.unlink(missing_ok=True)
        self._parts = [self._controller(database_url), *(self._worker(name) for name in self._settings.worker_names)]
        for part in self._parts:
            part.start()
        self._write_status("starting")
        names = self._settings.worker_names
        try:
            wait_until_ready(
                self._endpoint, self._folder.token_file.read_text().strip(), names, READY_TIMEOUT_S, self._check_start
            )
        except _StoppedMeanwhile:
            return

    def _start_postgres(self) -> str:
        self._postgres = EmbeddedPostgres(self._folder.postgres, log_file=self._folder.log_file("postgres"))
        self._postgres.start()
        if not self._postgres.has_database(DATABASE):
            self._postgres.create_database(DATABASE)
        return self._postgres.url(DATABASE)

    def _migrate(self, database_url: str) -> None:
        log_file = self._folder.log_file("migrate")
        with log_file.open("ab") as log:
            code = subprocess.run(
                [sys.executable, "-m", "plexrl_controller", "migrate"],
                stdout=log,
                stderr=log,
                env=_environment(PLEXRL_CONTROLLER_DATABASE_URL=database_url),
            ).returncode
        if code != 0:
            raise EmbeddedError(f"the database could not be migrated (exit {code}):\n{tail(log_file)}")

    def _controller(self, database_url: str) -> Part:
        folder = self._folder
        argv = [
            *(sys.executable, "-m", "plexrl_controller", "serve", "--listen", self._endpoint),
            *("--endpoint-file", str(folder.endpoint_file), "--payload-url", folder.payloads.as_uri()),
            *("--policy", self._settings.policy),
            *("--worker-token-file", str(folder.worker_token_file), "--bootstrap-token-file", str(folder.token_file)),
            *self._settings.controller_flags,
        ]
        # By variable, not by flag: the URL may hold a password, and everybody may read the arguments of a process.
        environment = _environment(PLEXRL_CONTROLLER_DATABASE_URL=database_url)
        return Part("controller", argv, folder.log_file("controller"), environment)

    def _worker(self, name: str) -> Part:
        settings = self._settings
        index = settings.worker_names.index(name)
        given = {
            "--controller": self._endpoint,
            "--token-file": str(self._folder.worker_token_file),
            "--name": name,
            "--listen": "127.0.0.1:0",
            "--device": "cpu" if settings.device == "cpu" else "cuda:0",
            "--device-state-bytes": settings.device_state_bytes,
            "--host-state-bytes": settings.host_state_bytes,
            "--kv-cache-bytes": settings.kv_cache_bytes,
            "--threads": str(settings.threads or max(1, (os.cpu_count() or 1) // settings.workers)),
            "--state-dir": str(self._folder.workers / name),
            "--checkpoint-dir": str(self._folder.checkpoints),
            "--catalogue-file": None if settings.catalogue_file is None else str(settings.catalogue_file),
            "--engine": settings.engine,
            "--stop-grace-s": f"{STOP_TIMEOUT_S - 2:g}",
        }
        argv = [sys.executable, "-m", "plexrl_worker"]
        argv += [word for flag, value in given.items() if value is not None for word in (flag, value)]
        argv += settings.worker_flags
        environment = _environment(CUDA_VISIBLE_DEVICES=str(index)) if settings.device == "cuda" else _environment()
        return Part(name, argv, self._folder.log_file(name), environment)

    def _check_start(self) -> None:
        if self._stop.is_set():
            raise _StoppedMeanwhile
        for part in self._parts:
            if (code := part.exit_code()) is not None:
                log = f"The end of {part.log_file}:\n{tail(part.log_file)}"
                raise EmbeddedError(f"{part.name} ended while starting ({_how(code)}). {log}")

    def _look_after_all(self) -> None:
        now_s = time.monotonic()
        changed = self._look_after_postgres(now_s)
        for part in self._parts:
            changed |= self._look_after(part, now_s)
        if changed:
            self._write_status("ready")

    def _look_after(self, part: Part, now_s: float) -> bool:
        if part.process is not None:
            if (code := part.exit_code()) is None:
                return False
            part.process = None
            part.deaths = 1 if now_s - part.started_s > STEADY_S else part.deaths + 1
            part.restart_at_s = now_s + self._delay_s(part.deaths)
            self._say(f"{part.name} died ({_how(code)}){self._what_now(part.deaths)}; its log: {part.log_file}")
            return True
        if not self._settings.restart or now_s < part.restart_at_s:
            return False
        part.start()
        return True

    def _look_after_postgres(self, now_s: float) -> bool:
        if self._postgres is None or self._postgres.running:
            return False
        if self._postgres_restart_at_s == 0.0:
            steady = now_s - self._postgres_started_s > STEADY_S
            self._postgres_deaths = 1 if steady else self._postgres_deaths + 1
            self._postgres_restart_at_s = now_s + self._delay_s(self._postgres_deaths)
            self._say(f"postgres died{self._what_now(self._postgres_deaths)}; its log: {self._postgres.log_file}")
            return True
        if not self._settings.restart or now_s < self._postgres_restart_at_s:
            return False
        self._postgres_restart_at_s = 0.0
        self._postgres_started_s = now_s
        try:
            self._postgres.start()
        except EmbeddedError as error:
            self._say(str(error))
            return False
        return True

    def _delay_s(self, deaths: int) -> float:
        return min(MOST_RESTART_DELAY_S, self._settings.restart_delay_s * 2.0 ** min(deaths - 1, 20))

    def _what_now(self, deaths: int) -> str:
        return f", starting it again in {self._delay_s(deaths):.1f} s" if self._settings.restart else ""

    def _stop_all(self) -> None:
        """Workers first, so that they can say goodbye, then the controller, then the database under it."""
        workers = [part for part in self._parts if part.name != "controller"]
        controllers = [part for part in self._parts if part.name == "controller"]
        for group in (workers, controllers):
            processes = [part.process for part in group if part.process is not None and part.process.poll() is None]
            for process in processes:
                process.terminate()
            deadline = time.monotonic() + STOP_TIMEOUT_S
            for process in processes:
                try:
                    process.wait(max(0.0, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    self._say(f"process {process.pid} did not end within {STOP_TIMEOUT_S:.0f} s and was killed")
                    process.kill()
                    process.wait()
        if self._postgres is not None:
            self._postgres.stop()
        self._parts = []
        # A client that looks for a cluster here is told at once that there is none.
        self._folder.endpoint_file.unlink(missing_ok=True)
        self._folder.write_status({"state": "stopped"})

    def _write_status(self, state: str) -> None:
        pids = {part.name: part.process.pid for part in self._parts if part.process is not None}
        if self._postgres is not None and self._postgres.running:
            pids["postgres"] = self._postgres.pid
        self._folder.write_status(
            {
                "state": state,
                "endpoint": self._endpoint,
                "supervisor": os.getpid(),
                "parts": {name: {"pid": pid, "start_ticks": start_ticks(pid)} for name, pid in pids.items()},
            }
        )

    def _end_earlier_life(self) -> None:
        """Ends what a supervisor that was killed may have left: the kernel ends its children, but not at once."""
        parts = self._folder.read_status().get("parts", {})
        # The start time tells a part from a stranger that got its process id since. Postgres sees to itself.
        left = [
            part["pid"]
            for name, part in parts.items()
            if name != "postgres" and is_running(part["pid"]) and start_ticks(part["pid"]) == part["start_ticks"]
        ]
        for pid in wait_until_gone(left, 1.0):
            send_signal(pid, signal.SIGKILL)
        if still := wait_until_gone(left, STOP_TIMEOUT_S):
            raise EmbeddedError(f"processes of an earlier `plexrl up` do not end: {still}")


class _StoppedMeanwhile(Exception):
    """`stop` was set before everything was ready."""


def _environment(**more: str) -> dict[str, str]:
    # Settings of another cluster in the caller's environment must not reach these parts.
    ours = ("PLEXRL_CONTROLLER_", "PLEXRL_WORKER_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    # What the parts say to each other stays on this machine, whatever proxy there is.
    return {**environment, **more, "PYTHONUNBUFFERED": "1", "no_grpc_proxy": "127.0.0.1,localhost"}


def _how(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit {code}"
