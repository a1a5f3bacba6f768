"""The daemon's settings: flags, `PLEXRL_WORKER_*` variables and their defaults, read once into one frozen record."""

import argparse
import os
import re
import socket
import ssl
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from plexrl_worker.errors import SettingsError

ENGINES = ("vllm", "fake")
NAME_PATTERN = re.compile(r"[A-Za-z0-9._-]{1,64}")
_ENVIRONMENT_PREFIX = "PLEXRL_WORKER_"
_BYTE_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
LOOPBACK_HOSTS = frozenset({"127.0.0.1", "localhost", "[::1]", "::1"})
_WILDCARD_HOSTS = frozenset({"0.0.0.0", "[::]", "::"})


@dataclass(frozen=True)
class TlsFiles:
    """PEM files of mutual TLS: this worker's certificate and key, and the authority that signs its peers."""

    certificate: Path
    key: Path
    authority: Path


@dataclass(frozen=True)
class WorkerSettings:
    """Everything a worker daemon is told from outside."""

    controller: str
    token: str
    name: str
    listen: str
    advertise: str
    device: str
    device_state_bytes: int
    host_state_bytes: int
    disk_state_bytes: int
    residue_bytes: int
    kv_cache_bytes: int
    threads: int
    state_dir: Path
    checkpoint_dir: Path
    snapshot_bytes: int
    catalogue: Mapping[str, Path]
    labels: Mapping[str, str]
    engine: str
    engine_start_timeout_s: float
    hang_timeout_s: float
    stop_grace_s: float
    tls: TlsFiles | None


def read(arguments: Sequence[str], environment: Mapping[str, str] = os.environ) -> WorkerSettings:
    """Reads flags, then the environment, then defaults. Raises SettingsError; `--help` exits by itself."""
    options = _parser(environment).parse_args(arguments)
    listen_host = _host(options.listen, "--listen")
    tls = _tls_files(options)
    if tls is None and listen_host not in LOOPBACK_HOSTS:
        raise SettingsError(
            f"--listen {options.listen} is beyond loopback, where orders and tokens need TLS: give --tls-cert, "
            "--tls-key and --tls-ca, or listen on 127.0.0.1"
        )
    if tls is None and _host(options.controller, "--controller") not in LOOPBACK_HOSTS:
        raise SettingsError(
            f"--controller {options.controller} is beyond loopback, where the token needs TLS: give --tls-cert, "
            "--tls-key and --tls-ca"
        )
    if listen_host in _WILDCARD_HOSTS and not options.advertise:
        raise SettingsError(
            f"--listen {options.listen} has no address that the controller could call: give --advertise HOST:PORT"
        )
    if options.advertise:
        _host(options.advertise, "--advertise")
    # argparse holds a flag to its choices, and lets a default, which is what a variable makes, be anything.
    if options.engine not in ENGINES:
        raise SettingsError(f"--engine {options.engine!r}: want {' or '.join(ENGINES)}")
    if not NAME_PATTERN.fullmatch(options.name):
        raise SettingsError(f"--name {options.name!r}: want 1-64 characters of [A-Za-z0-9._-]")
    if options.device != "cpu" and not re.fullmatch(r"cuda:\d+", options.device):
        raise SettingsError(f"--device {options.device!r}: want cpu or cuda:N")
    if options.threads < 1:
        raise SettingsError(f"--threads {options.threads}: want at least 1")
    state_dir = Path(options.state_dir).absolute()
    return WorkerSettings(
        controller=options.controller,
        token=_read_token(Path(options.token_file)),
        name=options.name,
        listen=options.listen,
        advertise=options.advertise,
        device=options.device,
        device_state_bytes=parse_bytes(options.device_state_bytes, "--device-state-bytes"),
        host_state_bytes=parse_bytes(options.host_state_bytes, "--host-state-bytes"),
        disk_state_bytes=0
        if options.disk_state_bytes == "0"
        else parse_bytes(options.disk_state_bytes, "--disk-state-bytes"),
        residue_bytes=parse_bytes(options.residue_bytes, "--residue-bytes"),
        kv_cache_bytes=parse_bytes(options.kv_cache_bytes, "--kv-cache-bytes"),
        threads=options.threads,
        state_dir=state_dir,
        checkpoint_dir=Path(options.checkpoint_dir).absolute() if options.checkpoint_dir else state_dir / "checkpoints",
        snapshot_bytes=parse_bytes(options.snapshot_bytes, "--snapshot-bytes"),
        catalogue=read_catalogue(Path(options.catalogue_file)) if options.catalogue_file else {},
        labels=_labels(options.label),
        engine=options.engine,
        engine_start_timeout_s=_positive(options.engine_start_timeout_s, "--engine-start-timeout-s"),
        stop_grace_s=_not_negative(options.stop_grace_s, "--stop-grace-s"),
        hang_timeout_s=_positive(options.hang_timeout_s, "--hang-timeout-s"),
        tls=tls,
    )


def parse_bytes(text: str, name: str) -> int:
    """A byte count: a plain integer, or one with K, M, G or T (powers of 1024; "iB" may follow).

    >>> parse_bytes("512M", "--kv-cache-bytes")
    536870912
    """
    match = re.fullmatch(r"(\d+)\s*([KMGT]?)(?:iB|B)?", text.strip())
    if match is None or int(match[1]) == 0:
        raise SettingsError(f"{name} {text!r}: want a positive byte count such as 268435456, 256M or 2GiB")
    return int(match[1]) * _BYTE_UNITS[match[2]]


def read_catalogue(file: Path) -> dict[str, Path]:
    """Reads a TOML file of `name = "directory"` lines; relative directories are taken from the file's own folder."""
    try:
        entries = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SettingsError(f"--catalogue-file {file}: {error}") from error
    catalogue: dict[str, Path] = {}
    for name, value in entries.items():
        if not NAME_PATTERN.fullmatch(name) or not isinstance(value, str):
            raise SettingsError(f'--catalogue-file {file}: entry {name!r}: want NAME = "DIRECTORY"')
        directory = (file.absolute().parent / value).resolve()
        if not (directory / "config.json").is_file():
            raise SettingsError(f"--catalogue-file {file}: entry {name!r}: {directory} has no config.json")
        catalogue[name] = directory
    return catalogue


def _parser(environment: Mapping[str, str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m plexrl_worker",
        description="The PlexRL worker daemon: registers one device with a controller and executes its orders there.",
        epilog="Every flag can be given as a variable instead: --kv-cache-bytes is PLEXRL_WORKER_KV_CACHE_BYTES. "
        "A flag wins over its variable. Byte counts take K, M, G, T. Commas separate the labels of the variable.",
    )

    def add(flag: str, default: str | None, text: str, **extra: object) -> None:
        variable = _ENVIRONMENT_PREFIX + flag.removeprefix("--").replace("-", "_").upper()
        value = environment.get(variable, default)
        suffix = f" (default: {default})" if default else ""
        parser.add_argument(flag, default=value, required=value is None, help=text + suffix, **extra)  # type: ignore[arg-type]

    add("--controller", None, "host:port of the controller", metavar="HOST:PORT")
    add("--token-file", None, "file that holds the cluster's worker token (mode 0600)", metavar="FILE")
    add("--name", socket.gethostname()[:64], "stable name of this worker, unique in the cluster")
    add("--listen", "127.0.0.1:0", "address to serve on; beyond loopback only with TLS", metavar="HOST:PORT")
    add("--advertise", "", "address that the controller calls, where it is not that of --listen", metavar="HOST:PORT")
    add("--device", "cpu", "cpu or cuda:N")
    add("--device-state-bytes", "4G", "model state that the device may hold at a time, KV cache apart", metavar="BYTES")
    add("--host-state-bytes", "8G", "parked model state that this worker's host memory may hold", metavar="BYTES")
    add("--disk-state-bytes", "64G", "parked model state that the state directory may hold; 0: none", metavar="BYTES")
    add("--residue-bytes", "1G", "an engine that keeps more than this after a swap is replaced", metavar="BYTES")
    add("--kv-cache-bytes", "256M", "KV cache of an engine", metavar="BYTES")
    add("--threads", "2", "compute threads of an engine; bit-equal replay needs the same number", type=int)
    add("--state-dir", "plexrl-worker", "private directory of this daemon; one daemon at a time", metavar="DIR")
    add("--checkpoint-dir", "", "where checkpoints are committed (default: STATE_DIR/checkpoints)", metavar="DIR")
    add("--snapshot-bytes", "100G", "automatic snapshots that CHECKPOINT_DIR may hold, of all workers", metavar="BYTES")
    add("--catalogue-file", "", 'TOML file of NAME = "DIRECTORY": the model bases that jobs may name', metavar="FILE")
    add("--engine", "vllm", "vllm, or fake: no model at all, for tests of the cluster", choices=ENGINES)
    add("--engine-start-timeout-s", "300", "longest start of an engine", type=float, metavar="SECONDS")
    add("--hang-timeout-s", "300", "an engine without progress for this long is killed", type=float, metavar="SECONDS")
    add("--stop-grace-s", "20", "longest wait of SIGTERM for running steps and parking", type=float, metavar="SECONDS")
    add("--tls-cert", "", "PEM certificate of this worker", metavar="FILE")
    add("--tls-key", "", "PEM key of that certificate", metavar="FILE")
    add("--tls-ca", "", "PEM certificates of the authority that signs the controller's", metavar="FILE")
    labels = environment.get(f"{_ENVIRONMENT_PREFIX}LABEL", "")
    parser.add_argument(
        "--label",
        action="append",
        metavar="KEY=VALUE",
        help="label for affinity, repeatable",
        default=[label for label in labels.split(",") if label],
    )
    return parser


def _host(address: str, flag: str) -> str:
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdigit() or int(port) > 65535:
        raise SettingsError(f"{flag} {address!r}: want HOST:PORT")
    return host


def _tls_files(options: argparse.Namespace) -> TlsFiles | None:
    names = {"--tls-cert": options.tls_cert, "--tls-key": options.tls_key, "--tls-ca": options.tls_ca}
    missing = [flag for flag, value in names.items() if not value]
    if len(missing) == len(names):
        return None
    if missing:
        raise SettingsError(f"TLS needs all of {', '.join(names)}; missing: {', '.join(missing)}")
    for flag, value in names.items():
        if not Path(value).is_file():
            raise SettingsError(f"{flag} {value}: no such file")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # With a password at hand OpenSSL does not ask the terminal for one.
        context.load_cert_chain(options.tls_cert, options.tls_key, password="")
    except OSError as error:
        raise SettingsError(
            f"--tls-cert {options.tls_cert}, --tls-key {options.tls_key}: want a PEM certificate and its key: {error}"
        ) from error
    try:
        context.load_verify_locations(options.tls_ca)
    except OSError as error:
        raise SettingsError(f"--tls-ca {options.tls_ca}: want PEM certificates: {error}") from error
    return TlsFiles(Path(options.tls_cert), Path(options.tls_key), Path(options.tls_ca))


def _read_token(file: Path) -> str:
    try:
        token = file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"--token-file {file}: {error}") from error
    if not token:
        raise SettingsError(f"--token-file {file}: is empty")
    return token


def _labels(items: Sequence[str]) -> dict[str, str]:
    labels: dict[str, str] = {}
    for item in items:
        key, equals, value = item.partition("=")
        if not equals or not NAME_PATTERN.fullmatch(key) or not NAME_PATTERN.fullmatch(value):
            raise SettingsError(f"--label {item!r}: want KEY=VALUE, each of 1-64 characters of [A-Za-z0-9._-]")
        labels[key] = value
    return labels


def _not_negative(value: float, flag: str) -> float:
    if not value >= 0:
        raise SettingsError(f"{flag} {value}: want 0 or more")
    return float(value)


def _positive(value: float, flag: str) -> float:
    if not value > 0:
        raise SettingsError(f"{flag} {value}: want more than 0")
    return float(value)
