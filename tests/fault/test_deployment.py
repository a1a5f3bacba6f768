"""The deployment guide at work: its settings start a controller and a worker over TLS, and both tell systemd."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from plexrl.v1 import admin_pb2, admin_pb2_grpc
from plexrl_controller.embedded.postgres import EmbeddedPostgres

DEPLOY = Path(__file__).parents[2] / "deploy"
HOST = "localhost"
ADMIN_TOKEN = "a" * 64
WORKER_TOKEN = "b" * 64


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def assignments(text: str) -> dict[str, str]:
    """NAME=VALUE lines of an environment file."""
    return dict(line.split("=", 1) for line in text.splitlines() if re.match(r"[A-Z_]+=", line))


def unit_environment(unit: str, specifiers: Mapping[str, str]) -> dict[str, str]:
    """The Environment= lines of a unit, its specifiers filled in."""
    lines = re.findall(r"^Environment=(.*)$", (DEPLOY / "systemd" / unit).read_text(), re.MULTILINE)
    found = assignments("\n".join(lines))
    for specifier, value in specifiers.items():
        found = {name: text.replace(specifier, value) for name, text in found.items()}
    return found


@pytest.fixture
def machine(tmp_path: Path, postgres_cluster: EmbeddedPostgres) -> dict[str, str]:
    """What the guide has an operator put into place; here below a folder, on loopback, on a CPU."""
    for name in ("tls", "credentials", "state"):
        (tmp_path / name).mkdir()
    (tmp_path / "credentials" / "admin-token").write_text(ADMIN_TOKEN)
    (tmp_path / "credentials" / "worker-token").write_text(WORKER_TOKEN)
    for name in ("controller", "worker"):
        command = [str(DEPLOY / "tls" / "issue.sh"), str(tmp_path / "tls"), name, HOST, "127.0.0.1"]
        subprocess.run(command, check=True, capture_output=True)
    url = postgres_cluster.create_database("deployment")
    return {"folder": str(tmp_path), "database_url": url, "port": str(free_port()), "worker_port": str(free_port())}


def controller_environment(machine: Mapping[str, str]) -> dict[str, str]:
    folder = machine["folder"]
    environment = assignments((DEPLOY / "examples" / "controller.env").read_text())
    environment |= {
        "PLEXRL_CONTROLLER_DATABASE_URL": machine["database_url"],
        "PLEXRL_CONTROLLER_LISTEN": environment["PLEXRL_CONTROLLER_LISTEN"].replace("7400", machine["port"]),
    }
    environment |= unit_environment(
        "plexrl-controller.service", {"%S": f"{folder}/state", "%d": f"{folder}/credentials"}
    )
    return {name: value.replace("/etc/plexrl/tls", f"{folder}/tls") for name, value in environment.items()}


def worker_environment(machine: Mapping[str, str]) -> dict[str, str]:
    folder = machine["folder"]
    given = {"%i": "0", "%l": "node", "%H": HOST, "%S": f"{folder}/state", "%d": f"{folder}/credentials", "%C": folder}
    environment = unit_environment("plexrl-worker@.service", given)
    environment |= assignments((DEPLOY / "examples" / "worker.env").read_text())
    # The catalogue of the example names a folder of its machine.
    del environment["PLEXRL_WORKER_CATALOGUE_FILE"]
    environment |= {
        "PLEXRL_WORKER_CONTROLLER": f"{HOST}:{machine['port']}",
        "PLEXRL_WORKER_LISTEN": f"0.0.0.0:{machine['worker_port']}",
        "PLEXRL_WORKER_ADVERTISE": f"{HOST}:{machine['worker_port']}",
        "PLEXRL_WORKER_DEVICE": "cpu",
        "PLEXRL_WORKER_ENGINE": "fake",
    }
    return {name: value.replace("/etc/plexrl/tls", f"{folder}/tls") for name, value in environment.items()}


@contextmanager
def service(name: str, command: list[str], environment: Mapping[str, str], folder: Path) -> Iterator[None]:
    """Runs a command as systemd would a Type=notify service: goes on at READY=1, and ends it with SIGTERM, cleanly."""
    address = folder / f"{name}.notify"
    log = folder / f"{name}.log"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener, log.open("wb") as output:
        listener.bind(str(address))
        listener.settimeout(1)
        process = subprocess.Popen(
            command,
            env={**os.environ, **environment, "NOTIFY_SOCKET": str(address)},
            cwd="/",
            stdout=output,
            stderr=output,
        )
        try:
            deadline = time.monotonic() + 60
            ready = False
            while not ready:
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                try:
                    ready = b"READY=1" in listener.recv(4096).split(b"\n")
                except TimeoutError:
                    continue
            yield
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0, log.read_text()
        finally:
            process.kill()
            process.wait()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is missing")
def test_the_guide_leads_to_a_ready_worker_over_tls(machine: dict[str, str]) -> None:
    folder = Path(machine["folder"])
    controller = controller_environment(machine)
    program = [sys.executable, "-m", "plexrl_controller"]
    subprocess.run([*program, "migrate"], check=True, env={**os.environ, **controller}, cwd="/")
    worker = [sys.executable, "-m", "plexrl_worker"]
    with (
        service("controller", [*program, "serve"], controller, folder),
        service("worker", worker, worker_environment(machine), folder),
    ):
        address = f"{HOST}:{machine['port']}"
        credentials = grpc.ssl_channel_credentials((folder / "tls" / "ca.pem").read_bytes())
        with grpc.secure_channel(address, credentials) as channel:
            admin = admin_pb2_grpc.AdminServiceStub(channel)
            metadata = (("authorization", f"Bearer {ADMIN_TOKEN}"),)
            deadline = time.monotonic() + 30
            workers: list[admin_pb2.Worker] = []
            while not any(worker.state == admin_pb2.WORKER_STATE_READY for worker in workers):
                assert time.monotonic() < deadline, (folder / "worker.log").read_text()
                time.sleep(0.1)
                workers = list(admin.ListWorkers(admin_pb2.ListWorkersRequest(), metadata=metadata).workers)
        assert [(worker.name, dict(worker.labels)) for worker in workers] == [
            ("node-gpu0", {"gpu": "h200", "zone": "a"})
        ]
        # Clear text gets nothing from a server beyond loopback.
        with grpc.insecure_channel(address) as channel:
            admin = admin_pb2_grpc.AdminServiceStub(channel)
            with pytest.raises(grpc.RpcError):
                admin.ListWorkers(admin_pb2.ListWorkersRequest(), metadata=metadata, timeout=3)


@pytest.mark.parametrize(
    ("program", "prefix", "places"),
    [
        ("plexrl_controller serve", "PLEXRL_CONTROLLER_", ["plexrl-controller.service", "controller.env"]),
        ("plexrl_worker", "PLEXRL_WORKER_", ["plexrl-worker@.service", "worker.env"]),
    ],
)
def test_every_variable_of_units_and_examples_is_a_flag(program: str, prefix: str, places: list[str]) -> None:
    told = subprocess.run(
        [sys.executable, "-m", *program.split(), "--help"], capture_output=True, text=True, check=True, env=os.environ
    ).stdout
    for place in places:
        text = next(DEPLOY.glob(f"*/{place}")).read_text()
        named = re.findall(rf"^(?:Environment=)?{prefix}([A-Z_]+)=", text, re.MULTILINE)
        assert named
        for name in named:
            assert f"--{name.lower().replace('_', '-')}" in told
