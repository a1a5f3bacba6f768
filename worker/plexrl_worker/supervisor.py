"""Starts, watches and ends the engine children, one per engine key; records each for the next life to reap.

Knows processes; what they compute, and whose state dies with them, is for its callers.
"""

import asyncio
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import structlog

from plexrl_worker.engine import errors as engine_errors
from plexrl_worker.engine import port
from plexrl_worker.engine.client import EngineProcess
from plexrl_worker.errors import ShuttingDown, of_engine

_log = structlog.get_logger(__name__)

# psutil derives start times from the boot time, which a clock adjustment shifts a little.
_START_TIME_SLACK_S = 1.0

MAX_SPARE_ENGINES = 2
"""Children without a model that are kept for the next one."""

DeathListener = Callable[[EngineProcess, str], None]


@dataclass
class _Slot:
    """An engine key's place: its child, if one lives, and how often one was started."""

    settings: port.EngineSettings
    lock: asyncio.Lock
    process: EngineProcess | None = None
    starts: int = 0


@dataclass(frozen=True)
class EngineFacts:
    """What is known of an engine key's child."""

    key: str
    architecture: str
    process: EngineProcess | None
    starting: bool
    starts: int


class EngineSupervisor:
    """All engine children of a daemon."""

    def __init__(
        self,
        kind: str,
        record_dir: Path,
        *,
        start_limit_s: float,
        hang_limit_s: float,
        on_death: DeathListener,
    ) -> None:
        self._kind = kind
        self._record_dir = record_dir
        self._start_limit_s = start_limit_s
        self._hang_limit_s = hang_limit_s
        self._on_death = on_death
        self._slots: dict[str, _Slot] = {}
        self._spares: dict[str, None] = {}
        self._watchers: set[asyncio.Task[None]] = set()
        self._closing = False
        record_dir.mkdir(parents=True, exist_ok=True, mode=0o700)

    async def get(self, key: str, settings: port.EngineSettings) -> EngineProcess:
        """The living child of a key, started if need be. Raises what `of_engine` makes of a failed start."""
        self._spares.pop(key, None)
        slot = self._slots.setdefault(key, _Slot(settings, asyncio.Lock()))
        async with slot.lock:
            if self._closing:
                raise ShuttingDown("this worker is stopping and starts no engine")
            if slot.process is None or slot.process.death is not None:
                slot.process = await self._start(key, slot)
            return slot.process

    def living(self, key: str) -> EngineProcess | None:
        """The child of a key, if one lives."""
        slot = self._slots.get(key)
        if slot is None or slot.process is None or slot.process.death is not None:
            return None
        return slot.process

    def facts(self) -> list[EngineFacts]:
        """Every key that was ever used in this life."""
        return [
            EngineFacts(
                key=key,
                architecture=json.loads(slot.settings.config_json)["architectures"][0],
                process=self.living(key),
                starting=slot.lock.locked(),
                starts=slot.starts,
            )
            for key, slot in self._slots.items()
        ]

    async def spare(self, key: str) -> None:
        """Takes note that no deployment uses a key any more.

        A start costs many seconds, and the next job of a lab often has the architecture of the last: the newest
        MAX_SPARE_ENGINES children wait for it, with their device memory released; older ones end.
        """
        self._spares.pop(key, None)
        self._spares[key] = None
        while len(self._spares) > MAX_SPARE_ENGINES:
            oldest = next(iter(self._spares))
            del self._spares[oldest]
            process = self.living(oldest)
            self._slots.pop(oldest, None)
            if process is not None:
                await process.close()

    async def close(self) -> None:
        """Ends all children; returns when all are gone."""
        self._closing = True
        living = [slot.process for slot in self._slots.values() if slot.process is not None]
        await asyncio.gather(*(process.close(limit_s=2.0) for process in living))
        await asyncio.gather(*self._watchers)

    async def _start(self, key: str, slot: _Slot) -> EngineProcess:
        slot.starts += 1
        _log.info("engine_starting", engine_key=key[:12], starts=slot.starts)
        try:
            process = await EngineProcess.start(
                self._kind,
                slot.settings,
                start_limit_s=self._start_limit_s,
                hang_limit_s=self._hang_limit_s,
            )
            # A child starts with the device; whoever needs it there grants it.
            await process.release_device()
        except engine_errors.EngineError as error:
            raise of_engine(error) from error
        record = self._record_dir / f"{process.pid}.json"
        write_record(record, process.pid)
        _log.info("engine_started", engine_key=key[:12], pid=process.pid)
        watcher = asyncio.create_task(self._watch(key, process, record))
        self._watchers.add(watcher)
        watcher.add_done_callback(self._watchers.discard)
        return process

    async def _watch(self, key: str, process: EngineProcess, record: Path) -> None:
        death = await process.wait_exit()
        await asyncio.to_thread(record.unlink, missing_ok=True)
        _log.warning("engine_ended", engine_key=key[:12], pid=process.pid, reason=death.reason, message=str(death))
        self._on_death(process, key)


def write_record(path: Path, pid: int) -> None:
    """Writes which process a child is: its pid, and its start time against a later reuse of the pid."""
    try:
        started = psutil.Process(pid).create_time()
    except psutil.NoSuchProcess:
        return
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps({"pid": pid, "create_time": started}), encoding="ascii")
    os.replace(temporary, path)


def reap_orphans(record_dir: Path, limit_s: float = 10.0) -> list[int]:
    """Kills exactly the children that an earlier life recorded and that still live; returns their pids.

    A zombie counts as gone: nothing but its parent can remove it.
    """
    reaped: list[psutil.Process] = []
    for record in sorted(record_dir.glob("*.json")):
        try:
            facts = json.loads(record.read_text(encoding="ascii"))
            process = psutil.Process(int(facts["pid"]))
            same = abs(process.create_time() - facts["create_time"]) < _START_TIME_SLACK_S
            if same and process.status() != psutil.STATUS_ZOMBIE:
                process.kill()
                reaped.append(process)
        except (ValueError, KeyError, psutil.NoSuchProcess):
            pass
        record.unlink(missing_ok=True)
    _, alive = psutil.wait_procs(reaped, timeout=limit_s)
    still = [process.pid for process in alive if _lives(process)]
    if still:
        raise RuntimeError(f"engine processes {still} of an earlier life do not end after SIGKILL")
    return [process.pid for process in reaped]


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
