"""A worker's registration: a life begins, is renewed, ends, and the next begins with nothing of it."""

import asyncio
from pathlib import Path

import pytest

from plexrl.v1 import registry_pb2 as r
from plexrl.v1 import types_pb2 as t
from plexrl_worker.daemon import WorkerDaemon
from tests.support.worker_daemon import (
    TOKEN,
    FakeRegistry,
    Orders,
    call,
    cluster,
    deploy,
    fake_config,
    generate,
    score,
    serving,
    settings_in,
    swap,
)


async def test_a_worker_says_what_it_is_and_can(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        request = c.registry.registered[0]
        assert (request.name, dict(request.labels)) == ("w0", {"zone": "a"})
        assert request.address == c.daemon.server.address
        assert t.LOSS_GRPO in request.capabilities.losses
        assert request.capabilities.device_state_bytes == c.daemon.settings.device_state_bytes
        assert c.registry.tokens == {f"Bearer {TOKEN}"}


async def test_a_worker_waits_for_a_controller_that_is_not_there_yet(tmp_path: Path) -> None:
    registry = FakeRegistry()
    async with serving(registry) as address:
        pass
    daemon = WorkerDaemon(settings_in(tmp_path, controller=address))
    running = asyncio.create_task(daemon.run())
    await asyncio.sleep(0.3)
    assert not running.done()
    server_port = int(address.rpartition(":")[2])
    async with serving(registry, server_port):
        await registry.until(lambda: bool(registry.synchronized))
    daemon.stop()
    await running


async def test_what_a_worker_holds_and_does_goes_up(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        slow = fake_config({"function": "generate", "fault": "slow", "delay_s": 20})
        await c.orders.ok(deploy=deploy("m1", config_json=slow))
        await c.orders.ok(swap_weights=swap("m1"))
        running = call("m1", generate())
        await c.orders.send(run_call=running)

        def told() -> bool:
            last = c.registry.synchronized[-1]
            return running.call in last.attempts and [d.model_id for d in last.deployments] == ["m1"]

        await c.registry.until(told)
        assert c.registry.synchronized[-1].resident_bytes > 10 * 2**20
        await c.orders.ok(abort={"call": running.call})


async def test_models_that_do_not_belong_here_are_dropped(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        for model_id in ("m1", "m2"):
            await c.orders.ok(deploy=deploy(model_id))
        c.registry.model_ids = ["m2"]
        await c.registry.until(lambda: [d.model_id for d in c.registry.synchronized[-1].deployments] == ["m2"])


async def test_after_a_lost_lease_a_new_life_begins_with_nothing_of_the_old(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        slow = fake_config({"function": "generate", "fault": "slow", "delay_s": 20})
        await c.orders.ok(deploy=deploy("m1", config_json=slow))
        await c.orders.ok(swap_weights=swap("m1"))
        await c.orders.send(run_call=call("m1", generate()))
        first_life = c.registry.incarnation
        c.registry.end_life = True
        await c.registry.until(lambda: c.registry.incarnation > first_life)
        old, new = c.orders, Orders(c.channel, c.registry.incarnation)
        await new.open()
        await old.ended.wait()
        status = await c.status()
        assert (list(status.deployments), list(status.attempts), status.host_used_bytes) == ([], [], 0)
        assert status.worker_incarnation == first_life + 1
        await new.ok(deploy=deploy("m1"))
        await new.ok(swap_weights=swap("m1"))
        await new.ok(run_call=call("m1", score(), 1))
        assert all(report.worker_incarnation == first_life + 1 for report in new.reports)
        await new.close()


async def test_a_newer_term_in_an_answer_makes_older_orders_stale(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        c.registry.leader_term = 5
        await c.registry.until(lambda: c.daemon.status().leader_term == 5)
        assert c.registry.incarnation == 1
        with pytest.raises(ConnectionError, match="a controller of term 5 leads, the order is of term 1"):
            await c.orders.do(deploy=deploy("m1"))


async def test_an_answer_of_an_older_term_changes_nothing(tmp_path: Path) -> None:
    """G19: a controller that was replaced and does not know it must not have the models of the next one dropped."""
    async with cluster(tmp_path) as c:
        await c.orders.ok(deploy=deploy("m1"))
        c.registry.leader_term = 5
        await c.registry.until(lambda: c.daemon.status().leader_term == 5)
        c.registry.leader_term, c.registry.model_ids = 4, []
        heard = len(c.registry.synchronized)
        await c.registry.until(lambda: len(c.registry.synchronized) > heard + 3)
        assert [d.model_id for d in (await c.status()).deployments] == ["m1"]


async def test_a_worker_that_may_go_stops_by_itself(tmp_path: Path) -> None:
    registry = FakeRegistry(directive=r.WORKER_DIRECTIVE_STOP)
    async with serving(registry) as address:
        await asyncio.wait_for(WorkerDaemon(settings_in(tmp_path, controller=address)).run(), 10)
