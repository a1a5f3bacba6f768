"""A Unix-socket proxy before Postgres that cuts the connection at a chosen moment of the next COMMIT."""

import asyncio
from enum import Enum
from pathlib import Path

from sqlalchemy import make_url


class Cut(Enum):
    """When the connection dies."""

    BEFORE_COMMIT = "the server never sees the COMMIT"
    AFTER_COMMIT = "the server has committed, the client does not hear of it"


class CuttingProxy:
    """Forwards bytes both ways. `cut_next` arms it for one COMMIT."""

    def __init__(self, database_url: str, folder: Path) -> None:
        url = make_url(database_url)
        self._server_socket = f"{url.query['host']}/.s.PGSQL.5432"
        self._socket = folder / ".s.PGSQL.5432"
        self.url = url.update_query_dict({"host": str(folder)}).render_as_string(hide_password=False)
        self.cut_next: Cut | None = None
        self.cuts = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> "CuttingProxy":
        self._server = await asyncio.start_unix_server(self._serve, self._socket)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        upstream_reader, upstream_writer = await asyncio.open_unix_connection(self._server_socket)
        swallow = asyncio.Event()
        directions = [
            asyncio.create_task(self._forward(reader, upstream_writer, swallow)),
            asyncio.create_task(self._return(upstream_reader, writer, swallow)),
        ]
        try:
            await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for direction in directions:
                direction.cancel()
            await asyncio.gather(*directions, return_exceptions=True)
            writer.close()
            upstream_writer.close()
            self._tasks.discard(task)

    async def _forward(
        self, reader: asyncio.StreamReader, upstream: asyncio.StreamWriter, swallow: asyncio.Event
    ) -> None:
        while data := await reader.read(1 << 16):
            if b"COMMIT" in data and self.cut_next is not None:
                cut, self.cut_next = self.cut_next, None
                self.cuts += 1
                if cut is Cut.BEFORE_COMMIT:
                    return
                swallow.set()
            upstream.write(data)
            await upstream.drain()

    async def _return(
        self, upstream: asyncio.StreamReader, writer: asyncio.StreamWriter, swallow: asyncio.Event
    ) -> None:
        while data := await upstream.read(1 << 16):
            if swallow.is_set():
                return
            writer.write(data)
            await writer.drain()
