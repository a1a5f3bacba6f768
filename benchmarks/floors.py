"""What the machine allows: an fsync, and bytes through a raw gRPC stream, beside the payload service."""

import asyncio
import hashlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc

from benchmarks.measurement import Measurement, Spread, quantile
from plexrl.v1 import payload_pb2 as p
from plexrl.v1 import payload_pb2_grpc
from plexrl.wire import CHANNEL_OPTIONS, CHUNK_BYTES
from plexrl_controller.embedded.cluster import LocalCluster
from plexrl_controller.embedded.settings import ClusterSettings

PAYLOAD_BYTES = 64 * 1024 * 1024
FSYNC_BYTES = 8192


def fsync_ms(folder: Path, seconds: float) -> dict[str, float]:
    """Milliseconds of a write of 8 KiB into a file that exists, with its fdatasync: no commit can be faster."""
    times: list[float] = []
    with (folder / "fsync").open("wb") as file:
        file.write(bytes(16 << 20))
        file.flush()
        os.fsync(file.fileno())
        begun = time.perf_counter()
        while time.perf_counter() - begun < seconds:
            start = time.perf_counter()
            os.pwrite(file.fileno(), os.urandom(FSYNC_BYTES), FSYNC_BYTES * (len(times) % 2000))
            os.fdatasync(file.fileno())
            times.append(time.perf_counter() - start)
    return {"p50": 1e3 * quantile(times, 0.5), "p99": 1e3 * quantile(times, 0.99)}


def payload_throughput(runs: int) -> list[Measurement]:
    """MB/s of a 64 MB payload, client to payload store and back, beside the same chunks through a bare gRPC stream; and
    beside what it takes one process without a network to hash, write and sync them.

    The payload service hashes, writes and syncs what comes, and hashes what it reads; the bare stream does nothing. Who
    uploads names the hash first, so that both streams begin when it is known.
    """
    argv = [sys.executable, "-m", "benchmarks.floors"]
    with tempfile.TemporaryDirectory(prefix="plexrl-bench-") as folder:
        settings = ClusterSettings(data_dir=Path(folder) / "plexrl", engine="fake", workers=1)
        with LocalCluster(settings) as local, subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as bare:
            assert bare.stdout is not None
            try:
                return asyncio.run(_throughput(local, bare.stdout.readline().strip(), Path(folder) / "plain", runs))
            finally:
                bare.terminate()


class _Echo(payload_pb2_grpc.PayloadServiceServicer):
    """Takes chunks and drops them; sends chunks of noughts."""

    async def PutPayload(
        self, request_iterator: AsyncIterator[p.PutPayloadRequest], context: Any
    ) -> p.PutPayloadResponse:
        async for _ in request_iterator:
            pass
        return p.PutPayloadResponse()

    async def GetPayload(self, request: p.GetPayloadRequest, context: Any) -> AsyncIterator[p.GetPayloadResponse]:
        chunk = bytes(CHUNK_BYTES)
        for _ in range(PAYLOAD_BYTES // CHUNK_BYTES):
            yield p.GetPayloadResponse(data=chunk)


async def _throughput(local: LocalCluster, bare: str, plain: Path, runs: int) -> list[Measurement]:
    found: dict[tuple[str, str], list[float]] = {}
    for number in range(runs):
        data = os.urandom(PAYLOAD_BYTES - 8) + number.to_bytes(8, "little")
        found.setdefault(("file", "put"), []).append(PAYLOAD_BYTES / _write_file(plain, data) / 1e6)
        for name, endpoint, token in (("ours", local.endpoint, local.token), ("bare", bare, "")):
            async with grpc.aio.insecure_channel(endpoint, options=list(CHANNEL_OPTIONS)) as channel:
                stub = payload_pb2_grpc.PayloadServiceStub(channel)
                metadata = (("authorization", f"Bearer {token}"),)
                begun = time.perf_counter()
                stored = await stub.PutPayload(_chunks(data), metadata=metadata)
                found.setdefault((name, "put"), []).append(PAYLOAD_BYTES / (time.perf_counter() - begun) / 1e6)
                begun = time.perf_counter()
                request = p.GetPayloadRequest(payload_id=stored.payload_id)
                size = 0
                async for chunk in stub.GetPayload(request, metadata=metadata):
                    size += len(chunk.data)
                found.setdefault((name, "get"), []).append(size / (time.perf_counter() - begun) / 1e6)
    return [
        Measurement(
            f"payload of 64 MB, {way}", "MB/s", Spread(tuple(found["ours", way])), Spread(tuple(found[peer, way])), name
        )
        for peer, way, name in (
            ("bare", "put", "raw gRPC stream"),
            ("file", "put", "a file hashed, written, synced"),
            ("bare", "get", "raw gRPC stream"),
        )
    ]


def _write_file(path: Path, data: bytes) -> float:
    """Seconds to hash, write and sync a new file, chunk by chunk in one thread."""
    begun, digest, view = time.perf_counter(), hashlib.sha256(), memoryview(data)
    with path.open("wb", buffering=0) as file:
        for start in range(0, len(data), CHUNK_BYTES):
            digest.update(view[start : start + CHUNK_BYTES])
            file.write(view[start : start + CHUNK_BYTES])
        os.fdatasync(file.fileno())
    seconds = time.perf_counter() - begun
    path.unlink()
    return seconds


async def _chunks(data: bytes) -> AsyncIterator[p.PutPayloadRequest]:
    view = memoryview(data)
    yield p.PutPayloadRequest(size_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
    for start in range(0, len(data), CHUNK_BYTES):
        yield p.PutPayloadRequest(data=bytes(view[start : start + CHUNK_BYTES]))


async def _serve_bare() -> None:
    server = grpc.aio.server(options=list(CHANNEL_OPTIONS))
    payload_pb2_grpc.add_PayloadServiceServicer_to_server(_Echo(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"127.0.0.1:{port}", flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(_serve_bare())
