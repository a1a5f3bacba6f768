"""A worker daemon with the fake engine, and the controller's side of its wire, for tests of the worker alone."""

from __future__ import annotations  # enum ValueTypes exist for type checkers only

import asyncio
import contextlib
import itertools
import json
import secrets
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf.duration_pb2 import Duration
from grpc import aio

from plexrl import wire
from plexrl.v1 import model_pb2 as m
from plexrl.v1 import registry_pb2 as r
from plexrl.v1 import registry_pb2_grpc, worker_pb2_grpc
from plexrl.v1 import types_pb2 as t
from plexrl.v1 import worker_pb2 as w
from plexrl_worker.channel import open_channel, server_credentials
from plexrl_worker.daemon import WorkerDaemon
from plexrl_worker.settings import TlsFiles, WorkerSettings

TOKEN = "test-worker-token"
METADATA = (("authorization", f"Bearer {TOKEN}"),)
VOCAB_SIZE = 32
# Train weights, gradients, two optimizer moments and rollout weights, float32 [VOCAB_SIZE, VOCAB_SIZE] each.
STATE_BYTES = 5 * 4 * VOCAB_SIZE**2
_ANSWER_LIMIT_S = 30.0


def fake_config(*faults: dict[str, Any], salt: int = 0) -> str:
    """A config.json for the fake engine; models with different salts get different engine children."""
    return json.dumps(
        {
            "architectures": ["Qwen3ForCausalLM"],
            "vocab_size": VOCAB_SIZE,
            "max_position_embeddings": 64 + salt,
            "plexrl_fake": list(faults),
        }
    )


def settings_in(directory: Path, **changes: Any) -> WorkerSettings:
    """Settings of a worker that lives in a directory and whose device holds a model and a half."""
    settings = WorkerSettings(
        controller="127.0.0.1:1",
        token=TOKEN,
        name="w0",
        listen="127.0.0.1:0",
        advertise="",
        device="cpu",
        device_state_bytes=STATE_BYTES * 3 // 2,
        host_state_bytes=64 * 2**20,
        disk_state_bytes=256 * 2**20,
        residue_bytes=2**30,
        kv_cache_bytes=2**20,
        threads=1,
        state_dir=directory / "state",
        checkpoint_dir=directory / "checkpoints",
        snapshot_bytes=64 * 2**20,
        catalogue={},
        labels={"zone": "a"},
        engine="fake",
        engine_start_timeout_s=30.0,
        hang_timeout_s=30.0,
        stop_grace_s=5.0,
        tls=None,
    )
    return replace(settings, **changes)


@dataclass
class FakeRegistry(registry_pb2_grpc.RegistryServiceServicer):
    """The controller's registry: counts lives, and can end one."""

    leader_term: int = 1
    sync_interval_s: float = 0.05
    incarnation: int = 0
    model_ids: list[str] | None = None
    registered: list[r.RegisterRequest] = field(default_factory=list)
    synchronized: list[r.SynchronizeRequest] = field(default_factory=list)
    directive: r.WorkerDirective.ValueType = r.WORKER_DIRECTIVE_SERVE
    end_life: bool = False
    tokens: set[str] = field(default_factory=set)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def Register(self, request: r.RegisterRequest, context: Any) -> r.RegisterResponse:
        self.tokens.add(dict(context.invocation_metadata()).get("authorization", ""))
        if not self.registered or self.registered[-1].life_nonce != request.life_nonce:
            self.incarnation += 1
        self.registered.append(request)
        self.end_life = False
        self._changed.set()
        return r.RegisterResponse(
            worker_id="worker-1",
            worker_incarnation=self.incarnation,
            leader_term=self.leader_term,
            sync_interval=Duration(nanos=int(self.sync_interval_s * 1e9)),
            lease=Duration(seconds=5),
        )

    async def Synchronize(self, request: r.SynchronizeRequest, context: Any) -> r.SynchronizeResponse:
        if self.end_life or request.worker_incarnation != self.incarnation:
            status = wire.error_status(wire.ErrorInfo(9, "STALE_INCARNATION", "the lease was lost"))
            details = (("grpc-status-details-bin", status.SerializeToString()),)
            await context.abort(grpc_code(9), "the lease was lost", details)
        self.synchronized.append(request)
        self._changed.set()
        present = [deployment.model_id for deployment in request.deployments]
        return r.SynchronizeResponse(
            leader_term=self.leader_term,
            directive=self.directive,
            model_ids=present if self.model_ids is None else self.model_ids,
        )

    async def until(self, condition: Callable[[], bool], limit_s: float = _ANSWER_LIMIT_S) -> None:
        """Waits until something that the worker said makes the condition true."""
        async with asyncio.timeout(limit_s):
            while not condition():
                self._changed.clear()
                await self._changed.wait()


def grpc_code(number: int) -> Any:
    import grpc

    return next(code for code in grpc.StatusCode if code.value[0] == number)


class Orders:
    """The controller's end of an Execute stream: sends orders, gathers reports."""

    _ids = itertools.count(1001)
    """Of all streams: a report that one of them missed comes on the next, and must not be taken for another's."""

    def __init__(
        self, channel: aio.Channel, incarnation: int, leader_term: int = 1, limit_s: float = _ANSWER_LIMIT_S
    ) -> None:
        self.incarnation = incarnation
        self._limit_s = limit_s
        self.leader_term = leader_term
        self.reports: list[w.Report] = []
        self.ended = asyncio.Event()
        self.error: aio.AioRpcError | None = None
        self._arrived = asyncio.Event()
        self._stream = worker_pb2_grpc.WorkerServiceStub(channel).Execute(metadata=METADATA)
        self._reader = asyncio.create_task(self._read())

    async def open(self) -> None:
        """Opens the stream."""
        await self._send([])

    async def send(self, **action: Any) -> int:
        """Sends one order; returns its id."""
        order = self.order(**action)
        await self._send([order])
        return order.order_id

    def order(self, **action: Any) -> w.Order:
        """An order under this stream's fences."""
        return w.Order(
            order_id=next(self._ids), leader_term=self.leader_term, worker_incarnation=self.incarnation, **action
        )

    async def finished(self, order_id: int) -> w.Report:
        """Waits for an order's end."""
        return await self.report(lambda report: report.order_id == order_id and report.HasField("finished"))

    async def report(self, wanted: Callable[[w.Report], bool]) -> w.Report:
        """Waits for a report."""
        async with asyncio.timeout(self._limit_s):
            while True:
                for report in self.reports:
                    if wanted(report):
                        return report
                if self.ended.is_set():
                    raise ConnectionError(f"the stream ended: {self.error}")
                self._arrived.clear()
                await self._arrived.wait()

    async def do(self, **action: Any) -> w.Report:
        """Sends an order and waits for its end."""
        return await self.finished(await self.send(**action))

    async def ok(self, **action: Any) -> w.Report:
        """Sends an order that must succeed."""
        report = await self.do(**action)
        assert report.finished.error.code == 0, report.finished.error
        return report

    async def close(self) -> None:
        """Breaks the stream."""
        self._stream.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)

    async def _send(self, orders: Sequence[w.Order]) -> None:
        await self._stream.write(
            w.ExecuteRequest(orders=orders, leader_term=self.leader_term, worker_incarnation=self.incarnation)
        )

    async def _read(self) -> None:
        try:
            async for frame in self._stream:
                self.reports.extend(frame.reports)
                self._arrived.set()
        except aio.AioRpcError as error:
            self.error = error
        finally:
            self.ended.set()
            self._arrived.set()


@dataclass
class Cluster:
    """A registry, a daemon that is registered there, and a stream of orders to it."""

    registry: FakeRegistry
    daemon: WorkerDaemon
    channel: aio.Channel
    orders: Orders

    async def reopen(self, leader_term: int | None = None) -> Orders:
        """Another stream, of the same or a newer term."""
        self.orders = Orders(self.channel, self.registry.incarnation, leader_term or self.orders.leader_term)
        await self.orders.open()
        return self.orders

    @property
    def stub(self) -> worker_pb2_grpc.WorkerServiceAsyncStub:
        """The worker's rpcs."""
        return worker_pb2_grpc.WorkerServiceStub(self.channel)

    async def status(self) -> w.WorkerStatus:
        """GetStatus."""
        return await self.stub.GetStatus(w.GetStatusRequest(), metadata=METADATA)


@contextlib.asynccontextmanager
async def serving(registry: FakeRegistry, port: int = 0, tls: TlsFiles | None = None) -> AsyncIterator[str]:
    """Serves a registry; yields its address."""
    server = aio.server()
    registry_pb2_grpc.add_RegistryServiceServicer_to_server(registry, server)
    if tls is None:
        port = server.add_insecure_port(f"127.0.0.1:{port}")
    else:
        port = server.add_secure_port(f"127.0.0.1:{port}", server_credentials(tls))
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


@contextlib.asynccontextmanager
async def cluster(directory: Path, **changes: Any) -> AsyncIterator[Cluster]:
    """A registered worker in this process, with the fake engine."""
    registry = FakeRegistry()
    async with serving(registry, tls=changes.get("tls")) as address:
        settings = settings_in(directory, controller=address, **changes)
        daemon = WorkerDaemon(settings)
        running = asyncio.create_task(daemon.run())
        try:
            await registry.until(lambda: bool(registry.synchronized))
            async with open_channel(settings, daemon.server.address) as channel:
                orders = Orders(channel, registry.incarnation)
                await orders.open()
                try:
                    yield Cluster(registry, daemon, channel, orders)
                finally:
                    await orders.close()
        finally:
            daemon.stop()
            await running


# Orders and calls, as short as a test wants them.


def deploy(model_id: str, *, seed: int = 1, config_json: str | None = None, **fields: Any) -> w.DeployOrder:
    base = m.ModelBase(init=m.InitBase(config_json=config_json or fake_config(), seed=seed))
    return w.DeployOrder(model_id=model_id, job_id=f"job-of-{model_id}", **({"base": base} | fields))


def swap(load: str = "", *evict: str) -> w.SwapWeightsOrder:
    return w.SwapWeightsOrder(load_model_id=load, evict_model_ids=evict)


def call(model_id: str, spec: t.CallSpec, sequence: int = 0, *, attempt: int = 1, **fields: Any) -> w.RunCallOrder:
    given: dict[str, Any] = {"after_sequence": max(sequence - 1, 0), "call_id": secrets.token_hex(8)} | fields
    return w.RunCallOrder(
        call=r.CallAttempt(call_id=given.pop("call_id"), attempt=attempt),
        job_id=f"job-of-{model_id}",
        model_id=model_id,
        sequence=sequence,
        spec=spec,
        **given,
    )


PROMPTS = [[1, 2, 3], [4, 5]]


def generate(seed: int = 7, max_tokens: int = 4) -> t.CallSpec:
    sampling = t.SamplingParams(n=2, temperature=1.0, max_tokens=max_tokens, seed=seed, logprobs=True)
    return t.CallSpec(generate=t.GenerateSpec(prompts=wire.token_batch(PROMPTS), sampling=sampling))


def score() -> t.CallSpec:
    return t.CallSpec(score=t.ScoreSpec(batch=wire.token_batch(PROMPTS)))


def forward_backward() -> t.CallSpec:
    weights = wire.tensor(np.array([0, 1, 1, 0, 1], dtype=np.float32), "float32")
    batch = wire.token_batch(PROMPTS)
    return t.CallSpec(forward_backward=t.ForwardBackwardSpec(batch=batch, loss=t.LOSS_CROSS_ENTROPY, weights=weights))


def optim_step() -> t.CallSpec:
    return t.CallSpec(optim_step=t.OptimStepSpec(adamw=t.AdamWParams(lr=0.1)))


def sync() -> t.CallSpec:
    return t.CallSpec(sync_weights=t.SyncWeightsSpec())


def save(label: str = "now") -> t.CallSpec:
    return t.CallSpec(save_checkpoint=t.SaveCheckpointSpec(label=label))


def load(checkpoint_id: str = "") -> t.CallSpec:
    source = t.LoadCheckpointSpec(checkpoint_id=checkpoint_id) if checkpoint_id else t.LoadCheckpointSpec(base=True)
    return t.CallSpec(load_checkpoint=source)


def new_checkpoint_id() -> str:
    return uuid.uuid4().hex


def reason(report: w.Report) -> str:
    """The reason of an order's error, empty for success."""
    info = wire.error_info(report.finished.error)
    return info.reason if info else ""


def tiers(status: r.DeploymentStatus) -> dict[str, tuple[int, bool]]:
    """Component to (tier, dirty)."""
    return {c.component: (c.tier, c.dirty) for c in status.residency}


async def train(orders: Orders, model_id: str, first: int, steps: int = 1) -> int:
    """forward_backward, optim_step and sync_weights, `steps` times; returns the last sequence number."""
    sequence = first - 1
    for _ in range(steps):
        for spec in (forward_backward(), optim_step(), sync()):
            sequence += 1
            await orders.ok(run_call=call(model_id, spec, sequence))
    return sequence


async def scores(orders: Orders, model_id: str, sequence: int) -> list[float]:
    """Log-probabilities under the training weights, to compare states bit by bit."""
    report = await orders.ok(run_call=call(model_id, score(), sequence))
    return [float(value) for value in wire.float32s(report.finished.result.score.logprobs)]
