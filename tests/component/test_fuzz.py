"""Bad input (G17, G12): whatever is sent, each rpc answers with a status that its proto lists, and the next call works.

Messages are good ones with fields replaced, at any depth, and bytes that are none. `make fuzz` sends many more.
"""

import asyncio
import contextvars
import itertools
import os
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from plexrl import wire
from plexrl.v1 import admin_pb2, call_pb2, call_pb2_grpc, job_pb2, model_pb2, types_pb2
from plexrl_controller.api.auth import token_sha256
from plexrl_controller.dispatch import jobs
from plexrl_controller.dispatch.grpc_transport import GrpcTransport
from plexrl_controller.dispatch.ledger import live_jobs
from plexrl_controller.domain.ids import CallId, TokenId, WorkerId
from plexrl_controller.domain.records import Token
from plexrl_controller.domain.states import CallState, JobState, Role
from plexrl_controller.server import SERVICES, build_server
from tests.support import specs
from tests.support.declared_statuses import judge
from tests.support.fuzz_messages import broken_bytes, mutated, new
from tests.support.leader import TENANT, Leader, running_leader
from tests.support.worker_double import TransportDouble

MESSAGES = int(os.environ.get("FUZZ_MESSAGES", "1200"))
CANARY_EVERY = 20
METHODS: list[MethodDescriptor] = [
    method for name, module in SERVICES.items() for method in module.DESCRIPTOR.services_by_name[name].methods
]

T = TypeVar("T")


class LenientTransport(TransportDouble):
    """Workers that only registered get no orders."""

    def send(self, worker_id: WorkerId, orders: Any) -> None:
        worker = self.opened.get(worker_id)
        if worker is not None and worker.name in self.doubles:
            super().send(worker_id, orders)


class Target:
    """A served leader on a loop of its own, with resources to aim at and a canary that must keep singing."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._context = contextvars.copy_context()
        self.sent = 0
        self._songs = itertools.count()
        self._running = running_leader()
        self.leader: Leader = self.do(self._running.__aenter__())
        self.leader.core.transport = self.leader.transport = LenientTransport(self.leader.worker)
        self.do(self._begin())

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs something on the target's loop."""
        return self.loop.run_until_complete(self.loop.create_task(work, context=self._context))

    def close(self) -> None:
        """Ends it."""
        self.do(self._end())
        self.loop.close()

    async def _begin(self) -> None:
        core = self.leader.core
        batch = core.batch()
        for secret, role, tenant in (("admin", Role.ADMIN, TENANT), ("worker", Role.WORKER, None)):
            batch.insert(Token(TokenId(secret), token_sha256(secret), secret, role, tenant))
        await core.commit(batch)
        await self.leader.join()
        self.canary = await self.leader.model(await self.leader.job("canary", lease_s=3600.0))
        await self._victims()
        self._server, _ = build_server(core, GrpcTransport(1, "worker"))
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=list(wire.CHANNEL_OPTIONS))

    async def _end(self) -> None:
        await self.channel.close()
        await self._server.stop(0)
        await self._running.__aexit__(None, None, None)

    async def _victims(self) -> None:
        """A job with a model, a call and a checkpoint, to be mistreated; the jobs before it end."""
        leader = self.leader
        for other in live_jobs(leader.core.ledger):
            if other.job_id != self.canary.job_id:
                await jobs.finish_job(leader.core, other)
        await leader.work()
        job = await leader.job(f"victim-{self.sent}", lease_s=3600.0)
        model = await leader.model(job)
        call = await leader.submit(model, specs.save("kept"), 1)
        await leader.work()
        checkpoint = next(reversed(leader.core.ledger.checkpoints))
        self.job = job
        self.ids = {
            "job_id": job.job_id, "model_id": model.model_id, "call_id": call.call_id, "checkpoint_id": checkpoint,
            "name": "fresh", "request_id": "request", "payload_id": "0" * 64, "sha256": "0" * 64, "label": "fresh",
        }  # fmt: skip

    def good(self, method: MethodDescriptor, spec: types_pb2.CallSpec) -> Message:
        """A request that makes sense; `spec` is what a call asks for."""
        message = new(method.input_type)
        for field in method.input_type.fields:
            if field.name in self.ids and not field.is_repeated:
                setattr(message, field.name, self.ids[field.name])
        match message:
            case call_pb2.SubmitCallRequest():
                message.spec.CopyFrom(spec)
                message.sequence = 0 if message.spec.HasField("generate") else 2
            case call_pb2.ConnectRequest():
                message.messages.add().hello.job_id = self.ids["job_id"]
                submit = message.messages.add().submit
                submit.request_id, submit.job_id, submit.model_id = "s", self.ids["job_id"], self.ids["model_id"]
                submit.spec.CopyFrom(specs.generate())
            case model_pb2.CreateModelRequest():
                message.base.init.config_json = '{"architectures": ["Qwen3ForCausalLM"]}'
            case _:
                pass
        return message

    def send(self, method: MethodDescriptor, data: bytes) -> tuple[str, str]:
        """The status and message of one rpc."""
        self.sent += 1
        if (
            self.leader.core.ledger.jobs.get(self.job.job_id, self.job).state is not JobState.ACTIVE
            or self.sent % 97 == 0
        ):
            self.do(self._victims())
        answer = self.do(self._send(method, data))
        if self.sent % CANARY_EVERY == 0:
            self.do(self._sing())
        return answer

    async def _send(self, method: MethodDescriptor, data: bytes) -> tuple[str, str]:
        token = "worker" if method.containing_service.name == "RegistryService" else "admin"
        kinds = {True: "stream", False: "unary"}
        kind = f"{kinds[method.client_streaming]}_{kinds[method.server_streaming]}"
        path = f"/{method.containing_service.full_name}/{method.name}"
        rpc = getattr(self.channel, kind)(path, request_serializer=bytes, response_deserializer=bytes)
        metadata = (("authorization", f"Bearer {token}"),)
        watching = method.name == "WatchCall"
        try:
            outcome = rpc(
                iter([data]) if method.client_streaming else data, metadata=metadata, timeout=1 if watching else 20
            )
            if not method.server_streaming:
                await outcome
            elif watching:
                await anext(aiter(outcome), None)
                outcome.cancel()
            else:
                async for _ in outcome:
                    pass
        except grpc.aio.AioRpcError as error:
            if watching and error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                return "OK", "it watches for longer than this test does"
            return error.code().name, error.details() or ""
        return "OK", ""

    async def _sing(self) -> None:
        """Another job's next good call works."""
        stub = call_pb2_grpc.CallServiceStub(self.channel)
        request = call_pb2.SubmitCallRequest(
            request_id=f"canary-{next(self._songs)}", job_id=self.canary.job_id, model_id=self.canary.model_id,
            spec=specs.generate(),
        )  # fmt: skip
        metadata = (("authorization", "Bearer admin"),)
        call = await stub.SubmitCall(request, metadata=metadata, timeout=20)
        assert self.leader.worker_id is not None
        # The group may be held or busy for victims for a while, never for long.
        for _ in range(20):
            self.leader.clock.time += 5.0
            for group in self.leader.core.ledger.groups.values():
                group.last_sync = self.leader.clock.time
            for facts in self.leader.core.ledger.facts.values():
                facts.lease_end = self.leader.clock.time + 3600.0
            self.leader.core.wake(self.leader.worker_id)
            await self.leader.work()
            if self.leader.core.ledger.calls[CallId(call.call_id)].state is CallState.SUCCEEDED:
                break
        done = await stub.GetCall(call_pb2.GetCallRequest(call_id=call.call_id), metadata=metadata, timeout=20)
        assert done.state == types_pb2.CALL_STATE_SUCCEEDED, done
        ack = call_pb2.AckCallsRequest(job_id=self.canary.job_id, call_ids=[call.call_id])
        await stub.AckCalls(ack, metadata=metadata, timeout=20)
        assert not self.leader.dispatcher.failed.done(), self.leader.dispatcher.failed


GOOD_SPECS = [
    specs.generate(),
    specs.generate_at(at_least=0),
    types_pb2.CallSpec(score=types_pb2.ScoreSpec(batch=wire.token_batch([[1, 2]]))),
    specs.forward_backward(),
    specs.optim_step(),
    specs.sync(),
    specs.save("other"),
    specs.load(),
]


@pytest.fixture(scope="module", name="target")
def target_fixture() -> Iterator[Target]:
    target = Target()
    yield target
    target.close()


many = settings(
    max_examples=MESSAGES, deadline=None, suppress_health_check=list(HealthCheck), derandomize=MESSAGES <= 1200
)


@pytest.mark.timeout(1800)
@given(data=st.data())
@many
def test_g17_a_bad_message_gets_a_declared_status_and_the_next_call_works(target: Target, data: st.DataObject) -> None:
    method = data.draw(st.sampled_from(METHODS))
    others = [target.canary.model_id, target.canary.job_id]
    good = target.good(method, data.draw(st.sampled_from(GOOD_SPECS)))
    message = data.draw(mutated(good, [*target.ids.values(), *others]))
    if any(i.encode() in message.SerializeToString() for i in others) and not method.name.startswith(("Get", "List")):
        return  # the canary is not to be harmed
    judge(method, target.send(method, message.SerializeToString()))


@pytest.mark.timeout(600)
@given(data=st.data())
@settings(many, max_examples=max(200, MESSAGES // 8))
def test_g17_bytes_that_are_no_message_get_invalid_argument(target: Target, data: st.DataObject) -> None:
    method = data.draw(st.sampled_from(METHODS))
    good = target.good(method, data.draw(st.sampled_from(GOOD_SPECS)))
    judge(method, target.send(method, data.draw(broken_bytes(good))), "INVALID_ARGUMENT")


def test_g17_a_message_over_the_limit_is_refused_and_the_next_call_works(target: Target) -> None:
    submit = next(m for m in METHODS if m.name == "SubmitCall")
    code, details = target.send(submit, b"\x0a" * (wire.MAX_MESSAGE_BYTES + 1))
    assert code == "RESOURCE_EXHAUSTED", details
    target.do(target._sing())


ONCE_INTERNAL = {
    "a time after the year 9999": admin_pb2.ListIntervalsRequest(start_time=Timestamp(seconds=2**62)),
    "a time that no database column holds": admin_pb2.ListIntervalsRequest(
        start_time=Timestamp(seconds=200_000_000_000)
    ),
    "a duration of a trillion years": job_pb2.CreateJobRequest(request_id="r", name="n", lease=Duration(seconds=2**62)),
    "a version of digits that are no numbers": job_pb2.GetCapabilitiesRequest(client_version="²"),
    "a version of a hundred thousand digits": job_pb2.GetCapabilitiesRequest(client_version="1" * 100_000),
}


@pytest.mark.parametrize("what", ONCE_INTERNAL)
def test_g17_what_was_once_an_internal_error_is_refused(target: Target, what: str) -> None:
    message = ONCE_INTERNAL[what]
    method = next(method for method in METHODS if method.input_type.full_name == message.DESCRIPTOR.full_name)
    judge(method, target.send(method, message.SerializeToString()))
