"""Generate calls that give way on a daemon with the fake engine: parked, stopped, lost with their engine, gone on."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from plexrl.v1 import registry_pb2 as r
from plexrl.v1 import types_pb2 as t
from plexrl.v1 import worker_pb2 as w
from plexrl_worker.engine.call import EngineCall
from plexrl_worker.engine.client import EngineProcess
from tests.support.worker_daemon import (
    METADATA,
    Cluster,
    call,
    cluster,
    deploy,
    fake_config,
    generate,
    reason,
    swap,
    sync,
)

BEFORE_THE_THIRD = {"function": "completion-2", "fault": "slow", "delay_s": 25}
"""Two completions of four are sampled, then it takes its time until it is asked to yield."""


def config(flag: Path, salt: int = 0) -> str:
    """Takes its time once, when the flag is there."""
    return fake_config({**BEFORE_THE_THIRD, "flag_file": str(flag)}, salt=salt)


def arm(flag: Path) -> None:
    flag.touch()


async def two_models(c: Cluster, flag: Path) -> None:
    """Both in one engine, the first on the device."""
    await c.orders.ok(deploy=deploy("m1", config_json=config(flag)))
    await c.orders.ok(deploy=deploy("m2", seed=2, config_json=config(flag)))
    await c.orders.ok(swap_weights=swap("m1"))


async def undisturbed(c: Cluster, model_id: str = "m1") -> t.GenerateResult:
    report = await c.orders.ok(run_call=call(model_id, generate()))
    return report.finished.result.generate


async def parked(c: Cluster, flag: Path, call_id: str) -> w.Report:
    """A call of m1 that has given way after three of its completions."""
    arm(flag)
    order_id = await c.orders.send(run_call=call("m1", generate(), call_id=call_id))
    await c.orders.report(lambda report: report.order_id == order_id and report.HasField("started"))
    return await yielded(c, call_id)


async def yielded(c: Cluster, call_id: str) -> w.Report:
    seen = len(c.orders.reports)
    await c.orders.send(yield_call=w.YieldOrder(call=attempt(call_id)))
    return await c.orders.report(
        lambda report: (
            report.HasField("yielded") and report.call.call_id == call_id and report in c.orders.reports[seen:]
        )
    )


def attempt(call_id: str, number: int = 1) -> r.CallAttempt:
    return r.CallAttempt(call_id=call_id, attempt=number)


async def test_a_call_gives_way_another_model_runs_and_it_goes_on(tmp_path: Path) -> None:
    flag = tmp_path / "slow"
    async with cluster(tmp_path) as c:
        await two_models(c, flag)
        expected = await undisturbed(c)
        report = await parked(c, flag, "c1")
        assert [interval.kind for interval in report.intervals] == [t.INTERVAL_KIND_BUSY]
        assert attempt("c1") in (await c.status()).attempts
        await c.orders.ok(swap_weights=swap("m2", "m1"))
        await undisturbed(c, "m2")
        await c.orders.ok(swap_weights=swap("m1", "m2"))
        report = await c.orders.ok(run_call=call("m1", generate(), call_id="c1"))
        assert report.finished.result.generate == expected
        assert attempt("c1") not in (await c.status()).attempts


async def test_what_its_engine_had_sampled_may_be_lost_it_begins_anew(tmp_path: Path) -> None:
    flag = tmp_path / "slow"
    async with cluster(tmp_path) as c:
        await two_models(c, flag)
        expected = await undisturbed(c)
        await parked(c, flag, "c1")
        await c.orders.ok(swap_weights=swap("m2", "m1"))
        (engine,) = (await c.status()).engines
        os.kill(engine.pid, signal.SIGKILL)
        await c.orders.do(swap_weights=swap("m1", "m2"))
        report = await c.orders.ok(run_call=call("m1", generate(), call_id="c1"))
        assert report.finished.result.generate == expected


async def test_a_parked_call_that_is_stopped_ends_and_a_newer_attempt_begins_anew(tmp_path: Path) -> None:
    flag = tmp_path / "slow"
    async with cluster(tmp_path) as c:
        await two_models(c, flag)
        expected = await undisturbed(c)
        await parked(c, flag, "c1")
        await c.orders.ok(abort=w.AbortOrder(call=attempt("c1")))
        ended = await c.orders.report(lambda report: report.call == attempt("c1") and report.HasField("finished"))
        assert reason(ended) == "CANCELLED"
        await parked(c, flag, "c2")
        report = await c.orders.ok(run_call=call("m1", generate(), call_id="c2", attempt=2))
        assert report.finished.result.generate == expected
        assert (await c.status()).attempts == []


async def test_a_call_that_is_queued_gives_way_without_having_begun(tmp_path: Path) -> None:
    flag = tmp_path / "slow"
    async with cluster(tmp_path) as c:
        await two_models(c, flag)
        expected = await undisturbed(c)
        arm(flag)
        first = await c.orders.send(run_call=call("m1", generate(), call_id="c1"))
        await c.orders.send(run_call=call("m1", generate(), call_id="c2"))
        await c.orders.report(lambda report: report.order_id == first and report.HasField("started"))
        report = await yielded(c, "c2")
        assert report.yielded.done == 0
        assert not any(r.call == attempt("c1") and r.HasField("finished") for r in c.orders.reports)
        await yielded(c, "c1")
        for call_id in ("c2", "c1"):
            report = await c.orders.ok(run_call=call("m1", generate(), call_id=call_id))
            assert report.finished.result.generate == expected


async def test_one_that_is_stopped_before_it_goes_on_leaves_nothing_in_its_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flag, forgotten = tmp_path / "slow", []
    forget = EngineProcess.forget_execution

    def noted(process: EngineProcess, execution: str) -> EngineCall[None]:
        forgotten.append(execution)
        return forget(process, execution)

    monkeypatch.setattr(EngineProcess, "forget_execution", noted)
    async with cluster(tmp_path) as c:
        await two_models(c, flag)
        await parked(c, flag, "c1")
        arm(flag)
        running = await c.orders.send(run_call=call("m1", generate(), call_id="c2"))
        await c.orders.report(lambda report: report.order_id == running and report.HasField("started"))
        await c.orders.send(run_call=call("m1", generate(), call_id="c1"))
        await c.orders.ok(abort=w.AbortOrder(call=attempt("c1")))
        ended = await c.orders.report(lambda report: report.call == attempt("c1") and report.HasField("finished"))
        assert reason(ended) == "CANCELLED"
        assert forgotten == ["c1/1"]
        await yielded(c, "c2")


async def test_asked_again_it_says_how_the_call_stands(tmp_path: Path) -> None:
    """What a controller does that lost the report: a parked call has yielded, one that ended has ended."""
    flag = tmp_path / "slow"
    async with cluster(tmp_path) as c:
        await two_models(c, flag)
        await parked(c, flag, "c1")
        await yielded(c, "c1")
        report = await yielded(c, "unknown")
        assert report.call == attempt("unknown")
        finished = await c.orders.ok(run_call=call("m1", generate(), call_id="c1"))
        order_id = await c.orders.send(yield_call=w.YieldOrder(call=attempt("c1")))
        again = await c.orders.report(lambda report: report.order_id == order_id and report.call.call_id == "c1")
        assert again.finished.result == finished.finished.result
        sequenced = await c.orders.ok(run_call=call("m1", sync(), 1, call_id="s1"))
        assert sequenced.finished.result.HasField("sync_weights")


async def test_whoever_orders_a_call_that_runs_hears_how_it_ends(tmp_path: Path) -> None:
    """RunOrder of a call that the stream ordered too: nobody waits for a report that went elsewhere."""
    flag = tmp_path / "slow"
    async with cluster(tmp_path) as c:
        await two_models(c, flag)
        arm(flag)
        order = call("m1", generate(), call_id="c1")
        order_id = await c.orders.send(run_call=order)
        await c.orders.report(lambda report: report.order_id == order_id and report.HasField("started"))
        again = c.orders.order(run_call=order)
        asked = asyncio.ensure_future(run_order(c, again))
        await c.status()  # Behind it on the same connection: by then it was taken, as good as ever.
        given = await yielded(c, "c1")
        answer = (await asked).report
        assert given.HasField("yielded")
        assert answer.call == attempt("c1")
        assert answer.WhichOneof("event") in ("yielded", "finished")
        ended = await run_order(c, again)
        assert ended.report.finished.result.HasField("generate")


async def run_order(c: Cluster, order: w.Order) -> w.RunOrderResponse:
    return await c.stub.RunOrder(w.RunOrderRequest(order=order), metadata=METADATA)
