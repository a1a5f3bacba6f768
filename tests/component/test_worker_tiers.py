"""The tiers of a worker's parked states: budgets, the disk and back, prefetching, damage, engines that keep memory.

The daemon runs in this process; its engine child is a process of its own, with the fake engine.
"""

import asyncio
import contextlib
import hashlib
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from plexrl.v1 import types_pb2 as t
from plexrl.v1 import worker_pb2 as w
from plexrl_worker.parked_files import ParkedFiles
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
    optim_step,
    reason,
    scores,
    swap,
    tiers,
    train,
)

# Room in host memory for this many states.
TWO_STATES = 2 * STATE_BYTES + 4096


def worker(directory: Path, **changes: Any) -> contextlib.AbstractAsyncContextManager[Cluster]:
    """A worker whose device holds two states."""
    return cluster(directory, **({"device_state_bytes": 2 * STATE_BYTES} | changes))


def prefetch(model_id: str, tier: t.Tier.ValueType = t.TIER_HOST) -> w.PrefetchOrder:
    return w.PrefetchOrder(model_id=model_id, tier=tier)


async def tier_of(c: Cluster, model_id: str) -> int:
    (tier,) = {tier for d in (await c.status()).deployments if d.model_id == model_id for tier, _ in tiers(d).values()}
    return tier


async def trained(c: Cluster, *model_ids: str) -> dict[str, list[float]]:
    """Deploys models, trains each a different way, leaves a gradient in each; their scores."""
    expected = {}
    for seed, model_id in enumerate(model_ids):
        await c.orders.ok(deploy=deploy(model_id, seed=seed))
        await c.orders.ok(swap_weights=swap(model_id))
        last = await train(c.orders, model_id, first=1, steps=seed + 1)
        await c.orders.ok(run_call=call(model_id, forward_backward(), last + 1))
        expected[model_id] = await scores(c.orders, model_id, last + 2)
    return expected


async def applied(c: Cluster, model_id: str) -> int:
    return next(d.applied_sequence for d in (await c.status()).deployments if d.model_id == model_id)


async def test_states_beyond_the_host_budget_lie_on_disk_and_come_back_bit_for_bit(tmp_path: Path) -> None:
    """G02: gradients included. Least recently used first; no tier ever holds more than its budget."""
    async with worker(tmp_path, host_state_bytes=TWO_STATES) as c:
        models = ["m0", "m1", "m2", "m3"]
        expected = await trained(c, *models)
        assert [await tier_of(c, model_id) for model_id in models[:2]] == [t.TIER_DISK, t.TIER_DISK]
        for _ in range(2):
            for model_id in models:
                await c.orders.ok(swap_weights=swap(model_id))
                assert await scores(c.orders, model_id, await applied(c, model_id) + 1) == expected[model_id]
                status = await c.status()
                assert status.host_used_bytes <= TWO_STATES
                assert status.disk_used_bytes <= len(models) * STATE_BYTES
        status = await c.status()
        assert status.tiers.loads_from_disk >= 6
        # The accumulated gradient is still there: a step moves the weights.
        await c.orders.ok(run_call=call("m3", optim_step(), await applied(c, "m3") + 1))
        assert await scores(c.orders, "m3", await applied(c, "m3") + 1) != expected["m3"]


async def test_a_clean_copy_is_not_written_twice(tmp_path: Path) -> None:
    async with worker(tmp_path, host_state_bytes=TWO_STATES) as c:
        await trained(c, "m0", "m1", "m2")
        for model_id in ("m0", "m1", "m2"):
            await c.orders.ok(swap_weights=swap(model_id))
        await c.orders.ok(swap_weights=swap("", "m2"))
        await quiet(c)
        before = (await c.status()).tiers
        for model_id in ("m0", "m1", "m2", "m0", "m1", "m2"):
            await c.orders.ok(swap_weights=swap(model_id))
        after = (await c.status()).tiers
        assert after.spills >= before.spills + 4
        assert after.disk_writes == before.disk_writes


async def quiet(c: Cluster) -> None:
    """Waits until the background has written what it will."""
    writes = -1
    while writes != (written := (await c.status()).tiers.disk_writes):
        writes = written
        await asyncio.to_thread(time.sleep, 0.05)


async def test_dirty_states_are_written_ahead_of_need_where_not_all_fit(tmp_path: Path) -> None:
    async with worker(tmp_path, host_state_bytes=TWO_STATES) as c:
        await trained(c, "m0", "m1", "m2")
        await c.orders.ok(swap_weights=swap("", "m2"))
        await quiet(c)
        status = await c.status()
        assert status.tiers.disk_writes >= 3
        # Both are in host memory, and on disk as well: making room costs no write now.
        assert await tier_of(c, "m1") == await tier_of(c, "m2") == t.TIER_HOST
        writes = status.tiers.disk_writes
        await c.orders.ok(swap_weights=swap("m0"))
        assert (await c.status()).tiers.disk_writes == writes


async def test_nothing_is_written_where_all_fit_host_memory(tmp_path: Path) -> None:
    async with worker(tmp_path) as c:
        await trained(c, "m0", "m1", "m2")
        await c.orders.ok(swap_weights=swap("", "m2"))
        assert (await c.status()).tiers.disk_writes == 0


async def test_a_model_that_no_tier_can_hold_is_refused_and_nothing_is_lost(tmp_path: Path) -> None:
    budgets = {"host_state_bytes": TWO_STATES, "disk_state_bytes": 3 * STATE_BYTES}
    async with worker(tmp_path, **budgets) as c:
        expected = await trained(c, "m0", "m1", "m2")
        report = await c.orders.do(deploy=deploy("m3"))
        assert reason(report) == "OVER_BUDGET"
        assert f"holds {TWO_STATES} in host memory and {3 * STATE_BYTES} on disk" in report.finished.error.message
        assert {d.model_id for d in (await c.status()).deployments} == {"m0", "m1", "m2"}
        for model_id, values in expected.items():
            await c.orders.ok(swap_weights=swap(model_id))
            assert await scores(c.orders, model_id, await applied(c, model_id) + 1) == values
        await c.orders.ok(drop=w.DropOrder(model_id="m0"))
        await c.orders.ok(deploy=deploy("m3"))


async def test_a_state_damaged_on_disk_is_never_served_and_the_model_can_be_restored(tmp_path: Path) -> None:
    """G08."""
    async with worker(tmp_path, host_state_bytes=TWO_STATES) as c:
        expected = await trained(c, "m0", "m1", "m2", "m3")
        assert await tier_of(c, "m0") == t.TIER_DISK
        (file,) = [p for p in (tmp_path / "state" / "parked").glob("*.state") if p.name[:32] == name_of("m0")]
        flip(file)
        report = await c.orders.do(swap_weights=swap("m0"))
        assert reason(report) == "HOST_STATE_CORRUPT"
        (status,) = [d for d in report.deployments if d.model_id == "m0"]
        assert status.state_lost
        assert set(tiers(status).values()) == {(t.TIER_ABSENT, False)}
        last = await applied(c, "m0")
        assert reason(await c.orders.do(run_call=call("m0", generate()))) == "STATE_LOST"
        await c.orders.ok(run_call=call("m0", load(), last + 1))
        await c.orders.ok(swap_weights=swap("m1"))
        assert await scores(c.orders, "m1", await applied(c, "m1") + 1) == expected["m1"]
        await c.orders.ok(swap_weights=swap("m0"))


def name_of(model_id: str) -> str:
    return hashlib.sha256(model_id.encode()).hexdigest()[:32]


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


async def test_a_bit_flipped_in_host_memory_is_found_before_the_first_token(tmp_path: Path) -> None:
    """G08."""
    async with worker(tmp_path) as c:
        expected = await trained(c, "m0", "m1")
        fd = c.daemon._host.tiers.image("m0").fd
        byte = os.pread(fd, 1, 100)[0]
        os.pwrite(fd, bytes([byte ^ 16]), 100)
        report = await c.orders.do(swap_weights=swap("m0"))
        assert reason(report) == "HOST_STATE_CORRUPT"
        assert reason(await c.orders.do(run_call=call("m0", generate()))) == "STATE_LOST"
        await c.orders.ok(swap_weights=swap("m1"))
        assert await scores(c.orders, "m1", await applied(c, "m1") + 1) == expected["m1"]


# Prefetching.


async def test_a_prefetch_brings_a_state_up_beside_a_running_call(tmp_path: Path) -> None:
    slow = fake_config({"function": "generate", "fault": "slow", "delay_s": 3})
    async with worker(tmp_path, host_state_bytes=TWO_STATES) as c:
        expected = await trained(c, "m0", "m1")
        await c.orders.ok(deploy=deploy("busy", config_json=slow))
        await c.orders.ok(swap_weights=swap("busy"))
        assert await tier_of(c, "m0") == t.TIER_DISK
        running = await c.orders.send(run_call=call("busy", generate()))
        await c.orders.report(lambda report: report.order_id == running and report.HasField("started"))
        await c.orders.ok(prefetch=prefetch("m0"))
        assert await tier_of(c, "m0") == t.TIER_HOST
        assert not any(r.order_id == running and r.HasField("finished") for r in c.orders.reports)
        await c.orders.finished(running)
        await c.orders.ok(swap_weights=swap("m0"))
        counters = (await c.status()).tiers
        assert (counters.prefetch_hits, counters.loads_from_disk) == (1, 0)
        assert await scores(c.orders, "m0", await applied(c, "m0") + 1) == expected["m0"]


async def test_a_prefetch_goes_into_spare_device_memory_where_the_budget_holds_both(tmp_path: Path) -> None:
    async with worker(tmp_path) as c:
        expected = await trained(c, "m0", "m1")
        await c.orders.ok(prefetch=prefetch("m0", t.TIER_DEVICE))
        status = await c.status()
        assert status.device_used_bytes == 2 * STATE_BYTES
        report = await c.orders.ok(swap_weights=swap("m0", "m1"))
        arrived = next(i for i in report.intervals if i.kind == t.INTERVAL_KIND_SWAP_IN)
        assert arrived.moved_bytes == 0
        counters = (await c.status()).tiers
        assert (counters.prefetch_hits, counters.loads_from_device) == (1, 1)
        assert await scores(c.orders, "m0", await applied(c, "m0") + 1) == expected["m0"]
        await c.orders.ok(run_call=call("m0", optim_step(), await applied(c, "m0") + 1))
        changed = await scores(c.orders, "m0", await applied(c, "m0") + 1)
        await c.orders.ok(swap_weights=swap("m1", "m0"))
        assert await scores(c.orders, "m1", await applied(c, "m1") + 1) == expected["m1"]
        await c.orders.ok(swap_weights=swap("m0", "m1"))
        assert await scores(c.orders, "m0", await applied(c, "m0") + 1) == changed


async def test_a_prefetch_that_the_device_has_no_room_for_is_refused_and_the_state_stays_parked(tmp_path: Path) -> None:
    async with worker(tmp_path, device_state_bytes=3 * STATE_BYTES) as c:
        expected = await trained(c, "m0", "m1", "m2", "m3")
        await c.orders.ok(prefetch=prefetch("m1", t.TIER_DEVICE))
        await c.orders.ok(prefetch=prefetch("m2", t.TIER_DEVICE))
        assert reason(await c.orders.do(prefetch=prefetch("m0", t.TIER_DEVICE))) == "OVER_BUDGET"
        assert await tier_of(c, "m0") == t.TIER_HOST
        await c.orders.ok(swap_weights=swap("m0"))
        assert await scores(c.orders, "m0", await applied(c, "m0") + 1) == expected["m0"]


async def test_a_prefetched_state_makes_way_for_the_model_that_came_instead(tmp_path: Path) -> None:
    async with worker(tmp_path) as c:
        expected = await trained(c, "m0", "m1")
        await c.orders.ok(deploy=deploy("m2", config_json=fake_config(salt=1)))
        await c.orders.ok(prefetch=prefetch("m0", t.TIER_DEVICE))
        # An engine of its own: the device changes hands, and what was prefetched into the former one's part goes.
        await c.orders.ok(swap_weights=swap("m2", "m1"))
        status = await c.status()
        assert status.tiers.prefetch_misses == 1
        assert status.device_used_bytes == STATE_BYTES
        await c.orders.ok(swap_weights=swap("m0", "m2"))
        assert await scores(c.orders, "m0", await applied(c, "m0") + 1) == expected["m0"]


@pytest.mark.parametrize("model_id", ["nowhere", "lost"])
async def test_a_prefetch_of_what_is_not_parked_is_refused(tmp_path: Path, model_id: str) -> None:
    async with worker(tmp_path) as c:
        await c.orders.ok(deploy=deploy("lost"))
        os.pwrite(c.daemon._host.tiers.image("lost").fd, b"\xff" * 8, 64)
        assert reason(await c.orders.do(swap_weights=swap("lost"))) == "HOST_STATE_CORRUPT"
        wanted = {"nowhere": "NOT_DEPLOYED", "lost": "STATE_LOST"}[model_id]
        assert reason(await c.orders.do(prefetch=prefetch(model_id))) == wanted


# Residue.


async def test_an_engine_that_keeps_memory_after_a_swap_is_replaced_and_no_state_is_lost(tmp_path: Path) -> None:
    """G09. Two models in one leaking engine: both are parked, and go on in the new one."""
    leaking = fake_config({"function": "generate", "fault": "leak", "leak_bytes": 24 * 2**20})
    async with worker(tmp_path, residue_bytes=32 * 2**20) as c:
        expected = {}
        for model_id in ("m0", "m1"):
            await c.orders.ok(deploy=deploy(model_id, config_json=leaking))
            await c.orders.ok(swap_weights=swap(model_id))
            await train(c.orders, model_id, first=1)
            expected[model_id] = await scores(c.orders, model_id, 4)
        pids = []
        for _ in range(4):
            for model_id in ("m0", "m1"):
                await c.orders.ok(swap_weights=swap(model_id))
                await c.orders.ok(run_call=call(model_id, generate(), weights_version=3))
                assert await scores(c.orders, model_id, await applied(c, model_id) + 1) == expected[model_id]
                (engine,) = (await c.status()).engines
                pids.append(engine.pid)
                # Two leaks are within the bound; the third one ends the engine when its model leaves the device.
                assert engine.resident_bytes < 250 * 2**20
        assert len(set(pids)) >= 3
        assert (await c.status()).tiers.engines_replaced == len(set(pids)) - 1


async def test_a_swap_waits_for_the_prefetch_that_fills_the_same_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G08: what is half read is not used."""
    async with worker(tmp_path, host_state_bytes=TWO_STATES) as c:
        expected = await trained(c, "m0", "m1", "m2")
        await c.orders.ok(swap_weights=swap("", "m2"))
        await quiet(c)
        assert await tier_of(c, "m0") == t.TIER_DISK
        begun = threading.Event()
        read, places = ParkedFiles.read, c.daemon._host.tiers

        def read_once_wanted(self: ParkedFiles, copy: Any, memory_fd: int, stop: Any) -> None:
            begun.set()
            limit_s = time.monotonic() + 5
            while not places._wanted and time.monotonic() < limit_s:
                time.sleep(0.002)
            assert places._wanted, "no swap came while the prefetch was under way"
            read(self, copy, memory_fd, stop)

        monkeypatch.setattr(ParkedFiles, "read", read_once_wanted)
        prefetching = await c.orders.send(prefetch=prefetch("m0"))
        assert await asyncio.to_thread(begun.wait, 20)
        await c.orders.ok(swap_weights=swap("m0"))
        assert await scores(c.orders, "m0", await applied(c, "m0") + 1) == expected["m0"]
        assert not reason(await c.orders.finished(prefetching))
