"""The way in: connect to a controller, create jobs, take them up again.

Knows the controller's front door; knows nothing of calls.
"""

import importlib.metadata
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from plexrl import durations, errors
from plexrl.connection import Connection, Retry, resolve_target
from plexrl.job import Job
from plexrl.v1 import job_pb2 as j
from plexrl.v1 import types_pb2 as t

WIRE_PACKAGE = "plexrl.v1"


def connect(
    endpoint: str | None = None,
    token: str | None = None,
    *,
    token_file: str | os.PathLike[str] | None = None,
    tls: bool | str | Path | None = None,
    retry_for_s: float = 300.0,
) -> "Cluster":
    """Connects to a controller ("host:port") and checks that the two understand each other.

    What is not given comes from PLEXRL_ENDPOINT, PLEXRL_TOKEN or PLEXRL_TOKEN_FILE, and PLEXRL_TLS_CA, else from the
    files that `plexrl up` leaves in the current directory. tls: a CA file, or True (in the variable: `system`) for the
    system's roots; a token is sent in clear text on loopback only. retry_for_s: how long the controller may be away
    before calls give up.

    Raises ConfigurationError, Unauthenticated, Unavailable, Unsupported.
    """
    return Cluster(Connection(resolve_target(endpoint, token, token_file, tls), Retry(bound_s=retry_for_s)))


class Cluster:
    """A connection to a controller. Close it, or use it as a context manager."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        try:
            request = j.GetCapabilitiesRequest(client_version=importlib.metadata.version("plexrl"))
            self._capabilities = connection.unary(connection.jobs.GetCapabilities, request, timeout_s=10.0)
            if WIRE_PACKAGE not in self._capabilities.wire_packages:
                served = ", ".join(self._capabilities.wire_packages) or "nothing"
                raise errors.Unsupported(
                    f"this client speaks {WIRE_PACKAGE}, the server serves {served}: "
                    f"install plexrl {self._capabilities.server_version}"
                )
        except BaseException:
            connection.close()
            raise

    @property
    def endpoint(self) -> str:
        """Where the controller is."""
        return self.connection.target.endpoint

    @property
    def server_version(self) -> str:
        """The controller's version."""
        return self._capabilities.server_version

    @property
    def functions(self) -> frozenset[str]:
        """Functions that some worker offers, e.g. "generate"."""
        kinds = self._capabilities.call_kinds
        return frozenset(t.CallKind.Name(kind).removeprefix("CALL_KIND_").lower() for kind in kinds)

    @property
    def losses(self) -> frozenset[str]:
        """Losses that some worker offers, e.g. "grpo"."""
        return frozenset(t.Loss.Name(loss).removeprefix("LOSS_").lower() for loss in self._capabilities.losses)

    @property
    def catalogue(self) -> frozenset[str]:
        """Names for `plexrl.Catalogue`."""
        return frozenset(self._capabilities.catalogue)

    def job(
        self,
        name: str,
        *,
        weight: float = 1.0,
        slowdown_target: float = 1.3,
        lease_s: float = 60.0,
        labels: Mapping[str, str] | None = None,
    ) -> Job:
        """Creates a job. Use it as a context manager: it is finished on exit.

        name: unique among the tenant's live jobs. weight: share of device time relative to other jobs. slowdown_target:
        largest acceptable ratio of shared to exclusive time. lease_s: how long the job outlives its client, 5 s to 1 h.

        Raises AlreadyExists when a live job has the name: attach to it or choose another.
        """
        request = j.CreateJobRequest(
            request_id=uuid.uuid4().hex,
            name=name,
            labels=labels or {},
            weight=weight,
            slowdown_target=slowdown_target,
        )
        durations.put(request.lease, lease_s, "lease_s")
        job = self.connection.unary(self.connection.jobs.CreateJob, request)
        return Job(self.connection, job, self._capabilities.max_message_bytes)

    def attach(self, name: str | None = None, *, job_id: str | None = None) -> Job:
        """Takes up a live job where its client left it: `job.models` count on from their next sequence numbers,
        `job.unacknowledged` are the calls whose results were not taken, `job.client_state` is what was stored.

        Raises NotFound when no live job has the name or id. Two clients of one job at a time disturb each other.
        """
        if name is not None and job_id is None:
            request = j.AttachJobRequest(name=name)
        elif job_id is not None and name is None:
            request = j.AttachJobRequest(job_id=job_id)
        else:
            raise errors.InvalidArgument("attach wants a name or a job_id, one of the two")
        attached = self.connection.unary(self.connection.jobs.AttachJob, request)
        models = []
        for cursor in attached.models:
            cursor.model.next_sequence = cursor.next_sequence
            models.append(cursor.model)
        return Job(
            self.connection,
            attached.job,
            self._capabilities.max_message_bytes,
            models=models,
            calls=sorted(attached.calls, key=lambda call: (call.create_time.ToNanoseconds(), call.sequence)),
            client_state=attached.client_state,
        )

    def close(self) -> None:
        """Closes the connection; jobs that were not finished live on until their leases run out."""
        self.connection.close()

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
