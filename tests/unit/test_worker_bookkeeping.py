"""Attempts, fences, reports on their way, the host arena and engine keys: the daemon's small rooms."""

import asyncio
import json
import os

import pytest

from plexrl.v1 import registry_pb2 as r
from plexrl.v1 import types_pb2 as t
from plexrl.v1 import worker_pb2 as w
from plexrl_worker.arena import HostArena
from plexrl_worker.attempts import Attempt, AttemptLog
from plexrl_worker.deployment import engine_key
from plexrl_worker.engine.settings import EngineSettings
from plexrl_worker.errors import NotRegistered, OverBudget, StaleAttempt, StaleIncarnation, StaleTerm
from plexrl_worker.fences import Fences
from plexrl_worker.outbox import Outbox


def attempt(call_id: str, number: int = 1) -> Attempt:
    return Attempt(call_id, number, order_id=1, model_id="m", stop=lambda _: None, end=lambda _: None)


def outcome(size_bytes: int = 0) -> w.OrderFinished:
    tensor = t.Tensor(data=bytes(size_bytes))
    return w.OrderFinished(result=t.CallResult(score=t.ScoreResult(logprobs=tensor)))


def test_an_attempt_is_known_from_its_beginning_until_it_is_forgotten_for_room() -> None:
    log = AttemptLog(max_outcomes=2, max_outcome_bytes=10**6)
    for call_id in ("a", "b", "c"):
        started = attempt(call_id)
        log.begin(started)
        assert log.find(r.CallAttempt(call_id=call_id, attempt=1)) is started
        log.finish(started, outcome())
    assert log.find(r.CallAttempt(call_id="a", attempt=1)) is None
    assert log.find(r.CallAttempt(call_id="c", attempt=1)) is not None
    assert log.all_running() == []


def test_outcomes_are_bounded_by_bytes_too() -> None:
    log = AttemptLog(max_outcomes=100, max_outcome_bytes=1000)
    for call_id in ("a", "b", "c"):
        log.begin(started := attempt(call_id))
        log.finish(started, outcome(600))
    known = [c for c in "abc" if log.find(r.CallAttempt(call_id=c, attempt=1))]
    assert known == ["c"]


def test_a_newer_attempt_replaces_an_older_and_refuses_it() -> None:
    log = AttemptLog()
    log.begin(first := attempt("a"))
    log.begin(attempt("a", 2))
    log.finish(first, outcome())
    with pytest.raises(StaleAttempt):
        log.find(r.CallAttempt(call_id="a", attempt=1))
    running = log.running("a")
    assert running is not None
    assert running.number == 2


def test_fences_refuse_what_is_older_and_adopt_what_is_newer() -> None:
    fences = Fences()
    with pytest.raises(NotRegistered):
        fences.check(1, 1)
    fences.worker_incarnation = 3
    fences.check(5, 3)
    assert fences.leader_term == 5
    with pytest.raises(StaleTerm):
        fences.check(4, 3)
    for other in (2, 4):
        with pytest.raises(StaleIncarnation):
            fences.check(5, other)


def started(order_id: int) -> w.Report:
    return w.Report(order_id=order_id, started=w.OrderStarted())


async def test_reports_wait_for_a_stream_within_a_bound_and_progress_does_not() -> None:
    outbox = Outbox(max_kept_reports=3)
    for order_id in range(5):
        outbox.put(started(order_id))
        outbox.put(w.Report(order_id=order_id, progress=w.OrderProgress(done=1)))
    frame = await outbox.open(1).next_frame()
    assert frame is not None
    assert [report.order_id for report in frame] == [2, 3, 4]


def large(order_id: int) -> w.Report:
    tokens = t.TokenBatch(token_ids=t.Tensor(data=bytes(1000)))
    result = t.CallResult(generate=t.GenerateResult(completions=tokens))
    return w.Report(order_id=order_id, finished=w.OrderFinished(result=result))


async def test_reports_are_kept_within_bytes_too_and_the_newest_whatever_its_size() -> None:
    outbox = Outbox(max_kept_bytes=2500)
    for order_id in range(5):
        outbox.put(large(order_id))
    frame = await outbox.open(1).next_frame()
    assert frame is not None
    assert [report.order_id for report in frame] == [3, 4]
    outbox = Outbox(max_kept_bytes=10)
    for order_id in range(3):
        outbox.put(large(order_id))
    assert [report.order_id for report in await outbox.open(1).next_frame() or []] == [2]
    outbox.put(started(3))  # what was taken counts no more
    assert [report.order_id for report in await outbox.open(2).next_frame() or []] == [3]


async def test_a_newer_stream_takes_over_and_the_older_hears_that() -> None:
    outbox = Outbox()
    older = outbox.open(1)
    waiting = asyncio.create_task(older.next_frame())
    await asyncio.sleep(0)
    newer = outbox.open(2)
    outbox.put(started(1))
    assert await waiting is None
    older.close()
    frame = await newer.next_frame()
    assert frame is not None
    assert len(frame) == 1


async def test_a_frame_holds_a_bounded_number_of_reports() -> None:
    outbox = Outbox()
    for order_id in range(300):
        outbox.put(started(order_id))
    stream = outbox.open(1)
    sizes = [len(await stream.next_frame() or []) for _ in range(2)]
    assert sizes == [256, 44]


def test_the_arena_keeps_its_budget_and_gives_memory_back() -> None:
    arena = HostArena(1000)
    image = arena.allocate("a", 600)
    with pytest.raises(OverBudget) as caught:
        arena.allocate("b", 600)
    assert caught.value.metadata == {"needed_bytes": "600", "used_bytes": "600", "budget_bytes": "1000"}
    os.pwrite(image.fd, b"x", 599)
    with pytest.raises(PermissionError):
        os.ftruncate(image.fd, 10)
    arena.release("a")
    arena.release("a")
    arena.allocate("b", 600)
    arena.close()
    assert arena.used_bytes == 0


def config(**changes: object) -> str:
    return json.dumps({"architectures": ["A"], "hidden_size": 8} | changes)


def test_engines_are_shared_exactly_by_equal_architectures_and_settings() -> None:
    key = engine_key(EngineSettings(config()))
    same = json.dumps({"transformers_version": "9", "hidden_size": 8, "architectures": ["A"]}, indent=2)
    assert engine_key(EngineSettings(same)) == key
    others = [
        EngineSettings(config(hidden_size=16)),
        EngineSettings(config(), max_sequence_tokens=7),
        EngineSettings(config(), threads=1),
    ]
    assert len({key, *map(engine_key, others)}) == 4
