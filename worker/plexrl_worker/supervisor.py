"""Starts, watches and ends the engine children, one per engine key; each has a directory, which is also its record.

A child's directory is made before the child, and its path is among the child's arguments: whatever moment the daemon
dies in, the next life finds both the child and what it left.

Knows processes; what they compute, and whose state dies with them, is for its callers.
"""

import asyncio
import json
import os
import secrets
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import structlog

from plexrl_worker.engine import errors as engine_errors
from plexrl_worker.engine.client import EngineProcess
from plexrl_worker.engine.settings import EngineSettings
from plexrl_worker.errors import EngineFailed, ShuttingDown, of_engine

_log = structlog.get_logger(__name__)

MAX_SPARE_ENGINES = 2
"""Children without a model that are kept for the next one."""

DIRECTORY_PREFIX = "plexrl-engine-"

DeathListener = Callable[[EngineProcess, str], None]


@dataclass
class _Slot:
    """An engine key's place: its child, if one lives, and how often one was started."""

    settings: EngineSettings
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
        device: str,
        directory: Path,
        *,
        start_limit_s: float,
        hang_limit_s: float,
        on_death: DeathListener,
    ) -> None:
        self._kind = kind
        self._device = device
        self._directory = directory
        self._start_limit_s = start_limit_s
        self._hang_limit_s = hang_limit_s
        self._on_death = on_death
        self._slots: dict[str, _Slot] = {}
        self._spares: dict[str, None] = {}
        self._watchers: set[asyncio.Task[None]] = set()
        self._closing = False
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)

    async def get(self, key: str, settings: EngineSettings) -> EngineProcess:
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
        environment = device_environment(self._device, os.environ.get("CUDA_VISIBLE_DEVICES"))
        directory = self._directory / f"{DIRECTORY_PREFIX}{secrets.token_hex(8)}"
        directory.mkdir(mode=0o700)
        try:
            process = await EngineProcess.start(
                self._kind,
                slot.settings,
                directory=directory,
                start_limit_s=self._start_limit_s,
                hang_limit_s=self._hang_limit_s,
                environment=environment,
            )
        except engine_errors.EngineError as error:
            shutil.rmtree(directory, ignore_errors=True)
            raise of_engine(error) from error
        watcher = asyncio.create_task(self._watch(key, process, directory))
        self._watchers.add(watcher)
        watcher.add_done_callback(self._watchers.discard)
        _log.info("engine_started", engine_key=key[:12], pid=process.pid)
        if process.description.device_kind != self._device.partition(":")[0]:
            await process.close()
            raise EngineFailed(
                f"the engine computes on {process.description.device_kind}, this worker was told --device "
                f"{self._device}: install the engine for that device, or name the other"
            )
        try:
            # A child starts with the device; whoever needs it there grants it.
            process.floor_bytes = (await process.release_device()).held_bytes
        except engine_errors.EngineError as error:
            raise of_engine(error) from error
        return process

    async def _watch(self, key: str, process: EngineProcess, directory: Path) -> None:
        death = await process.wait_exit()
        await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)
        # A child that was asked to end is no news.
        log = _log.info if death.exit_code == 0 else _log.warning
        log("engine_ended", engine_key=key[:12], pid=process.pid, reason=death.reason, message=str(death))
        self._on_death(process, key)


def device_environment(device: str, visible: str | None) -> dict[str, str]:
    """Shows an engine its device and no other: none for `cpu`, for `cuda:N` the Nth of those that this daemon sees.

    visible: the daemon's own CUDA_VISIBLE_DEVICES (a unit per GPU narrows it to one), None where all are seen.

    >>> device_environment("cuda:0", "3")
    {'CUDA_VISIBLE_DEVICES': '3'}
    """
    kind, _, number = device.partition(":")
    if kind != "cuda":
        return {"CUDA_VISIBLE_DEVICES": ""}
    if visible is None:
        return {"CUDA_VISIBLE_DEVICES": number}
    names = [name.strip() for name in visible.split(",") if name.strip()]
    if int(number) >= len(names):
        raise EngineFailed(f"--device {device}: CUDA_VISIBLE_DEVICES={visible!r} shows {len(names)} device(s)")
    return {"CUDA_VISIBLE_DEVICES": names[int(number)]}


def reap_orphans(directory: Path, limit_s: float = 10.0) -> list[int]:
    """Kills exactly the children that an earlier life left, and removes what they left; returns their pids.

    A child is known by its directory among its arguments, which no other process has. A zombie counts as gone: nothing
    but its parent can remove it.
    """
    leftovers = {str(path) for path in directory.glob(f"{DIRECTORY_PREFIX}*")}
    reaped: list[psutil.Process] = []
    for process in psutil.process_iter(["cmdline"]) if leftovers else ():
        if leftovers.intersection(process.info["cmdline"] or ()) and _lives(process):
            process.kill()
            reaped.append(process)
    _, alive = psutil.wait_procs(reaped, timeout=limit_s)
    still = [process.pid for process in alive if _lives(process)]
    if still:
        raise RuntimeError(f"engine processes {still} of an earlier life do not end after SIGKILL")
    for leftover in leftovers:
        shutil.rmtree(leftover)
    return [process.pid for process in reaped]


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
