"""Group commit: everything that waits while one commit is under way goes into the next one.

Callers apply transitions in memory first and release their effects when `commit` returns. The writer asks of
what it writes only how large it is. A store that does not answer stops nothing but the release: the writer tries
again until it answers.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from secrets import token_hex
from time import monotonic

import structlog

from plexrl_controller.domain.errors import ControllerError, LeadershipLost, Unavailable
from plexrl_controller.domain.records import Call
from plexrl_controller.store.batch import merge
from plexrl_controller.store.port import Changes, Store

_log = structlog.get_logger(__name__)

MAX_BATCH_ROWS = 2000
MAX_BATCH_BYTES = 8 << 20
"""Of inline payloads: a commit that carries many of them would make everybody behind it wait."""
MAX_QUEUED_ROWS = 20_000
FIRST_BACKOFF_S = 0.05
MAX_BACKOFF_S = 2.0

ROUNDS_BEFORE_COMMIT = 2
"""Of the loop: orders that need not wait for the commit are handed to gRPC in them, and not behind its encoding."""

Then = Callable[[ControllerError | None], None]
"""Told once: None when the changes are durable, else what `commit` would raise."""


@dataclass(slots=True)
class WriterCounters:
    """What the writer did so far. `commit_s` is time spent in commits, failed tries included."""

    commits: int = 0
    changes: int = 0
    rows: int = 0
    retries: int = 0
    commit_s: float = 0.0
    largest_batch_rows: int = 0


@dataclass(slots=True)
class _Waiting:
    changes: Changes
    rows: int
    inline_bytes: int
    then: Then
    confirms: bool = False
    """The store is asked although there is nothing to write."""


class GroupWriter:
    """The leader's only way to the store. Order of calls to `queue`, `post` and `commit` is the order of the writes.

    All queue synchronously: what is given before the first await of a task stands before what it gives later. Above
    `max_queued_rows` `has_room` waits; callers that accept new work await it first, others are never refused.
    """

    def __init__(
        self,
        store: Store,
        term: int,
        *,
        max_batch_rows: int = MAX_BATCH_ROWS,
        max_queued_rows: int = MAX_QUEUED_ROWS,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.counters = WriterCounters()
        self.before_commit: Callable[[], None] = _nothing
        """Runs before the writer takes what is queued: what it queues goes into the same commit."""
        self._store = store
        self._term = term
        self._max_batch_rows = max_batch_rows
        self._max_queued_rows = max_queued_rows
        self._sleep = sleep
        self._clock = clock
        self._queue: deque[_Waiting] = deque()
        self._queued_rows = 0
        self._work = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._stopped: asyncio.Future[ControllerError] = asyncio.get_running_loop().create_future()
        self._closing = False
        self._task = asyncio.create_task(self._run(), name="store-writer")
        self._task.add_done_callback(self._ended)

    @property
    def term(self) -> int:
        """The term under which everything is written."""
        return self._term

    @property
    def is_open(self) -> bool:
        """Whether it takes changes: nothing has ended it, and nobody has asked it to end."""
        return not self._stopped.done() and not self._closing

    @property
    def queued_rows(self) -> int:
        """Rows that are not durable yet."""
        return self._queued_rows

    async def stopped(self) -> ControllerError:
        """Waits for the error that ended the writer: LeadershipLost, or a defect. The leader must stop then."""
        return await asyncio.shield(self._stopped)

    async def has_room(self) -> None:
        """Waits while the queue is full. Raises what `commit` would raise when the writer has stopped."""
        self._check_open()
        await self._room.wait()
        self._check_open()

    def queue(self, changes: Changes, then: Then) -> None:
        """Queues `changes` and tells `then` of their fate: in the order of queueing, one right after the other.

        Raises LeadershipLost or the error that stopped the writer.
        """
        self._check_open()
        rows = _rows(changes)
        if rows == 0 and not self._queue:
            then(None)
            return
        self._queue.append(_Waiting(changes, rows, _inline_bytes(changes), then))
        self._queued_rows += rows
        if self._queued_rows >= self._max_queued_rows:
            self._room.clear()
        self._work.set()

    def confirm(self, then: Then) -> None:
        """Tells `then` once all that was queued is durable and the store has said that this term still leads: what
        memory shows was true when this was called.

        Raises LeadershipLost or the error that stopped the writer.
        """
        self._check_open()
        self._queue.append(_Waiting(Changes(), 0, 0, then, confirms=True))
        self._work.set()

    def post(self, changes: Changes) -> asyncio.Future[None]:
        """Queues `changes`; the future resolves when they are durable, and need not be awaited.

        Raises LeadershipLost or the error that stopped the writer.
        """
        durable: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.queue(changes, _resolving(durable))
        return durable

    async def commit(self, changes: Changes) -> None:
        """Queues `changes` and waits until they are durable. Cancelling the wait does not take them back.

        Raises LeadershipLost or the error that stopped the writer.
        """
        await asyncio.shield(self.post(changes))

    async def confirmed(self) -> None:
        """As `confirm`, for whoever waits."""
        sure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.confirm(_resolving(sure))
        await asyncio.shield(sure)

    async def flush(self) -> None:
        """Waits until everything queued so far is durable."""
        await self.commit(Changes())

    async def close(self) -> None:
        """Writes what is queued, then ends. While the store does not answer, this waits."""
        self._closing = True
        self._work.set()
        await self._task

    async def abort(self) -> None:
        """Ends at once; what is queued may or may not have been written."""
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        self._fail(Unavailable("the controller is stopping"))

    def _check_open(self) -> None:
        if self._stopped.done():
            raise _told(self._stopped.result())
        if self._closing:
            raise Unavailable("the controller is stopping")

    async def _run(self) -> None:
        while True:
            if not self._queue:
                if self._closing:
                    return
                self._work.clear()
                await self._work.wait()
                continue
            self.before_commit()
            for _ in range(ROUNDS_BEFORE_COMMIT):
                await asyncio.sleep(0)
            batch = self._next_batch()
            try:
                if any(item.rows or item.confirms for item in batch):
                    await self._commit_until_durable(merge([item.changes for item in batch], token_hex(8)))
            except ControllerError as error:
                _log.error("store_writer_stopped", reason=error.reason, message=error.message, term=self._term)
                self._fail(error)
                return
            self._release(batch)

    def _next_batch(self) -> list[_Waiting]:
        """The head of the queue, at least one; it stays queued until it is durable."""
        batch: list[_Waiting] = []
        rows = inline_bytes = 0
        for item in self._queue:
            rows += item.rows
            inline_bytes += item.inline_bytes
            if batch and (rows > self._max_batch_rows or inline_bytes > MAX_BATCH_BYTES):
                break
            batch.append(item)
        return batch

    async def _commit_until_durable(self, changes: Changes) -> None:
        backoff_s = FIRST_BACKOFF_S
        while True:
            started = self._clock()
            try:
                await self._store.commit(self._term, changes)
            except Unavailable as error:
                self.counters.retries += 1
                _log.warning("store_commit_retried", message=error.message, backoff_s=backoff_s, term=self._term)
            else:
                return
            finally:
                self.counters.commit_s += self._clock() - started
            await self._sleep(backoff_s)
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)

    def _release(self, batch: list[_Waiting]) -> None:
        rows = sum(item.rows for item in batch)
        self.counters.commits += rows > 0
        self.counters.changes += sum(item.rows > 0 for item in batch)
        self.counters.rows += rows
        self.counters.largest_batch_rows = max(self.counters.largest_batch_rows, rows)
        self._queued_rows -= rows
        if self._queued_rows < self._max_queued_rows:
            self._room.set()
        for item in batch:
            self._queue.popleft()
            item.then(None)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """A defect in a store must not leave anybody waiting."""
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("store_writer_stopped", exc_info=error, term=self._term)
            self._fail(ControllerError(f"the store writer failed: {error!r}"))

    def _fail(self, error: ControllerError) -> None:
        if not self._stopped.done():
            self._stopped.set_result(error)
        while self._queue:
            self._queue.popleft().then(_told(error))
        self._queued_rows = 0
        self._room.set()


def _nothing() -> None:
    return None


def _resolving(future: asyncio.Future[None]) -> Then:
    """Resolves a future that need not be awaited."""

    def tell(error: ControllerError | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)
            future.exception()  # posted without a wait: `stopped` reports it

    return tell


def _told(error: ControllerError) -> ControllerError:
    """What a waiter hears, one object each: not durable for all that is known, so the same request must come again."""
    if isinstance(error, LeadershipLost):
        return LeadershipLost(error.message)
    return Unavailable("the controller could not write and starts anew; retry", retry_after_s=0.5)


def _rows(changes: Changes) -> int:
    return (
        len(changes.inserts)
        + len(changes.updates)
        + len(changes.events)
        + len(changes.intervals)
        + len(changes.requests)
    )


def _inline_bytes(changes: Changes) -> int:
    payloads = [record.spec for record in changes.inserts if isinstance(record, Call)]
    payloads += [record.result for record in changes.updates if isinstance(record, Call)]
    return sum(len(payload.inline) for payload in payloads if payload is not None and payload.inline is not None)
