"""A worker daemon as a process of its own, with the real engine, driven order by order as a controller would."""

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import psutil
from grpc import aio

from plexrl.v1 import types_pb2 as t
from plexrl.v1 import worker_pb2 as w
from plexrl.v1 import worker_pb2_grpc
from tests.support.worker_daemon import (
    METADATA,
    TOKEN,
    FakeRegistry,
    Orders,
    call,
    deploy,
    forward_backward,
    generate,
    optim_step,
    serving,
    swap,
    sync,
)

MIB = 1 << 20
# An engine's start on a busy machine.
_ANSWER_LIMIT_S = 900.0


def qwen3(hidden_size: int, layers: int, vocab_size: int = 512, **changes: object) -> str:
    """A config.json of a small Qwen3."""
    return json.dumps(
        {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "hidden_size": hidden_size,
            "num_hidden_layers": layers,
            "num_attention_heads": max(1, hidden_size // 64),
            "num_key_value_heads": max(1, hidden_size // 64),
            "head_dim": 64,
            "intermediate_size": 3 * hidden_size,
            "vocab_size": vocab_size,
            "max_position_embeddings": 256,
            "tie_word_embeddings": True,
        }
        | changes
    )


@dataclass
class WorkerProcess:
    """A daemon that is registered here, and the stream of orders to it."""

    process: psutil.Process
    orders: Orders
    stub: "worker_pb2_grpc.WorkerServiceAsyncStub"
    sequences: dict[str, int]
    versions: dict[str, int]

    async def status(self) -> w.WorkerStatus:
        """What the worker says of itself."""
        return await self.stub.GetStatus(w.GetStatusRequest(), metadata=METADATA)

    async def deploy(self, model_id: str, config_json: str, seed: int = 1) -> None:
        """Builds a model, parked."""
        await self.orders.ok(deploy=deploy(model_id, seed=seed, config_json=config_json))
        self.sequences[model_id] = self.versions[model_id] = 0

    async def swap(self, load: str = "", *evict: str) -> None:
        """Changes residency."""
        await self.orders.ok(swap_weights=swap(load, *evict))

    async def prefetch(self, model_id: str, tier: t.Tier.ValueType) -> None:
        """Moves a parked state up."""
        await self.orders.ok(prefetch=w.PrefetchOrder(model_id=model_id, tier=tier))

    async def generate(self, model_id: str, max_tokens: int = 4, seed: int = 7) -> None:
        """Samples at the present version."""
        spec = generate(seed, max_tokens)
        await self.orders.ok(run_call=call(model_id, spec, weights_version=self.versions[model_id]))

    async def train(self, model_id: str) -> None:
        """forward_backward, optim_step and sync_weights: three calls."""
        for spec in (forward_backward(), optim_step(), sync()):
            number = self.sequences[model_id] = self.sequences[model_id] + 1
            await self.orders.ok(run_call=call(model_id, spec, number))
        self.versions[model_id] = self.sequences[model_id]

    def processes(self) -> dict[str, psutil.Process]:
        """The daemon and its engines, by a name that stays the same."""
        engines = sorted(self.process.children(), key=lambda child: child.pid)
        return {"daemon": self.process} | {f"engine-{i}": child for i, child in enumerate(engines)}


@contextlib.asynccontextmanager
async def running(
    directory: Path, *flags: str, threads: int = 2, log: Path | None = None
) -> AsyncIterator[WorkerProcess]:
    """Starts a daemon and registers it at a registry in this process; ends it with SIGTERM."""
    registry = FakeRegistry()
    (directory / "token").write_text(TOKEN)
    async with serving(registry) as address:
        with (log or Path(os.devnull)).open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "plexrl_worker", "--controller", address, "--name", "w0"),
                *("--token-file", str(directory / "token"), "--state-dir", str(directory / "state")),
                *("--threads", str(threads), *flags),
                stdout=output,
                stderr=output,
            )
        try:
            await registry.until(lambda: bool(registry.synchronized), _ANSWER_LIMIT_S)
            async with aio.insecure_channel(registry.registered[-1].address) as channel:
                orders = Orders(channel, registry.incarnation, limit_s=_ANSWER_LIMIT_S)
                await orders.open()
                stub = worker_pb2_grpc.WorkerServiceStub(channel)
                yield WorkerProcess(psutil.Process(process.pid), orders, stub, {}, {})
                await orders.close()
        finally:
            if process.returncode is None:
                process.terminate()
            await process.wait()
