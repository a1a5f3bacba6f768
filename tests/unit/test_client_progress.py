"""Bars are for terminals, and only for long waits."""

import asyncio
import concurrent.futures
import io
import sys

import pytest

from plexrl import progress
from plexrl.futures import CallFuture, Outcome
from plexrl.v1 import types_pb2 as t


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Handle:
    """A call that finishes when it has been looked at three times."""

    call_id = "call-1"
    description = "generate call-1"
    state = t.CALL_STATE_RUNNING

    def __init__(self, outcome: "concurrent.futures.Future[int] | Outcome[int]") -> None:
        self._outcome = outcome
        self._looks = 0

    @property
    def progress(self) -> tuple[int, int]:
        self._looks += 1
        if self._looks == 3:
            self._outcome.set_result(7)
        return (self._looks, 3)

    def delivered(self) -> None: ...

    def dropped(self) -> None: ...

    def wake(self, waiter: "asyncio.Future[None]") -> None: ...

    def cancel(self) -> None: ...

    def explain(self) -> str:
        return ""


@pytest.fixture
def future() -> CallFuture[int]:
    outcome: concurrent.futures.Future[int] = concurrent.futures.Future()
    return CallFuture(Handle(outcome), outcome)


def test_a_long_wait_shows_a_bar_on_a_terminal(future: CallFuture[int], monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(progress, "REFRESH_S", 0.001)
    monkeypatch.delenv("PLEXRL_PROGRESS", raising=False)
    assert progress.wait(future, "generate", quiet_s=0.0) == 7
    assert "generate running" in terminal.getvalue()


def test_nothing_is_shown_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = io.StringIO()
    monkeypatch.setattr(sys, "stderr", pipe)
    outcome: concurrent.futures.Future[int] = concurrent.futures.Future()
    outcome.set_result(7)
    assert progress.wait(CallFuture(Handle(outcome), outcome), "generate", quiet_s=0.0) == 7
    assert pipe.getvalue() == ""


def test_the_environment_turns_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("PLEXRL_PROGRESS", "0")
    assert not progress.enabled()
