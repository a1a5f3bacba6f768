"""A controller in memory, for tests of the client alone: it keeps the wire's promises and can be made to misbehave.

Calls are executed by a plain function at once, in sequence order per model. Switches hold executions back, lose
replies, refuse submits, and take the server away while the state stays.
"""

import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import grpc
from google.rpc import code_pb2, status_pb2

from plexrl.v1 import (
    admin_pb2_grpc,
    call_pb2,
    call_pb2_grpc,
    job_pb2,
    job_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
    payload_pb2_grpc,
    session_pb2,
    session_pb2_grpc,
)
from plexrl.v1 import types_pb2 as t
from plexrl.wire import CHANNEL_OPTIONS, kind_of
from tests.support.fake_calls import TERMINAL, Execute, Refuse, copy_of, echo, status
from tests.support.fake_services import Admin, Authentication, Calls, Jobs, Models, Payloads
from tests.support.fake_sessions import FakeSessions


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

    def start(self, credentials: grpc.ServerCredentials | None = None) -> "FakeController":
        server = grpc.server(ThreadPoolExecutor(32), interceptors=[Authentication(self)], options=CHANNEL_OPTIONS)
        job_pb2_grpc.add_JobServiceServicer_to_server(Jobs(self), server)
        model_pb2_grpc.add_ModelServiceServicer_to_server(Models(self), server)  # type: ignore[abstract]
        call_pb2_grpc.add_CallServiceServicer_to_server(Calls(self), server)  # type: ignore[abstract]
        payload_pb2_grpc.add_PayloadServiceServicer_to_server(Payloads(self), server)  # type: ignore[abstract]
        session_pb2_grpc.add_SessionServiceServicer_to_server(self.sessions, server)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(Admin(self), server)  # type: ignore[abstract]
        address = f"127.0.0.1:{self.port}"
        if credentials is None:
            self.port = server.add_insecure_port(address)
        else:
            self.port = server.add_secure_port(address, credentials)
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
                watcher.put(call_pb2.ServerMessage(updated=copy_of(call)))
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
                    watcher.put(call_pb2.ServerMessage(updated=copy_of(call)))
            return watcher

    def unwatch(self, job_id: str, watcher: "queue.SimpleQueue[call_pb2.ServerMessage | None]") -> None:
        with self.changed:
            self._watchers[job_id].remove(watcher)

    def by_call_id(self, call_id: str) -> call_pb2.Call | None:
        with self.changed:
            return next((call for call in self.calls.values() if call.call_id == call_id), None)
