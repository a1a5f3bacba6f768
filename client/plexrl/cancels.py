"""The cancels that a job's client asks for, sent beside its stream: a cancel must not wait for what it is to end."""

import logging
import threading
import uuid
from collections import deque

from plexrl import errors
from plexrl.connection import Connection
from plexrl.v1 import call_pb2

log = logging.getLogger(__name__)


class Cancels:
    """Sends CancelCall for calls in a thread of its own, one for all: each may have to wait until the controller is
    back. The thread ends with the last cancel."""

    def __init__(self, connection: Connection, job_id: str) -> None:
        self._connection = connection
        self._job_id = job_id
        self._lock = threading.Lock()
        self._waiting: deque[str] = deque()
        self._sending = False

    def send(self, call_id: str) -> None:
        """Asks for a call to be ended; returns at once. What cannot be sent within the retry bound is logged."""
        with self._lock:
            self._waiting.append(call_id)
            if self._sending:
                return
            self._sending = True
        threading.Thread(target=self._send_all, name=f"plexrl-cancels-{self._job_id}", daemon=True).start()

    def _send_all(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._sending = False
                    return
                call_id = self._waiting.popleft()
            request = call_pb2.CancelCallRequest(request_id=uuid.uuid4().hex, call_id=call_id)
            try:
                self._connection.unary(self._connection.calls.CancelCall, request)
            except errors.PlexRLError as error:
                log.warning("cancel of %s failed: %s", call_id, error)
