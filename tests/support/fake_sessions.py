"""Sessions of the controller in memory: opened, told of, yielded and closed on request; it grants nothing by itself."""

import threading
from collections.abc import Callable, Iterable

import grpc

from plexrl.v1 import session_pb2, session_pb2_grpc


class FakeSessions(session_pb2_grpc.SessionServiceServicer):
    """Tests read `opened` and `yielded`, set `silent`; `grant` changes what a session may do, and tells it."""

    def __init__(self, tell: Callable[[session_pb2.Session], None], changed: threading.Condition) -> None:
        self._tell = tell
        self._changed = changed
        self.opened: dict[str, session_pb2.Session] = {}
        self.yielded: list[float] = []
        self.silent = False
        """Ends are not told of."""

    def grant(self, session_id: str, grant: "session_pb2.SessionGrant.ValueType") -> None:
        self.opened[session_id].grant = grant
        self._tell(self.opened[session_id])

    def expire(self, session_id: str) -> None:
        """Ends a session, which is told to nobody."""
        session = self.opened[session_id]
        session.state, session.grant = session_pb2.SESSION_STATE_EXPIRED, session_pb2.SESSION_GRANT_UNSPECIFIED

    def ended(self, session_ids: Iterable[str]) -> list[session_pb2.Session]:
        """Those of them that have ended."""
        sessions = [self.opened[session_id] for session_id in session_ids]
        return [session for session in sessions if session.state != session_pb2.SESSION_STATE_OPEN]

    def OpenSession(
        self, request: session_pb2.OpenSessionRequest, context: grpc.ServicerContext
    ) -> session_pb2.Session:
        session = session_pb2.Session(
            session_id=f"session-{len(self.opened)}",
            job_id="job-1",
            model_id=request.model_id,
            state=session_pb2.SESSION_STATE_OPEN,
            grant=session_pb2.SESSION_GRANT_WAITING,
            max_concurrent=request.max_concurrent,
            grace=request.grace,
        )
        self.opened[session.session_id] = session
        return session

    def YieldSession(
        self, request: session_pb2.YieldSessionRequest, context: grpc.ServicerContext
    ) -> session_pb2.Session:
        with self._changed:
            self.yielded.append(request.idle.ToNanoseconds() / 1e9)
            self._changed.notify_all()
        return self.opened[request.session_id]

    def CloseSession(
        self, request: session_pb2.CloseSessionRequest, context: grpc.ServicerContext
    ) -> session_pb2.Session:
        session = self.opened[request.session_id]
        session.state, session.grant = session_pb2.SESSION_STATE_CLOSED, session_pb2.SESSION_GRANT_UNSPECIFIED
        if not self.silent:
            self._tell(session)
        return session

    def GetSession(self, request: session_pb2.GetSessionRequest, context: grpc.ServicerContext) -> session_pb2.Session:
        return self.opened[request.session_id]
