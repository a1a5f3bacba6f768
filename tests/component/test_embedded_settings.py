"""The data folder of an embedded cluster and what the cluster is told."""

import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from plexrl.cli.main import main
from plexrl_controller.embedded.process import EmbeddedError
from plexrl_controller.embedded.settings import PORTS, ClusterSettings, DataFolder


@pytest.fixture
def folder(tmp_path: Path) -> DataFolder:
    folder = DataFolder(tmp_path / "plexrl")
    folder.make()
    return folder


def test_settings_reach_the_supervisor_unchanged(tmp_path: Path) -> None:
    settings = ClusterSettings(
        data_dir=tmp_path, workers=3, catalogue_file=tmp_path / "c.toml", restart=False, worker_flags=("--label", "a=b")
    )
    assert ClusterSettings.from_json(settings.to_json()) == settings


def test_what_the_controller_alone_needs_to_know_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[ClusterSettings] = []

    def run(settings: ClusterSettings, say: Callable[[str], None], on_ready: Callable[[str], None]) -> int:
        told.append(settings)
        return 0

    monkeypatch.setattr("plexrl_controller.embedded.foreground.run", run)
    assert main(["up"]) == main(["up", "--metrics-listen", "127.0.0.1:7401"]) == 0
    assert [settings.controller_flags for settings in told] == [(), ("--metrics-listen", "127.0.0.1:7401")]


@pytest.mark.parametrize("wrong", [{"workers": 0}, {"threads": 0}, {"device": "tpu"}])
def test_settings_that_cannot_be_kept_are_refused(wrong: dict[str, int | str]) -> None:
    with pytest.raises(EmbeddedError, match=next(iter(wrong))):
        ClusterSettings(**wrong)  # type: ignore[arg-type]


def test_only_its_owner_may_enter_and_read_the_tokens(folder: DataFolder) -> None:
    assert folder.path.stat().st_mode & 0o777 == 0o700
    for token_file in (folder.token_file, folder.worker_token_file):
        assert token_file.stat().st_mode & 0o777 == 0o600
        assert len(token_file.read_text().strip()) >= 32
    assert folder.token_file.read_text() != folder.worker_token_file.read_text()


def test_tokens_stay_the_same(folder: DataFolder) -> None:
    token = folder.token_file.read_text()
    folder.make()
    assert folder.token_file.read_text() == token


def test_the_controller_keeps_its_address(folder: DataFolder) -> None:
    address = folder.controller_address()
    assert int(address.rpartition(":")[2]) in PORTS
    assert DataFolder(folder.path).controller_address() == address


def test_the_controller_moves_when_its_port_is_taken(folder: DataFolder) -> None:
    address = folder.controller_address()
    with socket.create_server(("127.0.0.1", int(address.rpartition(":")[2]))):
        moved = folder.controller_address()
    assert moved != address
    assert folder.controller_address() == moved


def test_one_folder_serves_one_cluster(folder: DataFolder) -> None:
    folder.lock()
    with pytest.raises(EmbeddedError, match=r"another `plexrl up` \(process \d+\) uses .*--data-dir"):
        DataFolder(folder.path).lock()
    folder.unlock()
    again = DataFolder(folder.path)
    again.lock()
    again.unlock()
