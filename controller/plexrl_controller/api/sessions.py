"""SessionService: grants for generates of one model that run together."""

from typing import Any

from plexrl.v1 import session_pb2, session_pb2_grpc
from plexrl_controller.api import messages
from plexrl_controller.api.auth import require_visible
from plexrl_controller.api.jobs import key_of
from plexrl_controller.dispatch import limits, sessions
from plexrl_controller.dispatch.core import Core
from plexrl_controller.domain.errors import InvalidArgument
from plexrl_controller.domain.ids import ModelId, SessionId
from plexrl_controller.domain.records import Session


class SessionService(session_pb2_grpc.SessionServiceServicer):
    """The wire's SessionService over the dispatcher's core."""

    def __init__(self, core: Core) -> None:
        self._core = core

    async def OpenSession(self, request: session_pb2.OpenSessionRequest, context: Any) -> session_pb2.Session:
        """Opens a session of a model."""
        model = self._core.ledger.model(ModelId(request.model_id))
        require_visible(model.tenant, "model", request.model_id)
        if request.max_concurrent > limits.MAX_CONCURRENT:
            raise InvalidArgument(f"max_concurrent: {request.max_concurrent}, want 1 to {limits.MAX_CONCURRENT}")
        spec = sessions.SessionSpec(
            max_concurrent=request.max_concurrent or limits.DEFAULT_CONCURRENT,
            grace_s=messages.seconds(request, "grace", limits.DEFAULT_GRACE_S, limits.GRACE_RANGE_S),
            idle_limit_s=messages.seconds(
                request, "idle_limit", limits.DEFAULT_IDLE_LIMIT_S, limits.IDLE_LIMIT_RANGE_S
            ),
        )
        key = key_of(f"{model.model_id}/OpenSession", request)
        session = await sessions.open_session(self._core, key, model, spec)
        return messages.session_message(self._core, session)

    async def YieldSession(self, request: session_pb2.YieldSessionRequest, context: Any) -> session_pb2.Session:
        """Says that nothing will be asked for a while."""
        session = await self._session(request.session_id)
        if not request.HasField("idle"):
            raise InvalidArgument("idle: not set, want for how long nothing will be asked")
        idle_s = messages.seconds(request, "idle", 0.0, (0.0, limits.MAX_IDLE_HINT_S))
        sessions.yield_session(self._core, session, idle_s)
        return messages.session_message(self._core, session)

    async def CloseSession(self, request: session_pb2.CloseSessionRequest, context: Any) -> session_pb2.Session:
        """Ends a session."""
        messages.request_id_of(request.request_id)
        session = await self._session(request.session_id)
        return messages.session_message(self._core, await sessions.close_session(self._core, session))

    async def GetSession(self, request: session_pb2.GetSessionRequest, context: Any) -> session_pb2.Session:
        """Reads a session."""
        return messages.session_message(self._core, await self._session(request.session_id))

    async def _session(self, session_id: str) -> Session:
        session = await sessions.find(self._core, SessionId(session_id))
        require_visible(session.tenant, "session", session_id)
        return session
