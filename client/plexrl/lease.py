"""Keeps a job's lease alive from a thread and a connection of its own, and carries the idle hint.

Knows one job's heartbeat; knows nothing of its calls, so that they never delay it.
"""

import logging
import threading
import time
from collections.abc import Callable

from plexrl import durations, errors
from plexrl.connection import Connection
from plexrl.v1 import job_pb2 as j

log = logging.getLogger("plexrl")


class Lease:
    """Renews a lease every `interval_s` until stopped; `on_lost` is told once if the job has ended."""

    def __init__(
        self, connection: Connection, job_id: str, interval_s: float, on_lost: Callable[[errors.PlexRLError], None]
    ) -> None:
        self._connection = connection
        self._job_id = job_id
        self._interval_s = interval_s
        self._on_lost = on_lost
        self._wake = threading.Condition()
        self._stopping = False
        self._idle_until: float | None = None
        self._thread = threading.Thread(target=self._run, name=f"plexrl-lease-{job_id}", daemon=True)

    def start(self) -> None:
        """Begins to renew."""
        self._thread.start()

    def idle(self, seconds: float) -> None:
        """Sends the hint with a heartbeat at once; returns before it has arrived. Raises InvalidArgument."""
        durations.checked(seconds, "seconds")
        with self._wake:
            self._idle_until = time.monotonic() + seconds
            self._wake.notify_all()

    def stop(self) -> None:
        """Stops renewing; the lease then runs out by itself unless the job is finished."""
        with self._wake:
            self._stopping = True
            self._wake.notify_all()
        self._connection.close()
        if self._thread.ident is not None and threading.current_thread() is not self._thread:
            self._thread.join(timeout=5.0)

    def _run(self) -> None:
        wait_s = self._interval_s
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._stopping or self._idle_until is not None, wait_s)
                if self._stopping:
                    return
                idle_until, self._idle_until = self._idle_until, None
            wait_s = self._interval_s
            try:
                self._beat(idle_until)
            except errors.JobEnded as error:
                self._on_lost(error)
                return
            except (errors.PlexRLError, ValueError) as error:
                # ValueError is gRPC's word for a channel that was closed under the call.
                if self._stopping:
                    return
                log.warning("heartbeat of job %s failed, trying again: %s", self._job_id, error)
                wait_s = min(1.0, self._interval_s)

    def _beat(self, idle_until: float | None) -> None:
        request = j.HeartbeatJobRequest(job_id=self._job_id)
        if idle_until is not None:
            durations.put(request.idle_hint, max(0.0, idle_until - time.monotonic()), "idle_hint")
        self._connection.unary(
            self._connection.jobs.HeartbeatJob, request, timeout_s=max(1.0, self._interval_s), retry_for_s=0.0
        )
