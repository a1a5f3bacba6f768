"""The controller process: takes leadership, starts the dispatcher, serves gRPC, and stops when it no longer leads."""

import asyncio
import contextlib
import gc
import os
import signal
import socket
import ssl
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import structlog
from grpc_channelz.v1 import channelz
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from plexrl.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    call_pb2,
    call_pb2_grpc,
    job_pb2,
    job_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
    payload_pb2,
    payload_pb2_grpc,
    registry_pb2,
    registry_pb2_grpc,
    session_pb2,
    session_pb2_grpc,
)
from plexrl.wire import SERVER_OPTIONS
from plexrl_controller.api.admin import AdminService, RegistryService
from plexrl_controller.api.auth import AuthInterceptor, token_sha256
from plexrl_controller.api.calls import CallService
from plexrl_controller.api.certificate import first_end
from plexrl_controller.api.jobs import JobService
from plexrl_controller.api.metrics_server import LoopCollector, MetricsServer, mutual_tls
from plexrl_controller.api.models import ModelService
from plexrl_controller.api.payloads import PayloadService
from plexrl_controller.api.sessions import SessionService
from plexrl_controller.dispatch.clock import WallClock
from plexrl_controller.dispatch.core import Core
from plexrl_controller.dispatch.dispatcher import Dispatcher
from plexrl_controller.dispatch.grpc_transport import GrpcTransport
from plexrl_controller.domain.ids import Tenant, TokenId
from plexrl_controller.domain.records import Token
from plexrl_controller.domain.states import Role
from plexrl_controller.payloads.by_url import open_payloads, require_payloads
from plexrl_controller.settings import ServeSettings, is_loopback, read_secret
from plexrl_controller.store.port import Changes, Store
from plexrl_controller.store.postgres import PostgresStore
from plexrl_controller.store.writer import GroupWriter

_log = structlog.get_logger("plexrl.controller")

STOP_GRACE_S = 2.0
SERVICES = {
    "JobService": job_pb2,
    "ModelService": model_pb2,
    "CallService": call_pb2,
    "SessionService": session_pb2,
    "PayloadService": payload_pb2,
    "AdminService": admin_pb2,
    "RegistryService": registry_pb2,
}
DEFAULT_TENANT = Tenant("default")


async def serve(settings: ServeSettings) -> int:
    """Runs until SIGTERM or SIGINT (0), or until it cannot go on (1: the supervisor starts a fresh one)."""
    store = PostgresStore(settings.database_url)
    try:
        return await lead(settings, store)
    finally:
        await store.close()


async def lead(settings: ServeSettings, store: Store) -> int:
    """As `serve`. What is wrong with this start is raised before it takes the lead from one that is all right."""
    worker_token = read_secret(settings.worker_token_file)
    admin_token = read_secret(settings.bootstrap_token_file) if settings.bootstrap_token_file is not None else None
    await require_payloads(settings.payload_url, settings.s3_endpoint)
    async with _metrics(settings) as metrics:
        _check_port(settings.listen)
        refuse_revoked(await store.tokens(), worker_token, admin_token)
        return await _lead(settings, store, metrics, worker_token, admin_token)


async def _lead(
    settings: ServeSettings, store: Store, metrics: LoopCollector, worker_token: str, admin_token: str | None
) -> int:
    term = await store.acquire_term(f"{socket.gethostname()}:{os.getpid()}")
    # Only now: it lists what is there and removes what is half written, and until now somebody else may have written.
    payloads = await open_payloads(settings.payload_url, settings.s3_endpoint, settings.tenant_payload_bytes)
    writer = GroupWriter(store, term)
    transport = GrpcTransport(term, worker_token, _channel_credentials(settings))
    core = Core(
        store=store,
        writer=writer,
        payloads=payloads,
        transport=transport,
        clock=WallClock(),
        term=term,
        policy=settings.policy,
        recovery_policy=settings.recovery,
    )
    core.ledger.tenant_accounts.default_quota = settings.tenant_quota
    dispatcher = Dispatcher(core, settings.history_s)
    transport.handler = dispatcher
    await ensure_tokens(store, writer, worker_token, admin_token)
    await dispatcher.start()
    server, health_service = build_server(core, transport)
    port = _listen(server, settings)
    await server.start()
    endpoint = f"{settings.listen.rpartition(':')[0]}:{port}"
    if settings.endpoint_file is not None:
        _write_atomically(settings.endpoint_file, endpoint)
    for service in ("", *(f"plexrl.v1.{name}" for name in SERVICES)):
        await health_service.set(service, health_pb2.HealthCheckResponse.SERVING)
    # What the start made, the loaded records among it, mostly stays: looking through it would stop all calls each time.
    gc.collect()
    gc.freeze()
    metrics.core = core
    _log.info("controller_serving", endpoint=endpoint, term=term)
    try:
        return await _until_stopped(dispatcher, writer)
    finally:
        metrics.core = None
        await health_service.enter_graceful_shutdown()
        await server.stop(STOP_GRACE_S)
        await dispatcher.stop()
        with contextlib.suppress(Exception):
            await asyncio.wait_for(writer.close(), STOP_GRACE_S)


@contextlib.asynccontextmanager
async def _metrics(settings: ServeSettings) -> AsyncIterator[LoopCollector]:
    """What the metrics are read from, served meanwhile where that is asked for. Raises OSError for a taken port."""
    loop, listen = asyncio.get_running_loop(), settings.metrics_listen
    if listen is None:
        yield LoopCollector(loop, None)
        return
    collector = LoopCollector(loop, first_end(settings.tls_cert.read_bytes()) if settings.tls_cert else None)
    tls = None if is_loopback(listen, "--metrics-listen") else _metrics_tls(settings)
    server = MetricsServer(listen, collector, tls)
    server.start()
    _log.info("metrics_serving", endpoint=server.endpoint)
    try:
        yield collector
    finally:
        await asyncio.to_thread(server.stop)


def _metrics_tls(settings: ServeSettings) -> ssl.SSLContext:
    """Beyond loopback: the settings were refused if one of these is missing."""
    assert settings.tls_cert is not None
    assert settings.tls_key is not None
    assert settings.tls_ca is not None
    return mutual_tls(settings.tls_cert, settings.tls_key, settings.tls_ca)


def build_server(core: Core, transport: GrpcTransport) -> tuple[grpc.aio.Server, health.aio.HealthServicer]:
    """A server with every service, not yet listening."""
    # Without SO_REUSEPORT a second controller on a taken port fails instead of sharing it.
    server = grpc.aio.server(
        interceptors=[AuthInterceptor(core.ledger)], options=[*SERVER_OPTIONS, ("grpc.so_reuseport", 0)]
    )
    job_pb2_grpc.add_JobServiceServicer_to_server(JobService(core), server)
    model_pb2_grpc.add_ModelServiceServicer_to_server(ModelService(core, transport), server)
    call_pb2_grpc.add_CallServiceServicer_to_server(CallService(core), server)
    session_pb2_grpc.add_SessionServiceServicer_to_server(SessionService(core), server)
    payload_pb2_grpc.add_PayloadServiceServicer_to_server(PayloadService(core), server)
    admin_pb2_grpc.add_AdminServiceServicer_to_server(AdminService(core), server)
    registry_pb2_grpc.add_RegistryServiceServicer_to_server(RegistryService(core), server)
    health_service = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_service, server)
    channelz.add_channelz_servicer(server)
    names = [module.DESCRIPTOR.services_by_name[name].full_name for name, module in SERVICES.items()]
    reflection.enable_server_reflection(
        [*names, health.SERVICE_NAME, "grpc.channelz.v1.Channelz", reflection.SERVICE_NAME], server
    )
    return server, health_service


async def _until_stopped(dispatcher: Dispatcher, writer: GroupWriter) -> int:
    loop = asyncio.get_running_loop()
    asked = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, asked.set)
    notify("READY=1")
    stop, failed = asyncio.create_task(asked.wait()), asyncio.create_task(writer.stopped())
    waits: set[asyncio.Future[Any]] = {stop, failed, dispatcher.failed}
    while True:
        done, _ = await asyncio.wait(waits, timeout=5.0, return_when=asyncio.FIRST_COMPLETED)
        if done:
            break
        # The event loop answers and the writer lives: that is what the watchdog watches.
        notify("WATCHDOG=1")
    notify("STOPPING=1")
    code = 0 if stop in done else 1
    for task in waits:
        task.cancel()
    _log.info("controller_stopping", reason="signal" if code == 0 else "cannot go on; a fresh start reloads")
    return code


def refuse_revoked(known: Sequence[Token], worker_token: str, admin_token: str | None) -> None:
    """Raises ValueError for a file's token that was revoked."""
    wanted = {token.token_sha256: token.label for token in _of_files(worker_token, admin_token)}
    for token in known:
        if token.revoked and token.token_sha256 in wanted:
            raise ValueError(f"the token of the file, {token.label}, was revoked: write a new one into it")


async def ensure_tokens(store: Store, writer: GroupWriter, worker_token: str, admin_token: str | None) -> None:
    """Makes the tokens of the files known, and revokes those that the files held before: the files are the operator's
    way in, and a new file shuts the old way. Where there is no file of a kind, nothing of the kind is touched.
    """
    wanted = {token.token_sha256: token for token in _of_files(worker_token, admin_token)}
    roles = {token.role for token in wanted.values()}
    known = {token.token_sha256: token for token in await store.tokens()}
    missing = [token for sha256, token in wanted.items() if sha256 not in known]
    # Of a file's token the id is made of its content; those that an admin makes have ids of their own.
    replaced = [
        replace(token, revoked=True, revision=token.revision + 1)
        for sha256, token in known.items()
        if token.token_id == sha256[:32] and token.role in roles and sha256 not in wanted and not token.revoked
    ]
    if missing or replaced:
        await writer.commit(Changes(inserts=tuple(missing), updates=tuple(replaced)))
    for token in replaced:
        _log.info("replaced_token_revoked", token=token.token_id, label=token.label)


def _of_files(worker_token: str, admin_token: str | None) -> list[Token]:
    files: list[tuple[str, str, Role, Tenant | None]] = [(worker_token, "worker", Role.WORKER, None)]
    if admin_token is not None:
        files.append((admin_token, "bootstrap", Role.ADMIN, DEFAULT_TENANT))
    return [
        Token(TokenId(sha256[:32]), sha256, f"{label}-{sha256[:8]}", role, tenant)
        for token, label, role, tenant in files
        for sha256 in (token_sha256(token),)
    ]


def _check_port(listen: str) -> None:
    """Raises OSError with the reason, which gRPC does not give."""
    host, _, port = listen.rpartition(":")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            # As gRPC does: a connection of an earlier life that lingers is no server.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise OSError(f"--listen {listen}: cannot be bound: {error.strerror}") from error


def _listen(server: grpc.aio.Server, settings: ServeSettings) -> int:
    if settings.tls_cert is None or settings.tls_key is None:
        return server.add_insecure_port(settings.listen)
    pair = (settings.tls_key.read_bytes(), settings.tls_cert.read_bytes())
    ca = settings.tls_ca.read_bytes() if settings.tls_ca is not None else None
    return server.add_secure_port(settings.listen, grpc.ssl_server_credentials([pair], ca, require_client_auth=False))


def _channel_credentials(settings: ServeSettings) -> grpc.ChannelCredentials | None:
    """What the controller shows workers: its own certificate, where there is one."""
    if settings.tls_cert is None or settings.tls_key is None:
        return None
    ca = settings.tls_ca.read_bytes() if settings.tls_ca is not None else None
    return grpc.ssl_channel_credentials(ca, settings.tls_key.read_bytes(), settings.tls_cert.read_bytes())


def _write_atomically(path: Path, text: str) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text + "\n")
    partial.replace(path)


def notify(state: str) -> None:
    """Tells systemd, when it asked (sd_notify(3))."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.connect("\0" + address[1:] if address.startswith("@") else address)
        sock.sendall(state.encode())
