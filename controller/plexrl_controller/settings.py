"""The controller's settings: flags, each also a PLEXRL_CONTROLLER_* variable, read once, here."""

import argparse
import logging
import math
import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from plexrl_controller.dispatch.replay_log import RecoveryPolicy
from plexrl_controller.dispatch.retention import MIN_HISTORY_S
from plexrl_controller.payloads.by_url import check_payload_url
from plexrl_controller.scheduling.fairness import Quota
from plexrl_controller.scheduling.policy import HoldRule, Order, Policy

_PREFIX = "PLEXRL_CONTROLLER_"
POLICIES = {order.value: Policy(order=order) for order in Order} | {
    "hold": Policy(order=Order.FIFO, hold=HoldRule.ITERATION)
}


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """Everything that `serve` needs."""

    listen: str
    metrics_listen: str | None
    database_url: str
    payload_url: str
    s3_endpoint: str | None
    tenant_payload_bytes: int
    history_s: float
    policy: Policy
    tenant_quota: Quota | None
    recovery: RecoveryPolicy
    worker_token_file: Path
    bootstrap_token_file: Path | None
    endpoint_file: Path | None
    tls_cert: Path | None
    tls_key: Path | None
    tls_ca: Path | None
    log_level: str


def add_serve_arguments(parser: argparse.ArgumentParser, environ: Mapping[str, str] = os.environ) -> None:
    """Declares the flags of `serve`."""

    def flag(name: str, help_text: str, default: str | None = None, *, required: bool = False) -> None:
        value = environ.get(_PREFIX + name.replace("-", "_").upper(), default)
        parser.add_argument(
            f"--{name}", default=value, required=required and value is None, help=f"{help_text} (default: {default})"
        )

    flag("listen", "host:port of the gRPC server; port 0 takes a free one", "127.0.0.1:50050")
    flag(
        "metrics-listen",
        "host:port of Prometheus metrics over HTTP, off unless given; beyond loopback over TLS, for clients with a "
        "certificate of --tls-ca",
    )
    flag("endpoint-file", "file that gets the host:port once it listens")
    flag("database-url", "SQLAlchemy URL, postgresql+asyncpg://...", required=True)
    flag("payload-url", "where payloads over 64 KiB lie: file:///directory or s3://bucket/prefix", required=True)
    flag("tenant-payload-gib", "GiB of stored payloads that a tenant may have", "64")
    flag("history-days", "days for which ended jobs, events and device intervals can be looked at", "30")
    flag("s3-endpoint", "URL of an S3-compatible service that is not AWS; keys come from the AWS_* variables")
    flag("policy", f"scheduling policy: {', '.join(POLICIES)}", Policy().order.value)
    flag("chunk-s", "seconds after which a long call yields to jobs that wait", f"{Policy().chunk_s:g}")
    flag("tenant-device-hours", "device hours that each tenant may use a day; unlimited unless given")
    flag("worker-token-file", "file with the token that workers and controller show each other", required=True)
    flag(
        "bootstrap-token-file",
        "file with a token that gets role admin in tenant `default` at the start; the same file for every controller",
    )
    flag("tls-cert", "PEM certificate chain; required beyond loopback")
    flag("tls-key", "PEM private key of --tls-cert")
    flag("tls-ca", "PEM authorities that certificates of workers and of metrics clients must chain to (mutual TLS)")
    defaults = RecoveryPolicy()
    flag(
        "snapshot-replay-s",
        "seconds of replay since a model's newest copy that make a snapshot due",
        f"{defaults.replay_s:g}",
    )
    flag(
        "replay-log-mib",
        "MiB of arguments kept per model until snapshots cover them; half of it makes one due",
        f"{defaults.log_bytes / 2**20:g}",
    )
    flag("snapshots-kept", "newest snapshots of a model that are kept", str(defaults.snapshots_kept))
    flag("log-level", "debug, info, warning or error", "info")


def serve_settings(args: argparse.Namespace) -> ServeSettings:
    """Checks parsed flags. Raises ValueError with a plain sentence."""
    if args.policy not in POLICIES:
        raise ValueError(f"--policy {args.policy}: want one of {', '.join(POLICIES)}")
    if args.log_level.upper() not in logging.getLevelNamesMapping():
        raise ValueError(f"--log-level {args.log_level}: want debug, info, warning or error")
    check_payload_url(args.payload_url, args.s3_endpoint)
    if bool(args.tls_cert) != bool(args.tls_key):
        raise ValueError("--tls-cert and --tls-key go together")
    if not is_loopback(args.listen, "--listen") and not args.tls_cert:
        raise ValueError(f"--listen {args.listen}: beyond loopback the server needs --tls-cert and --tls-key")
    metrics_listen = args.metrics_listen or None
    if metrics_listen is not None and not is_loopback(metrics_listen, "--metrics-listen"):
        _require_mutual_tls(metrics_listen, args)
    _check_tls(_path(args.tls_cert), _path(args.tls_key), _path(args.tls_ca))
    policy, chunk_s = POLICIES[args.policy], _number(args.chunk_s, "--chunk-s", 0.1)
    return ServeSettings(
        listen=args.listen,
        metrics_listen=metrics_listen,
        database_url=args.database_url,
        payload_url=args.payload_url,
        s3_endpoint=args.s3_endpoint,
        tenant_payload_bytes=int(_number(args.tenant_payload_gib, "--tenant-payload-gib", 2**-20) * 2**30),
        history_s=_number(args.history_days, "--history-days", MIN_HISTORY_S / 86_400) * 86_400,
        # A slice that outlasted the chunk would have a call that yielded go on at once.
        policy=replace(policy, chunk_s=chunk_s, quantum_s=min(policy.quantum_s, chunk_s)),
        tenant_quota=_quota(args.tenant_device_hours),
        recovery=RecoveryPolicy(
            replay_s=_number(args.snapshot_replay_s, "--snapshot-replay-s", 0.0),
            log_bytes=int(_number(args.replay_log_mib, "--replay-log-mib", 1) * 2**20),
            snapshots_kept=int(_number(args.snapshots_kept, "--snapshots-kept", 1)),
        ),
        worker_token_file=Path(args.worker_token_file),
        bootstrap_token_file=_path(args.bootstrap_token_file),
        endpoint_file=_path(args.endpoint_file),
        tls_cert=_path(args.tls_cert),
        tls_key=_path(args.tls_key),
        tls_ca=_path(args.tls_ca),
        log_level=args.log_level,
    )


def is_loopback(listen: str, flag: str) -> bool:
    """Whether only this machine can connect there. Raises ValueError for what is no host:port."""
    host, _, port = listen.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"{flag} {listen}: want HOST:PORT")
    return host.strip("[]") in ("127.0.0.1", "localhost", "::1")


def read_secret(path: Path) -> str:
    """A token from its file. Raises ValueError when it is none."""
    try:
        secret = path.read_text(encoding="ascii").strip()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: a token is of ASCII characters") from error
    if len(secret) < 16 or len(secret.split()) > 1:
        raise ValueError(f"{path}: a token is one word of at least 16 characters")
    return secret


def database_url_argument(parser: argparse.ArgumentParser, environ: Mapping[str, str] = os.environ) -> None:
    """Declares the flag of `migrate`."""
    url = environ.get(_PREFIX + "DATABASE_URL")
    parser.add_argument("--database-url", default=url, required=url is None, help="SQLAlchemy URL of the database")


def _require_mutual_tls(metrics_listen: str, args: argparse.Namespace) -> None:
    wanted = {"--tls-cert": args.tls_cert, "--tls-key": args.tls_key, "--tls-ca": args.tls_ca}
    missing = [flag for flag, value in wanted.items() if not value]
    if missing:
        raise ValueError(
            f"--metrics-listen {metrics_listen}: beyond loopback metrics need {' and '.join(missing)}, since only "
            "clients with a certificate of --tls-ca are answered; or listen on 127.0.0.1"
        )


def _check_tls(certificate: Path | None, key: Path | None, authorities: Path | None) -> None:
    """gRPC would say of any of this that it cannot bind the port."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    if certificate is not None and key is not None:
        try:
            # With a password at hand OpenSSL does not ask the terminal for one.
            context.load_cert_chain(certificate, key, password="")
        except OSError as error:
            raise ValueError(
                f"--tls-cert {certificate}, --tls-key {key}: want a PEM certificate and its key: {error}"
            ) from error
    if authorities is not None:
        try:
            context.load_verify_locations(authorities)
        except OSError as error:
            raise ValueError(f"--tls-ca {authorities}: want PEM certificates: {error}") from error


def _quota(device_hours: str | None) -> Quota | None:
    return Quota(_number(device_hours, "--tenant-device-hours", 0.0) * 3600) if device_hours is not None else None


def _number(value: str, flag: str, least: float) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not least <= number < math.inf:
        raise ValueError(f"{flag} {value}: want a number of at least {least:.6g}")
    return number


def _path(value: str | None) -> Path | None:
    return Path(value) if value else None
