"""The group writer: order, coalescing, retries, back-pressure, and its end."""

import asyncio
from dataclasses import replace
from functools import partial

import pytest

from plexrl_controller.domain.errors import ControllerError, LeadershipLost, Unavailable
from plexrl_controller.domain.records import Payload
from plexrl_controller.store.memory import MemoryStore
from plexrl_controller.store.port import Changes
from plexrl_controller.store.writer import MAX_BACKOFF_S, GroupWriter
from tests.store.records import make_call, make_event, make_job, make_model, make_worker


class GatedStore(MemoryStore):
    """A store whose commits wait until the test lets them, and fail as the test says."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.gate.set()
        self.failures: list[Exception] = []
        self.lost_replies = 0
        self.committed: list[Changes] = []
        self.arrived = asyncio.Event()

    async def commit(self, term: int, changes: Changes) -> None:
        self.arrived.set()
        await self.gate.wait()
        if self.failures:
            raise self.failures.pop(0)
        await super().commit(term, changes)
        self.committed.append(changes)
        if self.lost_replies:
            self.lost_replies -= 1
            raise Unavailable("the reply was lost")


class Sleeps:
    """Stands for asyncio.sleep: remembers, and returns at once."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    async def __call__(self, seconds: float) -> None:
        self.seconds.append(seconds)
        await asyncio.sleep(0)


@pytest.fixture
def store() -> GatedStore:
    return GatedStore()


@pytest.fixture
def sleeps() -> Sleeps:
    return Sleeps()


async def start(
    store: MemoryStore, sleeps: Sleeps, max_batch_rows: int = 1000, max_queued_rows: int = 1000
) -> GroupWriter:
    term = await store.acquire_term("leader")
    return GroupWriter(store, term, sleep=sleeps, max_batch_rows=max_batch_rows, max_queued_rows=max_queued_rows)


async def test_commit_returns_when_the_store_has_it(store: GatedStore, sleeps: Sleeps) -> None:
    """G14: nothing is released before it is durable."""
    writer = await start(store, sleeps)
    store.gate.clear()
    commit = asyncio.create_task(writer.commit(Changes(inserts=(make_worker(),))))
    await store.arrived.wait()
    for _ in range(20):
        await asyncio.sleep(0)
    assert not commit.done()
    store.gate.set()
    await commit
    assert (await store.load()).workers == (make_worker(),)
    await writer.close()


async def test_what_waits_goes_into_one_commit_in_order(store: GatedStore, sleeps: Sleeps) -> None:
    writer = await start(store, sleeps)
    store.gate.clear()
    first = writer.post(Changes(inserts=(make_worker(),)))
    await store.arrived.wait()
    finished: list[int] = []

    def note(revision: int, _: asyncio.Future[None]) -> None:
        finished.append(revision)

    for revision in range(2, 12):
        changes = Changes(
            updates=(make_worker(revision=revision, incarnation=revision),),
            events=(make_event("worker-1", at=float(revision)),),
        )
        writer.post(changes).add_done_callback(partial(note, revision))
    store.gate.set()
    await writer.flush()
    await asyncio.sleep(0)
    assert first.done()
    assert len(store.committed) == 2
    assert finished == list(range(2, 12))
    assert (await store.load()).workers == (make_worker(revision=11, incarnation=11),)
    assert [event.at for event in await store.events("worker-1")] == [float(revision) for revision in range(2, 12)]
    assert writer.counters.commits == 2
    assert writer.counters.changes == 11
    assert writer.counters.largest_batch_rows == 20
    await writer.close()


async def test_a_batch_is_bounded(store: GatedStore, sleeps: Sleeps) -> None:
    writer = await start(store, sleeps, max_batch_rows=10)
    store.gate.clear()
    writer.post(Changes(inserts=(make_worker(0),)))
    await store.arrived.wait()
    for number in range(1, 8):
        writer.post(Changes(inserts=(make_worker(number),), events=(make_event("e"),) * 3))
    store.gate.set()
    await writer.close()
    assert [len(changes.inserts) for changes in store.committed] == [1, 2, 2, 2, 1]


async def test_a_batch_is_bounded_in_bytes_too(store: GatedStore, sleeps: Sleeps) -> None:
    writer = await start(store, sleeps)
    await writer.commit(Changes(inserts=(make_job(), make_model())))
    store.gate.clear()
    posted = [
        writer.post(Changes(inserts=(make_call(number, spec=Payload("ab" * 32, 1 << 20, bytes(1 << 20))),)))
        for number in range(1, 21)
    ]
    store.gate.set()
    await asyncio.gather(*posted)
    assert [len(changes.inserts) for changes in store.committed] == [2, 8, 8, 4]
    await writer.close()


async def test_more_rows_than_a_batch_still_go_in_one_commit(store: GatedStore, sleeps: Sleeps) -> None:
    writer = await start(store, sleeps, max_batch_rows=10)
    await writer.commit(Changes(inserts=tuple(make_worker(number) for number in range(25))))
    assert len(store.committed) == 1
    await writer.close()


async def test_a_silent_store_is_tried_until_it_answers(store: GatedStore, sleeps: Sleeps) -> None:
    writer = await start(store, sleeps)
    store.failures = [Unavailable("no")] * 12
    await writer.commit(Changes(inserts=(make_worker(),)))
    assert writer.counters.retries == 12
    assert sleeps.seconds == sorted(sleeps.seconds)
    assert sleeps.seconds[0] < sleeps.seconds[-1] == MAX_BACKOFF_S
    await writer.close()


async def test_a_lost_reply_does_not_write_twice(store: GatedStore, sleeps: Sleeps) -> None:
    writer = await start(store, sleeps)
    await writer.commit(Changes(inserts=(make_worker(),)))
    store.lost_replies = 1
    changes = Changes(updates=(make_worker(revision=2),), events=(make_event("worker-1"),))
    await writer.commit(changes)
    await writer.commit(Changes(updates=(make_worker(revision=3),)))
    assert len(await store.events("worker-1")) == 1
    await writer.close()


async def test_equal_changes_are_not_taken_for_a_repetition(store: GatedStore, sleeps: Sleeps) -> None:
    writer = await start(store, sleeps)
    for _ in range(2):
        await writer.commit(Changes(events=(make_event("call-1"),)))
    assert len(await store.events("call-1")) == 2
    await writer.close()


async def test_lost_leadership_fails_everybody_and_stops(store: GatedStore, sleeps: Sleeps) -> None:
    writer = await start(store, sleeps)
    store.gate.clear()
    commits = [asyncio.create_task(writer.commit(Changes(inserts=(make_worker(number),)))) for number in range(3)]
    posted = writer.post(Changes(inserts=(make_worker(9),)))
    await store.arrived.wait()
    await store.acquire_term("another")
    store.gate.set()
    outcomes = await asyncio.gather(*commits, posted, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [LeadershipLost] * 4
    assert isinstance(await writer.stopped(), LeadershipLost)
    with pytest.raises(LeadershipLost):
        writer.post(Changes())
    with pytest.raises(LeadershipLost):
        await writer.has_room()
    assert (await store.load()).workers == ()
    await writer.close()


@pytest.mark.parametrize("defect", [ControllerError("refused"), RuntimeError("a bug in the store")])
async def test_a_defect_stops_the_writer_too(store: GatedStore, sleeps: Sleeps, defect: Exception) -> None:
    """G03: nobody waits for ever."""
    writer = await start(store, sleeps)
    store.failures = [defect]
    with pytest.raises(ControllerError):
        await writer.commit(Changes(inserts=(make_worker(),)))
    assert str(defect) in (await writer.stopped()).message


async def test_a_full_queue_makes_newcomers_wait(store: GatedStore, sleeps: Sleeps) -> None:
    writer = await start(store, sleeps, max_queued_rows=5)
    store.gate.clear()
    for number in range(5):
        await writer.has_room()
        writer.post(Changes(inserts=(make_worker(number),)))
    newcomer = asyncio.create_task(writer.has_room())
    await store.arrived.wait()
    await asyncio.sleep(0)
    assert not newcomer.done()
    writer.post(Changes(inserts=(make_worker(5),)))
    assert writer.queued_rows == 6
    store.gate.set()
    await newcomer
    await writer.close()


async def test_cancelling_a_wait_does_not_take_the_write_back(store: GatedStore, sleeps: Sleeps) -> None:
    writer = await start(store, sleeps)
    store.gate.clear()
    commit = asyncio.create_task(writer.commit(Changes(inserts=(make_worker(),))))
    await store.arrived.wait()
    commit.cancel()
    await asyncio.wait([commit])
    store.gate.set()
    await writer.commit(Changes(updates=(make_worker(revision=2),)))
    assert (await store.load()).workers == (make_worker(revision=2),)
    await writer.close()


async def test_nothing_to_write_waits_for_what_is_before_it(store: GatedStore, sleeps: Sleeps) -> None:
    writer = await start(store, sleeps)
    await writer.commit(Changes())
    store.gate.clear()
    writer.post(Changes(inserts=(make_worker(),)))
    nothing = writer.post(Changes())
    await store.arrived.wait()
    assert not nothing.done()
    store.gate.set()
    await nothing
    await writer.close()


async def test_close_writes_what_is_queued(store: GatedStore, sleeps: Sleeps) -> None:
    writer = await start(store, sleeps)
    durable = writer.post(Changes(inserts=(make_worker(),)))
    await writer.close()
    assert durable.done()
    assert (await store.load()).workers == (make_worker(),)
    with pytest.raises(Unavailable):
        writer.post(Changes())


async def test_abort_leaves_nobody_waiting(store: GatedStore, sleeps: Sleeps) -> None:
    writer = await start(store, sleeps)
    store.gate.clear()
    commit = asyncio.create_task(writer.commit(Changes(inserts=(make_worker(),))))
    await store.arrived.wait()
    await writer.abort()
    with pytest.raises(Unavailable):
        await commit


async def test_many_tasks_keep_their_own_order(store: GatedStore, sleeps: Sleeps) -> None:
    writer = await start(store, sleeps, max_batch_rows=7)

    async def work(number: int) -> None:
        worker = make_worker(number)
        await writer.commit(Changes(inserts=(worker,)))
        for revision in range(2, 10):
            worker = replace(worker, revision=revision)
            await writer.commit(Changes(updates=(worker,)))

    await asyncio.gather(*(work(number) for number in range(20)))
    assert {worker.revision for worker in (await store.load()).workers} == {9}
    await writer.close()
