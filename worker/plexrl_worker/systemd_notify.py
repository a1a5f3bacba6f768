"""The sd_notify datagrams of a Type=notify unit; silent when systemd did not start the process."""

import os
import socket


def notify(state: str) -> bool:
    """Sends one state line, e.g. "READY=1". False when nobody listens (`NOTIFY_SOCKET` is unset or its end is gone)."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return False
    # A leading @ stands for the NUL byte of Linux's abstract namespace.
    target = "\0" + address[1:] if address.startswith("@") else address
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
        try:
            channel.sendto(state.encode(), target)
        except OSError:
            return False
    return True


def watchdog_interval_s() -> float | None:
    """How often to send WATCHDOG=1: half of what systemd allows; None when it watches nobody or another process."""
    usec, pid = os.environ.get("WATCHDOG_USEC", ""), os.environ.get("WATCHDOG_PID", "")
    if not usec.isdigit() or int(usec) == 0 or (pid and pid != str(os.getpid())):
        return None
    return int(usec) / 1e6 / 2
