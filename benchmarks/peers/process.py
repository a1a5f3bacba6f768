"""A peer's driver from outside: bounded in time, and ended with all that it started."""

import asyncio
import contextlib
import json
import os
import signal
import sys
from typing import Any, Self

from benchmarks.driving import Driven

CLOSE_LIMIT_S = 5.0


class PeerFailed(Exception):
    """A peer cannot be measured here; the message says why."""


class PeerProcess:
    """One peer, opened by `start`."""

    def __init__(self, process: asyncio.subprocess.Process, answers: asyncio.StreamReader) -> None:
        self._process = process
        self._answers = answers

    @classmethod
    async def start(cls, name: str, limit_s: float) -> Self:
        """Starts a peer. Raises PeerFailed when it is not ready in time."""
        ours, theirs = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "benchmarks.peers.driver", name, str(theirs)),
                pass_fds=(theirs,),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.DEVNULL,
                # With what it starts, a group of its own, which can be ended as a whole.
                start_new_session=True,
            )
        except BaseException:
            os.close(ours)
            raise
        finally:
            os.close(theirs)
        answers = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(answers)
        await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, os.fdopen(ours, "rb"))
        peer = cls(process, answers)
        try:
            await peer._answer(limit_s, f"it had not answered a first call after {limit_s:.0f} s")
        except BaseException:
            await peer.close()
            raise
        return peer

    async def drive(self, in_flight: int, seconds: float, limit_s: float) -> Driven:
        """Has it called for `seconds`. Raises PeerFailed when that takes longer than `limit_s`."""
        assert self._process.stdin is not None
        with contextlib.suppress(ConnectionError):
            self._process.stdin.write(json.dumps({"in_flight": in_flight, "seconds": seconds}).encode() + b"\n")
            await self._process.stdin.drain()
        why = f"{in_flight} in flight: calls of {seconds:g} s had not all ended after {limit_s:.0f} s"
        return Driven(**await self._answer(limit_s, why))

    async def close(self) -> None:
        """Ends it, at the latest by SIGKILL to its whole group."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_LIMIT_S):
                await self._process.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()

    async def _answer(self, limit_s: float, too_late: str) -> dict[str, Any]:
        try:
            async with asyncio.timeout(limit_s):
                line = await self._answers.readline()
        except TimeoutError:
            raise PeerFailed(too_late) from None
        content: dict[str, Any] = json.loads(line) if line else {"error": "its driver ended without a word"}
        if "error" in content:
            raise PeerFailed(content["error"])
        return content
