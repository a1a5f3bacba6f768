"""G01: every rpc that changes something, sent again, at once or after later requests: it happened once, as was told."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from google.protobuf.message import Message

from plexrl.v1 import call_pb2, job_pb2, model_pb2, session_pb2
from plexrl_controller.api.jobs import JobService
from plexrl_controller.api.models import ModelService
from plexrl_controller.api.sessions import SessionService
from plexrl_controller.dispatch.grpc_transport import GrpcTransport
from plexrl_controller.domain.errors import AlreadyExists
from plexrl_controller.domain.ids import CallId
from plexrl_controller.domain.records import Call, Job, Model, Session
from plexrl_controller.domain.states import CallReason
from plexrl_controller.server import SERVICES
from plexrl_controller.store.memory import MemoryStore
from tests.support import specs
from tests.support.leader import Leader, running_leader

MUTATING = {
    method.name
    for name, module in SERVICES.items()
    for method in module.DESCRIPTOR.services_by_name[name].methods
    if "request_id" in method.input_type.fields_by_name
}
BASE = model_pb2.ModelBase(init=model_pb2.InitBase(config_json='{"architectures": ["Qwen3ForCausalLM"]}', seed=1))


@dataclass
class Scene:
    """A leader with a job, its placed model, an open session of it, and one call that waits."""

    leader: Leader
    model: Model
    waiting: call_pb2.Call
    session_id: str
    jobs: JobService = field(init=False)
    models: ModelService = field(init=False)
    sessions: SessionService = field(init=False)

    def __post_init__(self) -> None:
        self.jobs = JobService(self.leader.core)
        self.models = ModelService(self.leader.core, GrpcTransport(1, "worker"))
        self.sessions = SessionService(self.leader.core)

    def request(self, rpc: str) -> tuple[Callable[..., Awaitable[Any]], Message]:
        """An rpc and a request that changes something."""
        key, job_id, model_id = f"key-of-{rpc}", self.model.job_id, self.model.model_id
        match rpc:
            case "CreateJob":
                return self.jobs.CreateJob, job_pb2.CreateJobRequest(request_id=key, name="another")
            case "FinishJob":
                return self.jobs.FinishJob, job_pb2.FinishJobRequest(request_id=key, job_id=job_id)
            case "PutClientState":
                request = job_pb2.PutClientStateRequest(request_id=key, job_id=job_id, client_state=b"step 1")
                return self.jobs.PutClientState, request
            case "CreateModel":
                created = model_pb2.CreateModelRequest(request_id=key, job_id=job_id, name="another", base=BASE)
                return self.models.CreateModel, created
            case "DeleteModel":
                return self.models.DeleteModel, model_pb2.DeleteModelRequest(request_id=key, model_id=model_id)
            case "ResumeSequence":
                return self.models.ResumeSequence, model_pb2.ResumeSequenceRequest(request_id=key, model_id=model_id)
            case "SubmitCall":
                submit = call_pb2.SubmitCallRequest(
                    request_id=key, job_id=job_id, model_id=model_id, spec=specs.generate()
                )
                return self.leader.calls.SubmitCall, submit
            case "CancelCall":
                cancel = call_pb2.CancelCallRequest(request_id=key, call_id=self.waiting.call_id)
                return self.leader.calls.CancelCall, cancel
            case "OpenSession":
                return self.sessions.OpenSession, session_pb2.OpenSessionRequest(request_id=key, model_id=model_id)
            case "CloseSession":
                close = session_pb2.CloseSessionRequest(request_id=key, session_id=self.session_id)
                return self.sessions.CloseSession, close
            case _:
                raise AssertionError(f"{rpc} carries a request_id: say here how it is called")

    def kept(self) -> tuple[Any, ...]:
        """What there is, by content."""
        ledger = self.leader.core.ledger
        records: list[Job | Model | Call | Session] = [
            *ledger.jobs.values(), *ledger.models.values(), *ledger.calls.values(), *ledger.sessions.values(),
        ]  # fmt: skip
        return tuple(sorted(repr(replace(record, revision=0)) for record in records))


async def scene(leader: Leader) -> Scene:
    await leader.join()
    model = await leader.model(await leader.job())
    opening = session_pb2.OpenSessionRequest(request_id="opened", model_id=model.model_id)
    session = await SessionService(leader.core).OpenSession(opening, None)
    return Scene(leader, model, await leader.submit(model, specs.sync(), 3), session.session_id)


@pytest.mark.parametrize("rpc", sorted(MUTATING))
async def test_the_same_request_again_is_the_same_outcome_and_changes_nothing(rpc: str) -> None:
    """G01: as after a reply that was lost; also when another process sends it after a restart of the controller."""
    store = MemoryStore()
    async with running_leader(store) as leader:
        s = await scene(leader)
        call, request = s.request(rpc)
        before = s.kept()
        first = await call(request, None)
        after = s.kept()
        assert rpc == "ResumeSequence" or after != before
        again = await call(request, None)
        assert s.kept() == after
        for name in ("job_id", "model_id", "call_id", "session_id", "next_sequence"):
            assert getattr(again, name, None) == getattr(first, name, None)
    async with running_leader(store) as leader:
        s = Scene(leader, s.model, s.waiting, s.session_id)
        call, request = s.request(rpc)
        loaded = s.kept()
        again = await call(request, None)
        assert s.kept() == loaded
        for name in ("job_id", "model_id", "call_id", "session_id", "next_sequence"):
            assert getattr(again, name, None) == getattr(first, name, None)


async def test_a_client_state_that_comes_again_late_does_not_undo_the_next() -> None:
    """G01."""
    async with running_leader() as leader:
        s = await scene(leader)
        put, first = s.request("PutClientState")
        await put(first, None)
        second = job_pb2.PutClientStateRequest(request_id="later", job_id=s.model.job_id, client_state=b"step 2")
        await put(second, None)
        await put(first, None)
        assert leader.core.ledger.jobs[s.model.job_id].client_state == b"step 2"
        other = job_pb2.PutClientStateRequest(request_id="later", job_id=s.model.job_id, client_state=b"step 3")
        with pytest.raises(AlreadyExists) as refused:
            await put(other, None)
        assert refused.value.reason == "REQUEST_ID_REUSED"


async def test_a_resume_that_comes_again_late_frees_nothing_that_failed_since() -> None:
    """G01."""
    async with running_leader() as leader:
        s = await scene(leader)
        resume, request = s.request("ResumeSequence")
        first = await resume(request, None)
        assert first.next_sequence == 4
        leader.worker.fail_next["optim_step"] = (3, "NON_FINITE")
        await leader.submit(s.model, specs.optim_step(), 4)
        await leader.work()
        assert (await resume(request, None)).next_sequence == 4
        assert leader.core.ledger.models[s.model.model_id].failed_sequence == 4
        fresh = model_pb2.ResumeSequenceRequest(request_id="fresh", model_id=s.model.model_id)
        assert (await resume(fresh, None)).next_sequence == 5
        call = await leader.submit(s.model, specs.optim_step(), 5)
        await leader.work()
        assert leader.core.ledger.calls[CallId(call.call_id)].reason is CallReason.NONE
