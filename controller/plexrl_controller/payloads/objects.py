"""Payloads as objects of an S3-compatible store: `<prefix>/<hash of the tenant>/<hash of the content>`.

An object appears under its name only when it is whole: a small one is written at once, a large one in parts under a
name of its own and copied by the store. Names are hexadecimal digests and nothing else. One process owns the prefix.
Writing and deleting of one content exclude each other, so that a deletion never meets a new object of that content.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterable, AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from hashlib import sha256
from secrets import token_hex
from typing import Any
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import BaseError
from obstore.store import ObjectStore, S3Store

from plexrl_controller.domain.errors import DataLoss, Unavailable
from plexrl_controller.domain.ids import Tenant
from plexrl_controller.domain.records import Payload
from plexrl_controller.payloads.held import HeldPayloads
from plexrl_controller.payloads.ledger import Key, Ledger, is_digest, owner_of
from plexrl_controller.payloads.port import CHUNK_BYTES, MAX_PAYLOAD_BYTES, QUOTA_BYTES, chunks_of

PART_BYTES = 8 << 20
"""What is smaller goes up in one request; the parts of what is larger have this size (S3 asks for at least 5 MiB)."""
REQUEST_TIMEOUT = timedelta(seconds=30)
RETRY_TIMEOUT = timedelta(seconds=20)
_PARTIAL = "partial"
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def s3_store(url: str, endpoint: str | None) -> ObjectStore:
    """The store of `s3://bucket/prefix`. Credentials and region come from the AWS_* variables or the instance.

    endpoint: another S3-compatible service. Raises ValueError for a URL without bucket, or plain http beyond loopback.
    """
    parts = urlsplit(url)
    if parts.scheme != "s3" or not parts.netloc or parts.query or parts.fragment:
        raise ValueError(f"{url}: want s3://bucket/prefix")
    plain = endpoint is not None and urlsplit(endpoint).scheme == "http"
    if plain and urlsplit(endpoint or "").hostname not in _LOOPBACK:
        raise ValueError(f"{endpoint}: beyond loopback the object store needs https")
    optional: dict[str, Any] = {} if endpoint is None else {"endpoint": endpoint}
    return S3Store(
        parts.netloc,
        prefix=parts.path.strip("/") or None,
        client_options={"allow_http": plain, "timeout": REQUEST_TIMEOUT},
        retry_config={"retry_timeout": RETRY_TIMEOUT},
        **optional,
    )


async def require_objects(objects: ObjectStore) -> None:
    """Asks for one page of what is there. Raises Unavailable."""
    try:
        async for _ in obstore.list(objects, chunk_size=1):
            return
    except BaseError as error:
        raise _unavailable(error) from error


class ObjectPayloadStore(HeldPayloads):
    """Implements `PayloadStore`. Made by `open`."""

    def __init__(self, objects: ObjectStore, ledger: Ledger, part_bytes: int) -> None:
        super().__init__(ledger)
        self._objects = objects
        self._part_bytes = part_bytes
        self._locks: dict[Key, asyncio.Lock] = {}
        self._lock_users: Counter[Key] = Counter()

    @classmethod
    async def open(
        cls,
        objects: ObjectStore,
        *,
        quota_bytes: int = QUOTA_BYTES,
        max_payload_bytes: int = MAX_PAYLOAD_BYTES,
        part_bytes: int = PART_BYTES,
    ) -> "ObjectPayloadStore":
        """Reads what is there; what an earlier life left half-written is removed. Raises Unavailable."""
        ledger = Ledger(quota_bytes, max_payload_bytes)
        leftovers: list[str] = []
        try:
            async for page in obstore.list(objects):
                for entry in page:
                    owner, _, digest = entry["path"].rpartition("/")
                    if owner == _PARTIAL:
                        leftovers.append(entry["path"])
                    elif is_digest(owner) and is_digest(digest):
                        ledger.found((owner, digest), entry["size"])
            if leftovers:
                await obstore.delete_async(objects, leftovers)
        except BaseError as error:
            raise _unavailable(error) from error
        return cls(objects, ledger, part_bytes)

    async def put(
        self, tenant: Tenant, content: bytes | AsyncIterable[bytes], *, beyond_quota: bool = False
    ) -> Payload:
        owner = owner_of(tenant)
        upload = _Upload(self._ledger, owner, beyond_quota)
        try:
            pieces = upload.measured(chunks_of(content))
            head = await _head(pieces, self._part_bytes)
            if len(head) <= self._part_bytes:
                payload = upload.payload()
                await self._write(owner, payload, head)
            else:
                payload = await self._write_parts(upload, _joined(head, pieces))
        except BaseException:
            if not upload.settled:
                self._ledger.cancel(owner, upload.size_bytes)
            else:
                await self.release(tenant, upload.payload())
            raise
        return payload

    async def _write(self, owner: str, payload: Payload, content: bytes) -> None:
        key = owner, payload.sha256
        async with self._exclusive(key):
            try:
                await obstore.put_async(self._objects, _path(key), content, use_multipart=False)
            except BaseError as error:
                raise _unavailable(error) from error
            self._ledger.settle(key, payload.size_bytes)

    async def _write_parts(self, upload: "_Upload", pieces: AsyncIterator[bytes]) -> Payload:
        partial = f"{_PARTIAL}/{token_hex(16)}"
        try:
            await self._put_parts(partial, pieces)
            payload = upload.payload()
            key = upload.owner, payload.sha256
            async with self._exclusive(key):
                await obstore.copy_async(self._objects, partial, _path(key))
                self._ledger.settle(key, payload.size_bytes)
                upload.settled = True
        except BaseError as error:
            # An error of the source comes back wrapped in one of the object store's.
            raise upload.error or _unavailable(error) from error
        finally:
            with suppress(BaseError, FileNotFoundError):
                await obstore.delete_async(self._objects, partial)
        return payload

    async def _put_parts(self, name: str, pieces: AsyncIterator[bytes]) -> None:
        """Puts an object in parts. These go when the source fails, but not when the wait is cancelled: so it fails."""
        given_up = asyncio.Event()

        async def put() -> None:
            source = _until(given_up, pieces)
            await obstore.put_async(self._objects, name, source, use_multipart=True, chunk_size=self._part_bytes)

        putting = asyncio.ensure_future(put())
        try:
            await asyncio.shield(putting)
        except asyncio.CancelledError:
            given_up.set()
            await asyncio.wait([putting])
            putting.exception()
            raise

    async def _pieces(self, key: Key, digest: Any) -> AsyncIterator[bytes]:
        try:
            size_bytes = self._ledger.size(key)
            # In requests of their own: the time limit of one holds until its last byte has been taken, by whoever waits
            # for the reader of these pieces as well.
            for first in range(0, max(size_bytes, 1), PART_BYTES):
                part = (first, min(first + PART_BYTES, size_bytes))
                options: Any = {"range": part} if size_bytes else None
                found = await obstore.get_async(self._objects, _path(key), options=options)
                if found.meta["size"] != size_bytes:
                    raise DataLoss(f"payload {key[1]} no longer has its size", reason="PAYLOAD_CORRUPT")
                view = memoryview(await found.bytes_async())
                for start in range(0, len(view), CHUNK_BYTES):
                    chunk = bytes(view[start : start + CHUNK_BYTES])
                    await asyncio.to_thread(digest.update, chunk)
                    yield chunk
        except FileNotFoundError as error:
            raise DataLoss(f"a stored payload is missing: {key[1]}", reason="PAYLOAD_MISSING") from error
        except BaseError as error:
            raise _unavailable(error) from error

    async def _delete(self, keys: Sequence[Key]) -> None:
        for key in keys:
            async with self._exclusive(key):
                if self._ledger.holds(*key):
                    continue
                try:
                    await obstore.delete_async(self._objects, _path(key))
                except FileNotFoundError:
                    pass
                except BaseError as error:
                    raise _unavailable(error) from error

    @asynccontextmanager
    async def _exclusive(self, key: Key) -> AsyncIterator[None]:
        self._lock_users[key] += 1
        try:
            async with self._locks.setdefault(key, asyncio.Lock()):
                yield
        finally:
            self._lock_users[key] -= 1
            if not self._lock_users[key]:
                del self._lock_users[key], self._locks[key]


class _Upload:
    """Counts, hashes and reserves the bytes of one upload as they pass; keeps the error that ended it."""

    def __init__(self, ledger: Ledger, owner: str, beyond_quota: bool) -> None:
        self._beyond_quota = beyond_quota
        self.owner = owner
        self.size_bytes = 0
        self.error: BaseException | None = None
        self.settled = False
        """The reservation has become stored content: it is not given back, it is released."""
        self._ledger = ledger
        self._digest = sha256()

    async def measured(self, content: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        try:
            async for chunk in content:
                self._ledger.reserve(
                    self.owner, len(chunk), self.size_bytes + len(chunk), beyond_quota=self._beyond_quota
                )
                self.size_bytes += len(chunk)
                self._digest.update(chunk)
                yield chunk
        except BaseException as error:
            self.error = error
            raise

    def payload(self) -> Payload:
        return Payload(self._digest.hexdigest(), self.size_bytes)


async def _head(pieces: AsyncIterator[bytes], part_bytes: int) -> bytes:
    """All of it, or the first bytes past `part_bytes`."""
    head = bytearray()
    async for piece in pieces:
        head += piece
        if len(head) > part_bytes:
            break
    return bytes(head)


async def _joined(head: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield head
    async for piece in rest:
        yield piece


async def _until(given_up: asyncio.Event, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The pieces, or an error as soon as nobody wants them any more."""
    ending = asyncio.ensure_future(given_up.wait())
    coming: asyncio.Future[bytes | None] | None = None
    try:
        while True:
            coming = asyncio.ensure_future(anext(pieces, None))
            await asyncio.wait({coming, ending}, return_when=asyncio.FIRST_COMPLETED)
            if not coming.done():
                raise Unavailable("the upload was given up")
            if (piece := coming.result()) is None:
                return
            yield piece
    finally:
        ending.cancel()
        if coming is not None and not coming.done():
            coming.cancel()


def _path(key: Key) -> str:
    return f"{key[0]}/{key[1]}"


def _unavailable(error: BaseError) -> Unavailable:
    # The library's text goes on with its internals after the first line.
    said = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return Unavailable(f"the object store does not answer: {said}", retry_after_s=1.0)
