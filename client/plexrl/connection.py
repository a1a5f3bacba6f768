"""One authenticated channel to a controller: where it is, how to talk to it safely, and how often to try again.

Knows endpoints, tokens, TLS and retries of rpcs that carry a request_id; knows nothing of what the rpcs mean.
"""

import ipaddress
import logging
import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import grpc

from plexrl import errors
from plexrl.v1 import admin_pb2_grpc, call_pb2_grpc, job_pb2_grpc, model_pb2_grpc, payload_pb2_grpc, session_pb2_grpc
from plexrl.wire import CHANNEL_OPTIONS

log = logging.getLogger("plexrl")

EMBEDDED_ENDPOINT_FILE = Path(".plexrl/endpoint")
EMBEDDED_TOKEN_FILE = Path(".plexrl/token")

Request = TypeVar("Request", contravariant=True)
Response = TypeVar("Response", covariant=True)
Item = TypeVar("Item")
Metadata = tuple[tuple[str, str], ...]


class UnaryMethod(Protocol[Request, Response]):
    """A unary rpc of a generated stub."""

    def __call__(
        self, request: Request, timeout: float | None = None, metadata: Metadata | None = None
    ) -> Response: ...


class ServerStreamMethod(Protocol[Request, Response]):
    """A server-streaming rpc of a generated stub."""

    def __call__(
        self, request: Request, timeout: float | None = None, metadata: Metadata | None = None
    ) -> Iterator[Response]: ...


@dataclass(frozen=True)
class Retry:
    """How to try again: full jitter, doubling from `first_s` to `most_s`, given up after `bound_s`."""

    bound_s: float = 300.0
    first_s: float = 0.1
    most_s: float = 5.0

    def delay_s(self, failures: int, hint_s: float | None = None) -> float:
        """Seconds to wait after `failures` failures in a row; never less than the server's own hint."""
        ceiling = min(self.most_s, self.first_s * 2.0 ** min(failures - 1, 30))
        return max(hint_s or 0.0, ceiling * random.uniform(0.5, 1.0))


@dataclass(frozen=True)
class Target:
    """Where to connect and with which secret. `tls` is None (clear text), True (system roots) or a CA file."""

    endpoint: str
    token: str | None = None
    tls: bool | Path | None = None

    def __post_init__(self) -> None:
        if self.token and not self.tls and not is_loopback(self.endpoint):
            raise errors.ConfigurationError(
                f"refusing to send the token to {self.endpoint} in clear text: pass tls=True (system roots) or "
                "tls=<CA file>; clear text is for loopback only"
            )


def is_loopback(endpoint: str) -> bool:
    """Whether an endpoint (host:port, [v6]:port or unix:path) stays on this machine."""
    if endpoint.startswith("unix:"):
        return True
    host = endpoint.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def resolve_target(
    endpoint: str | None, token: str | None, token_file: str | os.PathLike[str] | None, tls: bool | str | Path | None
) -> Target:
    """Fills in what was not given from PLEXRL_ENDPOINT, PLEXRL_TOKEN and PLEXRL_TOKEN_FILE, else from the files that
    `plexrl up` leaves in the current directory."""
    if token is not None and token_file is not None:
        raise errors.ConfigurationError("both token and token_file are given: give one")
    endpoint = endpoint or os.environ.get("PLEXRL_ENDPOINT")
    embedded = endpoint is None
    if endpoint is None:
        endpoint = _read(EMBEDDED_ENDPOINT_FILE, "endpoint")
        if endpoint is None:
            raise errors.ConfigurationError(
                "no endpoint: pass endpoint=, set PLEXRL_ENDPOINT, or run `plexrl up` in this directory"
            )
    if token is None and token_file is None:
        token = os.environ.get("PLEXRL_TOKEN")
        token_file = os.environ.get("PLEXRL_TOKEN_FILE") if token is None else None
    if token is None and token_file is not None:
        token = _read(Path(token_file), "token")
        if token is None:
            raise errors.ConfigurationError(f"the token file {token_file} does not exist")
    # The embedded token belongs to the embedded controller: it goes to a loopback endpoint only.
    if token is None and (embedded or is_loopback(endpoint)):
        token = _read(EMBEDDED_TOKEN_FILE, "token")
    return Target(endpoint, token, Path(tls) if isinstance(tls, str) else tls)


def _read(path: Path, what: str) -> str | None:
    try:
        text = path.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise errors.ConfigurationError(f"cannot read the {what} from {path}: {error.strerror}") from error
    if not text:
        raise errors.ConfigurationError(f"{path} is empty, want the {what} in it")
    return text


class Connection:
    """A channel with its stubs. Safe to share between threads."""

    def __init__(self, target: Target, retry: Retry | None = None) -> None:
        self.target = target
        self.retry = retry or Retry()
        self.metadata: Metadata = (("authorization", f"Bearer {target.token}"),) if target.token else ()
        # Without a pool of its own, gRPC would fold several channels to one endpoint into one TCP connection, and a
        # large result would delay a heartbeat.
        options = (*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1))
        if target.tls:
            self._channel = grpc.secure_channel(target.endpoint, _credentials(target.tls), options)
        else:
            self._channel = grpc.insecure_channel(target.endpoint, options)
        self.jobs = job_pb2_grpc.JobServiceStub(self._channel)
        self.models = model_pb2_grpc.ModelServiceStub(self._channel)
        self.calls = call_pb2_grpc.CallServiceStub(self._channel)
        self.sessions = session_pb2_grpc.SessionServiceStub(self._channel)
        self.payloads = payload_pb2_grpc.PayloadServiceStub(self._channel)
        self.admin = admin_pb2_grpc.AdminServiceStub(self._channel)

    def another(self) -> "Connection":
        """A second connection to the same target, on a TCP connection of its own."""
        return Connection(self.target, self.retry)

    def unary(
        self,
        method: UnaryMethod[Request, Response],
        request: Request,
        *,
        timeout_s: float = 30.0,
        retry_for_s: float | None = None,
    ) -> Response:
        """Calls an rpc, again while the service is unavailable, for at most `retry_for_s` (default: the connection's).

        Only for rpcs that are safe to repeat: reads, and those that carry a request_id.
        """
        return self.again(lambda: method(request, timeout=timeout_s, metadata=self.metadata), retry_for_s)

    def collect(self, method: ServerStreamMethod[Request, Item], request: Request) -> list[Item]:
        """Reads a server stream to its end, from the start again when it breaks on the way."""
        return self.again(lambda: list(method(request, metadata=self.metadata)))

    def again(self, attempt: Callable[[], Item], retry_for_s: float | None = None) -> Item:
        """Repeats an attempt while the service is unavailable; see `unary`."""
        bound_s = self.retry.bound_s if retry_for_s is None else retry_for_s
        give_up = time.monotonic() + bound_s
        failures = 0
        while True:
            try:
                return attempt()
            except grpc.RpcError as rpc_error:
                error = errors.from_rpc(rpc_error)
                failures += 1
                delay_s = self.retry.delay_s(failures, error.retry_after_s)
                if not isinstance(error, errors.Unavailable) or time.monotonic() + delay_s > give_up:
                    raise error from rpc_error
                log.info("retrying in %.1f s: %s", delay_s, error)
                time.sleep(delay_s)

    def close(self) -> None:
        """Closes the channel; rpcs in flight end as cancelled."""
        self._channel.close()


def _credentials(tls: bool | Path) -> grpc.ChannelCredentials:
    if isinstance(tls, bool):
        return grpc.ssl_channel_credentials()
    try:
        return grpc.ssl_channel_credentials(root_certificates=tls.read_bytes())
    except OSError as error:
        raise errors.ConfigurationError(f"cannot read the CA file {tls}: {error.strerror}") from error
