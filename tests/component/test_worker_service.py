"""What the worker's server answers beside orders: who may ask, status, tokens, reflection."""

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from grpc import StatusCode, aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from safetensors.numpy import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from plexrl import wire
from plexrl.v1 import model_pb2 as m
from plexrl.v1 import worker_pb2 as w
from plexrl.v1 import worker_pb2_grpc
from plexrl_worker.registration import reason_of
from tests.support.worker_daemon import METADATA, TOKEN, VOCAB_SIZE, cluster, deploy, fake_config, swap

GRPCURL = Path(sys.executable).parent / "grpcurl"


def catalogue_directory(root: Path) -> Path:
    directory = root / "tiny"
    directory.mkdir()
    save_file({"table": np.eye(VOCAB_SIZE, dtype=np.float32)}, directory / "model.safetensors")
    (directory / "config.json").write_text(fake_config())
    tokenizer = Tokenizer(WordLevel({"[UNK]": 0, "one": 1, "two": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


def grpcurl(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(GRPCURL), "-plaintext", *arguments], capture_output=True, text=True, timeout=30, check=False
    )


@pytest.mark.parametrize("metadata", [(), (("authorization", "Bearer wrong"),), (("authorization", TOKEN),)])
async def test_without_the_token_every_rpc_is_refused(tmp_path: Path, metadata: Any) -> None:
    """G23."""
    async with cluster(tmp_path) as c:
        weights = worker_pb2_grpc.WeightServiceStub(c.channel)
        refused: list[Any] = [
            c.stub.GetStatus(w.GetStatusRequest(), metadata=metadata),
            c.stub.RunOrder(w.RunOrderRequest(), metadata=metadata),
            c.stub.TokenizeText(m.TokenizeRequest(), metadata=metadata),
            c.stub.DetokenizeIds(m.DetokenizeRequest(), metadata=metadata),
            c.stub.ReadCheckpoint(m.ExportCheckpointRequest(), metadata=metadata),
            weights.Pull(w.PullRequest(), metadata=metadata),
            c.stub.Execute(iter([w.ExecuteRequest()]), metadata=metadata),
        ]
        for rpc in refused:
            with pytest.raises(aio.AioRpcError) as caught:
                await (rpc if hasattr(rpc, "__await__") else rpc.read())
            assert caught.value.code() is StatusCode.UNAUTHENTICATED


async def test_health_is_open(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        health = health_pb2_grpc.HealthStub(c.channel)
        answer = await health.Check(health_pb2.HealthCheckRequest())
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_grpcurl_lists_describes_and_calls_with_the_token_only(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        address = c.daemon.server.address
        header = ("-H", f"authorization: Bearer {TOKEN}")
        listed = await asyncio.to_thread(grpcurl, *header, address, "list")
        assert "plexrl.v1.WorkerService" in listed.stdout.split()
        described = await asyncio.to_thread(grpcurl, *header, address, "describe", "plexrl.v1.WorkerService")
        assert "rpc Execute" in described.stdout
        called = await asyncio.to_thread(grpcurl, *header, address, "plexrl.v1.WorkerService/GetStatus")
        assert '"name": "w0"' in called.stdout
        refused = await asyncio.to_thread(grpcurl, address, "list")
        assert refused.returncode != 0
        assert "plexrl" not in refused.stdout


async def test_status_tells_engines_models_and_bytes(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        await c.orders.ok(deploy=deploy("m1"))
        await c.orders.ok(deploy=deploy("m2", config_json=fake_config(salt=1)))
        await c.orders.ok(swap_weights=swap("m2"))
        status = await c.status()
        assert [list(engine.model_ids) for engine in status.engines] == [["m1"], ["m2"]]
        assert [engine.has_device for engine in status.engines] == [False, True]
        assert [engine.state for engine in status.engines] == ["idle", "idle"]
        assert all(engine.pid and engine.resident_bytes and engine.starts == 1 for engine in status.engines)
        assert status.device_used_bytes > 0
        assert status.host_used_bytes > status.device_used_bytes


async def test_a_later_status_has_a_higher_revision(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        deployed = await c.orders.ok(deploy=deploy("m1"))
        status = await c.status()
        swapped = await c.orders.ok(swap_weights=swap("m1"))
        revisions = [message.deployments[0].revision for message in (deployed, status, swapped)]
        assert revisions[0] < revisions[1] <= status.revision < revisions[2]


async def test_text_becomes_tokens_and_back(tmp_path: Path) -> None:
    async with cluster(tmp_path, catalogue={"tiny": catalogue_directory(tmp_path)}) as c:
        report = await c.orders.ok(deploy=deploy("m1", base=m.ModelBase(catalogue="tiny")))
        assert report.finished.deployed.has_tokenizer
        tokenize = m.TokenizeRequest(model_id="m1", texts=["one two", "two"])
        batch = (await c.stub.TokenizeText(tokenize, metadata=METADATA)).batch
        token_ids, lengths = wire.batch_arrays(batch, min_length=0)
        assert (token_ids.tolist(), lengths.tolist()) == ([1, 2, 2], [2, 1])
        detokenize = m.DetokenizeRequest(model_id="m1", batch=batch)
        assert list((await c.stub.DetokenizeIds(detokenize, metadata=METADATA)).texts) == ["one two", "two"]


async def test_a_model_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        await c.orders.ok(deploy=deploy("m1"))
        with pytest.raises(aio.AioRpcError) as caught:
            await c.stub.TokenizeText(m.TokenizeRequest(model_id="m1", texts=["one"]), metadata=METADATA)
        assert (caught.value.code(), reason_of(caught.value)) == (StatusCode.FAILED_PRECONDITION, "NO_TOKENIZER")


async def test_a_catalogue_name_that_is_not_there_is_refused_with_those_that_are(tmp_path: Path) -> None:
    async with cluster(tmp_path, catalogue={"tiny": catalogue_directory(tmp_path)}) as c:
        report = await c.orders.do(deploy=deploy("m1", base=m.ModelBase(catalogue="../tiny")))
        assert "which has: tiny" in report.finished.error.message
