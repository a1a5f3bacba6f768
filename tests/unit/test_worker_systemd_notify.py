"""sd_notify: datagrams where a unit listens, silence elsewhere."""

import os
import socket
from pathlib import Path

import pytest

from plexrl_worker.systemd_notify import notify, watchdog_interval_s


def test_a_state_reaches_the_unit_s_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for address, name in ((str(tmp_path / "n"), str(tmp_path / "n")), (f"\0plexrl-{os.getpid()}", "")):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
            listener.bind(address)
            listener.settimeout(5)
            monkeypatch.setenv("NOTIFY_SOCKET", name or "@" + address[1:])
            assert notify("READY=1")
            assert listener.recv(64) == b"READY=1"


def test_without_a_unit_nothing_happens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    assert not notify("READY=1")
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "gone"))
    assert not notify("READY=1")


def test_the_watchdog_is_fed_at_half_its_limit_by_the_process_it_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WATCHDOG_PID", raising=False)
    monkeypatch.setenv("WATCHDOG_USEC", "30000000")
    assert watchdog_interval_s() == 15.0
    monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()))
    assert watchdog_interval_s() == 15.0
    monkeypatch.setenv("WATCHDOG_PID", "1")
    assert watchdog_interval_s() is None
    monkeypatch.delenv("WATCHDOG_PID")
    monkeypatch.setenv("WATCHDOG_USEC", "")
    assert watchdog_interval_s() is None
