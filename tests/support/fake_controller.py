"""A controller in memory, for tests of the client alone: it keeps the wire's promises and can be made to misbehave.

Calls are executed by a plain function at once, in sequence order per model. Switches hold executions back, lose
replies, refuse submits, and take the server away while the state stays.
"""

import hashlib
import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

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
    session_pb2,
    session_pb2_grpc,
)
from plexrl.v1 import types_pb2 as t
from plexrl.wire import CHANNEL_OPTIONS, ErrorInfo, batch_arrays, error_status, kind_of, tensor, token_batch
from tests.support.fake_sessions import FakeSessions

Execute = Callable[[call_pb2.SubmitCallRequest], t.CallResult | status_pb2.Status]
Refuse = Callable[[call_pb2.SubmitCallRequest], status_pb2.Status | None]

TERMINAL = {t.CALL_STATE_SUCCEEDED, t.CALL_STATE_FAILED, t.CALL_STATE_CANCELLED, t.CALL_STATE_EXPIRED}


def status(code: int, reason: str, message: str) -> status_pb2.Status:
    return error_status(ErrorInfo(code, reason, message))


def echo(submit: call_pb2.SubmitCallRequest) -> t.CallResult | status_pb2.Status:
    """A result of the right shape for every function: generate returns each prompt n times."""
    spec = submit.spec
    match spec.WhichOneof("function"):
        case "generate":
            token_ids, lengths = batch_arrays(spec.generate.prompts)
            prompts, start = [], 0
            for length in lengths:
                prompts.append(token_ids[start : start + length])
                start += length
            completions = token_batch([p for p in prompts for _ in range(spec.generate.sampling.n)])
            count, _ = batch_arrays(completions)
            return t.CallResult(
                generate=t.GenerateResult(
                    completions=completions,
                    logprobs=tensor([-0.5] * count.size, "float32"),
                    finish_reasons=[t.FINISH_REASON_STOP] * (len(prompts) * spec.generate.sampling.n),
                    weights_version=spec.generate.version.exact,
                )
            )
        case "score":
            token_ids, _ = batch_arrays(spec.score.batch)
            return t.CallResult(score=t.ScoreResult(logprobs=tensor([-1.0] * token_ids.size, "float32")))
        case "forward_backward":
            token_ids, _ = batch_arrays(spec.forward_backward.batch)
            logprobs = tensor([-2.0] * token_ids.size, "float32")
            return t.CallResult(forward_backward=t.ForwardBackwardResult(loss=0.25, token_count=3, logprobs=logprobs))
        case "optim_step":
            return t.CallResult(optim_step=t.OptimStepResult(grad_norm=1.5, step=submit.sequence))
        case "sync_weights":
            return t.CallResult(sync_weights=t.SyncWeightsResult(weights_version=submit.sequence))
        case "save_checkpoint":
            checkpoint = t.Checkpoint(
                checkpoint_id=f"checkpoint-{submit.sequence}",
                label=spec.save_checkpoint.label,
                sequence=submit.sequence,
            )
            return t.CallResult(save_checkpoint=t.SaveCheckpointResult(checkpoint=checkpoint))
        case _:
            return t.CallResult(load_checkpoint=t.LoadCheckpointResult(weights_version=submit.sequence, step=0))


class FakeController:
    """See the module. `calls`, `executed`, `acknowledged`, `heartbeats` and `exports` may be read and set by tests."""

    def __init__(self) -> None:
        self.token = "secret"
        self.execute: Execute = echo
        self.refuse: Refuse = lambda _: None
        self.holding = False
        self.lost_replies = 0
        self.lost_acks = 0
        self.jobs: dict[str, job_pb2.Job] = {}
        self.models: dict[str, model_pb2.Model] = {}
        self.calls: dict[str, call_pb2.Call] = {}
        self.submits: dict[str, call_pb2.SubmitCallRequest] = {}
        self.executed: list[str] = []
        self.acknowledged: list[str] = []
        self.heartbeats: list[job_pb2.HeartbeatJobRequest] = []
        self.finished: list[str] = []
        self.client_state: dict[str, bytes] = {}
        self.exports: dict[str, list[model_pb2.FileChunk]] = {}
        self.intervals: list[t.DeviceInterval] = []
        self.payloads: dict[str, bytes] = {}
        self.blocked: set[str] = set()
        self.applied: defaultdict[str, int] = defaultdict(int)
        self.changed = threading.Condition(threading.RLock())
        self.sessions = FakeSessions(self.tell, self.changed)
        self._watchers: defaultdict[str, list[queue.SimpleQueue[call_pb2.ServerMessage | None]]] = defaultdict(list)
        self._server: grpc.Server | None = None
        self.port = 0

    # --- switches ----------------------------------------------------------------------------------------------------

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> "FakeController":
        server = grpc.server(ThreadPoolExecutor(32), interceptors=[_Authentication(self)], options=CHANNEL_OPTIONS)
        job_pb2_grpc.add_JobServiceServicer_to_server(_Jobs(self), server)
        model_pb2_grpc.add_ModelServiceServicer_to_server(_Models(self), server)  # type: ignore[abstract]
        call_pb2_grpc.add_CallServiceServicer_to_server(_Calls(self), server)  # type: ignore[abstract]
        payload_pb2_grpc.add_PayloadServiceServicer_to_server(_Payloads(self), server)  # type: ignore[abstract]
        session_pb2_grpc.add_SessionServiceServicer_to_server(self.sessions, server)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(_Admin(self), server)  # type: ignore[abstract]
        self.port = server.add_insecure_port(f"127.0.0.1:{self.port}")
        server.start()
        self._server = server
        return self

    def stop(self) -> None:
        """Goes away at once; the state stays, as in a database."""
        if self._server is not None:
            self.cut_streams()
            self._server.stop(grace=None).wait()
            self._server = None

    def cut_streams(self) -> None:
        """Breaks every open call stream."""
        with self.changed:
            for watchers in self._watchers.values():
                for watcher in watchers:
                    watcher.put(None)

    def release(self) -> None:
        """Lets held calls run."""
        with self.changed:
            self.holding = False
            for submit in list(self.submits.values()):
                self.run_ready(submit.model_id)

    def wait_for(self, condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
        """Waits until something that the client does makes the condition true."""
        with self.changed:
            assert self.changed.wait_for(condition, timeout_s), "the client did not do what the test waits for"

    # --- state -------------------------------------------------------------------------------------------------------

    def submit(self, request: call_pb2.SubmitCallRequest) -> call_pb2.Call | status_pb2.Status:
        with self.changed:
            known = self.calls.get(request.request_id)
            if known is not None:
                if self.submits[request.request_id] != request:
                    return status(code_pb2.ALREADY_EXISTS, "REQUEST_ID_REUSED", "other content under this request_id")
                return known
            refusal = self.refuse(request)
            if refusal is not None:
                return refusal
            if request.sequence and request.model_id in self.blocked:
                return status(code_pb2.FAILED_PRECONDITION, "PREDECESSOR_FAILED", "ResumeSequence first")
            call = call_pb2.Call(
                call_id=f"call-{len(self.calls) + 1}",
                request_id=request.request_id,
                job_id=request.job_id,
                model_id=request.model_id,
                kind=kind_of(request.spec),  # type: ignore[arg-type]
                sequence=request.sequence,
                state=t.CALL_STATE_PENDING,
            )
            call.create_time.FromNanoseconds(len(self.calls) + 1)
            self.calls[request.request_id] = call
            self.submits[request.request_id] = request
            self.changed.notify_all()
            return call

    def run_ready(self, model_id: str) -> None:
        with self.changed:
            if self.holding:
                return
            pending = [c for c in self.calls.values() if c.model_id == model_id and c.state == t.CALL_STATE_PENDING]
            for call in sorted(pending, key=lambda c: c.sequence):
                if call.sequence and call.sequence != self.applied[model_id] + 1:
                    continue
                self._run(call)

    def _run(self, call: call_pb2.Call) -> None:
        self.executed.append(call.request_id)
        call.attempt = 1
        outcome = self.execute(self.submits[call.request_id])
        if call.sequence:
            self.applied[call.model_id] = call.sequence
        if isinstance(outcome, status_pb2.Status):
            self.end(call, t.CALL_STATE_FAILED, outcome)
        else:
            call.state = t.CALL_STATE_SUCCEEDED
            call.result.CopyFrom(outcome)
            self.publish(call)

    def end(self, call: call_pb2.Call, state: "t.CallState.ValueType", error: status_pb2.Status) -> None:
        """Ends a call other than SUCCEEDED; what follows it in its sequence fails."""
        with self.changed:
            call.state = state
            call.error.CopyFrom(error)
            self.publish(call)
            if call.sequence:
                self.blocked.add(call.model_id)
                for other in list(self.calls.values()):
                    if (
                        other.model_id == call.model_id
                        and other.sequence > call.sequence
                        and other.state not in TERMINAL
                    ):
                        other.state = t.CALL_STATE_FAILED
                        message = f"call {call.sequence} did not succeed"
                        other.error.CopyFrom(status(code_pb2.FAILED_PRECONDITION, "PREDECESSOR_FAILED", message))
                        self.publish(other)

    def publish(self, call: call_pb2.Call) -> None:
        with self.changed:
            for watcher in self._watchers[call.job_id]:
                watcher.put(call_pb2.ServerMessage(updated=_copy(call)))
            self.changed.notify_all()

    def tell(self, session: session_pb2.Session) -> None:
        """Says on every stream of its job how a session stands."""
        with self.changed:
            for watcher in self._watchers[session.job_id]:
                watcher.put(call_pb2.ServerMessage(session=session))
            self.changed.notify_all()

    def watch(self, job_id: str, session_ids: Iterable[str]) -> "queue.SimpleQueue[call_pb2.ServerMessage | None]":
        with self.changed:
            watcher: queue.SimpleQueue[call_pb2.ServerMessage | None] = queue.SimpleQueue()
            self._watchers[job_id].append(watcher)
            for session in self.sessions.ended(session_ids):
                watcher.put(call_pb2.ServerMessage(session=session))
            for call in self.calls.values():
                if call.job_id == job_id and call.state in TERMINAL and call.call_id not in self.acknowledged:
                    watcher.put(call_pb2.ServerMessage(updated=_copy(call)))
            return watcher

    def unwatch(self, job_id: str, watcher: "queue.SimpleQueue[call_pb2.ServerMessage | None]") -> None:
        with self.changed:
            self._watchers[job_id].remove(watcher)

    def by_call_id(self, call_id: str) -> call_pb2.Call | None:
        with self.changed:
            return next((call for call in self.calls.values() if call.call_id == call_id), None)


def _copy(call: call_pb2.Call) -> call_pb2.Call:
    copy = call_pb2.Call()
    copy.CopyFrom(call)
    return copy


def _abort(context: grpc.ServicerContext, error: status_pb2.Status) -> None:
    context.set_trailing_metadata((("grpc-status-details-bin", error.SerializeToString()),))
    code = next(code for code in grpc.StatusCode if code.value[0] == error.code)
    context.abort(code, error.message)


class _Authentication(grpc.ServerInterceptor):
    def __init__(self, controller: FakeController) -> None:
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


class _Jobs(job_pb2_grpc.JobServiceServicer):
    def __init__(self, controller: FakeController) -> None:
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


class _Models(model_pb2_grpc.ModelServiceServicer):
    def __init__(self, controller: FakeController) -> None:
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


class _Calls(call_pb2_grpc.CallServiceServicer):
    def __init__(self, controller: FakeController) -> None:
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
                watcher.put(call_pb2.ServerMessage(accepted=_copy(answer)))
            self._c.run_ready(message.submit.model_id)

    def _acknowledge(self, request: call_pb2.AckCallsRequest) -> None:
        with self._c.changed:
            if self._c.lost_acks > 0:
                self._c.lost_acks -= 1
                self._c.changed.notify_all()
                return
            self._c.acknowledged.extend(request.call_ids)
            self._c.changed.notify_all()

    def CancelCall(self, request: call_pb2.CancelCallRequest, context: grpc.ServicerContext) -> call_pb2.Call:
        with self._c.changed:
            call = self._c.by_call_id(request.call_id)
            assert call is not None
            if call.state not in TERMINAL:
                error = status(code_pb2.CANCELLED, "CANCELLED_BY_CLIENT", "ended on request")
                self._c.end(call, t.CALL_STATE_CANCELLED, error)
            return _copy(call)

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


class _Payloads(payload_pb2_grpc.PayloadServiceServicer):
    def __init__(self, controller: FakeController) -> None:
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


class _Admin(admin_pb2_grpc.AdminServiceServicer):
    def __init__(self, controller: FakeController) -> None:
        self._c = controller

    def ListWorkers(
        self, request: admin_pb2.ListWorkersRequest, context: grpc.ServicerContext
    ) -> admin_pb2.ListWorkersResponse:
        worker = admin_pb2.Worker(worker_id="worker-1", name="here-0", state=admin_pb2.WORKER_STATE_READY)
        return admin_pb2.ListWorkersResponse(workers=[worker])

    def CreateToken(
        self, request: admin_pb2.CreateTokenRequest, context: grpc.ServicerContext
    ) -> admin_pb2.CreateTokenResponse:
        return admin_pb2.CreateTokenResponse(token_id="token-1", token=f"{request.tenant}-secret")

    def ListIntervals(
        self, request: admin_pb2.ListIntervalsRequest, context: grpc.ServicerContext
    ) -> Iterator[admin_pb2.ListIntervalsResponse]:
        yield admin_pb2.ListIntervalsResponse(intervals=self._c.intervals)
