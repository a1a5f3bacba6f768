"""Task queues on Redis, each with one worker process: Celery and Dramatiq.

Their clients wait for a result by blocking, so that every call in flight has a thread.
"""

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from benchmarks.peers.peer import CallIterator, Peer
from benchmarks.peers.redis_server import redis_server

MOST_IN_FLIGHT = 64
PAYLOAD = "x" * 100
PROMISE = (
    "a task and its result are on disk before each is answered (Redis with appendfsync always); a task runs again "
    "after its worker died, so it may run twice"
)


@asynccontextmanager
async def _worker(argv: list[str], blocking: Callable[[], Callable[[], Any]]) -> CallIterator:
    loop = asyncio.get_running_loop()
    with tempfile.TemporaryDirectory(prefix="plexrl-bench-") as folder, redis_server(Path(folder) / "redis") as url:
        os.environ["BENCH_REDIS_URL"] = url
        with (Path(folder) / "worker.log").open("wb") as log:
            command = [sys.executable, "-m", *argv]
            worker = subprocess.Popen(command, stdout=log, stderr=log)  # noqa: ASYNC220 - nothing else runs yet
        pool = ThreadPoolExecutor(MOST_IN_FLIGHT)
        try:
            run = blocking()

            async def call() -> None:
                await loop.run_in_executor(pool, run)

            await call()
            yield call
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            worker.terminate()
            worker.wait()


def _celery() -> Callable[[], Any]:
    from benchmarks.peers.celery_tasks import echo

    return lambda: echo.delay(PAYLOAD).get(timeout=60)


def _dramatiq() -> Callable[[], Any]:
    from benchmarks.peers.dramatiq_tasks import echo

    return lambda: echo.send(PAYLOAD).get_result(block=True, timeout=60_000)


def celery() -> Peer:
    """Celery."""
    argv = ["celery", "-A", "benchmarks.peers.celery_tasks", "worker", "--pool", "solo", "--loglevel", "warning"]
    return Peer("Celery + Redis", PROMISE, lambda: _worker(argv, _celery))


def dramatiq() -> Peer:
    """Dramatiq."""
    argv = ["dramatiq", "benchmarks.peers.dramatiq_tasks", "--processes", "1", "--threads", "8"]
    return Peer("Dramatiq + Redis", PROMISE, lambda: _worker(argv, _dramatiq))
