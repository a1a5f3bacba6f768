"""Payloads as files: `<root>/<hash of the tenant>/<two digits>/<hash of the content>`.

A file appears under its name only when it is whole and on disk. Names are hexadecimal digests and nothing else. One
process owns the directory. File I/O runs in threads, so that the event loop never waits for a disk; renames, which are
quick, run on the loop together with the ledger's entry, so that a deletion never meets a new file of the same content.
"""

import asyncio
import errno
import os
from collections.abc import AsyncIterable, AsyncIterator, Callable, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from secrets import token_hex
from typing import IO, Any, ParamSpec, TypeVar

from plexrl_controller.domain.errors import ControllerError, DataLoss, ResourceExhausted, Unavailable
from plexrl_controller.domain.ids import Tenant
from plexrl_controller.domain.records import Payload
from plexrl_controller.payloads.held import HeldPayloads
from plexrl_controller.payloads.ledger import Key, Ledger, is_digest, owner_of
from plexrl_controller.payloads.port import CHUNK_BYTES, MAX_PAYLOAD_BYTES, QUOTA_BYTES, chunks_of

P = ParamSpec("P")
T = TypeVar("T")

SYNC_BYTES = 8 << 20
"""Of an upload that is under way: so much is left for the end to wait for."""
WRITE_BYTES = 4 << 20
"""Of an upload are hashed and written together: a thread of its own for less costs more than it does."""
MOST_CHUNKS = 1024
"""Kept until they are written, however small."""
_PARTIAL = "partial"


class DirectoryPayloadStore(HeldPayloads):
    """Implements `PayloadStore`. Made by `open`."""

    def __init__(self, root: Path, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._root = root

    @classmethod
    async def open(
        cls, root: Path, *, quota_bytes: int = QUOTA_BYTES, max_payload_bytes: int = MAX_PAYLOAD_BYTES
    ) -> "DirectoryPayloadStore":
        """Makes or reads the directory; what an earlier life left half-written is removed. Raises Unavailable."""
        ledger = Ledger(quota_bytes, max_payload_bytes)
        for key, size_bytes in await _in_thread(_prepare, root):
            ledger.found(key, size_bytes)
        return cls(root, ledger)

    async def put(
        self, tenant: Tenant, content: bytes | AsyncIterable[bytes], *, beyond_quota: bool = False
    ) -> Payload:
        owner = owner_of(tenant)
        partial = self._root / _PARTIAL / token_hex(16)
        reserved_bytes = 0
        try:
            file = _WrittenBehind(await _in_thread(_create, partial))
            try:
                async for chunk in chunks_of(content):
                    self._ledger.reserve(owner, len(chunk), reserved_bytes + len(chunk), beyond_quota=beyond_quota)
                    reserved_bytes += len(chunk)
                    await file.append(chunk)
                payload = Payload(await file.finish(), reserved_bytes)
            finally:
                await file.close()
            path = self._path((owner, payload.sha256))
            await _in_thread(_make_directory, path.parent)
            _rename(partial, path)
        except BaseException:
            self._ledger.cancel(owner, reserved_bytes)
            with suppress(OSError):
                partial.unlink()
            raise
        self._ledger.settle((owner, payload.sha256), payload.size_bytes)
        try:
            await _in_thread(_sync_directory, path.parent)
        except BaseException:
            await self.release(tenant, payload)
            raise
        return payload

    async def _pieces(self, key: Key, digest: Any) -> AsyncIterator[bytes]:
        file = await _in_thread(_open, self._path(key))
        # A chunk is read and hashed while the one before it goes out.
        reading = _begin(_read, file, digest)
        try:
            while chunk := await reading:
                reading = _begin(_read, file, digest)
                yield chunk
        finally:
            await asyncio.wait([reading])
            file.close()

    def _path(self, key: Key) -> Path:
        owner, digest = key
        return self._root / owner / digest[:2] / digest

    async def _delete(self, keys: Sequence[Key]) -> None:
        """Takes the names away at once; the blocks of a large file are freed in a thread."""
        leftovers = [self._root / _PARTIAL / token_hex(16) for _ in keys]
        for key, leftover in zip(keys, leftovers, strict=True):
            try:
                self._path(key).rename(leftover)
            except FileNotFoundError:
                pass
            except OSError as error:
                raise _translate(error) from error
        for leftover in leftovers:
            await _in_thread(leftover.unlink, missing_ok=True)


class _WrittenBehind:
    """A new file: what came is hashed and written while more comes; what is written goes to disk meanwhile."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._digest = sha256()
        self._came: list[bytes] = []
        self._came_bytes = 0
        self._writing: asyncio.Task[None] | None = None
        self._syncing: asyncio.Task[None] | None = None
        self._unsynced_bytes = 0

    async def append(self, chunk: bytes) -> None:
        """Takes a chunk; where enough has come, begins to write it once what came before is written, whose error this
        raises.
        """
        if chunk:
            self._came.append(chunk)
            self._came_bytes += len(chunk)
        if self._came_bytes >= WRITE_BYTES or len(self._came) >= MOST_CHUNKS:
            await self._write_on()

    async def finish(self) -> str:
        """Returns the SHA-256 once everything is on disk."""
        await self._write_on()
        for begun in (self._writing, self._syncing):
            if begun is not None:
                await begun
        await _in_thread(_sync, self._file)
        return self._digest.hexdigest()

    async def close(self) -> None:
        """Nobody closes a file in use."""
        if begun := [task for task in (self._writing, self._syncing) if task is not None]:
            await asyncio.wait(begun)
        self._file.close()

    async def _write_on(self) -> None:
        """Begins to write all that came, once what came before is written."""
        if self._writing is not None:
            await self._writing
        if self._unsynced_bytes > SYNC_BYTES and (self._syncing is None or self._syncing.done()):
            if self._syncing is not None:
                # The kernel tells only once of bytes that did not reach the disk.
                await self._syncing
            self._syncing, self._unsynced_bytes = _begin(_sync, self._file), 0
        self._unsynced_bytes += self._came_bytes
        self._writing = _begin(_write, self._file, self._came, self._digest)
        self._came, self._came_bytes = [], 0


def _prepare(root: Path) -> list[tuple[Key, int]]:
    partials = root / _PARTIAL
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    partials.mkdir(mode=0o700, exist_ok=True)
    for leftover in partials.iterdir():
        leftover.unlink()
    owners = [path for path in root.iterdir() if is_digest(path.name)]
    files = [file for owner in owners for file in owner.glob("*/*") if is_digest(file.name)]
    return [((file.parent.parent.name, file.name), file.stat().st_size) for file in files]


def _create(path: Path) -> IO[bytes]:
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb", buffering=0)


def _open(path: Path) -> IO[bytes]:
    return path.open("rb")


def _write(file: IO[bytes], chunks: Sequence[bytes], digest: Any) -> None:
    for chunk in chunks:
        written = file.write(chunk)
        while written < len(chunk):
            written += file.write(memoryview(chunk)[written:])
        digest.update(chunk)


def _read(file: IO[bytes], digest: Any) -> bytes:
    chunk = file.read(CHUNK_BYTES)
    digest.update(chunk)
    return chunk


def _sync(file: IO[bytes]) -> None:
    os.fdatasync(file.fileno())


def _make_directory(path: Path) -> None:
    """The directory of a content's first digits, with its own names on disk."""
    if not path.exists():
        for directory in (path.parent, path):
            directory.mkdir(mode=0o700, exist_ok=True)
            _sync_directory(directory.parent)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _rename(source: Path, target: Path) -> None:
    try:
        source.replace(target)
    except OSError as error:
        raise _translate(error) from error


async def _in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Runs file I/O beside the loop. A cancelled wait still ends after the I/O: nobody closes a file in use."""
    work = asyncio.ensure_future(asyncio.to_thread(function, *args, **kwargs))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait([work])
        raise
    except OSError as error:
        raise _translate(error) from error


def _begin(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> asyncio.Task[T]:
    """Begins file I/O that somebody waits for later; its error is nobody's when something else failed first."""
    work = asyncio.ensure_future(_in_thread(function, *args, **kwargs))
    work.add_done_callback(lambda done: done.cancelled() or done.exception())
    return work


def _translate(error: OSError) -> ControllerError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ResourceExhausted("the payload store's disk is full", reason="DISK_FULL", retry_after_s=10.0)
    if isinstance(error, FileNotFoundError):
        return DataLoss(f"a stored payload is missing: {error.filename}", reason="PAYLOAD_MISSING")
    return Unavailable(f"the payload store does not answer: {error}", retry_after_s=1.0)
