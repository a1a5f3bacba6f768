"""Who wants to know of which calls and sessions. Updates coalesce: a slow reader costs memory for what is live."""

import asyncio
from collections import OrderedDict
from typing import TypeVar

from plexrl_controller.domain.ids import CallId, JobId, SessionId
from plexrl_controller.domain.records import Call, Session


class Subscription:
    """Calls of one job, or one call, that changed since the last `take`."""

    def __init__(self) -> None:
        self._changed: OrderedDict[CallId, None] = OrderedDict()
        self._sessions: dict[SessionId, Session] = {}
        self._event = asyncio.Event()

    def note(self, call_id: CallId) -> None:
        """Marks a call as changed."""
        self._changed[call_id] = None
        self._event.set()

    def note_session(self, session: Session) -> None:
        """Marks a session as changed; the last version of it counts."""
        self._sessions[session.session_id] = session
        self._event.set()

    def take_sessions(self) -> list[Session]:
        """The sessions that changed since this was last asked; never waits."""
        changed, self._sessions = list(self._sessions.values()), {}
        return changed

    def wake(self) -> None:
        """Ends a wait for changes, with none."""
        self._event.set()

    async def take(self) -> list[CallId]:
        """Waits for changes and returns the calls that changed, in order of their first change."""
        await self._event.wait()
        self._event.clear()
        changed, self._changed = list(self._changed), OrderedDict()
        return changed


class Hub:
    """Subscriptions by job and by call."""

    def __init__(self) -> None:
        self._jobs: dict[JobId, set[Subscription]] = {}
        self._calls: dict[CallId, set[Subscription]] = {}

    def watch_job(self, job_id: JobId) -> Subscription:
        """Subscribes to all calls of a job."""
        subscription = Subscription()
        self._jobs.setdefault(job_id, set()).add(subscription)
        return subscription

    def watch_call(self, call_id: CallId) -> Subscription:
        """Subscribes to one call."""
        subscription = Subscription()
        self._calls.setdefault(call_id, set()).add(subscription)
        return subscription

    def leave_job(self, job_id: JobId, subscription: Subscription) -> None:
        """Ends a subscription to a job."""
        _leave(self._jobs, job_id, subscription)

    def leave_call(self, call_id: CallId, subscription: Subscription) -> None:
        """Ends a subscription to a call."""
        _leave(self._calls, call_id, subscription)

    def publish(self, call: Call) -> None:
        """Tells everybody who watches the call or its job."""
        for watcher in (*self._jobs.get(call.job_id, ()), *self._calls.get(call.call_id, ())):
            watcher.note(call.call_id)

    def publish_session(self, session: Session) -> None:
        """Tells everybody who watches the session's job."""
        for watcher in self._jobs.get(session.job_id, ()):
            watcher.note_session(session)


K = TypeVar("K")


def _leave(table: dict[K, set[Subscription]], key: K, subscription: Subscription) -> None:
    watchers = table.get(key)
    if watchers is not None:
        watchers.discard(subscription)
        if not watchers:
            del table[key]
