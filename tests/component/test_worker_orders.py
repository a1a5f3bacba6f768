"""Orders against a daemon with the fake engine: deploy, swap, calls, fences, once-only, reports."""

import gc
from pathlib import Path

import pytest
from grpc import StatusCode

from plexrl.v1 import model_pb2 as m
from plexrl.v1 import registry_pb2 as r
from plexrl.v1 import types_pb2 as t
from plexrl.v1 import worker_pb2 as w
from plexrl_worker.work import Work
from tests.support.worker_daemon import (
    METADATA,
    STATE_BYTES,
    Cluster,
    Orders,
    call,
    cluster,
    deploy,
    fake_config,
    forward_backward,
    generate,
    optim_step,
    reason,
    score,
    scores,
    swap,
    sync,
    tiers,
    train,
)

SLOW_GENERATE = {"function": "generate", "fault": "slow", "delay_s": 20}


async def begun(orders: Orders, order_id: int) -> None:
    await orders.report(lambda report: report.order_id == order_id and report.HasField("started"))


async def with_model(c: Cluster, config_json: str | None = None) -> None:
    await c.orders.ok(deploy=deploy("m1", config_json=config_json))
    await c.orders.ok(swap_weights=swap("m1"))


async def test_deploy_parks_the_model_and_says_what_it_built(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        report = await c.orders.ok(deploy=deploy("m1"))
        assert report.finished.deployed.state_bytes == STATE_BYTES
        assert not report.finished.deployed.has_tokenizer
        (status,) = report.deployments
        assert set(tiers(status).values()) == {(t.TIER_HOST, False)}
        assert (await c.status()).device_used_bytes == 0


async def test_a_job_trains_and_samples(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        await with_model(c)
        before = await scores(c.orders, "m1", 1)
        last = await train(c.orders, "m1", first=2)
        assert await scores(c.orders, "m1", last + 1) != before
        report = await c.orders.ok(run_call=call("m1", generate(), weights_version=last))
        assert report.finished.result.generate.weights_version == last
        assert len(report.finished.result.generate.finish_reasons) == 4
        (interval,) = report.intervals
        assert interval.kind == t.INTERVAL_KIND_BUSY
        assert (interval.job_id, interval.model_id, interval.worker_id) == ("job-of-m1", "m1", "worker-1")
        assert interval.call_kind == t.CALL_KIND_GENERATE
        assert interval.start_unix_ns < interval.end_unix_ns


async def test_states_come_back_bit_equal_after_the_other_model_had_the_device(tmp_path: Path) -> None:
    """G02: gradients too: half a step, swap, other job, swap back, the other half equals the undisturbed run."""
    async with cluster(tmp_path) as c:
        for model_id in ("shared", "alone"):
            await c.orders.ok(deploy=deploy(model_id))
        await c.orders.ok(deploy=deploy("other", config_json=fake_config(salt=1)))

        await c.orders.ok(swap_weights=swap("alone"))
        for sequence, spec in enumerate((forward_backward(), forward_backward(), optim_step()), start=1):
            await c.orders.ok(run_call=call("alone", spec, sequence))
        undisturbed = await scores(c.orders, "alone", 4)

        await c.orders.ok(swap_weights=swap("shared", "alone"))
        await c.orders.ok(run_call=call("shared", forward_backward(), 1))
        await c.orders.ok(swap_weights=swap("other", "shared"))
        await train(c.orders, "other", first=1)
        report = await c.orders.ok(swap_weights=swap("shared", "other"))
        assert [i.kind for i in report.intervals] == [t.INTERVAL_KIND_SWAP_OUT, t.INTERVAL_KIND_SWAP_IN]
        assert [i.model_id for i in report.intervals] == ["other", "shared"]
        assert all(i.moved_bytes > 0 for i in report.intervals)
        await c.orders.ok(run_call=call("shared", forward_backward(), 2))
        await c.orders.ok(run_call=call("shared", optim_step(), 3))
        assert await scores(c.orders, "shared", 4) == undisturbed


async def test_only_what_changed_is_copied_when_a_model_leaves(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        await with_model(c)
        report = await c.orders.ok(swap_weights=swap("", "m1"))
        assert report.intervals[0].moved_bytes == 0

        await c.orders.ok(swap_weights=swap("m1"))
        report = await c.orders.ok(run_call=call("m1", forward_backward(), 1))
        (status,) = report.deployments
        dirty = {name for name, (_, is_dirty) in tiers(status).items() if is_dirty}
        assert dirty == {"gradients"}
        report = await c.orders.ok(swap_weights=swap("", "m1"))
        assert report.intervals[0].moved_bytes == STATE_BYTES // 5


async def test_a_load_that_would_exceed_the_budget_is_refused_with_the_numbers(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        await with_model(c)
        await c.orders.ok(deploy=deploy("m2"))
        report = await c.orders.do(swap_weights=swap("m2"))
        assert reason(report) == "OVER_BUDGET"
        assert str(STATE_BYTES) in report.finished.error.message
        # Nothing moved: the first model still runs.
        await c.orders.ok(run_call=call("m1", score(), 1))


async def test_models_too_large_for_device_or_host_are_refused_and_leave_nothing(tmp_path: Path) -> None:
    async with cluster(tmp_path, device_state_bytes=STATE_BYTES - 1) as c:
        report = await c.orders.do(deploy=deploy("m1"))
        assert reason(report) == "OVER_BUDGET"
        status = await c.status()
        assert (list(status.deployments), status.host_used_bytes) == ([], 0)
    async with cluster(tmp_path, host_state_bytes=STATE_BYTES * 3 // 2, disk_state_bytes=0) as c:
        await c.orders.ok(deploy=deploy("m1"))
        assert reason(await c.orders.do(deploy=deploy("m2"))) == "OVER_BUDGET"
        await c.orders.ok(drop=w.DropOrder(model_id="m1"))
        await c.orders.ok(deploy=deploy("m2"))


async def test_with_room_for_two_models_a_load_still_parks_the_other_and_says_so(tmp_path: Path) -> None:
    async with cluster(tmp_path, device_state_bytes=STATE_BYTES * 3) as c:
        await with_model(c)
        await c.orders.ok(deploy=deploy("m2", config_json=fake_config(salt=1)))
        report = await c.orders.ok(swap_weights=swap("m2"))
        on_host = {status.model_id for status in report.deployments if (t.TIER_HOST, False) in tiers(status).values()}
        assert on_host == {"m1"}
        assert reason(await c.orders.do(run_call=call("m1", score(), 1))) == "NOT_RESIDENT"


async def test_deploying_leaves_on_the_device_what_was_there(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        await with_model(c)
        last = await train(c.orders, "m1", first=1)
        before = await scores(c.orders, "m1", last + 1)
        await c.orders.ok(deploy=deploy("m2", config_json=fake_config(salt=1)))
        assert await scores(c.orders, "m1", last + 2) == before


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        (call("m1", score(), 2), "SEQUENCE_MISMATCH"),
        (call("m1", score(), 0), "SEQUENCE_MISMATCH"),
        (call("m1", generate(), weights_version=3), "VERSION_GONE"),
        (call("m2", score(), 1), "NOT_DEPLOYED"),
        (call("m1", t.CallSpec(), 1), "INVALID_ARGUMENT"),
        (call("m1", score(), 1, attempt=0), "INVALID_ARGUMENT"),
        (call("m1", generate(max_tokens=1000)), "INVALID_ARGUMENT"),
        (call("m1", t.CallSpec(sync_weights=t.SyncWeightsSpec(in_flight=t.IN_FLIGHT_KEEP)), 1), "UNSUPPORTED"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_what_cannot_run_is_refused_and_applies_nothing(
    tmp_path: Path, order: w.RunCallOrder, expected: str
) -> None:
    """G06: a version that is not there, and all else that must not run."""
    async with cluster(tmp_path) as c:
        await with_model(c)
        assert reason(await c.orders.do(run_call=order)) == expected
        await c.orders.ok(run_call=call("m1", score(), 1))


async def test_a_failed_call_leaves_its_number_unused(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        await with_model(c)
        bad = forward_backward()
        bad.forward_backward.loss = t.LOSS_PPO
        assert reason(await c.orders.do(run_call=call("m1", bad, 1))) == "INVALID_ARGUMENT"
        await c.orders.ok(run_call=call("m1", forward_backward(), 4, after_sequence=0))
        await c.orders.ok(run_call=call("m1", optim_step(), 5))


async def test_a_call_sent_again_does_not_run_again(tmp_path: Path) -> None:
    """G01."""
    async with cluster(tmp_path) as c:
        await with_model(c)
        order = call("m1", forward_backward(), 1)
        first = await c.orders.ok(run_call=order)
        await c.orders.ok(run_call=call("m1", optim_step(), 2))
        second = await c.orders.ok(run_call=order)
        assert second.order_id != first.order_id
        assert second.finished.result == first.finished.result
        await c.orders.ok(run_call=call("m1", score(), 3))


async def test_a_call_sent_again_while_it_runs_ends_under_its_new_order(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        await with_model(c, config_json=fake_config({"function": "generate", "fault": "slow", "delay_s": 0.5}))
        order = call("m1", generate())
        await begun(c.orders, await c.orders.send(run_call=order))
        newer = await c.reopen(leader_term=2)
        report = await newer.ok(run_call=order)
        assert report.finished.result.HasField("generate")
        assert sum(r.HasField("finished") for r in newer.reports) == 1


async def test_an_older_attempt_is_refused_once_a_newer_is_known(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        await with_model(c)
        await c.orders.ok(run_call=call("m1", generate(), call_id="c1", attempt=2))
        assert reason(await c.orders.do(run_call=call("m1", generate(), call_id="c1"))) == "STALE_ATTEMPT"


async def test_abort_ends_a_running_call_and_at_once_those_behind_it(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        await with_model(c, config_json=fake_config(SLOW_GENERATE))
        running, queued = call("m1", generate()), call("m1", generate())
        running_id = await c.orders.send(run_call=running)
        queued_id = await c.orders.send(run_call=queued)
        await begun(c.orders, running_id)
        heard = await c.orders.ok(abort=w.AbortOrder(call=queued.call))
        # How the call ended is its own report's to say.
        assert not heard.HasField("call")
        report = await c.orders.finished(queued_id)
        assert (reason(report), report.call) == ("CANCELLED", queued.call)
        assert not any(r.order_id == running_id and r.HasField("finished") for r in c.orders.reports)
        await c.orders.ok(abort=w.AbortOrder(call=running.call))
        assert reason(await c.orders.finished(running_id)) == "CANCELLED"
        await c.orders.ok(run_call=call("m1", score(), 1))


async def test_abort_of_a_call_that_is_not_known_or_has_ended_is_fine(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        await with_model(c)
        done = call("m1", generate())
        await c.orders.ok(run_call=done)
        await c.orders.ok(abort=w.AbortOrder(call=done.call))
        await c.orders.ok(abort=w.AbortOrder(call=r.CallAttempt(call_id="never", attempt=1)))
        assert (await c.orders.ok(run_call=done)).finished.result.HasField("generate")


async def test_dropping_a_model_ends_its_calls_and_frees_all(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        await with_model(c, config_json=fake_config(SLOW_GENERATE))
        running_id = await c.orders.send(run_call=call("m1", generate()))
        await begun(c.orders, running_id)
        await c.orders.ok(drop=w.DropOrder(model_id="m1"))
        assert reason(await c.orders.finished(running_id)) == "CANCELLED"
        status = await c.status()
        assert (status.host_used_bytes, status.device_used_bytes, list(status.deployments)) == (0, 0, [])
        await c.orders.ok(drop=w.DropOrder(model_id="m1"))


async def test_orders_of_another_life_or_an_older_controller_are_refused(tmp_path: Path) -> None:
    """G19."""
    async with cluster(tmp_path) as c:
        other_life = c.orders.order(deploy=deploy("m1"))
        other_life.worker_incarnation += 1
        await c.orders._send([other_life])
        assert reason(await c.orders.finished(other_life.order_id)) == "STALE_INCARNATION"
        older = c.orders
        newer = await c.reopen(leader_term=2)
        await newer.ok(deploy=deploy("m1"))
        await older.ended.wait()
        assert older.error is not None
        assert older.error.code() is StatusCode.FAILED_PRECONDITION
        stale = Orders(c.channel, c.registry.incarnation, leader_term=1)
        await stale.open()
        await stale.ended.wait()
        assert stale.error is not None
        assert stale.error.code() is StatusCode.FAILED_PRECONDITION


async def test_reports_made_while_no_stream_is_open_flow_to_the_next(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        await with_model(c, config_json=fake_config({"function": "generate", "fault": "slow", "delay_s": 0.4}))
        order_id = await c.orders.send(run_call=call("m1", generate()))
        await begun(c.orders, order_id)
        await c.orders.close()
        await c.registry.until(lambda: not c.registry.synchronized[-1].attempts)
        later = await c.reopen()
        assert (await later.finished(order_id)).finished.result.HasField("generate")


async def test_a_model_deployed_again_by_the_same_order_keeps_its_state(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        await with_model(c)
        last = await train(c.orders, "m1", first=1)
        report = await c.orders.ok(deploy=deploy("m1"))
        (status,) = report.deployments
        assert (status.applied_sequence, status.weights_version) == (last, last)
        report = await c.orders.ok(deploy=deploy("m1", seed=2))
        (status,) = report.deployments
        assert (status.applied_sequence, status.weights_version) == (0, 0)


async def test_orders_behind_a_deploy_of_their_model_wait_for_it(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        orders = [c.orders.order(deploy=deploy("m1")), c.orders.order(swap_weights=swap("m1"))]
        orders += [c.orders.order(run_call=call("m1", sync(), 1))]
        await c.orders._send(orders)
        for order in orders:
            assert reason(await c.orders.finished(order.order_id)) == ""


async def test_a_reference_is_never_trained(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        report = await c.orders.ok(deploy=deploy("m1", role=m.MODEL_ROLE_REFERENCE))
        assert report.finished.deployed.state_bytes == STATE_BYTES * 2 // 5
        await c.orders.ok(swap_weights=swap("m1"))
        assert reason(await c.orders.do(run_call=call("m1", forward_backward(), 1))) == "INVALID_ARGUMENT"
        await c.orders.ok(run_call=call("m1", score(), 1))


async def test_settings_that_are_not_offered_are_refused(tmp_path: Path) -> None:
    """G17."""
    refused = (
        m.ModelSettings(lora=m.LoraSettings(rank=8)),
        m.ModelSettings(world_size=2),
        m.ModelSettings(keep_versions=2),
    )
    async with cluster(tmp_path) as c:
        for settings in refused:
            assert reason(await c.orders.do(deploy=deploy("m1", settings=settings))) == "UNSUPPORTED"
        assert reason(await c.orders.do(deploy=deploy("m1", config_json="{}"))) == "INVALID_ARGUMENT"
        code = '{"architectures": ["A"], "auto_map": {"AutoModel": "x.py"}}'
        assert reason(await c.orders.do(deploy=deploy("m1", config_json=code))) == "INVALID_ARGUMENT"


async def test_run_order_answers_with_the_last_report(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        order = c.orders.order(deploy=deploy("m1"))
        answer = await c.stub.RunOrder(w.RunOrderRequest(order=order), metadata=METADATA)
        assert answer.report.finished.deployed.state_bytes == STATE_BYTES
        assert not c.orders.reports


async def test_what_a_call_was_ordered_with_goes_when_it_ends(tmp_path: Path) -> None:
    """The outcomes of a thousand calls are remembered; arguments of many megabytes each must not be along with them."""
    async with cluster(tmp_path) as c:
        await with_model(c)
        gc.collect()
        gc.disable()
        try:
            for sequence in range(1, 4):
                await c.orders.ok(run_call=call("m1", forward_backward(), sequence))
                await c.orders.ok(run_call=call("m1", generate(), call_id=f"generate-{sequence}"))
            # Without a look for cycles, which counts objects and knows nothing of their megabytes.
            kept = [work for work in gc.get_objects() if isinstance(work, Work)]
            assert [work.order.run_call.call.call_id for work in kept if work.order.HasField("run_call")] == []
        finally:
            gc.enable()
