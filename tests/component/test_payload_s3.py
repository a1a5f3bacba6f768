"""The object payload store against a server that speaks S3: parts, restarts, a service that is away."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from hashlib import sha256

import obstore
import pytest

from plexrl_controller.domain.errors import DataLoss, NotFound, Unavailable
from plexrl_controller.domain.ids import Tenant
from plexrl_controller.domain.records import Payload
from plexrl_controller.payloads import objects
from plexrl_controller.payloads.by_url import check_payload_url, open_payloads
from plexrl_controller.payloads.port import CHUNK_BYTES

ACME, OTHER = Tenant("acme"), Tenant("other")
QUOTA_BYTES = 64 * CHUNK_BYTES


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    """An S3 service in its own process, on loopback."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def url(endpoint: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """A prefix of its own in a bucket that exists."""
    import boto3

    for name, value in (("ACCESS_KEY_ID", "key"), ("SECRET_ACCESS_KEY", "secret"), ("REGION", "us-east-1")):
        monkeypatch.setenv(f"AWS_{name}", value)
    client = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1")
    client.create_bucket(Bucket="payloads")
    return f"s3://payloads/{sha256(request.node.name.encode()).hexdigest()[:8]}"


async def pieces(content: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(content), CHUNK_BYTES):
        yield content[start : start + CHUNK_BYTES]


def names(url: str, endpoint: str) -> list[str]:
    return sorted(entry["path"] for page in obstore.list(objects.s3_store(url, endpoint)) for entry in page)


@pytest.mark.parametrize("size_bytes", [0, 5, objects.PART_BYTES, 2 * objects.PART_BYTES + 1])
async def test_what_was_put_is_read_and_gone_when_released(url: str, endpoint: str, size_bytes: int) -> None:
    store = await open_payloads(url, endpoint, QUOTA_BYTES)
    content = os.urandom(size_bytes)
    payload = await store.put(ACME, pieces(content))
    assert payload == Payload(sha256(content).hexdigest(), size_bytes)
    chunks = [chunk async for chunk in store.chunks(ACME, payload)]
    assert b"".join(chunks) == content
    assert all(0 < len(chunk) <= CHUNK_BYTES for chunk in chunks)
    assert [name.rpartition("/")[2] for name in names(url, endpoint)] == [payload.sha256]
    with pytest.raises(NotFound):
        await store.read(OTHER, payload)
    await store.release(ACME, payload)
    assert names(url, endpoint) == []


async def test_a_restart_keeps_what_is_retained_and_sweeps_the_rest(url: str, endpoint: str) -> None:
    store = await open_payloads(url, endpoint, QUOTA_BYTES)
    kept = await store.put(ACME, b"kept")
    await store.put(ACME, b"lost")
    await obstore.put_async(objects.s3_store(url, endpoint), "partial/half", b"half")
    restarted = await open_payloads(url, endpoint, QUOTA_BYTES)
    assert restarted.stored_bytes(ACME) == 8
    restarted.retain(ACME, kept)
    assert await restarted.sweep() == 4
    assert await restarted.read(ACME, kept) == b"kept"
    assert [name.rpartition("/")[2] for name in names(url, endpoint)] == [kept.sha256]


async def test_damage_is_data_loss(url: str, endpoint: str) -> None:
    store = await open_payloads(url, endpoint, QUOTA_BYTES)
    payload = await store.put(ACME, b"content")
    [name] = names(url, endpoint)
    await obstore.put_async(objects.s3_store(url, endpoint), name, b"Content")
    with pytest.raises(DataLoss):
        await store.read(ACME, payload)
    await obstore.delete_async(objects.s3_store(url, endpoint), name)
    with pytest.raises(DataLoss):
        await store.read(ACME, payload)


async def test_a_service_that_is_away_is_unavailable(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "RETRY_TIMEOUT", timedelta(milliseconds=200))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{probe.getsockname()[1]}"
    with pytest.raises(Unavailable, match="does not answer"):
        await open_payloads(url, nobody, QUOTA_BYTES)


@pytest.mark.parametrize(
    ("url", "endpoint", "says"),
    [
        ("s3://", None, "s3://bucket/prefix"),
        ("s3://bucket?x=1", None, "s3://bucket/prefix"),
        ("s3://bucket", "http://example.com", "https"),
        ("file://host/dir", None, "absolute"),
        ("file:///", None, "absolute"),
        ("ftp://bucket", None, "want file"),
        ("/plain/path", None, "want file"),
    ],
)
def test_urls_that_are_not_taken(url: str, endpoint: str | None, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        check_payload_url(url, endpoint)
