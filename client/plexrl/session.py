"""A session: generates of one model that run together, for rollouts whose turns come at their own times.

Knows when its calls may run and what it says of being idle; what a generate takes is the model's business.
"""

import contextlib
import logging
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from plexrl import durations, errors
from plexrl.batch import Tokens
from plexrl.call_stream import CallStream
from plexrl.connection import Connection
from plexrl.functions import CallFunction
from plexrl.futures import CallFuture
from plexrl.results import Completions
from plexrl.v1 import session_pb2 as s

if TYPE_CHECKING:
    from plexrl.model import AtLeast, Model

log = logging.getLogger("plexrl")

_AWAY_S = 5.0
"""An exit by error does not wait longer for a controller that is away: the session expires anyway."""


class Session:
    """Made by `model.session(...)`; as a context manager it is closed on exit. Safe to use from many threads and tasks.

        with policy.session(max_concurrent=32) as session:
            first = session.generate([prompt], max_tokens=256)  # waits, in a thread of one's own
            turn = await session.generate.submit([prompt], max_tokens=256)
            with session.sleeping(tool.expected_s):
                answer = await tool.run(turn)

    When another job is to have the device, what runs is parked after a grace, with all that it has sampled, and goes on
    when it is this job's turn again: the futures only take longer.
    """

    def __init__(
        self,
        connection: Connection,
        stream: CallStream,
        model: "Model",
        message: s.Session,
        on_revoked: Callable[[], None] | None = None,
    ) -> None:
        self._connection = connection
        self._model = model
        self._message = message
        self._on_revoked = on_revoked
        self._lock = threading.Lock()
        self._revoked = message.grant == s.SESSION_GRANT_REVOKED
        self._calls: weakref.WeakSet[CallFuture[Completions]] = weakref.WeakSet()
        self._wakes_at: dict[object, float] = {}
        self.session_id = message.session_id
        self.max_concurrent = message.max_concurrent
        stream.watch_session(message.session_id, self._changed)

    def __repr__(self) -> str:
        return f"<Session {self.session_id} of {self._model.name} {self.state}>"

    @CallFunction
    def generate(
        self,
        prompts: Sequence[Tokens],
        *,
        max_tokens: int,
        n: int = 1,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        stop: Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
        seed: int | None = None,
        logprobs: bool = True,
        leave: int = 0,
        version: "int | AtLeast | None" = None,
        tags: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> CallFuture[Completions]:
        """As `model.generate`, together with the session's other calls: each joins at a step and ends by itself.

        In float32 the tokens are those of the call alone and log-probabilities the same to 1e-5. Raises SessionEnded.
        """
        future = self._model.generate.submit(
            prompts,
            max_tokens=max_tokens,
            n=n,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            stop=stop,
            stop_token_ids=stop_token_ids,
            seed=seed,
            logprobs=logprobs,
            leave=leave,
            version=version,
            session=self,
            tags=tags,
            timeout_s=timeout_s,
        )
        with self._lock:
            self._calls.add(future)
        return future

    @property
    def state(self) -> str:
        """As last heard: "WAITING", "GRANTED" or "REVOKED" while it is open, then "CLOSED" or "EXPIRED"."""
        message = self._message
        if message.state != s.SESSION_STATE_OPEN:
            return s.SessionState.Name(message.state).removeprefix("SESSION_STATE_")
        return s.SessionGrant.Name(message.grant).removeprefix("SESSION_GRANT_")

    @property
    def revoked(self) -> bool:
        """Whether what ran was asked to make way for another job, and has not been given the device again since.

        One of which nothing ran when its turn ended, or whose worker is away, only waits: `state` says so.
        """
        return self._message.state == s.SESSION_STATE_OPEN and self._revoked

    def idle(self, seconds: float) -> None:
        """Says that nothing will be asked in this session for so long: others may have the device. Returns at once."""
        request = s.YieldSessionRequest(session_id=self.session_id)
        durations.put(request.idle, seconds, "seconds")

        def send() -> None:
            try:
                self._connection.unary(self._connection.sessions.YieldSession, request, retry_for_s=0.0)
            except (errors.PlexRLError, ValueError) as error:
                # A hint alone. ValueError is gRPC's word for a channel that was closed meanwhile.
                log.info("idle hint of session %s was not heard: %s", self.session_id, error)

        threading.Thread(target=send, name=f"plexrl-idle-{self.session_id}", daemon=True).start()

    @contextlib.contextmanager
    def sleeping(self, seconds: float) -> Iterator[None]:
        """Around what one conversation does for so long without the model, however it does it: a tool call, a sleep.

        When all calls of the session are done and every conversation that is left sleeps so, the device may go to
        others until the first of them wakes.
        """
        durations.checked(seconds, "seconds")
        token = object()
        with self._lock:
            self._wakes_at[token] = time.monotonic() + seconds
            first = min(self._wakes_at.values())
            asleep = all(future.done() for future in self._calls)
        if asleep:
            self.idle(max(0.0, first - time.monotonic()))
        try:
            yield
        finally:
            with self._lock:
                del self._wakes_at[token]

    def sleep(self, seconds: float) -> None:
        """Sleeps, and says so; in asyncio: `with session.sleeping(t): await asyncio.sleep(t)`."""
        with self.sleeping(seconds):
            time.sleep(seconds)

    def close(self, *, retry_for_s: float | None = None) -> None:
        """Ends the session; closing twice is fine. Calls that it has go on, those that have not begun one at a time."""
        request = s.CloseSessionRequest(request_id=uuid.uuid4().hex, session_id=self.session_id)
        self._message = self._connection.unary(self._connection.sessions.CloseSession, request, retry_for_s=retry_for_s)

    def _changed(self, message: s.Session) -> None:
        """Heard on the call stream, in its thread."""
        if self._message.state != s.SESSION_STATE_OPEN:
            # What was sent before the answer to `close` may come after it.
            return
        before = self.revoked
        self._message = message
        if message.grant != s.SESSION_GRANT_WAITING:
            self._revoked = message.grant == s.SESSION_GRANT_REVOKED
        if self.revoked and not before and self._on_revoked is not None:
            self._on_revoked()

    def __enter__(self) -> "Session":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        try:
            self.close(retry_for_s=_AWAY_S)
        except errors.PlexRLError as left:
            log.warning("session %s was not closed, it will expire: %s", self.session_id, left)
