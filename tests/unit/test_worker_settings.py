"""The daemon's settings: flags over variables over defaults, and plain refusals."""

from pathlib import Path

import pytest

from plexrl_worker.errors import EngineFailed, SettingsError
from plexrl_worker.settings import parse_bytes, read, read_catalogue
from plexrl_worker.supervisor import device_environment


@pytest.fixture
def required(tmp_path: Path) -> list[str]:
    (tmp_path / "token").write_text("secret\n")
    return ["--controller", "127.0.0.1:7000", "--token-file", str(tmp_path / "token")]


def test_a_flag_wins_over_its_variable_and_a_variable_over_the_default(required: list[str]) -> None:
    environment = {"PLEXRL_WORKER_KV_CACHE_BYTES": "1G", "PLEXRL_WORKER_THREADS": "5", "PLEXRL_WORKER_LABEL": "a=1,b=2"}
    settings = read([*required, "--kv-cache-bytes", "64M", "--label", "c=3"], environment)
    assert (settings.kv_cache_bytes, settings.threads) == (64 * 2**20, 5)
    assert settings.labels == {"a": "1", "b": "2", "c": "3"}
    assert settings.token == "secret"


def test_a_variable_is_held_to_the_choices_of_its_flag(required: list[str]) -> None:
    with pytest.raises(SettingsError, match="--engine 'torch': want vllm or fake"):
        read(required, {"PLEXRL_WORKER_ENGINE": "torch"})


def test_everything_can_come_from_the_environment(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret")
    environment = {
        "PLEXRL_WORKER_CONTROLLER": "localhost:7000",
        "PLEXRL_WORKER_TOKEN_FILE": str(tmp_path / "token"),
        "PLEXRL_WORKER_STATE_DIR": str(tmp_path / "state"),
    }
    settings = read([], environment)
    assert settings.checkpoint_dir == tmp_path / "state" / "checkpoints"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--listen", "0.0.0.0:7001"],
        ["--listen", "no-port"],
        ["--controller", "controller.example:7000"],
        ["--device", "gpu"],
        ["--threads", "0"],
        ["--name", "a/b"],
        ["--label", "zone"],
        ["--label", "zone=a b"],
        ["--device-state-bytes", "0"],
        ["--hang-timeout-s", "0"],
        ["--advertise", "no-port"],
        ["--tls-cert", "cert.pem"],
        ["--catalogue-file", "/nonexistent.toml"],
    ],
    ids=" ".join,
)
def test_what_cannot_be_honoured_is_refused_by_name(required: list[str], arguments: list[str]) -> None:
    with pytest.raises(SettingsError) as caught:
        read([*required, *arguments], {})
    assert arguments[0].removesuffix("-cert") in caught.value.message or "TLS needs all of" in caught.value.message


@pytest.mark.parametrize(("text", "value"), [("1", 1), ("2K", 2048), ("3MiB", 3 * 2**20), ("1 GB", 2**30)])
def test_byte_counts(text: str, value: int) -> None:
    assert parse_bytes(text, "--x") == value


@pytest.mark.parametrize("text", ["", "-1", "1.5G", "G", "0", "1P"])
def test_what_is_no_byte_count(text: str) -> None:
    with pytest.raises(SettingsError):
        parse_bytes(text, "--x")


def test_a_catalogue_maps_names_to_directories_that_are_models(tmp_path: Path) -> None:
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    (tmp_path / "models" / "tiny" / "config.json").write_text("{}")
    file = tmp_path / "catalogue.toml"
    file.write_text('tiny = "models/tiny"\n')
    assert read_catalogue(file) == {"tiny": (tmp_path / "models" / "tiny").resolve()}
    file.write_text('other = "models"\n')
    with pytest.raises(SettingsError, match=r"no config\.json"):
        read_catalogue(file)


@pytest.mark.parametrize(
    ("device", "visible", "shown"),
    [
        ("cpu", "3", ""),
        ("cuda:2", None, "2"),
        # What the unit plexrl-worker@3 sets: the one device that the daemon sees, which is number 0 to it.
        ("cuda:0", "3", "3"),
        ("cuda:1", "4,GPU-abc", "GPU-abc"),
    ],
)
def test_an_engine_sees_its_device_among_those_that_the_daemon_sees(
    device: str, visible: str | None, shown: str
) -> None:
    assert device_environment(device, visible) == {"CUDA_VISIBLE_DEVICES": shown}


def test_a_device_that_the_daemon_does_not_see_is_refused() -> None:
    with pytest.raises(EngineFailed, match="shows 1 device"):
        device_environment("cuda:1", "3")
