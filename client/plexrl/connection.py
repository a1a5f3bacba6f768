"""One authenticated channel to a controller: where it is, how to talk to it safely, and how often to try again.

Knows endpoints, tokens, TLS and retries of rpcs that carry a request_id; knows nothing of what the rpcs mean.
"""

import ipaddress
import logging
import os
import random
import re
import ssl
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
SYSTEM_ROOTS = "system"
"""Value of PLEXRL_TLS_CA and --tls-ca for TLS with the authorities that the system trusts."""

QUIET_S = 5.0
"""An outage that lasts longer is told, on the log that Python shows unless told otherwise ..."""
SPEAK_EVERY_S = 60.0
"""... and from then on so often."""

_TOKEN = re.compile(r"[!-~]+")

Request = TypeVar("Request", contravariant=True)
Response = TypeVar("Response", covariant=True)
Item = TypeVar("Item")
Metadata = tuple[tuple[str, str], ...]

_JITTER = random.Random()
"""Of its own: jobs seed `random`, and must draw the same numbers however often the SDK had to wait."""


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
        return max(hint_s or 0.0, ceiling * _JITTER.uniform(0.5, 1.0))


@dataclass(frozen=True)
class Target:
    """Where to connect and with which secret. `tls` is None (clear text), True (system roots) or a CA file."""

    endpoint: str
    token: str | None = None
    tls: bool | Path | None = None

    def __post_init__(self) -> None:
        if self.token and not self.tls and not is_loopback(self.endpoint):
            raise errors.ConfigurationError(
                f"refusing to send the token to {self.endpoint} in clear text: set PLEXRL_TLS_CA to the CA file (or to "
                "`system` for the system's roots), or pass tls=; clear text is for loopback only"
            )
        # gRPC would only say that the metadata is invalid; "Bearer TOKEN" must be one header line of visible ASCII.
        if self.token and not _TOKEN.fullmatch(self.token):
            raise errors.ConfigurationError(
                "the token is not one: want a single word of visible ASCII characters, as `plexrl tokens create` prints"
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
    """Fills in what was not given from PLEXRL_ENDPOINT, PLEXRL_TOKEN, PLEXRL_TOKEN_FILE and PLEXRL_TLS_CA, else from
    the files that `plexrl up` leaves in the current directory. The endpoint of those files takes clear text."""
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
    if tls is None and not embedded:
        tls = os.environ.get("PLEXRL_TLS_CA") or None
    if tls == SYSTEM_ROOTS:
        tls = True
    return Target(endpoint, token, Path(tls) if isinstance(tls, str) else tls)


def _read(path: Path, what: str) -> str | None:
    try:
        text = path.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise errors.ConfigurationError(f"cannot read the {what} from {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise errors.ConfigurationError(f"{path} is no text, want the {what} in it") from error
    if not text:
        raise errors.ConfigurationError(f"{path} is empty, want the {what} in it")
    return text


class Connection:
    """A channel with its stubs. Safe to share between threads."""

    def __init__(self, target: Target, retry: Retry | None = None) -> None:
        self.target = target
        self.retry = retry or Retry()
        self._closed = False
        self.metadata: Metadata = (("authorization", f"Bearer {target.token}"),) if target.token else ()
        # Without a pool of its own, gRPC would fold several channels to one endpoint into one TCP connection, and a
        # large result would delay a heartbeat.
        options: tuple[tuple[str, int], ...] = (*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1))
        if is_loopback(target.endpoint):
            # A token in clear text stays on this machine: gRPC would hand it to the proxy of the environment.
            options = (*options, ("grpc.enable_http_proxy", 0))
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
        failures, speak_at = 0, time.monotonic() + QUIET_S
        while True:
            if self._closed:
                raise errors.ConfigurationError("this connection has been closed: plexrl.connect() makes another")
            try:
                return attempt()
            except grpc.RpcError as rpc_error:
                error = self._explained(errors.from_rpc(rpc_error))
                failures += 1
                delay_s = self.retry.delay_s(failures, error.retry_after_s)
                if not isinstance(error, errors.Unavailable) or time.monotonic() + delay_s > give_up:
                    raise error from rpc_error
                if time.monotonic() >= speak_at:
                    speak_at = time.monotonic() + SPEAK_EVERY_S
                    log.warning("trying again for %.0f s more: %s", give_up - time.monotonic(), error)
                time.sleep(delay_s)

    def _explained(self, error: errors.PlexRLError) -> errors.PlexRLError:
        """What a failed handshake means. TLS that does not fit stays so: it is no outage to wait out."""
        endpoint, text = self.target.endpoint, str(error)
        if not isinstance(error, errors.Unavailable):
            return error
        if "CERTIFICATE_VERIFY_FAILED" in text:
            authority = "the system's authorities" if self.target.tls is True else f"the CA file {self.target.tls}"
            why = text.rpartition("CERTIFICATE_VERIFY_FAILED: ")[2].partition(": OK")[0]
            return errors.ConfigurationError(f"the certificate of {endpoint} does not hold before {authority}: {why}")
        if "Hostname Verification Check failed" in text:
            return errors.ConfigurationError(
                f"the certificate of {endpoint} is for other names: connect by a name that is in it, or have one made"
            )
        if "WRONG_VERSION_NUMBER" in text:
            return errors.ConfigurationError(f"{endpoint} does not speak TLS: leave tls= (PLEXRL_TLS_CA, --tls-ca) out")
        if not self.target.tls and "Socket closed" in text:
            hint = f"{text}; where it wants TLS, pass tls= or set PLEXRL_TLS_CA"
            return errors.Unavailable(hint, reason=error.reason, retry_after_s=error.retry_after_s)
        return error

    def close(self) -> None:
        """Closes the channel; rpcs in flight end as cancelled."""
        self._closed = True
        self._channel.close()


def _credentials(tls: bool | Path) -> grpc.ChannelCredentials:
    if isinstance(tls, bool):
        return grpc.ssl_channel_credentials()
    try:
        authorities = tls.read_bytes()
    except OSError as error:
        raise errors.ConfigurationError(f"cannot read the CA file {tls}: {error.strerror}") from error
    try:
        # Between its certificates a bundle may say whose they are, in any alphabet.
        ssl.create_default_context(cadata=authorities.decode("ascii", errors="ignore"))
    except ssl.SSLError as error:
        raise errors.ConfigurationError(f"the CA file {tls} holds no certificate: want PEM") from error
    return grpc.ssl_channel_credentials(root_certificates=authorities)
