"""Metrics over HTTP: who is answered, what a loop that does not answer costs, and what is refused at the start."""

import argparse
import asyncio
import http.client
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest
import trustme
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from plexrl_controller.__main__ import main as controller_main
from plexrl_controller.api import metrics_server
from plexrl_controller.api.certificate import first_end
from plexrl_controller.api.metrics_server import LoopCollector, MetricsServer, mutual_tls
from plexrl_controller.server import lead
from plexrl_controller.settings import ServeSettings, add_serve_arguments, serve_settings
from plexrl_controller.store.memory import MemoryStore
from tests.support.leader import running_leader


@contextmanager
def served(collector: LoopCollector, tls: ssl.SSLContext | None = None) -> Iterator[int]:
    server = MetricsServer("127.0.0.1:0", collector, tls)
    server.start()
    try:
        yield int(server.endpoint.rpartition(":")[2])
    finally:
        server.stop()


def scrape(port: int, tls: ssl.SSLContext | None = None) -> tuple[int, str]:
    connection = (
        http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        if tls is None
        else http.client.HTTPSConnection("127.0.0.1", port, timeout=30, context=tls)
    )
    try:
        connection.request("GET", "/metrics")
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def value(text: str, name: str) -> float:
    families: list[Metric] = list(text_string_to_metric_families(text))
    return next(s.value for family in families for s in family.samples if s.name == name)


@pytest.fixture
def required(tmp_path: Path) -> list[str]:
    (tmp_path / "token").write_text("t" * 64)
    return [
        *("--database-url", "postgresql+asyncpg://plexrl@127.0.0.1/plexrl"),
        *("--payload-url", f"file://{tmp_path}/payloads", "--worker-token-file", str(tmp_path / "token")),
        *("--listen", "127.0.0.1:0"),
    ]


def settings_of(arguments: list[str], environ: dict[str, str] | None = None) -> ServeSettings:
    parser = argparse.ArgumentParser()
    add_serve_arguments(parser, environ or {})
    return serve_settings(parser.parse_args(arguments))


class Authority:
    """A cluster's authority with a certificate of the controller, as files."""

    def __init__(self, folder: Path) -> None:
        self.ca = trustme.CA()
        own = self.ca.issue_cert("127.0.0.1")
        self.files = {"cert": folder / "cert.pem", "key": folder / "key.pem", "ca": folder / "ca.pem"}
        for pem in own.cert_chain_pems:
            pem.write_to_path(self.files["cert"], append=True)
        own.private_key_pem.write_to_path(self.files["key"])
        self.ca.cert_pem.write_to_path(self.files["ca"])

    def server_side(self) -> ssl.SSLContext:
        return mutual_tls(self.files["cert"], self.files["key"], self.files["ca"])

    def client(self, of: trustme.CA | None) -> ssl.SSLContext:
        """Trusts this authority, and shows a certificate of `of`."""
        context = ssl.create_default_context(cafile=self.files["ca"])
        if of is not None:
            of.issue_cert("prometheus.example.org").configure_cert(context)
        return context


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


async def test_a_scrape_over_http_is_what_prometheus_reads() -> None:
    async with running_leader() as leader:
        await leader.join()
        await leader.model(await leader.job("sevens"))
        collector = LoopCollector(asyncio.get_running_loop(), None)
        with served(collector) as port:
            status, text = await asyncio.to_thread(scrape, port)
            assert (status, value(text, "plexrl_leader")) == (200, 0)
            collector.core = leader.core
            status, text = await asyncio.to_thread(scrape, port)
        families = {family.name: family for family in text_string_to_metric_families(text)}
        assert (status, value(text, "plexrl_leader")) == (200, 1)
        assert families["plexrl_calls"].type == "gauge"
        assert families["plexrl_job_device_seconds"].type == "counter"
        placed = [s for s in families["plexrl_models"].samples if s.labels == {"state": "placed"}]
        assert [sample.value for sample in placed] == [1]
        assert {s.labels["kind"] for s in families["plexrl_job_device_seconds"].samples} == {"busy", "swap", "hold"}
        assert all(family.documentation for family in families.values())


async def test_a_loop_that_is_blocked_costs_the_scrape_an_error_and_nobody_anything_later() -> None:
    collector = LoopCollector(asyncio.get_running_loop(), None, timeout_s=0.05)
    answers: list[tuple[int, str]] = []
    answered = threading.Event()

    def ask(port: int) -> None:
        answers.append(scrape(port))
        answered.set()

    with served(collector) as port:
        asking = threading.Thread(target=ask, args=(port,))
        asking.start()
        # This is the loop's thread: nothing else runs in it meanwhile.
        assert answered.wait(30)
        asking.join()
        assert answers == [(503, "the controller's event loop has not answered for 0.05 s\n")]
        collector._timeout_s = 30.0
        status, text = await asyncio.to_thread(scrape, port)
        assert (status, value(text, "plexrl_leader")) == (200, 0)


async def test_beyond_loopback_only_a_client_of_the_authority_is_answered(authority: Authority) -> None:
    collector = LoopCollector(asyncio.get_running_loop(), None)
    with served(collector, authority.server_side()) as port:
        status, text = await asyncio.to_thread(scrape, port, authority.client(authority.ca))
        assert (status, value(text, "plexrl_leader")) == (200, 0)
        for stranger in (authority.client(None), authority.client(trustme.CA())):
            with pytest.raises(OSError, match=r"alert|EOF|reset|closed|Broken pipe"):
                await asyncio.to_thread(scrape, port, stranger)
        with pytest.raises((OSError, http.client.HTTPException)):
            await asyncio.to_thread(scrape, port)
        assert (await asyncio.to_thread(scrape, port, authority.client(authority.ca)))[0] == 200


async def test_clients_that_say_nothing_keep_nobody_waiting(authority: Authority) -> None:
    collector = LoopCollector(asyncio.get_running_loop(), None)
    with served(collector, authority.server_side()) as port:
        silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(metrics_server.MAX_CLIENTS - 1)]
        try:
            assert (await asyncio.to_thread(scrape, port, authority.client(authority.ca)))[0] == 200
        finally:
            for each in silent:
                each.close()


async def test_one_client_more_than_there_are_places_for_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server, "MAX_CLIENTS", 1)
    with (
        served(LoopCollector(asyncio.get_running_loop(), None)) as port,
        socket.create_connection(("127.0.0.1", port)),
        socket.create_connection(("127.0.0.1", port)) as second,
    ):
        second.settimeout(30)
        assert await asyncio.to_thread(second.recv, 1) == b""


def test_metrics_are_off_unless_asked_for_by_flag_or_variable(required: list[str]) -> None:
    assert settings_of(required).metrics_listen is None
    assert settings_of([*required, "--metrics-listen", "[::1]:7401"]).metrics_listen == "[::1]:7401"
    by_variable = settings_of(required, {"PLEXRL_CONTROLLER_METRICS_LISTEN": "127.0.0.1:7401"})
    assert by_variable.metrics_listen == "127.0.0.1:7401"


@pytest.mark.parametrize("listen", ["7401", "127.0.0.1:metrics", "127.0.0.1:70000", ":7401"])
def test_what_is_no_address_is_refused_by_name(required: list[str], listen: str) -> None:
    with pytest.raises(ValueError, match=f"^--metrics-listen {listen}: want HOST:PORT$"):
        settings_of([*required, "--metrics-listen", listen])


def test_clear_text_beyond_loopback_is_refused_with_what_to_set(required: list[str], authority: Authority) -> None:
    beyond = [*required, "--metrics-listen", "0.0.0.0:7401"]
    with pytest.raises(ValueError, match="metrics need --tls-cert and --tls-key and --tls-ca"):
        settings_of(beyond)
    own = ["--tls-cert", str(authority.files["cert"]), "--tls-key", str(authority.files["key"])]
    with pytest.raises(ValueError, match="metrics need --tls-ca, since only clients with a certificate of"):
        settings_of([*beyond, *own])
    assert settings_of([*beyond, *own, "--tls-ca", str(authority.files["ca"])]).metrics_listen == "0.0.0.0:7401"


def test_a_taken_port_is_said_before_the_lead_is_taken(
    required: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def right_schema(url: str) -> None: ...

    async def acquire(self: object, holder: str) -> int:
        raise AssertionError("a start that cannot serve took the lead")

    # The log is set up for a process, and would outlive this test.
    monkeypatch.setattr("plexrl_controller.__main__._log_json", lambda level: None)
    monkeypatch.setattr("plexrl_migrations.require_head", right_schema)
    monkeypatch.setattr("plexrl_controller.store.postgres.PostgresStore.acquire_term", acquire)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        assert controller_main(["serve", *required, "--metrics-listen", listen]) == 1
    said = f"plexrl-controller: --metrics-listen {listen}: cannot be bound: Address already in use\n"
    assert capsys.readouterr().err == said
    # The port is free again, and cannot be both.
    assert controller_main(["serve", *required, "--metrics-listen", listen, "--listen", listen]) == 1
    assert capsys.readouterr().err == f"plexrl-controller: --listen {listen}: cannot be bound: Address already in use\n"


async def test_a_controller_answers_from_before_it_leads_until_it_has_stopped(
    required: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoints: asyncio.Queue[str] = asyncio.Queue()
    may_lead, serves, stop = asyncio.Event(), asyncio.Event(), asyncio.Event()

    class Waits(MemoryStore):
        async def acquire_term(self, holder: str) -> int:
            await may_lead.wait()
            return await super().acquire_term(holder)

    class Told(MetricsServer):
        def start(self) -> None:
            super().start()
            endpoints.put_nowait(self.endpoint)

    async def until_stopped(dispatcher: object, writer: object) -> int:
        serves.set()
        await stop.wait()
        return 0

    monkeypatch.setattr("plexrl_controller.server._until_stopped", until_stopped)
    monkeypatch.setattr("plexrl_controller.server.MetricsServer", Told)
    settings = settings_of([*required, "--metrics-listen", "127.0.0.1:0"])
    running = asyncio.create_task(lead(settings, Waits()))
    port = int((await endpoints.get()).rpartition(":")[2])
    _, text = await asyncio.to_thread(scrape, port)
    assert value(text, "plexrl_leader") == 0
    assert "plexrl_jobs" not in text
    may_lead.set()
    await serves.wait()
    _, text = await asyncio.to_thread(scrape, port)
    assert (value(text, "plexrl_leader"), value(text, "plexrl_leader_term")) == (1, 1)
    assert value(text, "plexrl_payload_quota_bytes") == 64 * 2**30
    stop.set()
    assert await running == 0
    with pytest.raises(ConnectionRefusedError):
        await asyncio.to_thread(scrape, port)


def test_the_first_certificate_of_a_chain_to_end_is_found() -> None:
    ca = trustme.CA()
    soon, late = datetime(2031, 2, 3, 4, 5, 6, tzinfo=UTC), datetime(2061, 2, 3, 4, 5, 6, tzinfo=UTC)
    # After 2049 the time is written in another form (RFC 5280, 4.1.2.5).
    pems = {when: ca.issue_cert("localhost", not_after=when).cert_chain_pems[0].bytes() for when in (soon, late)}
    for when, pem in pems.items():
        assert first_end("# Le contrôleur\n".encode() + pem) == when.timestamp()
    assert first_end(pems[late] + pems[soon]) == soon.timestamp()
