"""TLS between client and controller: what comes from the environment, and what a handshake that fails says, at once."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

import plexrl
from tests.support.client import controller_fixture  # noqa: F401
from tests.support.fake_controller import FakeController

ISSUE = Path(__file__).parents[2] / "deploy" / "tls" / "issue.sh"

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is missing")


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ca.pem and a certificate that is for `localhost` alone."""
    folder = tmp_path_factory.mktemp("authority")
    subprocess.run([str(ISSUE), str(folder), "controller", "localhost"], check=True, capture_output=True)
    return folder


@pytest.fixture
def secure(authority: Path) -> Iterator[FakeController]:
    """A controller that speaks TLS alone."""
    pair = ((authority / "controller.key").read_bytes(), (authority / "controller.pem").read_bytes())
    controller = FakeController().start(grpc.ssl_server_credentials([pair]))
    yield controller
    controller.stop()


def test_endpoint_token_and_authority_come_from_the_environment(
    authority: Path, secure: FakeController, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text(f"{secure.token}\n")
    monkeypatch.setenv("PLEXRL_ENDPOINT", f"localhost:{secure.port}")
    monkeypatch.setenv("PLEXRL_TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.setenv("PLEXRL_TLS_CA", str(authority / "ca.pem"))
    with plexrl.connect() as cluster:
        assert cluster.endpoint == f"localhost:{secure.port}"


def test_a_certificate_that_does_not_hold_is_not_waited_for(
    authority: Path, secure: FakeController, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    subprocess.run([str(ISSUE), str(other), "controller", "localhost"], check=True, capture_output=True)
    with pytest.raises(plexrl.ConfigurationError, match=r"certificate of localhost.*does not hold before the CA file"):
        plexrl.connect(f"localhost:{secure.port}", secure.token, tls=other / "ca.pem")
    with pytest.raises(plexrl.ConfigurationError, match=r"does not hold before the system's authorities"):
        plexrl.connect(f"localhost:{secure.port}", secure.token, tls=True)
    with pytest.raises(plexrl.ConfigurationError, match="is for other names"):
        plexrl.connect(f"127.0.0.1:{secure.port}", secure.token, tls=authority / "ca.pem")


def test_clear_text_and_tls_meet_with_a_hint(
    authority: Path, secure: FakeController, controller: FakeController
) -> None:
    with pytest.raises(plexrl.ConfigurationError, match="does not speak TLS"):
        plexrl.connect(controller.endpoint, controller.token, tls=authority / "ca.pem")
    with pytest.raises(plexrl.Unavailable, match="PLEXRL_TLS_CA"):
        plexrl.connect(f"127.0.0.1:{secure.port}", secure.token, retry_for_s=0.0)


def test_an_authority_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("no certificate")
    with pytest.raises(plexrl.ConfigurationError, match="holds no certificate"):
        plexrl.connect("localhost:1", "secret", tls=tmp_path / "ca.pem")


def test_a_bundle_may_say_whose_its_certificates_are(authority: Path, secure: FakeController, tmp_path: Path) -> None:
    bundle = tmp_path / "bundle.pem"
    bundle.write_bytes("# Autorité de la grappe\n".encode() + (authority / "ca.pem").read_bytes())
    plexrl.connect(f"localhost:{secure.port}", secure.token, tls=bundle).close()
