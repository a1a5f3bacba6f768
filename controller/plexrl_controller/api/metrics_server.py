"""The figures over HTTP, for Prometheus. Requests are taken by threads, and answered from the event loop's memory.

In clear text on loopback; beyond it over TLS, and only to clients that show a certificate of a known authority.
Knows nothing of what the figures mean. A loop that does not answer costs the client an error, and the loop nothing.
"""

import asyncio
import socket
import ssl
import sys
import threading
from collections.abc import Iterable
from concurrent.futures import CancelledError
from http.server import ThreadingHTTPServer
from pathlib import Path
from socketserver import TCPServer
from typing import Any

import structlog
from prometheus_client import CollectorRegistry, MetricsHandler
from prometheus_client.core import Metric

from plexrl_controller.api.metrics import figures
from plexrl_controller.dispatch.core import Core

_log = structlog.get_logger("plexrl.controller")

ANSWER_TIMEOUT_S = 5.0
"""How long the event loop has for the figures: half of what Prometheus waits."""
CLIENT_TIMEOUT_S = 10.0
"""How long a client may be silent, in the handshake too."""
MAX_CLIENTS = 8
"""At a time; who comes beyond them is hung up on."""


class NoFigures(Exception):
    """The event loop has not given its figures."""


class LoopCollector:
    """Fetches the figures from the event loop for a thread. Implements prometheus_client's Collector."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, certificate_end: float | None, timeout_s: float = ANSWER_TIMEOUT_S
    ) -> None:
        self.core: Core | None = None
        """The leader's parts, while it serves. Belongs to the loop."""
        self._loop = loop
        self._certificate_end = certificate_end
        self._timeout_s = timeout_s

    def collect(self) -> Iterable[Metric]:
        """All figures, of one moment. Raises NoFigures."""
        reading = self._read()
        try:
            answer = asyncio.run_coroutine_threadsafe(reading, self._loop)
        except RuntimeError as error:
            reading.close()
            raise NoFigures("the controller has stopped") from error
        try:
            return answer.result(self._timeout_s)
        except TimeoutError as error:
            answer.cancel()
            raise NoFigures(f"the controller's event loop has not answered for {self._timeout_s:g} s") from error
        except CancelledError as error:
            raise NoFigures("the controller is stopping") from error

    async def _read(self) -> list[Metric]:
        return figures(self.core, self._certificate_end)


class MetricsServer:
    """Serves what a collector has, on any path, from `start` to `stop`."""

    def __init__(self, listen: str, collector: LoopCollector, tls: ssl.SSLContext | None = None) -> None:
        """Takes the port. Raises OSError with the reason when that cannot be."""
        registry = CollectorRegistry()
        registry.register(collector)
        host, _, port = listen.rpartition(":")
        try:
            self._server = _Server(host.strip("[]"), int(port), registry, tls)
        except OSError as error:
            raise OSError(f"--metrics-listen {listen}: cannot be bound: {error.strerror}") from error
        self.endpoint = f"{host}:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)

    def start(self) -> None:
        """Answers from now on."""
        self._thread.start()

    def stop(self) -> None:
        """Answers no more, and gives the port back. Blocks for up to half a second."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()


def mutual_tls(certificate: Path, key: Path, authorities: Path) -> ssl.SSLContext:
    """A server's side of TLS that wants a certificate of the client's too."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    context.load_verify_locations(authorities)
    context.verify_mode = ssl.CERT_REQUIRED
    return context


class _Handler(MetricsHandler):
    timeout = CLIENT_TIMEOUT_S

    def setup(self) -> None:
        super().setup()
        if isinstance(self.connection, ssl.SSLSocket):
            # Here, in the client's own thread: who connects and says nothing keeps nobody else waiting.
            self.connection.do_handshake()

    def do_GET(self) -> None:
        try:
            super().do_GET()
        except NoFigures as error:
            _log.warning("scrape_failed", detail=str(error))
            body = f"{error}\n".encode()
            self.send_response(503)
            self.send_header("Content-Type", "text/plain; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)


class _Server(ThreadingHTTPServer):
    allow_reuse_port = False  # a second controller on a taken port fails instead of sharing it

    def __init__(self, host: str, port: int, registry: CollectorRegistry, tls: ssl.SSLContext | None) -> None:
        self._places = threading.Semaphore(MAX_CLIENTS)
        self.address_family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        super().__init__((str(address[0]), port), _Handler.factory(registry))
        if tls is not None:
            self.socket = tls.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)

    def server_bind(self) -> None:
        # HTTPServer's would ask the DNS for a name that nothing here needs, and wait for it.
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._places.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        error = sys.exception()
        # What is wrong with a connection or a handshake is the client's affair; anything else is a defect here.
        log = _log.info if isinstance(error, OSError) else _log.error
        log("scrape_failed", client=str(client_address[0]), detail=repr(error))
