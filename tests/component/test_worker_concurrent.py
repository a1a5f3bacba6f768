"""Generate calls that run together on a daemon with the fake engine: each ends, stops and gives way by itself."""

import itertools
import os
import signal
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Literal

import pytest

from plexrl.v1 import registry_pb2 as r
from plexrl.v1 import types_pb2 as t
from plexrl.v1 import worker_pb2 as w
from plexrl_worker import calls
from plexrl_worker.engine.call import EngineCall
from plexrl_worker.engine.client import EngineProcess
from plexrl_worker.engine.port import Component, SwapReport
from tests.support.worker_daemon import (
    Cluster,
    call,
    cluster,
    deploy,
    fake_config,
    forward_backward,
    generate,
    new_checkpoint_id,
    reason,
    score,
    swap,
)

Event = Literal["started", "yielded", "finished"]
CALLS = [f"c{number}" for number in range(8)]


class Held:
    """A model whose generates stand before their third completion, of four, as long as `file` is there."""

    def __init__(self, directory: Path) -> None:
        self.file = directory / "held"
        self.config = fake_config({"function": "completion-2", "fault": "held", "flag_file": str(self.file)})

    async def ready(self, c: Cluster) -> None:
        await c.orders.ok(deploy=deploy("m1", config_json=self.config))
        await c.orders.ok(swap_weights=swap("m1"))


def concurrent(call_id: str, attempt: int = 1) -> w.RunCallOrder:
    return call("m1", generate(seed=int(call_id[1:])), call_id=call_id, attempt=attempt, concurrent=True)


async def alone(c: Cluster) -> dict[str, t.GenerateResult]:
    """What each call samples with nobody beside it."""
    results = {}
    for call_id in CALLS:
        report = await c.orders.ok(run_call=call("m1", generate(seed=int(call_id[1:]))))
        results[call_id] = report.finished.result.generate
    return results


async def begun(c: Cluster, held: Held, *call_ids: str) -> list[int]:
    """The calls are with the engine, held."""
    held.file.touch()
    order_ids = [await c.orders.send(run_call=concurrent(call_id)) for call_id in call_ids]
    for order_id in order_ids:
        await c.orders.report(of_order(order_id, "started"))
    return order_ids


def of_call(call_id: str, event: Event) -> Callable[[w.Report], bool]:
    return lambda report: report.call.call_id == call_id and report.HasField(event)


def of_order(order_id: int, event: Event) -> Callable[[w.Report], bool]:
    return lambda report: report.order_id == order_id and report.HasField(event)


def ended(c: Cluster, call_id: str) -> list[w.Report]:
    return [report for report in c.orders.reports if report.call.call_id == call_id and report.HasField("finished")]


def attempt(call_id: str, number: int = 1) -> r.CallAttempt:
    return r.CallAttempt(call_id=call_id, attempt=number)


async def test_they_run_together_and_the_device_is_charged_once(tmp_path: Path) -> None:
    held = Held(tmp_path)
    async with cluster(tmp_path) as c:
        await held.ready(c)
        expected = await alone(c)
        order_ids = await begun(c, held, *CALLS)
        assert not any(ended(c, call_id) for call_id in CALLS)
        held.file.unlink()
        reports = [await c.orders.finished(order_id) for order_id in order_ids]
        assert {x.call.call_id: x.finished.result.generate for x in reports} == expected
        spans = sorted((i.start_unix_ns, i.end_unix_ns) for report in reports for i in report.intervals)
        assert len(spans) == len(CALLS)
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans))
        assert all(start < end for start, end in spans)


async def test_one_is_stopped_and_the_others_go_on(tmp_path: Path) -> None:
    held = Held(tmp_path)
    async with cluster(tmp_path) as c:
        await held.ready(c)
        expected = await alone(c)
        await begun(c, held, "c0", "c1", "c2")
        await c.orders.ok(abort=w.AbortOrder(call=attempt("c1")))
        stopped = await c.orders.report(of_call("c1", "finished"))
        assert reason(stopped) == "CANCELLED"
        held.file.unlink()
        for call_id in ("c0", "c2"):
            await c.orders.report(of_call(call_id, "finished"))
            assert ended(c, call_id)[0].finished.result.generate == expected[call_id]


async def test_all_give_way_another_model_runs_and_all_go_on_together(tmp_path: Path) -> None:
    held = Held(tmp_path)
    async with cluster(tmp_path) as c:
        await held.ready(c)
        await c.orders.ok(deploy=deploy("m2", seed=2, config_json=held.config))
        expected = await alone(c)
        await begun(c, held, *CALLS)
        for call_id in CALLS:
            await c.orders.send(yield_call=w.YieldOrder(call=attempt(call_id)))
        for call_id in CALLS:
            await c.orders.report(of_call(call_id, "yielded"))
        held.file.unlink()
        await c.orders.ok(swap_weights=swap("m2", "m1"))
        await c.orders.ok(run_call=call("m2", generate()))
        await c.orders.ok(swap_weights=swap("m1", "m2"))
        order_ids = [await c.orders.send(run_call=concurrent(call_id)) for call_id in CALLS]
        for order_id, call_id in zip(order_ids, CALLS, strict=True):
            report = await c.orders.finished(order_id)
            assert report.finished.result.generate == expected[call_id]


async def test_what_is_ordered_between_them_waits_for_those_before_it_and_comes_before_those_behind(
    tmp_path: Path,
) -> None:
    held = Held(tmp_path)
    async with cluster(tmp_path) as c:
        await held.ready(c)
        await begun(c, held, "c0", "c1")
        scored = await c.orders.send(run_call=call("m1", score(), 1, call_id="score"))
        behind = await c.orders.send(run_call=concurrent("c2"))
        await c.status()
        assert not ended(c, "score")
        held.file.unlink()
        await c.orders.finished(behind)
        await c.orders.finished(scored)
        order = [x.call.call_id for x in c.orders.reports if x.HasField("finished") and x.HasField("call")]
        assert order[-2:] == ["score", "c2"]
        assert set(order[-4:-2]) == {"c0", "c1"}


async def test_what_waits_for_the_device_outside_the_line_has_its_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session that always has another call must not keep a snapshot from the device: while it waits, nobody joins."""
    monkeypatch.setattr(calls, "HOLD_S", 0.0)
    order: list[str] = []
    generate_in, write_back = EngineProcess.generate, EngineProcess.write_back

    def noted_generate(
        process: EngineProcess, deployment_id: str, spec: t.GenerateSpec, version: int, execution: str, **how: bool
    ) -> EngineCall[t.GenerateResult]:
        order.append(execution.partition("/")[0])
        return generate_in(process, deployment_id, spec, version, execution, **how)

    def noted_write_back(
        process: EngineProcess, deployment_id: str, components: Collection[Component]
    ) -> EngineCall[SwapReport]:
        order.append("snapshot")
        return write_back(process, deployment_id, components)

    monkeypatch.setattr(EngineProcess, "generate", noted_generate)
    monkeypatch.setattr(EngineProcess, "write_back", noted_write_back)
    held = Held(tmp_path)
    async with cluster(tmp_path) as c:
        await held.ready(c)
        # Only what has changed on the device is copied by a snapshot.
        await c.orders.ok(run_call=call("m1", forward_backward(), 1))
        await begun(c, held, "c0")
        snapshot = await c.orders.send(snapshot=w.SnapshotOrder(model_id="m1", snapshot_id=new_checkpoint_id()))
        while not c.daemon._host.device.lock.wanted:
            await c.status()
        late = await c.orders.send(run_call=concurrent("c1"))
        await c.status()
        held.file.unlink()
        await c.orders.finished(late)
        await c.orders.finished(snapshot)
        assert order == ["c0", "snapshot", "c1"]


async def test_their_engine_dies_with_all_of_them_and_another_attempt_of_each_is_the_same(tmp_path: Path) -> None:
    held = Held(tmp_path)
    async with cluster(tmp_path) as c:
        await held.ready(c)
        expected = await alone(c)
        await c.orders.ok(swap_weights=swap("", "m1"))
        await c.orders.ok(swap_weights=swap("m1"))
        order_ids = await begun(c, held, *CALLS)
        (engine,) = (await c.status()).engines
        os.kill(engine.pid, signal.SIGKILL)
        for order_id in order_ids:
            assert reason(await c.orders.finished(order_id)) == "ENGINE_DIED"
        held.file.unlink()
        await c.orders.ok(swap_weights=swap("m1"))
        order_ids = [await c.orders.send(run_call=concurrent(call_id, 2)) for call_id in CALLS]
        for order_id, call_id in zip(order_ids, CALLS, strict=True):
            assert (await c.orders.finished(order_id)).finished.result.generate == expected[call_id]
