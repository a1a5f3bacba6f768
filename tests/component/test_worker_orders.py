"""Orders against a daemon with the fake engine: deploy, swap, calls, fences, once-only."""

from pathlib import Path

from plexrl.v1 import types_pb2 as t
from tests.support.worker_daemon import (
    STATE_BYTES,
    call,
    cluster,
    deploy,
    generate,
    scores,
    swap,
    tiers,
    train,
)


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
        await c.orders.ok(deploy=deploy("m1"))
        await c.orders.ok(swap_weights=swap("m1"))
        before = await scores(c.orders, "m1", 1)
        last = await train(c.orders, "m1", first=2)
        assert await scores(c.orders, "m1", last + 1) != before
        report = await c.orders.ok(run_call=call("m1", generate(), weights_version=last))
        assert report.finished.result.generate.weights_version == last
        assert len(report.finished.result.generate.finish_reasons) == 4
        (interval,) = report.intervals
        assert interval.kind == t.INTERVAL_KIND_BUSY
        assert interval.job_id == "job-of-m1"
        assert interval.call_kind == t.CALL_KIND_GENERATE
        assert interval.start_unix_ns < interval.end_unix_ns
