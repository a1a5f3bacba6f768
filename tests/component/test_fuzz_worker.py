"""Bad orders and questions to a worker (G17, G12): each gets a status that the protos list, the daemon lives on, and
the next good order works.

A real daemon with the numpy engine, behind its own server. Messages are good ones with fields replaced, at any depth,
and bytes that are none. `make fuzz` sends many more.
"""

import asyncio
import contextvars
import itertools
import os
import uuid
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import grpc
import numpy as np
import pytest
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from plexrl import wire
from plexrl.v1 import model_pb2, registry_pb2, types_pb2, worker_pb2
from tests.support import worker_daemon as wd
from tests.support.declared_statuses import judge
from tests.support.fuzz_messages import broken_bytes, mutated, new

MESSAGES = int(os.environ.get("FUZZ_MESSAGES", "1200")) // 4
CANARY_EVERY = 20
SERVICES = ("WorkerService", "WeightService")
METHODS: list[MethodDescriptor] = [
    method for name in SERVICES for method in worker_pb2.DESCRIPTOR.services_by_name[name].methods
]
ACTIONS = [field.name for field in worker_pb2.Order.DESCRIPTOR.oneofs_by_name["action"].fields]
CANARY, VICTIM, SAMPLER = "canary", "victim", "sampler"
RPC_LIMIT_S = 60.0

T = TypeVar("T")


def catalogue(folder: Path) -> dict[str, Path]:
    """A base with a tokenizer."""
    folder.mkdir()
    save_file({"table": np.eye(wd.VOCAB_SIZE, dtype=np.float32)}, folder / "model.safetensors")
    (folder / "config.json").write_text(wd.fake_config())
    Tokenizer(WordLevel({"[UNK]": 0, "one": 1}, unk_token="[UNK]")).save(str(folder / "tokenizer.json"))
    return {"tiny": folder}


class Target:
    """A worker on a loop of its own, with models to mistreat and a canary that must keep singing."""

    def __init__(self, folder: Path) -> None:
        self.loop = asyncio.new_event_loop()
        self._context = contextvars.copy_context()
        self.sent = 0
        self._names = itertools.count()
        self._running = wd.cluster(folder, catalogue=catalogue(folder / "tiny"))
        self.cluster = self.do(self._running.__aenter__())
        self.do(self._begin())

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs something on the target's loop."""
        return self.loop.run_until_complete(self.loop.create_task(work, context=self._context))

    def close(self) -> None:
        """Ends it."""
        self.do(self._running.__aexit__(None, None, None))
        self.loop.close()

    async def _begin(self) -> None:
        await self.cluster.orders.ok(deploy=wd.deploy(CANARY, base=model_pb2.ModelBase(catalogue="tiny")))
        await self._mend()
        orders = self.cluster.orders
        await orders.ok(swap_weights=wd.swap(VICTIM, CANARY))
        self.checkpoint_id = wd.new_checkpoint_id()
        saved = wd.call(VICTIM, wd.save(), 1, new_checkpoint_id=self.checkpoint_id)
        await orders.ok(run_call=saved)
        self.snapshot_id = str(uuid.uuid4())
        written = await orders.ok(snapshot=worker_pb2.SnapshotOrder(model_id=VICTIM, snapshot_id=self.snapshot_id))
        self.manifest = written.finished.snapshot.manifest_sha256
        self.last_call = saved.call
        names = [VICTIM, SAMPLER, self.cluster.daemon.server.address, "tiny"]
        self.ids = [*names, self.checkpoint_id, self.snapshot_id, self.manifest, saved.call.call_id]

    async def _mend(self) -> None:
        """The victim is there, whatever was done to it; the stream is of the newest term that anybody told."""
        self.status = await self.cluster.status()
        if self.status.leader_term > self.cluster.orders.leader_term or self.cluster.orders.ended.is_set():
            await self.cluster.orders.close()
            await self.cluster.reopen(self.status.leader_term)
        held = {deployment.model_id: deployment for deployment in self.status.deployments}
        for stranger in held.keys() - {CANARY, VICTIM, SAMPLER}:
            await self.cluster.orders.ok(drop=worker_pb2.DropOrder(model_id=stranger))
        good = {VICTIM: wd.deploy(VICTIM), SAMPLER: wd.deploy(SAMPLER, role=model_pb2.MODEL_ROLE_ROLLOUT)}
        for model_id, deploy in good.items():
            if model_id not in held or held[model_id].state_lost:
                await self.cluster.orders.do(drop=worker_pb2.DropOrder(model_id=model_id))
                await self.cluster.orders.ok(deploy=deploy)
                self.status = await self.cluster.status()

    def good(self, method: MethodDescriptor, action: str, spec: types_pb2.CallSpec) -> Message:
        """A request that makes sense; `action` is what an order asks for, `spec` what its call does."""
        message = new(method.input_type)
        match message:
            case worker_pb2.RunOrderRequest():
                message.order.CopyFrom(self.order(action, spec))
            case worker_pb2.ExecuteRequest():
                message.orders.append(self.order(action, spec))
                message.leader_term = self.status.leader_term
                message.worker_incarnation = self.status.worker_incarnation
            case model_pb2.TokenizeRequest():
                message.model_id = CANARY
                message.texts.append("one one")
            case model_pb2.DetokenizeRequest():
                message.model_id = CANARY
                message.batch.CopyFrom(wire.token_batch([[1], [1, 0]]))
            case model_pb2.ExportCheckpointRequest():
                message.checkpoint_id = self.checkpoint_id
            case worker_pb2.PullRequest():
                message.model_id, message.weights_version = VICTIM, self._held(VICTIM).weights_version
            case _:
                pass
        return message

    async def run_order(self, order: worker_pb2.Order) -> worker_pb2.RunOrderResponse:
        """RunOrder."""
        request = worker_pb2.RunOrderRequest(order=order)
        return await self.cluster.stub.RunOrder(request, metadata=wd.METADATA, timeout=RPC_LIMIT_S)

    def order(self, action: str, spec: types_pb2.CallSpec) -> worker_pb2.Order:
        """A good one; `spec` is what its call does."""
        order = self.cluster.orders.order()
        match action:
            case "deploy":
                order.deploy.CopyFrom(wd.deploy("fresh"))
            case "drop":
                order.drop.model_id = "fresh"
            case "swap_weights":
                order.swap_weights.CopyFrom(wd.swap(VICTIM, CANARY))
            case "run_call":
                order.run_call.CopyFrom(self._call(spec))
            case "abort":
                order.abort.call.CopyFrom(self.last_call)
            case "yield_call":
                order.yield_call.call.CopyFrom(self.last_call)
            case "snapshot":
                order.snapshot.model_id, order.snapshot.snapshot_id = VICTIM, str(uuid.uuid4())
            case "expire_snapshots":
                order.expire_snapshots.snapshot_ids.append(str(uuid.uuid4()))
            case "prefetch":
                order.prefetch.model_id, order.prefetch.tier = VICTIM, types_pb2.TIER_DEVICE
            case _:
                raise AssertionError(f"no good order of {action}")
        return order

    def _held(self, model_id: str) -> registry_pb2.DeploymentStatus:
        return next(d for d in self.status.deployments if d.model_id == model_id)

    def _call(self, spec: types_pb2.CallSpec) -> worker_pb2.RunCallOrder:
        pulls = spec.load_checkpoint.HasField("rollout")
        held = self._held(SAMPLER if pulls else VICTIM)
        generates = spec.HasField("generate")
        sequence = 0 if generates else held.applied_sequence + 1
        order = wd.call(held.model_id, spec, sequence, call_id=f"c-{next(self._names)}")
        order.after_sequence, order.weights_version = held.applied_sequence, held.weights_version
        if pulls:
            source = order.weight_source
            source.address = self.cluster.daemon.server.address
            source.model_id, source.weights_version = VICTIM, self._held(VICTIM).weights_version
        if spec.HasField("save_checkpoint"):
            order.new_checkpoint_id = wd.new_checkpoint_id()
        self.last_call = order.call
        return order

    def try_out(self, method: MethodDescriptor, data: bytes, *also: str) -> None:
        """Sends it, and raises AssertionError for an answer that nobody may be given; `also`: see judge."""
        try:
            judge(method, self.do(self._send_and_look(method, data)), *also)
        except Exception as error:
            # Sent again to a worker that has it behind it, it may be answered otherwise.
            print(f"{method.full_name} of {data[:2000]!r}: {error!r}")
            raise

    async def _send_and_look(self, method: MethodDescriptor, data: bytes) -> tuple[str, str]:
        self.sent += 1
        answer = await self.ask(method, data)
        await self._mend()
        if self.sent % CANARY_EVERY == 0:
            await self.sing()
        for report in self.cluster.orders.reports:
            judge_report(report)
        self.cluster.orders.reports.clear()
        return answer

    async def ask(self, method: MethodDescriptor, data: bytes) -> tuple[str, str]:
        """The status and message of one rpc, or of the order within."""
        kinds = {True: "stream", False: "unary"}
        kind = f"{kinds[method.client_streaming]}_{kinds[method.server_streaming]}"
        path = f"/{method.containing_service.full_name}/{method.name}"
        rpc = getattr(self.cluster.channel, kind)(path, request_serializer=bytes, response_deserializer=bytes)
        frames = iter([data]) if method.client_streaming else data
        try:
            outcome = rpc(frames, metadata=wd.METADATA, timeout=RPC_LIMIT_S)
            answers = [answer async for answer in outcome] if method.server_streaming else [await outcome]
        except grpc.aio.AioRpcError as error:
            return error.code().name, error.details() or ""
        for answer in answers:
            for report in reports_in(method, answer):
                judge_report(report)
        return "OK", ""

    async def settle(self) -> None:
        """What was sent before has had its effect, and `status` knows of it."""
        await self.sing()
        await self._mend()

    async def sing(self) -> None:
        """Another job's next good order works."""
        await self.cluster.orders.ok(swap_weights=wd.swap(CANARY, VICTIM))
        call = wd.call(CANARY, wd.generate(), call_id=f"canary-{next(self._names)}")
        await self.cluster.orders.ok(run_call=call)


def reports_in(method: MethodDescriptor, answer: bytes) -> list[worker_pb2.Report]:
    """Of an answer."""
    match method.name:
        case "RunOrder":
            return [worker_pb2.RunOrderResponse.FromString(answer).report]
        case "Execute":
            return list(worker_pb2.ExecuteResponse.FromString(answer).reports)
        case _:
            return []


def judge_report(report: worker_pb2.Report) -> None:
    """How an order ended is said as plainly as an rpc's status, and is never the worker's own fault."""
    error = report.finished.error
    if not error.code:
        return
    info = wire.error_info(error)
    assert info is not None, report
    assert error.code not in (grpc.StatusCode.INTERNAL.value[0], grpc.StatusCode.UNKNOWN.value[0]), report
    assert info.reason, report
    assert len(error.message) >= 8, report


PULL = types_pb2.CallSpec(
    load_checkpoint=types_pb2.LoadCheckpointSpec(rollout=types_pb2.RolloutSource(model_id=VICTIM))
)
GOOD_SPECS = [
    wd.generate(), wd.score(), wd.forward_backward(), wd.optim_step(), wd.sync(), wd.save("x"), wd.load(), PULL,
]  # fmt: skip


@pytest.fixture(scope="module", name="target")
def target_fixture(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    target = Target(tmp_path_factory.mktemp("worker"))
    yield target
    target.close()


many = settings(
    max_examples=MESSAGES,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=MESSAGES <= 300,
    # What failed is told as it was: to look for a smaller one takes minutes, with engines that start and stop.
    phases=[Phase.explicit, Phase.generate],
)
# Orders are what a worker is sent; questions are few, and seldom.
methods = st.sampled_from([*METHODS, *[method for method in METHODS if method.name in ("RunOrder", "Execute")] * 5])


@pytest.mark.timeout(3600)
@given(data=st.data())
@many
def test_g17_a_bad_order_gets_a_declared_status_and_the_next_one_works(target: Target, data: st.DataObject) -> None:
    method = data.draw(methods)
    good = target.good(method, data.draw(st.sampled_from(ACTIONS)), data.draw(st.sampled_from(GOOD_SPECS)))
    message = data.draw(mutated(good, target.ids))
    target.try_out(method, message.SerializeToString())


@pytest.mark.timeout(600)
@given(data=st.data())
@settings(many, max_examples=max(60, MESSAGES // 8))
def test_g17_bytes_that_are_no_message_get_invalid_argument(target: Target, data: st.DataObject) -> None:
    method = data.draw(st.sampled_from(METHODS))
    good = target.good(method, data.draw(st.sampled_from(ACTIONS)), data.draw(st.sampled_from(GOOD_SPECS)))
    target.try_out(method, data.draw(broken_bytes(good)), "INVALID_ARGUMENT")


def test_g17_a_message_over_the_limit_is_refused_and_the_next_order_works(target: Target) -> None:
    run_order = next(m for m in METHODS if m.name == "RunOrder")
    code, details = target.do(target.ask(run_order, b"\x0a" * (wire.MAX_MESSAGE_BYTES + 1)))
    assert code == "RESOURCE_EXHAUSTED", details
    target.do(target.sing())


def test_good_orders_are_obeyed(target: Target) -> None:
    """Else nearly every message would be refused at the door."""
    target.do(target.settle())
    for action in ACTIONS:
        response = target.do(target.run_order(target.order(action, wd.score())))
        assert not response.report.finished.error.code, (action, response)
    response = target.do(target.run_order(target.order("run_call", PULL)))
    assert response.report.finished.result.HasField("load_checkpoint"), response
    pull = next(method for method in METHODS if method.name == "Pull")
    good = target.good(pull, "", PULL)
    assert target.do(target.ask(pull, good.SerializeToString())) == ("OK", "")
