"""Uploaded bundles: fetched from the controller file by file, checked, and never more than was named."""

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc import aio
from safetensors.numpy import save

from plexrl.v1 import model_pb2 as m
from plexrl.v1 import payload_pb2 as p
from plexrl.v1 import payload_pb2_grpc, registry_pb2_grpc
from plexrl_worker.bases import BaseLibrary
from plexrl_worker.daemon import WorkerDaemon
from plexrl_worker.errors import InvalidOrder, PayloadUnavailable
from tests.support.worker_daemon import (
    TOKEN,
    VOCAB_SIZE,
    FakeRegistry,
    Orders,
    deploy,
    fake_config,
    reason,
    settings_in,
    swap,
    train,
)

WEIGHTS = save({"table": np.eye(VOCAB_SIZE, dtype=np.float32)})


@dataclass
class Payloads:
    """Payloads by id, handed out in small pieces; remembers who asked for what."""

    contents: dict[str, bytes] = field(default_factory=dict)
    asked: list[tuple[str, str]] = field(default_factory=list)

    def add(self, data: bytes) -> str:
        payload_id = hashlib.sha256(data).hexdigest()
        self.contents[payload_id] = data
        return payload_id

    async def read(self, model_id: str, payload_id: str) -> AsyncIterator[bytes]:
        self.asked.append((model_id, payload_id))
        data = self.contents[payload_id]
        for start in range(0, len(data), 1000):
            yield data[start : start + 1000]


def bundle(**payload_ids: str) -> m.ModelBase:
    return m.ModelBase(bundle=m.BundleBase(payload_ids={k.replace("__", "."): v for k, v in payload_ids.items()}))


@pytest.fixture
def payloads() -> Payloads:
    return Payloads()


@pytest.fixture
def library(tmp_path: Path, payloads: Payloads) -> BaseLibrary:
    return BaseLibrary(tmp_path / "bases", {}, payloads.read, max_bundle_bytes=100_000)


async def test_a_bundle_becomes_a_private_directory_with_exactly_its_files(
    library: BaseLibrary, payloads: Payloads, tmp_path: Path
) -> None:
    config, weights = payloads.add(fake_config().encode()), payloads.add(WEIGHTS)
    local = await library.resolve("m1", bundle(config__json=config, model__safetensors=weights))
    assert local.architecture == "Qwen3ForCausalLM"
    assert {path.name for path in local.directory.iterdir()} == {"config.json", "model.safetensors"}
    assert (local.directory / "model.safetensors").read_bytes() == WEIGHTS
    assert sorted(payloads.asked) == sorted([("m1", config), ("m1", weights)])
    local.discard()
    assert list((tmp_path / "bases").iterdir()) == []


@pytest.mark.parametrize(
    "name", ["../model.safetensors", "modeling.py", "pytorch_model.bin", ".safetensors", "a/b.safetensors", ""]
)
async def test_names_that_are_no_part_of_a_bundle_are_refused_before_anything_is_fetched(
    library: BaseLibrary, payloads: Payloads, name: str
) -> None:
    """G23: a name from outside never becomes a path, and code is never taken."""
    config = payloads.add(fake_config().encode())
    base = m.ModelBase(bundle=m.BundleBase(payload_ids={"config.json": config, name: config}))
    with pytest.raises(InvalidOrder):
        await library.resolve("m1", base)
    assert payloads.asked == []


async def test_a_bundle_that_is_damaged_or_too_large_leaves_nothing(
    library: BaseLibrary, payloads: Payloads, tmp_path: Path
) -> None:
    config = payloads.add(fake_config().encode())
    damaged = payloads.add(b"whole")
    payloads.contents[damaged] = b"damaged"
    with pytest.raises(PayloadUnavailable):
        await library.resolve("m1", bundle(config__json=config, model__safetensors=damaged))
    large = payloads.add(bytes(100_001))
    with pytest.raises(InvalidOrder, match="exceed 100000 bytes"):
        await library.resolve("m1", bundle(config__json=config, model__safetensors=large))
    with pytest.raises(InvalidOrder, match=r"config\.json is missing"):
        await library.resolve("m1", bundle(model__safetensors=config))
    assert list((tmp_path / "bases").iterdir()) == []


class PayloadService(payload_pb2_grpc.PayloadServiceServicer):
    """The controller's payload service, as far as a worker uses it."""

    def __init__(self, payloads: Payloads) -> None:
        self._payloads = payloads
        self.tokens: set[str] = set()

    async def PutPayload(self, request_iterator: Any, context: Any) -> p.PutPayloadResponse:
        raise NotImplementedError

    async def GetPayload(self, request: p.GetPayloadRequest, context: Any) -> AsyncIterator[p.GetPayloadResponse]:
        self.tokens.add(dict(context.invocation_metadata())["authorization"])
        if request.payload_id not in self._payloads.contents:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such payload")
        async for data in self._payloads.read(request.model_id, request.payload_id):
            yield p.GetPayloadResponse(data=data)


@contextlib.asynccontextmanager
async def controller(service: PayloadService, registry: Any) -> AsyncIterator[str]:
    server = aio.server()
    payload_pb2_grpc.add_PayloadServiceServicer_to_server(service, server)
    registry_pb2_grpc.add_RegistryServiceServicer_to_server(registry, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def test_a_model_is_deployed_from_files_that_the_controller_has(tmp_path: Path, payloads: Payloads) -> None:
    service, registry = PayloadService(payloads), FakeRegistry()
    config, weights = payloads.add(fake_config().encode()), payloads.add(WEIGHTS)
    async with controller(service, registry) as address:
        daemon = WorkerDaemon(settings_in(tmp_path, controller=address))
        running = asyncio.create_task(daemon.run())
        await registry.until(lambda: bool(registry.synchronized))
        async with aio.insecure_channel(daemon.server.address) as channel:
            orders = Orders(channel, registry.incarnation)
            await orders.open()
            base = bundle(config__json=config, model__safetensors=weights)
            await orders.ok(deploy=deploy("m1", base=base))
            await orders.ok(swap_weights=swap("m1"))
            await train(orders, "m1", first=1)
            missing = bundle(config__json=config, model__safetensors="0" * 64)
            assert reason(await orders.do(deploy=deploy("m2", base=missing))) == "PAYLOAD_UNAVAILABLE"
            await orders.close()
        daemon.stop()
        await running
    assert service.tokens == {f"Bearer {TOKEN}"}
    assert ("m1", weights) in payloads.asked
