"""Weights on their way between two workers, held up in the middle: what no commit begins or ends.

How much has come is read from the memory that the pulling worker borrows for it; a process is held up by a signal that
it cannot see. So no line of the product knows of it.
"""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress

LIMIT_S = 120.0
_FILL_LIMIT_S = 5.0
_LOOK_S = 0.0005
_SENT_ARRIVES_S = 0.05
_BORROWED = "/memfd:plexrl-borrowed (deleted)"
Pids = Callable[[], Sequence[int]]
"""Processes that run now: none while they are being started."""


@asynccontextmanager
async def standing_still(pids: Sequence[int]) -> AsyncIterator[None]:
    """Within the block the processes do nothing, and those that outlive it go on."""
    _signal(pids, signal.SIGSTOP)
    try:
        yield
    finally:
        _signal(pids, signal.SIGCONT)


@asynccontextmanager
async def coming(puller: Pids, source: Pids) -> AsyncIterator[None]:
    """Within the block a worker has some of the bytes that it pulls, and who sends them stands still. Raises
    TimeoutError.
    """
    stopped = await asyncio.to_thread(_stop_in_the_middle, puller, source)
    try:
        yield
    finally:
        _signal(stopped, signal.SIGCONT)


@asynccontextmanager
async def all_here(puller: Pids, engines: Pids) -> AsyncIterator[None]:
    """Within the block all bytes have come, and the engine that is to take them stands still. Raises TimeoutError."""
    deadline = time.monotonic() + LIMIT_S
    while True:
        stopped = await asyncio.to_thread(_stop_before_the_end, puller, engines)
        try:
            if await asyncio.to_thread(_filled, puller):
                yield
                return
        finally:
            _signal(stopped, signal.SIGCONT)
        if time.monotonic() > deadline:
            raise TimeoutError(f"no pull came to its last byte within {LIMIT_S:.0f} s")


def _stop_in_the_middle(puller: Pids, source: Pids) -> Sequence[int]:
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        pulling, stopped = _seen(puller), source()
        _signal(stopped, signal.SIGSTOP)
        # What was sent before arrives.
        time.sleep(_SENT_ARRIVES_S)
        if _some(pulling):
            return stopped
        _signal(stopped, signal.SIGCONT)
    raise TimeoutError(f"no pull was stopped on its way within {LIMIT_S:.0f} s")


def _stop_before_the_end(puller: Pids, engines: Pids) -> Sequence[int]:
    while True:
        pulling = _seen(puller)
        _signal([pulling], signal.SIGSTOP)
        stopped = engines() if _some(pulling) else ()
        _signal(stopped, signal.SIGSTOP)
        _signal([pulling], signal.SIGCONT)
        if stopped:
            return stopped


def _seen(puller: Pids) -> int:
    """The process, as soon as some bytes of a pull have come to it."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        for pid in puller():
            looks_until = time.monotonic() + 0.5
            while time.monotonic() < looks_until:
                if _some(pid):
                    return pid
                time.sleep(_LOOK_S)
    raise TimeoutError(f"no pull was seen on its way within {LIMIT_S:.0f} s")


def _filled(puller: Pids) -> bool:
    deadline = time.monotonic() + _FILL_LIMIT_S
    while time.monotonic() < deadline:
        for pid in puller():
            landed = _landed_bytes(pid)
            if landed is not None and landed[0] >= landed[1]:
                return True
        time.sleep(_LOOK_S)
    return False


def _some(pid: int) -> bool:
    landed = _landed_bytes(pid)
    return landed is not None and 0 < landed[0] < landed[1]


def _landed_bytes(pid: int) -> tuple[int, int] | None:
    """What has come of a pull, and how much there will be; None while none is under way, or it is not there."""
    with suppress(FileNotFoundError, ProcessLookupError), os.scandir(f"/proc/{pid}/fd") as entries:
        for entry in entries:
            with suppress(FileNotFoundError):
                if os.readlink(entry.path) == _BORROWED:
                    found = os.stat(entry.path)
                    return found.st_blocks * 512, found.st_size
    return None


def _signal(pids: Sequence[int], signum: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signum)
