"""The daemon as a process: killed, stopped, started twice; what it leaves and what it tells systemd."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from grpc import aio

from plexrl.v1 import worker_pb2 as w
from plexrl.v1 import worker_pb2_grpc
from plexrl_worker.supervisor import reap_orphans
from tests.support.worker_daemon import (
    METADATA,
    TOKEN,
    FakeRegistry,
    Orders,
    call,
    deploy,
    fake_config,
    forward_backward,
    generate,
    optim_step,
    reason,
    score,
    scores,
    serving,
    swap,
    train,
)

_START_LIMIT_S = 30.0


class DaemonProcess:
    """`python -m plexrl_worker` with the fake engine, registered at a registry of the test's."""

    def __init__(self, process: asyncio.subprocess.Process, registry: FakeRegistry) -> None:
        self.process = process
        self.registry = registry

    @property
    def pid(self) -> int:
        return self.process.pid

    async def wait(self, limit_s: float = 20.0) -> int:
        return await asyncio.wait_for(self.process.wait(), limit_s)

    @contextlib.asynccontextmanager
    async def orders(self) -> AsyncIterator[tuple[Orders, aio.Channel]]:
        async with aio.insecure_channel(self.registry.registered[-1].address) as channel:
            orders = Orders(channel, self.registry.incarnation)
            await orders.open()
            try:
                yield orders, channel
            finally:
                await orders.close()


async def start(directory: Path, controller: str, *extra: str, **environment: str) -> asyncio.subprocess.Process:
    token_file = directory / "token"
    token_file.write_text(TOKEN)
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "plexrl_worker", "--engine", "fake", "--controller", controller, "--name", "w0"),
        *("--token-file", str(token_file), "--state-dir", str(directory / "state"), *extra),
        env={**os.environ, **environment},
        stderr=asyncio.subprocess.PIPE,
    )


@contextlib.asynccontextmanager
async def registered(
    directory: Path, registry: FakeRegistry, controller: str, **environment: str
) -> AsyncIterator[DaemonProcess]:
    lives = registry.incarnation
    process = await start(directory, controller, **environment)
    drain = asyncio.create_task(process.stderr.read()) if process.stderr else None
    try:
        await registry.until(lambda: registry.incarnation > lives and registry.synchronized[-1:] != [])
        yield DaemonProcess(process, registry)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        if drain is not None:
            await drain


def lives(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def first_child(pid: int) -> int:
    """Waits until a process has one."""
    end_s = time.monotonic() + _START_LIMIT_S
    while not (children := psutil.Process(pid).children()):
        assert time.monotonic() < end_s
        time.sleep(0.01)
    return children[0].pid


def ends(pid: int) -> bool:
    """Whether a process ends soon."""
    end_s = time.monotonic() + 5.0
    while lives(pid) and time.monotonic() < end_s:
        time.sleep(0.01)
    return not lives(pid)


async def engine_pid(channel: aio.Channel) -> int:
    status = await worker_pb2_grpc.WorkerServiceStub(channel).GetStatus(w.GetStatusRequest(), metadata=METADATA)
    return status.engines[0].pid


async def test_sigterm_ends_daemon_and_engines_within_seconds_and_hands_back_every_call(tmp_path: Path) -> None:
    registry = FakeRegistry()
    async with (
        serving(registry) as address,
        registered(tmp_path, registry, address) as daemon,
        daemon.orders() as (orders, channel),
    ):
        slow = fake_config({"function": "generate", "fault": "slow", "delay_s": 60})
        await orders.ok(deploy=deploy("m1", config_json=slow))
        await orders.ok(swap_weights=swap("m1"))
        running = await orders.send(run_call=call("m1", generate()))
        queued = await orders.send(run_call=call("m1", score(), 1))
        await orders.report(lambda report: report.order_id == running and report.HasField("started"))
        pid = await engine_pid(channel)
        daemon.process.send_signal(signal.SIGTERM)
        for order_id in (running, queued):
            assert reason(await orders.finished(order_id)) == "SHUTTING_DOWN"
        assert await daemon.wait(10.0) == 0
        assert not lives(pid)


async def test_a_planned_restart_loses_nothing_and_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """Accumulated gradients included: nothing is replayed."""
    registry = FakeRegistry()
    async with serving(registry) as address:
        async with registered(tmp_path, registry, address) as daemon, daemon.orders() as (orders, _):
            for model_id in ("m1", "m2"):
                await orders.ok(deploy=deploy(model_id))
                await orders.ok(swap_weights=swap(model_id))
                await train(orders, model_id, first=1)
                await orders.ok(run_call=call(model_id, forward_backward(), 4))
            expected = await scores(orders, "m2", 5)
            daemon.process.send_signal(signal.SIGTERM)
            assert await daemon.wait(10.0) == 0
        async with registered(tmp_path, registry, address) as again, again.orders() as (orders, channel):
            status = await worker_pb2_grpc.WorkerServiceStub(channel).GetStatus(w.GetStatusRequest(), metadata=METADATA)
            kept = {
                d.model_id: (d.state_lost, d.host_image_sequence, d.host_image_weights_version)
                for d in status.deployments
            }
            assert kept == {"m1": (True, 4, 3), "m2": (True, 5, 3)}
            fields: dict[str, Any] = {"from_host_image": True, "host_image_sequence": 5, "applied_sequence": 5}
            report = await orders.ok(deploy=deploy("m2", **fields))
            assert report.finished.deployed.applied_sequence == 5
            await orders.ok(swap_weights=swap("m2"))
            assert await scores(orders, "m2", 6) == expected
            await orders.ok(run_call=call("m2", optim_step(), 7))
            assert await scores(orders, "m2", 8) != expected
            # What was kept is not what is wanted, or was built otherwise: the controller is told, and has other copies.
            wrong: dict[str, Any] = {"from_host_image": True, "host_image_sequence": 3, "applied_sequence": 3}
            assert reason(await orders.do(deploy=deploy("m1", **wrong))) == "STATE_LOST"
            await orders.ok(deploy=deploy("m1"))
            assert list((tmp_path / "state" / "parked").iterdir()) == []


async def test_what_was_kept_of_a_model_that_belongs_elsewhere_is_dropped(tmp_path: Path) -> None:
    registry = FakeRegistry()
    async with serving(registry) as address:
        async with registered(tmp_path, registry, address) as daemon, daemon.orders() as (orders, _):
            await orders.ok(deploy=deploy("m1"))
            daemon.process.send_signal(signal.SIGTERM)
            assert await daemon.wait(10.0) == 0
        parked = tmp_path / "state" / "parked"
        assert len(list(parked.iterdir())) == 2
        registry.model_ids = []
        async with registered(tmp_path, registry, address):
            # The model is forgotten before its files are gone.
            await registry.until(lambda: not registry.synchronized[-1].deployments and not list(parked.iterdir()))


async def test_a_second_sigterm_ends_the_daemon_at_once(tmp_path: Path) -> None:
    registry = FakeRegistry()
    async with (
        serving(registry) as address,
        registered(tmp_path, registry, address) as daemon,
        daemon.orders() as (orders, channel),
    ):
        hang = fake_config({"function": "generate", "fault": "hang"})
        await orders.ok(deploy=deploy("m1", config_json=hang))
        await orders.ok(swap_weights=swap("m1"))
        running = await orders.send(run_call=call("m1", generate()))
        queued = await orders.send(run_call=call("m1", score(), 1))
        await orders.report(lambda report: report.order_id == running and report.HasField("started"))
        pid = await engine_pid(channel)
        daemon.process.send_signal(signal.SIGTERM)
        assert reason(await orders.finished(queued)) == "SHUTTING_DOWN"
        assert reason(await orders.do(deploy=deploy("m2"))) == "SHUTTING_DOWN"
        daemon.process.send_signal(signal.SIGTERM)
        assert await daemon.wait(3.0) == 1
        assert await asyncio.to_thread(ends, pid)


async def test_after_kill_nine_of_the_daemon_no_engine_is_left_and_the_next_life_works(tmp_path: Path) -> None:
    """G10."""
    registry = FakeRegistry()
    async with serving(registry) as address:
        async with registered(tmp_path, registry, address) as daemon, daemon.orders() as (orders, channel):
            hang = fake_config({"function": "generate", "fault": "hang"})
            await orders.ok(deploy=deploy("m1", config_json=hang))
            await orders.ok(swap_weights=swap("m1"))
            await orders.send(run_call=call("m1", generate()))
            pid = await engine_pid(channel)
            directories = list((tmp_path / "state" / "engines").iterdir())
            assert len(directories) == 1
            daemon.process.kill()
            await daemon.wait()
        async with registered(tmp_path, registry, address) as daemon, daemon.orders() as (orders, _):
            assert not lives(pid)
            assert not directories[0].exists()
            assert registry.incarnation == 2
            await orders.ok(deploy=deploy("m1"))
            await orders.ok(swap_weights=swap("m1"))
            await orders.ok(run_call=call("m1", score(), 1))


async def test_a_second_daemon_on_a_state_directory_is_refused_with_the_reason(tmp_path: Path) -> None:
    registry = FakeRegistry()
    async with serving(registry) as address, registered(tmp_path, registry, address):
        second = await start(tmp_path, address)
        _, error = await asyncio.wait_for(second.communicate(), _START_LIMIT_S)
        assert second.returncode == 2
        assert b"another worker daemon runs there" in error


async def test_systemd_hears_ready_only_once_registered_then_the_watchdog_then_stopping(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.setblocking(False)
        registry = FakeRegistry()
        environment = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "200000"}
        async with serving(registry) as address, registered(tmp_path, registry, address, **environment) as daemon:
            loop = asyncio.get_running_loop()

            async def hear(wanted: str) -> list[str]:
                heard: list[str] = []
                async with asyncio.timeout(10):
                    while wanted not in heard:
                        heard.append((await loop.sock_recv(listener, 256)).decode())
                return heard

            assert "STOPPING=1" not in await hear("READY=1")
            await hear("WATCHDOG=1")
            await hear("WATCHDOG=1")
            daemon.process.send_signal(signal.SIGTERM)
            await hear("STOPPING=1")
            assert await daemon.wait() == 0


async def test_an_engine_killed_at_its_birth_with_its_daemon_is_reaped_by_the_next_life(tmp_path: Path) -> None:
    """G10. Seconds pass between the child's birth and its first answer; its directory is there before it."""
    registry = FakeRegistry()
    async with serving(registry) as address:
        async with registered(tmp_path, registry, address) as daemon, daemon.orders() as (orders, _):
            slow = fake_config({"function": "start", "fault": "slow", "delay_s": 60})
            await orders.send(deploy=deploy("m1", config_json=slow))
            engines = tmp_path / "state" / "engines"
            child = await asyncio.to_thread(first_child, daemon.pid)
            daemon.process.kill()
            await daemon.wait()
        async with registered(tmp_path, registry, address):
            assert not lives(child)
            assert list(engines.iterdir()) == []


def test_reaping_ends_exactly_what_an_earlier_life_left(tmp_path: Path) -> None:
    """G10: also where a child's own death signal did not reach it. Others' processes are left alone."""
    ours, torn = tmp_path / "plexrl-engine-1", tmp_path / "plexrl-engine-2"
    for directory in (ours, torn):
        (directory / "plexrl-engine-scratch").mkdir(parents=True)
    sleep = "import time; time.sleep(60)"
    orphan = subprocess.Popen([sys.executable, "-c", sleep, "--directory", str(ours)])
    stranger = subprocess.Popen([sys.executable, "-c", sleep, "--directory", f"{ours}7"])
    try:
        assert reap_orphans(tmp_path) == [orphan.pid]
        assert not lives(orphan.pid)
        assert stranger.poll() is None
        assert list(tmp_path.iterdir()) == []
    finally:
        for process in (stranger, orphan):
            process.kill()
            process.wait()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--listen", "0.0.0.0:0"), "--listen 0.0.0.0:0 is beyond loopback"),
        (("--controller", "10.0.0.1:7000"), "--controller 10.0.0.1:7000 is beyond loopback"),
        (("--kv-cache-bytes", "lots"), "--kv-cache-bytes 'lots'"),
        (("--token-file", "/nonexistent"), "--token-file /nonexistent"),
    ],
)
async def test_settings_that_cannot_be_honoured_end_with_a_plain_sentence(
    tmp_path: Path, arguments: tuple[str, ...], complaint: str
) -> None:
    process = await start(tmp_path, "127.0.0.1:1", *arguments)
    _, error = await asyncio.wait_for(process.communicate(), _START_LIMIT_S)
    assert process.returncode == 2
    assert complaint in error.decode()
    assert "Traceback" not in error.decode()


async def test_a_daemon_killed_in_a_call_is_a_new_life_that_refuses_the_old_ones_orders(tmp_path: Path) -> None:
    registry = FakeRegistry()
    async with serving(registry) as address:
        async with registered(tmp_path, registry, address) as daemon:
            daemon.process.kill()
            await daemon.wait()
        async with registered(tmp_path, registry, address) as daemon, daemon.orders() as (orders, _):
            stale = orders.order(deploy=deploy("m1"))
            stale.worker_incarnation = 1
            await orders._send([stale])
            assert reason(await orders.finished(stale.order_id)) == "STALE_INCARNATION"
