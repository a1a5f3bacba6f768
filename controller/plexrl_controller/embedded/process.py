"""Child processes that cannot outlive their parent, and the truth about whether a process still runs."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from subprocess import DEVNULL, Popen


class EmbeddedError(Exception):
    """A part of the embedded cluster could not be started or stopped; the message says which, why, and what to do."""


def die_with_parent(signum: signal.Signals, argv: Sequence[str]) -> list[str]:
    """`argv`, made to receive `signum` from the kernel when its parent dies, even of kill -9.

    setpriv sets this after the fork and before the program starts, so no Python runs between fork and exec: a fork of a
    process with gRPC threads is safe only that way.
    """
    return ["setpriv", f"--pdeathsig={signum.name.removeprefix('SIG')}", *argv]


def spawn(
    argv: Sequence[str], *, log_file: Path, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> Popen[bytes]:
    """Starts `argv` in a process group of its own, its output appended to `log_file`.

    The group of its own keeps a Ctrl-C at the terminal away from it: whoever supervises decides the order of the end.
    Raises EmbeddedError outside the main thread: the death signal follows the thread that forked, not the process.
    """
    if threading.current_thread() is not threading.main_thread():
        raise EmbeddedError(
            "processes must be started from the main thread: they die when the thread that starts them ends"
        )
    with log_file.open("ab") as log:
        return Popen(argv, stdin=DEVNULL, stdout=log, stderr=log, env=env, cwd=cwd, process_group=0)


def is_running(pid: int) -> bool:
    """Whether `pid` exists and is more than a zombie, which only waits for a parent that may be slow to collect it."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")


def start_ticks(pid: int) -> int:
    """When `pid` started, in clock ticks since boot; with the pid it names a process for good. 0 when there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    # Field 22 of proc(5); the name in field 2 may hold spaces and brackets.
    return int(stat.rpartition(")")[2].split()[19])


def children(pid: int) -> list[int]:
    """Process ids of the running children of `pid`."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
        if parent == pid and is_running(int(entry.name)):
            found.append(int(entry.name))
    return sorted(found)


def wait_until_gone(pids: Sequence[int], timeout_s: float) -> list[int]:
    """Waits until none of `pids` runs, at most `timeout_s`; returns those that still do."""
    deadline = time.monotonic() + timeout_s
    while (left := [pid for pid in pids if is_running(pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def send_signal(pid: int, signum: signal.Signals) -> None:
    """Sends `signum` to `pid`, and does nothing when it is gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signum)


def tail(log_file: Path, lines: int = 15) -> str:
    """The last `lines` lines of a log, for an error message."""
    try:
        with log_file.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - 8192))
            text = log.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
    return "\n".join(text.splitlines()[-lines:])
