"""The services of a controller in memory, one class each over its state, and who may call them.

They decide nothing: what a call comes to, is refused or lost is the controller's business.
"""

import hashlib
import queue
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import grpc
from google.rpc import code_pb2, status_pb2

from plexrl.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    call_pb2,
    call_pb2_grpc,
    job_pb2,
    job_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
    payload_pb2,
    payload_pb2_grpc,
)
from plexrl.v1 import types_pb2 as t
from plexrl.wire import batch_arrays, token_batch
from tests.support.fake_calls import TERMINAL, copy_of, status

if TYPE_CHECKING:
    from tests.support.fake_controller import FakeController


def _abort(context: grpc.ServicerContext, error: status_pb2.Status) -> None:
    context.set_trailing_metadata((("grpc-status-details-bin", error.SerializeToString()),))
    code = next(code for code in grpc.StatusCode if code.value[0] == error.code)
    context.abort(code, error.message)


class Authentication(grpc.ServerInterceptor):
    def __init__(self, controller: "FakeController") -> None:
        self._controller = controller

    def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Any], details: grpc.HandlerCallDetails
    ) -> Any:
        metadata = dict(details.invocation_metadata)
        if metadata.get("authorization") == f"Bearer {self._controller.token}":
            return continuation(details)

        def refuse(_: object, context: grpc.ServicerContext) -> None:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "the token is not known")

        handler = continuation(details)
        if handler.request_streaming:
            return grpc.stream_stream_rpc_method_handler(refuse)
        return grpc.unary_unary_rpc_method_handler(refuse)


class Jobs(job_pb2_grpc.JobServiceServicer):
    def __init__(self, controller: "FakeController") -> None:
        self._c = controller

    def GetCapabilities(
        self, request: job_pb2.GetCapabilitiesRequest, context: grpc.ServicerContext
    ) -> job_pb2.Capabilities:
        return job_pb2.Capabilities(
            server_version="0.1.0",
            wire_packages=["plexrl.v1"],
            call_kinds=[t.CALL_KIND_GENERATE, t.CALL_KIND_OPTIM_STEP],
            losses=[t.LOSS_GRPO],
            max_message_bytes=64 * 1024 * 1024,
            max_outstanding_calls=1000,
            max_sequence_ahead=256,
        )

    def CreateJob(self, request: job_pb2.CreateJobRequest, context: grpc.ServicerContext) -> job_pb2.Job:
        with self._c.changed:
            if any(job.name == request.name and job.state == job_pb2.JOB_STATE_ACTIVE for job in self._c.jobs.values()):
                message = f"a live job is named {request.name}: attach to it or choose another name"
                _abort(context, status(code_pb2.ALREADY_EXISTS, "JOB_NAME_TAKEN", message))
            job = job_pb2.Job(
                job_id=f"job-{len(self._c.jobs) + 1}",
                tenant="t",
                name=request.name,
                state=job_pb2.JOB_STATE_ACTIVE,
                lease=request.lease,
                weight=request.weight,
            )
            self._c.jobs[job.job_id] = job
            return job

    def AttachJob(self, request: job_pb2.AttachJobRequest, context: grpc.ServicerContext) -> job_pb2.AttachJobResponse:
        with self._c.changed:
            for job in self._c.jobs.values():
                if job.state == job_pb2.JOB_STATE_ACTIVE and (job.name == request.name or job.job_id == request.job_id):
                    return self._attached(job)
            _abort(context, status(code_pb2.NOT_FOUND, "NOT_FOUND", "no live job of that id or name"))
            raise AssertionError

    def _attached(self, job: job_pb2.Job) -> job_pb2.AttachJobResponse:
        response = job_pb2.AttachJobResponse(job=job, client_state=self._c.client_state.get(job.job_id, b""))
        for model in self._c.models.values():
            if model.job_id == job.job_id:
                numbers = [call.sequence for call in self._c.calls.values() if call.model_id == model.model_id]
                response.models.add(model=model, next_sequence=max(numbers, default=0) + 1)
        for call in self._c.calls.values():
            if call.job_id == job.job_id and call.call_id not in self._c.acknowledged:
                bare = response.calls.add()
                bare.CopyFrom(call)
                bare.ClearField("result")
        return response

    def HeartbeatJob(
        self, request: job_pb2.HeartbeatJobRequest, context: grpc.ServicerContext
    ) -> job_pb2.HeartbeatJobResponse:
        with self._c.changed:
            if self._c.jobs[request.job_id].state != job_pb2.JOB_STATE_ACTIVE:
                _abort(context, status(code_pb2.FAILED_PRECONDITION, "JOB_NOT_ACTIVE", "the job has ended"))
            self._c.heartbeats.append(request)
            self._c.changed.notify_all()
            return job_pb2.HeartbeatJobResponse(state=job_pb2.JOB_STATE_ACTIVE)

    def FinishJob(self, request: job_pb2.FinishJobRequest, context: grpc.ServicerContext) -> job_pb2.Job:
        with self._c.changed:
            job = self._c.jobs[request.job_id]
            job.state = job_pb2.JOB_STATE_FINISHED
            self._c.finished.append(request.job_id)
            self._c.changed.notify_all()
            return job

    def GetJob(self, request: job_pb2.GetJobRequest, context: grpc.ServicerContext) -> job_pb2.Job:
        return self._c.jobs[request.job_id]

    def ListJobs(self, request: job_pb2.ListJobsRequest, context: grpc.ServicerContext) -> job_pb2.ListJobsResponse:
        jobs = list(self._c.jobs.values())
        start = int(request.page_token or 0)
        page = jobs[start : start + 2]
        more = str(start + 2) if start + 2 < len(jobs) else ""
        return job_pb2.ListJobsResponse(jobs=page, next_page_token=more)

    def PutClientState(
        self, request: job_pb2.PutClientStateRequest, context: grpc.ServicerContext
    ) -> job_pb2.PutClientStateResponse:
        self._c.client_state[request.job_id] = request.client_state
        return job_pb2.PutClientStateResponse()


class Models(model_pb2_grpc.ModelServiceServicer):
    def __init__(self, controller: "FakeController") -> None:
        self._c = controller

    def CreateModel(self, request: model_pb2.CreateModelRequest, context: grpc.ServicerContext) -> model_pb2.Model:
        with self._c.changed:
            model = model_pb2.Model(
                model_id=f"model-{len(self._c.models) + 1}",
                job_id=request.job_id,
                name=request.name,
                state=model_pb2.MODEL_STATE_PLACED,
                settings=request.settings,
                affinity=request.affinity,
                next_sequence=1,
            )
            self._c.models[model.model_id] = model
            return model

    def GetModel(self, request: model_pb2.GetModelRequest, context: grpc.ServicerContext) -> model_pb2.Model:
        return self._c.models[request.model_id]

    def DeleteModel(self, request: model_pb2.DeleteModelRequest, context: grpc.ServicerContext) -> model_pb2.Model:
        model = self._c.models[request.model_id]
        model.state = model_pb2.MODEL_STATE_DELETED
        return model

    def ResumeSequence(
        self, request: model_pb2.ResumeSequenceRequest, context: grpc.ServicerContext
    ) -> model_pb2.ResumeSequenceResponse:
        with self._c.changed:
            numbers = [call.sequence for call in self._c.calls.values() if call.model_id == request.model_id]
            highest = max(numbers, default=0)
            self._c.blocked.discard(request.model_id)
            self._c.applied[request.model_id] = highest
            return model_pb2.ResumeSequenceResponse(next_sequence=highest + 1)

    def Tokenize(self, request: model_pb2.TokenizeRequest, context: grpc.ServicerContext) -> model_pb2.TokenizeResponse:
        return model_pb2.TokenizeResponse(
            batch=token_batch([[ord(letter) for letter in text] for text in request.texts])
        )

    def Detokenize(
        self, request: model_pb2.DetokenizeRequest, context: grpc.ServicerContext
    ) -> model_pb2.DetokenizeResponse:
        token_ids, lengths = batch_arrays(request.batch, min_length=0)
        ends = lengths.cumsum()
        texts = ["".join(map(chr, token_ids[end - length : end])) for end, length in zip(ends, lengths, strict=True)]
        return model_pb2.DetokenizeResponse(texts=texts)

    def ExportCheckpoint(
        self, request: model_pb2.ExportCheckpointRequest, context: grpc.ServicerContext
    ) -> Iterator[model_pb2.FileChunk]:
        yield from self._c.exports[request.checkpoint_id]


class Calls(call_pb2_grpc.CallServiceServicer):
    def __init__(self, controller: "FakeController") -> None:
        self._c = controller

    def Connect(
        self, request_iterator: Iterator[call_pb2.ConnectRequest], context: grpc.ServicerContext
    ) -> Iterator[call_pb2.ConnectResponse]:
        first = next(request_iterator)
        job_id = first.messages[0].hello.job_id
        if self._c.jobs[job_id].state != job_pb2.JOB_STATE_ACTIVE:
            _abort(context, status(code_pb2.FAILED_PRECONDITION, "JOB_NOT_ACTIVE", "the job has ended"))
        watcher = self._c.watch(job_id, first.messages[0].hello.session_ids)
        context.add_callback(lambda: watcher.put(None))

        def read() -> None:
            self._handle(list(first.messages)[1:], watcher)
            try:
                for frame in request_iterator:
                    self._handle(list(frame.messages), watcher)
            except (grpc.RpcError, ValueError):
                pass  # the client went away
            watcher.put(None)

        threading.Thread(target=read, daemon=True).start()
        try:
            while (message := watcher.get()) is not None:
                yield call_pb2.ConnectResponse(messages=[message])
            if context.is_active():
                context.abort(grpc.StatusCode.UNAVAILABLE, "the stream was cut")
        finally:
            self._c.unwatch(job_id, watcher)

    def _handle(
        self,
        messages: list[call_pb2.ClientMessage],
        watcher: "queue.SimpleQueue[call_pb2.ServerMessage | None]",
    ) -> None:
        for message in messages:
            if message.HasField("ack"):
                self._acknowledge(message.ack)
                continue
            answer = self._c.submit(message.submit)
            if isinstance(answer, status_pb2.Status):
                rejected = call_pb2.SubmitRejected(request_id=message.submit.request_id, error=answer)
                watcher.put(call_pb2.ServerMessage(rejected=rejected))
                continue
            with self._c.changed:
                lose = self._c.lost_replies > 0
                self._c.lost_replies -= lose
            if lose:
                watcher.put(None)
            else:
                watcher.put(call_pb2.ServerMessage(accepted=copy_of(answer)))
            self._c.run_ready(message.submit.model_id)

    def _acknowledge(self, request: call_pb2.AckCallsRequest) -> None:
        with self._c.changed:
            if self._c.lost_acks > 0:
                self._c.lost_acks -= 1
                self._c.changed.notify_all()
                return
            self._c.acknowledged.extend(request.call_ids)
            self._c.changed.notify_all()

    def AckCalls(self, request: call_pb2.AckCallsRequest, context: grpc.ServicerContext) -> call_pb2.AckCallsResponse:
        self._acknowledge(request)
        return call_pb2.AckCallsResponse()

    def CancelCall(self, request: call_pb2.CancelCallRequest, context: grpc.ServicerContext) -> call_pb2.Call:
        with self._c.changed:
            call = self._c.by_call_id(request.call_id)
            assert call is not None
            if call.state not in TERMINAL:
                error = status(code_pb2.CANCELLED, "CANCELLED_BY_CLIENT", "ended on request")
                self._c.end(call, t.CALL_STATE_CANCELLED, error)
            return copy_of(call)

    def ListCalls(
        self, request: call_pb2.ListCallsRequest, context: grpc.ServicerContext
    ) -> call_pb2.ListCallsResponse:
        calls = [call for call in self._c.calls.values() if request.job_id in ("", call.job_id)]
        return call_pb2.ListCallsResponse(calls=list(reversed(calls)))

    def ExplainCall(
        self, request: call_pb2.ExplainCallRequest, context: grpc.ServicerContext
    ) -> call_pb2.ExplainCallResponse:
        call = self._c.by_call_id(request.call_id)
        if call is None:
            _abort(context, status(code_pb2.NOT_FOUND, "NOT_FOUND", f"no call {request.call_id}"))
        return call_pb2.ExplainCallResponse(call=call, explanation="it waits for 1 earlier call of its sequence")


class Payloads(payload_pb2_grpc.PayloadServiceServicer):
    def __init__(self, controller: "FakeController") -> None:
        self._c = controller

    def PutPayload(
        self, request_iterator: Iterator[payload_pb2.PutPayloadRequest], context: grpc.ServicerContext
    ) -> payload_pb2.PutPayloadResponse:
        first = next(request_iterator)
        data = first.data + b"".join(request.data for request in request_iterator)
        digest = hashlib.sha256(data).hexdigest()
        if (len(data), digest) != (first.size_bytes, first.sha256):
            _abort(context, status(code_pb2.INVALID_ARGUMENT, "INVALID_ARGUMENT", "size or hash do not match"))
        self._c.payloads[digest] = data
        return payload_pb2.PutPayloadResponse(payload_id=digest)


class Admin(admin_pb2_grpc.AdminServiceServicer):
    def __init__(self, controller: "FakeController") -> None:
        self._c = controller

    def ListWorkers(
        self, request: admin_pb2.ListWorkersRequest, context: grpc.ServicerContext
    ) -> admin_pb2.ListWorkersResponse:
        return admin_pb2.ListWorkersResponse(workers=[self._worker(admin_pb2.WORKER_STATE_READY)])

    def CordonWorker(self, request: admin_pb2.CordonWorkerRequest, context: grpc.ServicerContext) -> admin_pb2.Worker:
        assert request.worker_id == "worker-1"
        return self._worker(admin_pb2.WORKER_STATE_CORDONED)

    def UncordonWorker(
        self, request: admin_pb2.UncordonWorkerRequest, context: grpc.ServicerContext
    ) -> admin_pb2.Worker:
        assert request.worker_id == "worker-1"
        return self._worker(admin_pb2.WORKER_STATE_READY)

    @staticmethod
    def _worker(state: "admin_pb2.WorkerState.ValueType") -> admin_pb2.Worker:
        return admin_pb2.Worker(worker_id="worker-1", name="here-0", state=state)

    def ListTokens(
        self, request: admin_pb2.ListTokensRequest, context: grpc.ServicerContext
    ) -> admin_pb2.ListTokensResponse:
        token = admin_pb2.Token(token_id="token-1", label="alice", tenant="research", role=admin_pb2.ROLE_TENANT)
        return admin_pb2.ListTokensResponse(tokens=[token])

    def CreateToken(
        self, request: admin_pb2.CreateTokenRequest, context: grpc.ServicerContext
    ) -> admin_pb2.CreateTokenResponse:
        return admin_pb2.CreateTokenResponse(token_id="token-1", token=f"{request.tenant}-secret")

    def ListIntervals(
        self, request: admin_pb2.ListIntervalsRequest, context: grpc.ServicerContext
    ) -> Iterator[admin_pb2.ListIntervalsResponse]:
        yield admin_pb2.ListIntervalsResponse(intervals=self._c.intervals)
