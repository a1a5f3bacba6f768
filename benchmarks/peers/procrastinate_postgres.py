"""procrastinate on an embedded Postgres of the same kind as the controller's."""

import asyncio
import os
import subprocess
import sys
import tempfile
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path

from benchmarks.peers.peer import CallIterator, Peer
from plexrl_controller.embedded.postgres import EmbeddedPostgres

PROMISE = (
    "a task and its end are in Postgres before each is answered; no result is kept (the task sends a NOTIFY instead, "
    "which dies with its listener); a task whose worker died runs again when somebody asks for that"
)


@asynccontextmanager
async def _open() -> CallIterator:
    import psycopg

    with (
        tempfile.TemporaryDirectory(prefix="plexrl-bench-") as folder,
        EmbeddedPostgres(Path(folder) / "pg") as postgres,
    ):
        postgres.create_database("bench")
        conninfo = f"host={postgres.socket_folder} user=plexrl dbname=bench"
        os.environ["BENCH_DATABASE"] = conninfo
        from benchmarks.peers.procrastinate_tasks import app, echo

        async with app.open_async(), await psycopg.AsyncConnection.connect(conninfo, autocommit=True) as listener:
            await app.schema_manager.apply_schema_async()
            await listener.execute("LISTEN bench")
            with (Path(folder) / "worker.log").open("wb") as log:
                argv = [sys.executable, "-m", "benchmarks.peers.procrastinate_tasks"]
                worker = subprocess.Popen(argv, stdout=log, stderr=log)  # noqa: ASYNC220 - nothing else runs yet
            waiting: dict[int, asyncio.Future[None]] = {}
            numbers = count()

            async def listen() -> None:
                async for notice in listener.notifies():
                    if (future := waiting.pop(int(notice.payload), None)) is not None and not future.done():
                        future.set_result(None)

            async def call() -> None:
                number = next(numbers)
                waiting[number] = asyncio.get_running_loop().create_future()
                done = waiting[number]
                await echo.defer_async(number=number, payload="x" * 100)
                await done

            task = asyncio.create_task(listen())
            try:
                await call()
                yield call
            finally:
                task.cancel()
                worker.terminate()
                worker.wait()


def peer() -> Peer:
    """The peer."""
    return Peer("procrastinate + Postgres", PROMISE, _open)
