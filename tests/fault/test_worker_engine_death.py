"""Engine children that die, hang or lie: what is reported, what survives, and that the next call works.

The daemon runs in this process; its engine children are real processes, killed with SIGKILL.
"""

import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from plexrl.v1 import types_pb2 as t
from plexrl.v1 import worker_pb2 as w
from tests.support.worker_daemon import (
    STATE_BYTES,
    Cluster,
    call,
    cluster,
    deploy,
    fake_config,
    forward_backward,
    generate,
    load,
    new_checkpoint_id,
    optim_step,
    reason,
    save,
    score,
    scores,
    swap,
    sync,
    tiers,
    train,
)


def once(directory: Path, function: str, fault: str, **more: Any) -> tuple[Path, str]:
    """A config whose engine fails in a function once, when the flag file is there; engines of their own by salt."""
    flag = directory / f"{function}-{fault}"
    return flag, fake_config({"function": function, "fault": fault, "flag_file": str(flag), **more}, salt=1)


def engine_of(status: w.WorkerStatus, model_id: str) -> int:
    return next(engine.pid for engine in status.engines if model_id in engine.model_ids)


async def killed(c: Cluster, model_id: str) -> w.Report:
    """Kills a model's engine with SIGKILL while no order runs; returns the report that no order caused."""
    os.kill(engine_of(await c.status(), model_id), signal.SIGKILL)
    return await c.orders.report(lambda report: report.order_id == 0)


async def with_bystander(c: Cluster, config_json: str) -> list[float]:
    """A trained and parked bystander (its scores), and the model "m1" on the device in an engine of its own."""
    await c.orders.ok(deploy=deploy("bystander"))
    await c.orders.ok(swap_weights=swap("bystander"))
    last = await train(c.orders, "bystander", first=1)
    await c.orders.ok(run_call=call("bystander", forward_backward(), last + 1))
    expected = await scores(c.orders, "bystander", last + 2)
    await c.orders.ok(deploy=deploy("m1", config_json=config_json))
    await c.orders.ok(swap_weights=swap("m1", "bystander"))
    return expected


async def bystander_is_whole(c: Cluster, expected: list[float]) -> None:
    """Its weights and its accumulated gradient are as they were, bit for bit, and it trains on."""
    await c.orders.ok(swap_weights=swap("bystander", "m1"))
    applied = next(d.applied_sequence for d in (await c.status()).deployments if d.model_id == "bystander")
    assert await scores(c.orders, "bystander", applied + 1) == expected
    await c.orders.ok(run_call=call("bystander", optim_step(), applied + 2))


@pytest.mark.parametrize(
    ("function", "spec"),
    [
        ("generate", generate()),
        ("score", score()),
        ("forward_backward", forward_backward()),
        ("optim_step", optim_step()),
        ("sync", sync()),
        ("save", save()),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_an_engine_that_dies_in_a_call_costs_that_attempt_only(
    tmp_path: Path, function: str, spec: t.CallSpec
) -> None:
    """G04. Nothing had changed since the model was parked: its host copy is the truth, and the next attempt goes on."""
    flag, config_json = once(tmp_path, function, "crash")
    async with cluster(tmp_path) as c:
        expected = await with_bystander(c, config_json)
        first_pid = engine_of(await c.status(), "m1")
        flag.touch()
        sequence = 0 if function == "generate" else 1
        order = call("m1", spec, sequence, new_checkpoint_id=new_checkpoint_id())
        report = await c.orders.do(run_call=order)
        assert (reason(report), report.finished.error.code) == ("ENGINE_DIED", 14)
        (status,) = report.deployments
        assert not status.state_lost
        assert set(tiers(status).values()) == {(t.TIER_HOST, False)}
        assert report.intervals[0].kind == t.INTERVAL_KIND_BUSY

        await c.orders.ok(swap_weights=swap("m1"))
        order.call.attempt = 2
        await c.orders.ok(run_call=order)
        assert engine_of(await c.status(), "m1") != first_pid
        assert not psutil.pid_exists(first_pid) or psutil.Process(first_pid).status() == psutil.STATUS_ZOMBIE
        await bystander_is_whole(c, expected)


async def test_a_state_that_was_on_the_device_alone_is_lost_and_said_so_before_the_call_ends(tmp_path: Path) -> None:
    flag, config_json = once(tmp_path, "optim_step", "crash")
    async with cluster(tmp_path) as c:
        expected = await with_bystander(c, config_json)
        await c.orders.ok(run_call=call("m1", forward_backward(), 1))
        flag.touch()
        report = await c.orders.do(run_call=call("m1", optim_step(), 2))
        assert reason(report) == "ENGINE_DIED"
        (status,) = report.deployments
        assert (status.state_lost, status.applied_sequence) == (True, 1)
        assert set(tiers(status).values()) == {(t.TIER_ABSENT, False)}
        # Nothing of it is served.
        assert reason(await c.orders.do(run_call=call("m1", score(), 2))) == "STATE_LOST"
        await bystander_is_whole(c, expected)


async def test_a_lost_state_comes_back_from_a_checkpoint(tmp_path: Path) -> None:
    flag, config_json = once(tmp_path, "optim_step", "crash")
    async with cluster(tmp_path) as c:
        expected = await with_bystander(c, config_json)
        last = await train(c.orders, "m1", first=1)
        checkpoint_id = new_checkpoint_id()
        await c.orders.ok(run_call=call("m1", save(), last + 1, new_checkpoint_id=checkpoint_id))
        saved = await scores(c.orders, "m1", last + 2)
        flag.touch()
        report = await c.orders.do(run_call=call("m1", optim_step(), last + 3))
        assert report.deployments[0].state_lost
        report = await c.orders.ok(run_call=call("m1", load(checkpoint_id), last + 5, after_sequence=last + 2))
        assert not report.deployments[0].state_lost
        assert await scores(c.orders, "m1", last + 6) == saved
        await bystander_is_whole(c, expected)
        await c.orders.ok(swap_weights=swap("m1", "bystander"))
        assert await scores(c.orders, "m1", last + 7) == saved


async def test_an_idle_engine_that_dies_with_a_changed_state_is_told_without_an_order(tmp_path: Path) -> None:
    """G04."""
    async with cluster(tmp_path) as c:
        expected = await with_bystander(c, fake_config(salt=1))
        await train(c.orders, "m1", first=1)
        report = await killed(c, "m1")
        (status,) = report.deployments
        assert (status.model_id, status.state_lost) == ("m1", True)
        await bystander_is_whole(c, expected)


async def test_an_idle_engine_that_dies_takes_no_parked_model_along(tmp_path: Path) -> None:
    """Two models of one engine: the parked one is attached to the next child, bit-equal."""
    async with cluster(tmp_path) as c:
        for model_id in ("m1", "m2"):
            await c.orders.ok(deploy=deploy(model_id))
        await c.orders.ok(swap_weights=swap("m2"))
        last = await train(c.orders, "m2", first=1)
        expected = await scores(c.orders, "m2", last + 1)
        await c.orders.ok(swap_weights=swap("m1", "m2"))
        await train(c.orders, "m1", first=1)
        report = await killed(c, "m1")
        assert [d.model_id for d in report.deployments if d.state_lost] == ["m1"]
        await c.orders.ok(swap_weights=swap("m2"))
        assert await scores(c.orders, "m2", last + 2) == expected
        assert [engine.starts for engine in (await c.status()).engines] == [2]


async def test_an_engine_that_dies_while_it_parks_loses_its_model_and_the_load_goes_on(tmp_path: Path) -> None:
    """G12: what comes onto the device next is not to blame."""
    flag, config_json = once(tmp_path, "swap_out", "crash")
    async with cluster(tmp_path) as c:
        expected = await with_bystander(c, config_json)
        await train(c.orders, "m1", first=1)
        flag.touch()
        report = await c.orders.ok(swap_weights=swap("bystander", "m1"))
        assert {d.model_id: d.state_lost for d in report.deployments} == {"bystander": False, "m1": True}
        await bystander_is_whole(c, expected)


async def test_an_engine_that_dies_while_it_loads_keeps_the_parked_copy(tmp_path: Path) -> None:
    flag, config_json = once(tmp_path, "swap_in", "crash")
    async with cluster(tmp_path) as c:
        await with_bystander(c, config_json)
        last = await train(c.orders, "m1", first=1)
        trained = await scores(c.orders, "m1", last + 1)
        await c.orders.ok(swap_weights=swap("bystander", "m1"))
        flag.touch()
        assert reason(await c.orders.do(swap_weights=swap("m1", "bystander"))) == "ENGINE_DIED"
        await c.orders.ok(swap_weights=swap("m1"))
        assert await scores(c.orders, "m1", last + 2) == trained


@pytest.mark.parametrize("function", ["start", "initialize", "swap_out"])
async def test_an_engine_that_dies_in_a_deploy_fails_that_deploy_and_leaves_nothing(
    tmp_path: Path, function: str
) -> None:
    flag, config_json = once(tmp_path, function, "crash")
    async with cluster(tmp_path) as c:
        await c.orders.ok(deploy=deploy("m0"))
        await c.orders.ok(swap_weights=swap("m0"))
        flag.touch()
        report = await c.orders.do(deploy=deploy("m1", config_json=config_json))
        assert reason(report) == "ENGINE_DIED"
        # What was on the device is there again.
        await c.orders.ok(run_call=call("m0", score(), 1))
        status = await c.status()
        assert [d.model_id for d in status.deployments] == ["m0"]
        assert status.host_used_bytes < 2 * STATE_BYTES
        await c.orders.ok(deploy=deploy("m1", config_json=config_json))
        await c.orders.ok(swap_weights=swap("m1", "m0"))
        await c.orders.ok(run_call=call("m1", score(), 1))


async def test_an_engine_that_hangs_is_killed_and_its_call_ends(tmp_path: Path) -> None:
    """G03."""
    flag, config_json = once(tmp_path, "generate", "hang")
    async with cluster(tmp_path, hang_timeout_s=1.0) as c:
        expected = await with_bystander(c, config_json)
        pid = engine_of(await c.status(), "m1")
        flag.touch()
        report = await c.orders.do(run_call=call("m1", generate()))
        assert (reason(report), report.finished.error.code) == ("ENGINE_HUNG", 14)
        assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        await c.orders.ok(swap_weights=swap("m1"))
        await c.orders.ok(run_call=call("m1", generate()))
        await bystander_is_whole(c, expected)


async def test_an_engine_without_memory_says_so_and_lives_on(tmp_path: Path) -> None:
    flag, config_json = once(tmp_path, "forward_backward", "out_of_memory")
    async with cluster(tmp_path) as c:
        await with_bystander(c, config_json)
        pid = engine_of(await c.status(), "m1")
        flag.touch()
        report = await c.orders.do(run_call=call("m1", forward_backward(), 1))
        assert (reason(report), report.finished.error.code) == ("OUT_OF_MEMORY", 8)
        await c.orders.ok(run_call=call("m1", forward_backward(), 1))
        assert engine_of(await c.status(), "m1") == pid


@pytest.mark.parametrize("component", [0, 2, 3], ids=["train_weights", "optimizer", "rollout_weights"])
async def test_one_flipped_byte_of_a_parked_state_is_noticed_and_nothing_of_it_is_served(
    tmp_path: Path, component: int
) -> None:
    """G08."""
    async with cluster(tmp_path) as c:
        expected = await with_bystander(c, fake_config(salt=1))
        await train(c.orders, "m1", first=1)
        await c.orders.ok(swap_weights=swap("bystander", "m1"))
        deployment = c.daemon._host.deployment("m1")
        assert deployment.layout is not None
        place = deployment.layout.components[component]
        fd = c.daemon._host.tiers.image("m1").fd
        (byte,) = os.pread(fd, 1, place.offset + 5)
        os.pwrite(fd, bytes([byte ^ 1]), place.offset + 5)
        report = await c.orders.do(swap_weights=swap("m1", "bystander"))
        assert reason(report) == "HOST_STATE_CORRUPT"
        assert {d.model_id: d.state_lost for d in report.deployments}["m1"]
        assert reason(await c.orders.do(run_call=call("m1", score(), 4))) == "STATE_LOST"
        await bystander_is_whole(c, expected)
