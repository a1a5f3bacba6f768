"""What is wrong with a start is said in a sentence, and before the start takes anything from who runs already."""

import argparse
import asyncio
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from plexrl_controller.__main__ import main as controller_main
from plexrl_controller.api.auth import token_sha256
from plexrl_controller.domain.errors import Unavailable
from plexrl_controller.domain.ids import Tenant, TokenId
from plexrl_controller.domain.records import Token
from plexrl_controller.domain.states import Role
from plexrl_controller.payloads.by_url import open_payloads, require_payloads
from plexrl_controller.server import ensure_tokens, lead, refuse_revoked
from plexrl_controller.settings import add_serve_arguments, read_secret, serve_settings
from plexrl_controller.store.memory import MemoryStore
from plexrl_controller.store.writer import GroupWriter
from plexrl_worker.daemon import WorkerDaemon
from plexrl_worker.errors import SettingsError
from plexrl_worker.settings import read as worker_settings
from tests.support.worker_daemon import settings_in

ISSUE = Path(__file__).parents[2] / "deploy" / "tls" / "issue.sh"


@pytest.fixture
def required(tmp_path: Path) -> list[str]:
    (tmp_path / "token").write_text("t" * 64)
    return [
        *("--database-url", "postgresql+asyncpg://plexrl@127.0.0.1/plexrl"),
        *("--payload-url", f"file://{tmp_path}/payloads", "--worker-token-file", str(tmp_path / "token")),
    ]


def check(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser()
    add_serve_arguments(parser, {})
    serve_settings(parser.parse_args(arguments))


@pytest.mark.parametrize(
    "arguments",
    [
        ["--listen", "127.0.0.1"],
        ["--listen", "127.0.0.1:http"],
        ["--listen", "127.0.0.1:70000"],
        ["--listen", "0.0.0.0:7400"],
        ["--log-level", "loud"],
    ],
    ids=" ".join,
)
def test_what_the_controller_cannot_honour_is_refused_by_name(required: list[str], arguments: list[str]) -> None:
    check(required)
    with pytest.raises(ValueError, match=f"{arguments[0]} {arguments[1]}: "):
        check([*required, *arguments])


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is missing")
def test_a_key_of_another_certificate_is_told_from_a_port_that_is_taken(required: list[str], tmp_path: Path) -> None:
    for name in ("one", "other"):
        subprocess.run([str(ISSUE), str(tmp_path), name, "localhost"], check=True, capture_output=True)
    cert, key, other, ca = (str(tmp_path / name) for name in ("one.pem", "one.key", "other.key", "ca.pem"))
    worker = ["--controller", "localhost:1", "--token-file", str(tmp_path / "token")]
    good = ["--tls-cert", cert, "--tls-key", key, "--tls-ca", ca]
    check([*required, *good])
    worker_settings([*worker, *good], {})
    for changes, named in ((["--tls-key", other], "one.pem.*other.key"), (["--tls-ca", key], "tls-ca.*one.key")):
        with pytest.raises(ValueError, match=named):
            check([*required, *good, *changes])
        with pytest.raises(SettingsError, match=named):
            worker_settings([*worker, *good, *changes], {})


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is missing")
def test_with_tls_a_worker_listens_beyond_loopback_at_an_address_that_can_be_called(
    required: list[str], tmp_path: Path
) -> None:
    subprocess.run([str(ISSUE), str(tmp_path), "one", "localhost"], check=True, capture_output=True)
    files = {"cert": "one.pem", "key": "one.key", "ca": "ca.pem"}
    tls = [word for flag, name in files.items() for word in (f"--tls-{flag}", str(tmp_path / name))]
    worker = ["--controller", "localhost:1", "--token-file", str(tmp_path / "token"), "--listen", "0.0.0.0:7001"]
    with pytest.raises(SettingsError, match="--advertise"):
        worker_settings([*worker, *tls], {})
    with pytest.raises(SettingsError, match="beyond loopback"):
        worker_settings([*worker, "--advertise", "10.0.0.2:7001"], {})
    settings = worker_settings([*worker, *tls, "--advertise", "10.0.0.2:7001"], {})
    assert settings.advertise == "10.0.0.2:7001"


def test_a_controller_on_a_taken_port_never_asks_for_the_lead(
    required: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def right_schema(url: str) -> None: ...

    async def lead(self: object, holder: str) -> int:
        raise AssertionError("a start that cannot serve took the lead")

    # The log is set up for a process, and would outlive this test.
    monkeypatch.setattr("plexrl_controller.__main__._log_json", lambda level: None)
    monkeypatch.setattr("plexrl_migrations.require_head", right_schema)
    monkeypatch.setattr("plexrl_controller.store.postgres.PostgresStore.acquire_term", lead)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        assert controller_main(["serve", *required, "--listen", listen]) == 1
    assert capsys.readouterr().err == f"plexrl-controller: --listen {listen}: cannot be bound: Address already in use\n"


async def test_a_worker_does_not_share_a_taken_port(tmp_path: Path) -> None:
    first = WorkerDaemon(settings_in(tmp_path / "first"))
    await first.server.start()
    try:
        with pytest.raises(SettingsError, match="the port is taken"):
            WorkerDaemon(settings_in(tmp_path / "second", listen=first.server.address))
    finally:
        await first.server.stop(0)


@pytest.mark.parametrize("content", [b"", b"short", b"a" * 16 + b" " + b"b" * 16, b"\xff" * 32])
def test_what_is_no_token_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "token").write_bytes(content)
    with pytest.raises(ValueError, match="a token is"):
        read_secret(tmp_path / "token")


async def test_a_new_file_revokes_the_token_that_it_replaces() -> None:
    store = MemoryStore()
    writer = GroupWriter(store, await store.acquire_term("test"))

    async def valid() -> set[str]:
        return {token.token_sha256 for token in (await store.load()).tokens if not token.revoked}

    first, second, worker = "a" * 32, "b" * 32, "w" * 32
    await ensure_tokens(store, writer, worker, first)
    assert await valid() == {token_sha256(first), token_sha256(worker)}
    await ensure_tokens(store, writer, worker, second)
    assert await valid() == {token_sha256(second), token_sha256(worker)}
    await ensure_tokens(store, writer, worker, second)
    assert await valid() == {token_sha256(second), token_sha256(worker)}
    # A controller that was given no such file knows nothing of who may be admin.
    await ensure_tokens(store, writer, worker, None)
    assert await valid() == {token_sha256(second), token_sha256(worker)}
    refuse_revoked(await store.tokens(), worker, second)
    with pytest.raises(ValueError, match="was revoked"):
        refuse_revoked(await store.tokens(), worker, first)
    await writer.close()


async def test_a_start_that_finds_out_later_that_it_cannot_serve_leaves_the_leaders_uploads_alone(
    tmp_path: Path,
) -> None:
    url, begun, come = f"file://{tmp_path}/payloads", asyncio.Event(), asyncio.Event()
    await require_payloads(url, None)
    leader = await open_payloads(url, None, 10**9)

    async def upload() -> AsyncIterator[bytes]:
        yield b"a" * 100_000
        begun.set()
        await come.wait()
        yield b"b" * 100_000

    stored = asyncio.create_task(leader.put(Tenant("default"), upload()))
    await begun.wait()
    assert list((tmp_path / "payloads" / "partial").iterdir())
    await require_payloads(url, None)
    come.set()
    assert (await stored).size_bytes == 200_000
    (tmp_path / "file").touch()
    with pytest.raises(Unavailable, match="no directory that this user can write"):
        await require_payloads(f"file://{tmp_path}/file/payloads", None)


async def test_a_revoked_token_is_found_before_the_lead_is_taken(required: list[str]) -> None:
    class Seen(MemoryStore):
        async def acquire_term(self, holder: str) -> int:
            raise AssertionError("a start that cannot serve took the lead")

        async def tokens(self) -> Sequence[Token]:
            sha256 = token_sha256("t" * 64)
            return [Token(TokenId(sha256[:32]), sha256, "worker-1", Role.WORKER, None, revoked=True)]

    parser = argparse.ArgumentParser()
    add_serve_arguments(parser, {})
    settings = serve_settings(parser.parse_args([*required, "--listen", "127.0.0.1:0"]))
    with pytest.raises(ValueError, match="was revoked"):
        await lead(settings, Seen())
