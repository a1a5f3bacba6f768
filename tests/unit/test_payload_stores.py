"""What every payload store does: memory, directory and object store answer alike."""

import asyncio
import contextlib
import errno
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import IO, Any

import pytest
from obstore.store import MemoryStore

from plexrl_controller.domain.errors import (
    DataLoss,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from plexrl_controller.domain.ids import Tenant
from plexrl_controller.domain.records import Payload
from plexrl_controller.payloads import directory, inline
from plexrl_controller.payloads.directory import DirectoryPayloadStore
from plexrl_controller.payloads.memory import MemoryPayloadStore
from plexrl_controller.payloads.objects import PART_BYTES, ObjectPayloadStore
from plexrl_controller.payloads.port import CHUNK_BYTES, PayloadStore

ACME = Tenant("acme")
OTHER = Tenant("../other/./\x00")
QUOTA_BYTES = 4 * CHUNK_BYTES
MAX_PAYLOAD_BYTES = 3 * CHUNK_BYTES
Open = Callable[[], Awaitable[PayloadStore]]


@pytest.fixture(params=["memory", "directory", "objects", "objects in parts"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> PayloadStore:
    limits = {"quota_bytes": QUOTA_BYTES, "max_payload_bytes": MAX_PAYLOAD_BYTES}
    if request.param == "memory":
        return MemoryPayloadStore(**limits)
    if request.param.startswith("objects"):
        part_bytes = PART_BYTES if request.param == "objects" else CHUNK_BYTES // 8
        return await ObjectPayloadStore.open(MemoryStore(), part_bytes=part_bytes, **limits)
    return await DirectoryPayloadStore.open(tmp_path / "payloads", **limits)


async def pieces(*chunks: bytes, error: Exception | None = None) -> AsyncIterator[bytes]:
    for chunk in chunks:
        yield chunk
    if error is not None:
        raise error


def payload_of(content: bytes) -> Payload:
    return Payload(sha256(content).hexdigest(), len(content))


@pytest.mark.parametrize("content", [b"", b"x", os.urandom(CHUNK_BYTES), os.urandom(2 * CHUNK_BYTES + 1)], ids=len)
async def test_what_was_put_is_read(store: PayloadStore, content: bytes) -> None:
    payload = await store.put(ACME, content)
    assert payload == payload_of(content)
    assert await store.read(ACME, payload) == content
    assert store.find(ACME, payload.sha256) == payload
    chunks = [chunk async for chunk in store.chunks(ACME, payload)]
    assert b"".join(chunks) == content
    assert all(0 < len(chunk) <= CHUNK_BYTES for chunk in chunks)


async def test_chunks_make_the_same_payload(store: PayloadStore) -> None:
    assert await store.put(ACME, pieces(b"one ", b"", b"two")) == payload_of(b"one two")
    assert await store.read(ACME, payload_of(b"one two")) == b"one two"


async def test_content_stays_until_its_last_reference_is_released(store: PayloadStore) -> None:
    payload = await store.put(ACME, b"shared")
    await store.put(ACME, b"shared")
    store.retain(ACME, payload)
    assert store.stored_bytes(ACME) == len(b"shared")
    await store.release(ACME, payload)
    await store.release(ACME, payload)
    assert await store.read(ACME, payload) == b"shared"
    await store.release(ACME, payload)
    assert store.stored_bytes(ACME) == 0
    for refused in (store.read(ACME, payload), store.release(ACME, payload)):
        with pytest.raises(NotFound):
            await refused
    with pytest.raises(NotFound):
        store.retain(ACME, payload)


async def test_a_tenant_reaches_its_own_content_only(store: PayloadStore) -> None:
    """G23."""
    payload = await store.put(ACME, b"secret")
    with pytest.raises(NotFound):
        await store.read(OTHER, payload)
    with pytest.raises(NotFound):
        await store.release(OTHER, payload)
    with pytest.raises(NotFound):
        store.retain(OTHER, payload)
    with pytest.raises(NotFound):
        store.find(OTHER, payload.sha256)
    await store.put(OTHER, b"secret")
    await store.release(OTHER, payload)
    assert await store.read(ACME, payload) == b"secret"


@pytest.mark.parametrize("name", ["", "../../etc/passwd", "AB" * 32, "ab" * 31 + "/.", "ab" * 32 + "\n", "é" * 64])
async def test_a_hash_that_is_none_is_refused(store: PayloadStore, name: str) -> None:
    with pytest.raises(InvalidArgument):
        await store.read(ACME, Payload(name, 1))
    with pytest.raises(InvalidArgument):
        await store.release(ACME, Payload(name, 1))
    with pytest.raises(InvalidArgument):
        store.retain(ACME, Payload(name, 1))
    with pytest.raises(InvalidArgument):
        store.find(ACME, name)


async def test_the_service_itself_reaches_any_content_by_its_hash(store: PayloadStore) -> None:
    payload = await store.put(OTHER, b"anybody's")
    assert store.has(OTHER, payload.sha256)
    assert store.has(None, payload.sha256)
    assert not store.has(ACME, payload.sha256)
    assert store.find(None, payload.sha256) == payload
    assert await store.read(None, Payload(payload.sha256, -1)) == b"anybody's"
    assert b"".join([chunk async for chunk in store.chunks(None, payload)]) == b"anybody's"
    await store.release(OTHER, payload)
    assert not store.has(None, payload.sha256)
    with pytest.raises(NotFound):
        await store.read(None, payload)


async def test_a_wrong_size_is_data_loss(store: PayloadStore) -> None:
    payload = await store.put(ACME, b"content")
    with pytest.raises(DataLoss):
        await store.read(ACME, Payload(payload.sha256, 6))


async def test_too_large_a_payload_is_refused_with_the_limit(store: PayloadStore) -> None:
    with pytest.raises(ResourceExhausted, match=str(MAX_PAYLOAD_BYTES)):
        await store.put(ACME, bytes(MAX_PAYLOAD_BYTES + 1))
    with pytest.raises(ResourceExhausted, match=str(MAX_PAYLOAD_BYTES)):
        await store.put(ACME, pieces(bytes(MAX_PAYLOAD_BYTES), b"x"))
    assert store.stored_bytes(ACME) == 0


async def test_the_quota_is_the_tenants_own(store: PayloadStore) -> None:
    assert store.quota_bytes == QUOTA_BYTES
    first = await store.put(ACME, b"1" * (3 * CHUNK_BYTES))
    with pytest.raises(ResourceExhausted, match=str(QUOTA_BYTES)):
        await store.put(ACME, b"2" * (CHUNK_BYTES + 1))
    await store.put(OTHER, b"2" * (CHUNK_BYTES + 1))
    await store.put(ACME, b"3" * CHUNK_BYTES)
    await store.release(ACME, first)
    await store.put(ACME, b"2" * (CHUNK_BYTES + 1))
    assert store.stored_bytes(ACME) == 2 * CHUNK_BYTES + 1


async def test_concurrent_puts_share_the_quota(store: PayloadStore) -> None:
    puts = [store.put(ACME, pieces(bytes([number]) * CHUNK_BYTES, b"end")) for number in range(6)]
    results = await asyncio.gather(*puts, return_exceptions=True)
    kept = [result for result in results if isinstance(result, Payload)]
    assert all(isinstance(result, Payload | ResourceExhausted) for result in results)
    assert len(kept) <= 3
    assert store.stored_bytes(ACME) == len(kept) * (CHUNK_BYTES + 3)


async def test_a_broken_upload_leaves_nothing(store: PayloadStore) -> None:
    with pytest.raises(ConnectionError):
        await store.put(ACME, pieces(b"half", error=ConnectionError("gone")))
    assert store.stored_bytes(ACME) == 0
    with pytest.raises(NotFound):
        await store.read(ACME, payload_of(b"half"))


async def test_a_cancelled_upload_leaves_nothing(store: PayloadStore) -> None:
    started = asyncio.Event()

    async def endless() -> AsyncIterator[bytes]:
        yield b"half"
        started.set()
        await asyncio.Event().wait()

    upload = asyncio.create_task(store.put(ACME, endless()))
    await started.wait()
    upload.cancel()
    with pytest.raises(asyncio.CancelledError):
        await upload
    assert store.stored_bytes(ACME) == 0


async def test_same_content_put_and_released_at_once_stays_for_its_holder(store: PayloadStore) -> None:
    payload = await store.put(ACME, b"contended")
    for _ in range(20):
        await asyncio.gather(store.put(ACME, b"contended"), store.release(ACME, payload))
        assert await store.read(ACME, payload) == b"contended"


async def test_sweep_spares_what_is_held(store: PayloadStore) -> None:
    payload = await store.put(ACME, b"held")
    assert await store.sweep() == 0
    assert await store.read(ACME, payload) == b"held"


async def test_small_payloads_are_inline(store: PayloadStore) -> None:
    small, large = bytes(inline.INLINE_LIMIT_BYTES), bytes(inline.INLINE_LIMIT_BYTES + 1)
    kept_small, kept_large = await inline.keep(store, ACME, small), await inline.keep(store, ACME, large)
    assert (kept_small.inline, kept_large.inline) == (small, None)
    assert store.stored_bytes(ACME) == len(large)
    assert await inline.fetch(store, ACME, kept_small) == small
    assert await inline.fetch(store, ACME, kept_large) == large
    for payload in (kept_small, kept_large, None):
        inline.retain(store, ACME, payload)
        await inline.release(store, ACME, payload)
    await inline.release(store, ACME, kept_large)
    assert store.stored_bytes(ACME) == 0


async def test_inline_bytes_are_checked() -> None:
    with pytest.raises(DataLoss):
        await inline.fetch(MemoryPayloadStore(), ACME, Payload(payload_of(b"good").sha256, 4, b"evil"))


class TestDirectory:
    """What only files can suffer."""

    @pytest.fixture
    def root(self, tmp_path: Path) -> Path:
        return tmp_path / "payloads"

    @staticmethod
    def files(root: Path) -> list[Path]:
        return [path for path in root.rglob("*") if path.is_file()]

    @staticmethod
    def modes(root: Path) -> set[int]:
        return {path.stat().st_mode & 0o777 for path in (root, *root.rglob("*"))}

    async def test_a_restart_keeps_what_is_retained_and_sweeps_the_rest(self, root: Path) -> None:
        store = await DirectoryPayloadStore.open(root)
        kept, lost = await store.put(ACME, b"kept"), await store.put(ACME, b"lost")
        (root / "partial" / "half").write_bytes(b"half")
        restarted = await DirectoryPayloadStore.open(root)
        assert restarted.stored_bytes(ACME) == 8
        restarted.retain(ACME, kept)
        assert await restarted.sweep() == 4
        assert [path.read_bytes() for path in self.files(root)] == [b"kept"]
        assert await restarted.read(ACME, kept) == b"kept"
        with pytest.raises(NotFound):
            await restarted.read(ACME, lost)

    @pytest.mark.parametrize("damaged", [b"", b"conten", b"Content", b"contents"], ids=len)
    async def test_damage_is_data_loss(self, root: Path, damaged: bytes) -> None:
        store = await DirectoryPayloadStore.open(root)
        payload = await store.put(ACME, b"content")
        self.files(root)[0].write_bytes(damaged)
        with pytest.raises(DataLoss):
            await store.read(ACME, payload)

    async def test_a_damaged_payload_never_comes_whole(self, root: Path) -> None:
        store = await DirectoryPayloadStore.open(root)
        payload = await store.put(ACME, bytes(3 * CHUNK_BYTES))
        self.files(root)[0].write_bytes(b"\x01" + bytes(3 * CHUNK_BYTES - 1))
        received = 0
        with contextlib.suppress(DataLoss):
            async for chunk in store.chunks(ACME, payload):
                received += len(chunk)
        assert received == 2 * CHUNK_BYTES

    async def test_a_missing_file_is_data_loss_and_can_still_be_released(self, root: Path) -> None:
        store = await DirectoryPayloadStore.open(root)
        payload = await store.put(ACME, b"content")
        self.files(root)[0].unlink()
        with pytest.raises(DataLoss):
            await store.read(ACME, payload)
        await store.release(ACME, payload)
        assert store.stored_bytes(ACME) == 0

    async def test_putting_again_heals(self, root: Path) -> None:
        store = await DirectoryPayloadStore.open(root)
        payload = await store.put(ACME, b"content")
        self.files(root)[0].write_bytes(b"")
        await store.put(ACME, b"content")
        assert await store.read(ACME, payload) == b"content"

    async def test_only_its_owner_may_look(self, root: Path) -> None:
        store = await DirectoryPayloadStore.open(root)
        await store.put(OTHER, b"content")
        names = [part for path in self.files(root) for part in path.relative_to(root).parts]
        assert all(set(name) <= set("0123456789abcdef") for name in names)
        assert self.modes(root) == {0o700, 0o600}

    @pytest.mark.parametrize("write_bytes", [1, 10, 1000])
    @pytest.mark.parametrize("most_chunks", [1, 3, 1000])
    async def test_an_upload_in_pieces_of_any_size_is_whole_and_few_are_kept(
        self, root: Path, monkeypatch: pytest.MonkeyPatch, write_bytes: int, most_chunks: int
    ) -> None:
        monkeypatch.setattr(directory, "WRITE_BYTES", write_bytes)
        monkeypatch.setattr(directory, "MOST_CHUNKS", most_chunks)
        kept: list[int] = []
        write = directory._write

        def counted(file: IO[bytes], chunks: Sequence[bytes], digest: Any) -> None:
            kept.append(len(chunks))
            write(file, chunks, digest)

        monkeypatch.setattr(directory, "_write", counted)
        pieces = [bytes([number]) * (number % 7) for number in range(50)]

        async def chunks() -> AsyncIterator[bytes]:
            for piece in pieces:
                yield piece

        store = await DirectoryPayloadStore.open(root)
        payload = await store.put(ACME, chunks())
        assert await store.read(ACME, payload) == b"".join(pieces)
        assert max(kept) <= most_chunks
        assert sum(kept) == len([piece for piece in pieces if piece])

    @pytest.mark.parametrize(
        ("code", "error"),
        [(errno.ENOSPC, ResourceExhausted), (errno.EDQUOT, ResourceExhausted), (errno.EIO, Unavailable)],
    )
    @pytest.mark.parametrize(("call", "failing"), [("fsync", 1), ("fdatasync", 1), ("fdatasync", 2)])
    async def test_a_failing_disk_has_a_name_whichever_write_it_is_that_fails(
        self, root: Path, monkeypatch: pytest.MonkeyPatch, code: int, error: type[Exception], call: str, failing: int
    ) -> None:
        """The kernel tells once of bytes that did not reach the disk: whoever hears it must not forget it."""
        store = await DirectoryPayloadStore.open(root)
        monkeypatch.setattr(directory, "SYNC_BYTES", 0)
        monkeypatch.setattr(directory, "WRITE_BYTES", 1)
        real, calls = getattr(os, call), 0

        async def chunks() -> AsyncIterator[bytes]:
            for _ in range(4):
                yield b"content"
                await asyncio.sleep(0.01)

        def fail(descriptor: int) -> None:
            nonlocal calls
            calls += 1
            if calls == failing:
                raise OSError(code, os.strerror(code))
            real(descriptor)

        monkeypatch.setattr(os, call, fail)
        with pytest.raises(error):
            await store.put(ACME, chunks())
        monkeypatch.undo()
        assert store.stored_bytes(ACME) == 0
        assert self.files(root) == []
        assert await store.read(ACME, await store.put(ACME, b"content")) == b"content"
