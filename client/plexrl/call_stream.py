"""Carries a job's calls over one long-lived stream, and brings them through disconnections and controller restarts.

Submits that the server has not accepted are sent again with the same request_id after every reconnect; results are
acknowledged once their future has delivered them. Knows nothing of what the calls compute.
"""

import asyncio
import itertools
import logging
import os
import threading
import time
import uuid
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator

import grpc

from plexrl import errors
from plexrl.cancels import Cancels
from plexrl.connection import Connection
from plexrl.futures import CallFuture, Outcome, wake_together
from plexrl.results import Result, decode
from plexrl.sequence import SequenceCounter
from plexrl.v1 import call_pb2 as c
from plexrl.v1 import session_pb2 as s
from plexrl.v1 import types_pb2 as t
from plexrl.wire import WireError

log = logging.getLogger("plexrl")

MAX_FRAME_MESSAGES = 256
MAX_FRAME_ACKS = 1024
MAX_HELLO_SESSIONS = 1024
MAX_FRAME_BYTES = 4 * 1024 * 1024
ACK_WITHIN_S = 0.05
"""An acknowledgement waits so long for submits to travel with: nobody waits for it."""
LAST_ACKS_S = 1.0
"""How long to try to tell the last of them."""
REMEMBERED_ACKS = 4096

TERMINAL = frozenset({t.CALL_STATE_SUCCEEDED, t.CALL_STATE_FAILED, t.CALL_STATE_CANCELLED, t.CALL_STATE_EXPIRED})


class TrackedCall:
    """One call of this client, from submit until its outcome is acknowledged. The stream's lock guards it.

    `submit` is what to send until it is accepted, then None; `size_bytes` is its size.
    """

    def __init__(
        self, stream: "CallStream", submit: c.SubmitCallRequest | None, call: c.Call | None, size_bytes: int = 0
    ) -> None:
        source: c.SubmitCallRequest | c.Call | None = submit or call
        assert source is not None
        self.stream = stream
        self.submit = submit
        self.call = call
        self.request_id = source.request_id
        self.model_id = source.model_id
        self.sequence = source.sequence
        self.kind = _kind_name(submit, call)
        self.cancelling = False
        self.abandoned = False
        self.refused_since_s: float | None = None
        self.waiters: list[asyncio.Future[None]] = []
        self.outcome: Outcome[Result] = Outcome()
        self.size_bytes = size_bytes

    @property
    def call_id(self) -> str | None:
        return self.call.call_id if self.call else None

    @property
    def description(self) -> str:
        number = f" (sequence {self.sequence})" if self.sequence else ""
        return f"{self.kind}{number} {self.call_id or 'not accepted yet'}"

    @property
    def state(self) -> "t.CallState.ValueType":
        return self.call.state if self.call else t.CALL_STATE_UNSPECIFIED

    @property
    def progress(self) -> tuple[int, int]:
        return (self.call.progress_done, self.call.progress_total) if self.call else (0, 0)

    def wake(self, waiter: "asyncio.Future[None]") -> None:
        self.stream.wake(self, waiter)

    def delivered(self) -> None:
        self.stream.acknowledge(self)

    def dropped(self) -> None:
        self.stream.drop(self)

    def cancel(self) -> None:
        self.stream.cancel(self)

    def explain(self) -> str:
        if self.call_id is None:
            return "the cluster has not accepted the call yet: it is on its way, or the controller is not reachable"
        request = c.ExplainCallRequest(call_id=self.call_id)
        connection = self.stream.connection
        return connection.unary(connection.calls.ExplainCall, request).explanation


def _kind_name(submit: c.SubmitCallRequest | None, call: c.Call | None) -> str:
    if submit is not None:
        return submit.spec.WhichOneof("function") or "call"
    return t.CallKind.Name(call.kind).removeprefix("CALL_KIND_").lower() if call is not None else "call"


class CallStream:
    """The calls of one job. A daemon thread owns the stream; all methods may be called from any thread."""

    def __init__(self, connection: Connection, job_id: str, max_message_bytes: int) -> None:
        self.connection = connection
        self._job_id = job_id
        self._max_message_bytes = max_message_bytes
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._calls: OrderedDict[str, TrackedCall] = OrderedDict()
        self._counters: dict[str, SequenceCounter] = {}
        self._hello_due = False
        self._outbox: deque[TrackedCall] = deque()
        self._acks: list[str] = []
        self._acks_since_s = 0.0
        self._sender_waits = False
        self._to_wake: list[asyncio.Future[None]] = []
        self._request_prefix = uuid.uuid4().hex[:20]
        self._request_numbers = itertools.count(1)
        self._acked: OrderedDict[str, None] = OrderedDict()
        self._dropped: deque[TrackedCall] = deque()
        self._session_listeners: dict[str, Callable[[s.Session], None]] = {}
        self._generation = 0
        self._pid = os.getpid()
        self._cancels = Cancels(connection, job_id)
        self._again: errors.Unavailable | None = None
        self._rpc: grpc.Call | None = None
        self._ended: errors.PlexRLError | None = None
        self._thread = threading.Thread(target=self._run, name=f"plexrl-calls-{job_id}", daemon=True)

    # --- the callers' side -------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Opens the stream, after `adopt` has named what an earlier client left."""
        self._thread.start()

    def adopt(self, call: c.Call) -> CallFuture[Result]:
        """Takes over a call that an earlier client of the job submitted."""
        with self._lock:
            tracked = self._calls[call.request_id] = TrackedCall(self, None, call)
            return CallFuture(tracked, tracked.outcome)

    def counter(self, model_id: str, next_number: int = 1) -> SequenceCounter:
        """The counter of a model's sequence, made when first asked for."""
        with self._lock:
            return self._counters.setdefault(model_id, SequenceCounter(next_number))

    def watch_session(self, session_id: str, listener: Callable[[s.Session], None]) -> None:
        """Has `listener` told of a session's changes, in the stream's thread, until it has ended."""
        with self._lock:
            self._session_listeners[session_id] = listener

    def submit(self, request: c.SubmitCallRequest, *, sequenced: bool) -> CallFuture[Result]:
        """Numbers a call if it is sequenced, and sends it. `request` lacks request_id and sequence.

        Raises InvalidArgument for a call that no message can hold, PredecessorFailed while the sequence has a hole, and
        the error that ended the stream.
        """
        if os.getpid() != self._pid:
            raise errors.ConfigurationError(
                "this process was forked from the one that made the job, and has none of its threads: connect anew and "
                "cluster.attach(...) here, or start processes by spawn"
            )
        size_bytes = request.ByteSize() + 1024
        if size_bytes > self._max_message_bytes:
            raise errors.InvalidArgument(
                f"the call needs {size_bytes} bytes, a message holds {self._max_message_bytes}: split it into several"
            )
        with self._lock:
            if self._ended:
                raise _copy(self._ended)
            # In one order for all calls of this client, so that they lie together in the controller's index.
            request.request_id = f"{self._request_prefix}{next(self._request_numbers):012x}"
            if sequenced:
                counter = self._counters[request.model_id]
                if counter.hole is not None:
                    raise errors.PredecessorFailed(
                        f"call {counter.hole} of the model's sequence was refused and later ones were cancelled: "
                        "call model.resume() to go on"
                    )
                request.sequence = counter.take()
            tracked = self._calls[request.request_id] = TrackedCall(self, request, None, size_bytes)
            self._outbox.append(tracked)
            self._wake_sender()
            return CallFuture(tracked, tracked.outcome)

    def wake(self, tracked: TrackedCall, waiter: "asyncio.Future[None]") -> None:
        """Resolves a future of the calling thread's loop once the call has its outcome."""
        with self._lock:
            if tracked.outcome.done():
                waiter.set_result(None)
            else:
                tracked.waiters.append(waiter)

    def acknowledge(self, tracked: TrackedCall) -> None:
        """Tells the server, once, that a terminal call's outcome has been taken."""
        with self._lock:
            if tracked.outcome.done() and self._calls.pop(tracked.request_id, None) is not None:
                self._queue_ack(tracked)

    def drop(self, tracked: TrackedCall) -> None:
        """See CallHandle.dropped: runs in destructors, so it only leaves a note for the sender."""
        self._dropped.append(tracked)

    def cancel(self, tracked: TrackedCall) -> None:
        """Asks for a call to be ended, as soon as it has an id."""
        with self._lock:
            if tracked.cancelling or tracked.outcome.done():
                return
            tracked.cancelling = True
            if tracked.call_id is not None:
                self._cancels.send(tracked.call_id)

    def send_acks(self) -> None:
        """Sends the acknowledgements that wait, for whoever lets go of the job; without an answer they are given up."""
        with self._lock:
            self._take_dropped()
            waiting, self._acks = self._acks, []
        for first in range(0, len(waiting), MAX_FRAME_ACKS):
            request = c.AckCallsRequest(job_id=self._job_id, call_ids=waiting[first : first + MAX_FRAME_ACKS])
            try:
                self.connection.unary(
                    self.connection.calls.AckCalls, request, timeout_s=LAST_ACKS_S, retry_for_s=LAST_ACKS_S
                )
            except errors.PlexRLError as error:
                log.info("results that were taken will be told again to whoever attaches to the job: %s", error)
                return

    def end(self, reason: errors.PlexRLError) -> None:
        """Ends the stream; calls without an outcome fail with `reason`."""
        self._settle_all(reason)
        if self._thread.ident is not None and threading.current_thread() is not self._thread:
            self._thread.join(timeout=5.0)

    # --- the stream's thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as defect:
            # Without this thread no call would ever hear anything.
            log.exception("the call stream of job %s failed", self._job_id)
            what = f"this client's call stream failed ({defect!r}): attach to the job again"
            self._settle_all(errors.PlexRLError(what))

    def _serve(self) -> None:
        retry = self.connection.retry
        failures, failing_since = 0, 0.0
        while self._ended is None:
            opened = time.monotonic()
            heard = False
            try:
                for frame in self._open():
                    heard = True
                    self._receive(frame)
                error: errors.PlexRLError = errors.Unavailable("the controller closed the call stream")
            except grpc.RpcError as rpc_error:
                error = errors.from_rpc(rpc_error)
            except errors.ConfigurationError as closed:
                error = closed
            except errors.Unavailable as not_now:
                # Refused for now: what has not been accepted comes again, in order, on a stream of its own.
                error = not_now
                if self._rpc is not None:
                    self._rpc.cancel()
            if self._ended is not None:
                return
            now = time.monotonic()
            if heard or failures == 0 or now - opened > retry.most_s:
                failures, failing_since = 0, now
            failures += 1
            delay_s = retry.delay_s(failures, error.retry_after_s)
            # Unclassified errors too: a connection that breaks may say INTERNAL or UNKNOWN, and resending is safe.
            passing = isinstance(error, errors.Unavailable) or type(error) is errors.PlexRLError
            if not passing or now + delay_s - failing_since > retry.bound_s:
                self._settle_all(error)
                return
            log.info("call stream lost, again in %.1f s: %s", delay_s, error)
            with self._lock:
                self._changed.wait_for(lambda: self._ended is not None, delay_s)

    def _open(self) -> Iterator[c.ConnectResponse]:
        with self._lock:
            self._generation += 1
            generation = self._generation
            # What was queued or in flight is sent anew, in order; the server knows request_ids that it has seen.
            self._outbox.clear()
            self._acks.clear()
            self._hello_due = True
            self._outbox.extend(tracked for tracked in self._calls.values() if tracked.submit is not None)
            self._changed.notify_all()
            try:
                rpc = self.connection.calls.Connect(self._frames(generation), metadata=self.connection.metadata)
            except ValueError as error:
                # gRPC's word for a channel that was closed.
                raise errors.ConfigurationError("this process has closed its connection to the controller") from error
            self._rpc = rpc
        return rpc

    def _frames(self, generation: int) -> Iterator[c.ConnectRequest]:
        """What to send on one opening of the stream; runs in a thread of gRPC's."""
        while True:
            with self._lock:
                self._await_work(generation)
                if self._generation != generation or self._ended:
                    return
                frame = c.ConnectRequest()
                size_bytes = 0
                if self._hello_due:
                    self._hello_due = False
                    hello = frame.messages.add().hello
                    hello.job_id = self._job_id
                    # What ended while there was no stream is told only to who asks.
                    hello.session_ids.extend(list(self._session_listeners)[-MAX_HELLO_SESSIONS:])
                elif self._acks:
                    # First, so that what is done with makes room for what comes.
                    taken, self._acks = self._acks[:MAX_FRAME_ACKS], self._acks[MAX_FRAME_ACKS:]
                    ack = frame.messages.add().ack
                    ack.job_id = self._job_id
                    ack.call_ids.extend(taken)
                while self._outbox and len(frame.messages) < MAX_FRAME_MESSAGES:
                    size_bytes += self._outbox[0].size_bytes
                    if frame.messages and size_bytes > MAX_FRAME_BYTES:
                        break
                    submit = self._outbox.popleft().submit
                    # Accepted meanwhile: it was sent twice, and the server knew it.
                    if submit is not None:
                        frame.messages.add().submit.CopyFrom(submit)
            yield frame

    def _await_work(self, generation: int) -> None:
        """Waits until there is something to send. Acknowledgements wait for submits to travel with, but not for long:
        on their own, each would cost a frame and a commit, which the next submit would have to wait for.
        """
        while True:
            self._take_dropped()
            if self._outbox or self._hello_due or self._generation != generation or self._ended:
                return
            if self._acks and time.monotonic() - self._acks_since_s >= ACK_WITHIN_S:
                return
            self._sender_waits = True
            # Acknowledgements and dropped futures leave a note and wake nobody: they come of calls that are under way.
            looks_up = bool(self._acks or self._calls)
            self._changed.wait(ACK_WITHIN_S if looks_up else None)

    def _receive(self, frame: c.ConnectResponse) -> None:
        changed: list[s.Session] = []
        with self._lock:
            for message in frame.messages:
                kind = message.WhichOneof("message")
                if kind == "accepted":
                    self._update(message.accepted, accepted=True)
                elif kind == "updated":
                    self._update(message.updated, accepted=False)
                elif kind == "rejected":
                    self._reject(message.rejected)
                elif kind == "session":
                    changed.append(message.session)
            woken, self._to_wake = self._to_wake, []
            again, self._again = self._again, None
        wake_together(woken)
        for session in changed:
            self._tell(session)
        if again is not None:
            raise again

    def _tell(self, session: s.Session) -> None:
        with self._lock:
            over = session.state != s.SESSION_STATE_OPEN
            listeners = self._session_listeners
            listener = listeners.pop(session.session_id, None) if over else listeners.get(session.session_id)
        if listener is not None:
            try:
                listener(session)
            except Exception:
                log.exception("what listens to session %s raised", session.session_id)

    def _update(self, call: c.Call, *, accepted: bool) -> None:
        tracked = self._calls.get(call.request_id)
        if tracked is None:
            # Sent again because our acknowledgement was lost on the way.
            if call.state in TERMINAL and call.call_id in self._acked:
                self._queue_ack(call)
                self._wake_sender()
            return
        if tracked.outcome.done():
            return
        first = tracked.call is None
        # An acceptance may be older news than an update that overtook it.
        if first or not accepted or call.state in TERMINAL:
            tracked.call = call
            tracked.submit = None
        if first and (tracked.cancelling or self._behind_hole(tracked)):
            tracked.cancelling = True
            self._cancels.send(call.call_id)
        if call.state in TERMINAL:
            self._settle(tracked, call)

    def _settle(self, tracked: TrackedCall, call: c.Call) -> None:
        if call.state != t.CALL_STATE_SUCCEEDED:
            tracked.outcome.set_exception(errors.from_status(call.error))
        elif call.HasField("error"):
            # It has succeeded, and what it returned cannot be told any more.
            tracked.outcome.set_exception(errors.from_status(call.error))
        elif call.HasField("result"):
            try:
                tracked.outcome.set_result(decode(call.result))
            except WireError as error:
                tracked.outcome.set_exception(
                    errors.PlexRLError(f"unreadable result of {tracked.description}: {error}")
                )
        self._wake_waiters(tracked)
        # A known call may be accepted as SUCCEEDED without its result; the update with the result follows.
        if tracked.abandoned and tracked.outcome.done():
            self._abandon(tracked)

    def _reject(self, rejected: c.SubmitRejected) -> None:
        tracked = self._calls.get(rejected.request_id)
        error = errors.from_status(rejected.error)
        if tracked is not None and isinstance(error, errors.Unavailable) and self._may_ask_again(tracked):
            self._again = error
            return
        self._calls.pop(rejected.request_id, None)
        if tracked is None or tracked.outcome.done():
            return
        if tracked.sequence:
            model_id = tracked.model_id
            self._counters[model_id].refuse(tracked.sequence)
            for other in self._calls.values():
                if other.call is not None and not other.outcome.done() and self._behind_hole(other):
                    self.cancel(other)
        tracked.outcome.set_exception(error)
        self._wake_waiters(tracked)

    def _may_ask_again(self, tracked: TrackedCall) -> bool:
        """Whether a submit that was refused for now is sent again: it may even have been accepted, for all that the
        controller knows that lost its database or its lead. As long as a controller may be away."""
        now = time.monotonic()
        if tracked.refused_since_s is None:
            tracked.refused_since_s = now
        return not tracked.outcome.done() and now - tracked.refused_since_s <= self.connection.retry.bound_s

    def _behind_hole(self, tracked: TrackedCall) -> bool:
        if not tracked.sequence or tracked.model_id not in self._counters:
            return False
        hole = self._counters[tracked.model_id].hole
        return hole is not None and tracked.sequence > hole

    # --- small things, under the lock --------------------------------------------------------------------------------

    def _queue_ack(self, call: TrackedCall | c.Call) -> None:
        if call.call_id is None or self._ended is not None:
            return
        if not self._acks:
            self._acks_since_s = time.monotonic()
        self._acks.append(call.call_id)
        self._acked[call.call_id] = None
        while len(self._acked) > REMEMBERED_ACKS:
            self._acked.popitem(last=False)

    def _wake_sender(self) -> None:
        if self._sender_waits:
            self._sender_waits = False
            self._changed.notify_all()

    def _wake_waiters(self, tracked: TrackedCall) -> None:
        """Notes whom to wake, where the outcome is here; `wake_together` does it, outside the lock and all at once."""
        if tracked.outcome.done() and tracked.waiters:
            self._to_wake += tracked.waiters
            tracked.waiters = []

    def _take_dropped(self) -> None:
        while self._dropped:
            tracked = self._dropped.popleft()
            tracked.abandoned = True
            if tracked.outcome.done() and tracked.request_id in self._calls:
                self._abandon(tracked)

    def _abandon(self, tracked: TrackedCall) -> None:
        """Gives up an outcome that nobody can ask for any more."""
        error = tracked.outcome.exception()
        if error is not None:
            log.warning("%s failed and nobody took its result: %s", tracked.description, error)
        del self._calls[tracked.request_id]
        self._queue_ack(tracked)

    def _settle_all(self, reason: errors.PlexRLError) -> None:
        with self._lock:
            if self._ended is not None:
                return
            self._ended = reason
            for tracked in self._calls.values():
                if not tracked.outcome.done():
                    tracked.outcome.set_exception(_copy(reason))
                    self._wake_waiters(tracked)
            woken, self._to_wake = self._to_wake, []
            rpc = self._rpc
            self._changed.notify_all()
        wake_together(woken)
        if rpc is not None:
            rpc.cancel()


def _copy(error: errors.PlexRLError) -> errors.PlexRLError:
    """One exception object per raise: tracebacks grow on the object."""
    return type(error)(str(error), reason=error.reason, metadata=error.metadata, retry_after_s=error.retry_after_s)
