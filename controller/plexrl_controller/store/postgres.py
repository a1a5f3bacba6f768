"""The store on Postgres. Reads go through SQLAlchemy; commits use array statements on one connection of its engine.

One commit is one transaction: the fence first, then at most one write per table. What the path of a call writes is one
statement, and so one round trip; rarer changes, whose rows may free each other's names, take a few. It knows no
lifecycle and never decides what to write.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, TypeVar

import asyncpg
from sqlalchemy import Select
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from plexrl_controller.domain.errors import ControllerError, LeadershipLost, Unavailable
from plexrl_controller.domain.ids import CallId, CheckpointId, JobId, ModelId, SessionId, Tenant
from plexrl_controller.domain.records import Call, Checkpoint, Event, Interval, Job, Model, Session, Token
from plexrl_controller.store import reads, retention, rows, statements
from plexrl_controller.store.batch import RowWrites, coalesce
from plexrl_controller.store.paging import encode_cursor
from plexrl_controller.store.port import Account, Changes, Listing, LiveState, Page, Tombstone
from plexrl_controller.store.rows import RowCodec, row_tuples
from plexrl_controller.store.statements import Part

R = TypeVar("R")

READ_CONNECTIONS = 4
COMMAND_TIMEOUT_S = 30.0
CONNECT_TIMEOUT_S = 5.0

_NOT_NOW = ("08", "25P03", "40", "53", "55P03", "57", "58", "XX")
"""SQLSTATE prefixes of what may pass: lost connection, conflict, full disk, shutdown, I/O error."""

_TABLES = [codec.table.name for codec in (*rows.RECORDS, rows.EVENT, rows.INTERVAL, rows.REQUEST)]
_INSERTS = {codec.record: statements.insert_statement(codec) for codec in rows.RECORDS}
_UPDATES = {codec.record: statements.UpdateStatement.of(codec) for codec in rows.RECORDS}
_INSERT_EVENTS = statements.insert_statement(rows.EVENT)
_INSERT_INTERVALS = statements.insert_statement(rows.INTERVAL)
_INSERT_REQUESTS = statements.insert_statement(rows.REQUEST)
_UPDATE_PARTS = {record: statements.update_part(_UPDATES[record]) for record in (Model, Call)}
_INSERT_CALLS = statements.insert_part(rows.CALL)
_INSERT_EVENTS_PART = statements.insert_part(rows.EVENT)
_INSERT_INTERVALS_PART = statements.insert_part(rows.INTERVAL)


class PostgresStore:
    """Implements `Store`. `url` is a `postgresql+asyncpg://` URL; the schema must be there (`plexrl_migrations`)."""

    def __init__(self, url: str) -> None:
        self._engine = create_engine(url)
        self._writer: _WriterConnection | None = None
        self._commit_lock = asyncio.Lock()

    async def acquire_term(self, holder: str) -> int:
        async with _translated(), self._commit_lock, self._writer_connection() as writer:
            term = await (await writer.prepare(statements.ACQUIRE_TERM)).fetchval(holder)
            assert isinstance(term, int)
            return term

    async def load(self) -> LiveState:
        async with _translated(), self._engine.connect() as connection:
            snapshot = await connection.execution_options(isolation_level="REPEATABLE READ")
            held_calls = (
                *await _all(snapshot, rows.CALL, reads.HELD_CALLS),
                *await _all(snapshot, rows.CALL, reads.CANCELLING_CALLS),
            )
            return LiveState(
                jobs=await _all(snapshot, rows.JOB, reads.LIVE_JOBS),
                models=await _all(snapshot, rows.MODEL, reads.LIVE_MODELS),
                calls=tuple(sorted(held_calls, key=lambda call: (call.create_time, call.call_id))),
                tombstones=tuple(Tombstone(*row) for row in await snapshot.execute(reads.TOMBSTONES)),
                workers=await _all(snapshot, rows.WORKER, reads.WORKERS),
                sessions=await _all(snapshot, rows.SESSION, reads.OPEN_SESSIONS),
                logged_calls=await _all(snapshot, rows.CALL, reads.LOGGED_CALLS),
                checkpoints=await _all(snapshot, rows.CHECKPOINT, reads.CHECKPOINTS_OF_LIVE_MODELS),
                snapshots=await _all(snapshot, rows.SNAPSHOT, reads.SNAPSHOTS_OF_LIVE_MODELS),
                tokens=await _all(snapshot, rows.TOKEN, reads.TOKENS),
                requests=await _all(snapshot, rows.REQUEST, reads.REQUESTS),
                accounts=tuple(
                    (await _accounts(snapshot, reads.ACCOUNTS, reads.FOLDED_ACCOUNTS, reads.SUCCEEDED)).values()
                ),
            )

    async def tokens(self) -> Sequence[Token]:
        async with _translated(), self._engine.connect() as connection:
            return await _all(connection, rows.TOKEN, reads.TOKENS)

    async def commit(self, term: int, changes: Changes) -> None:
        writes = coalesce(changes)
        if _is_hot(writes, changes):
            await self._commit_hot(term, writes, changes)
            return
        async with _translated(), self._commit_lock, self._writer_connection() as writer, writer.transaction():
            if await writer.execute(statements.FENCE, term, changes.commit_id) == 0:
                await _check_repeated(writer, term, changes.commit_id)
                return
            await _write_records(writer, writes)
            await _insert(writer, _INSERT_EVENTS, rows.EVENT, changes.events)
            await _insert(writer, _INSERT_INTERVALS, rows.INTERVAL, changes.intervals)
            await _insert(writer, _INSERT_REQUESTS, rows.REQUEST, changes.requests)

    async def _commit_hot(self, term: int, writes: RowWrites, changes: Changes) -> None:
        """Everything in one statement, which is a transaction of its own."""
        async with _translated(), self._commit_lock, self._writer_connection() as writer:
            parts: list[Part] = []
            arguments: list[Any] = []
            for record in (Model, Call):
                updates = [update for update in writes.updates if type(update.record) is record]
                if updates:
                    update = _UPDATES[record]
                    parts.append(_UPDATE_PARTS[record])
                    arguments.extend(update.arguments(updates, writer.columns[update.table]))
            for part, codec, records in (
                (_INSERT_CALLS, rows.CALL, writes.inserts),
                (_INSERT_EVENTS_PART, rows.EVENT, changes.events),
                (_INSERT_INTERVALS_PART, rows.INTERVAL, changes.intervals),
            ):
                if records:
                    parts.append(part)
                    order = writer.columns[codec.table.name]
                    arguments.extend(statements.insert_part_arguments(codec, records, order))
            statement = await writer.prepare(statements.commit_statement(tuple(parts)))
            try:
                held = await statement.fetchval(term, changes.commit_id, *arguments)
            except asyncpg.DivisionByZeroError:
                await _check_models(writer, writes)
                raise
            if not held:
                await _check_repeated(writer, term, changes.commit_id)

    async def get_job(self, job_id: JobId) -> Job | None:
        return await self._get(rows.JOB, job_id)

    async def get_model(self, model_id: ModelId) -> Model | None:
        return await self._get(rows.MODEL, model_id)

    async def get_call(self, call_id: CallId) -> Call | None:
        return await self._get(rows.CALL, call_id)

    async def get_session(self, session_id: SessionId) -> Session | None:
        return await self._get(rows.SESSION, session_id)

    async def get_checkpoint(self, checkpoint_id: CheckpointId) -> Checkpoint | None:
        return await self._get(rows.CHECKPOINT, checkpoint_id)

    async def list_jobs(self, tenant: Tenant | None, live_only: bool, page: Page) -> Listing[Job]:
        return await self._page(rows.JOB, page, reads.list_jobs(tenant, live_only, page))

    async def accounts(self, job_ids: Sequence[JobId]) -> Mapping[JobId, Account]:
        if not job_ids:
            return {}
        async with _translated(), self._engine.connect() as connection:
            # One moment for all three: pruning moves seconds from the first to the second.
            snapshot = await connection.execution_options(isolation_level="REPEATABLE READ")
            return await _accounts(snapshot, *reads.accounts_of(job_ids))

    async def list_calls(self, tenant: Tenant | None, job_id: JobId | None, page: Page) -> Listing[Call]:
        return await self._page(rows.CALL, page, reads.list_calls(tenant, job_id, page), absent=reads.BULK_FIELDS)

    async def list_checkpoints(self, model_id: ModelId) -> Sequence[Checkpoint]:
        async with _translated(), self._engine.connect() as connection:
            return await _all(connection, rows.CHECKPOINT, reads.list_checkpoints(model_id))

    async def intervals(
        self, tenant: Tenant | None, job_id: JobId | None, since_unix_ns: int
    ) -> AsyncIterator[Sequence[Interval]]:
        position = (since_unix_ns, 2**63 - 1)
        while True:
            async with _translated(), self._engine.connect() as connection:
                found = (await connection.execute(reads.list_intervals(tenant, job_id, position))).mappings().all()
            if not found:
                return
            yield tuple(rows.INTERVAL.decode(row) for row in found)
            position = (found[-1]["end_unix_ns"], found[-1]["interval_id"])

    async def events(self, record_id: str) -> Sequence[Event]:
        async with _translated(), self._engine.connect() as connection:
            return await _all(connection, rows.EVENT, reads.list_events(record_id))

    async def prune(self, before: float) -> int:
        pruned = 0
        for statement in retention.STEPS:
            while True:
                # One short transaction a batch: commits go on between them.
                async with _translated(), self._engine.begin() as connection:
                    arguments = {"before": before, "rows": retention.BATCH_ROWS}
                    rows_gone = (await connection.execute(statement, arguments)).scalar_one()
                if not rows_gone:
                    break
                pruned += rows_gone
        return pruned

    async def close(self) -> None:
        async with self._commit_lock:
            if self._writer is not None:
                await self._writer.close()
                self._writer = None
            await self._engine.dispose()

    async def _get(self, codec: RowCodec[R], record_id: str) -> R | None:
        if "\0" in record_id:
            # Postgres holds no such text, so nothing has that name.
            return None
        async with _translated(), self._engine.connect() as connection:
            found = await _all(connection, codec, reads.by_id(codec, record_id))
        return found[0] if found else None

    async def _page(
        self, codec: RowCodec[Any], page: Page, query: Select[Any], absent: Sequence[str] = ()
    ) -> Listing[Any]:
        async with _translated(), self._engine.connect() as connection:
            found = await _all(connection, codec, query, absent)
        items = found[: page.size]
        key = codec.table.primary_key.columns[0].name
        more = len(found) > page.size
        return Listing(items, encode_cursor((items[-1].create_time, getattr(items[-1], key))) if more else None)

    @asynccontextmanager
    async def _writer_connection(self) -> AsyncIterator["_WriterConnection"]:
        """The connection of the commits. After any error but a refused write its state is not known: it is dropped."""
        if self._writer is None:
            self._writer = await _WriterConnection.open(self._engine)
        writer, self._writer = self._writer, None
        try:
            yield writer
        except (LeadershipLost, asyncpg.IntegrityConstraintViolationError, asyncpg.DivisionByZeroError, _Inconsistent):
            self._writer = writer
            raise
        except BaseException:
            await writer.drop()
            raise
        self._writer = writer


class _WriterConnection:
    """A raw asyncpg connection of the engine's, with its prepared statements."""

    def __init__(self, connection: AsyncConnection, driver: "asyncpg.Connection[Any]") -> None:
        self._connection = connection
        self._driver = driver
        self._prepared: dict[str, asyncpg.prepared_stmt.PreparedStatement[Any]] = {}
        self.columns: dict[str, tuple[str, ...]] = {}
        """By table, in the order of its row type: migrations append."""

    @classmethod
    async def open(cls, engine: AsyncEngine) -> "_WriterConnection":
        connection = await engine.connect()
        raw = await connection.get_raw_connection()
        driver = raw.driver_connection
        assert driver is not None
        writer = cls(connection, driver)
        try:
            await driver.execute(statements.WRITER_SETTINGS)
            for table, columns in await driver.fetch(statements.TABLE_COLUMNS, _TABLES):
                writer.columns[table] = tuple(columns)
        except BaseException:
            await writer.drop()
            raise
        return writer

    def transaction(self) -> Any:
        return self._driver.transaction()

    async def prepare(self, sql: str) -> "asyncpg.prepared_stmt.PreparedStatement[Any]":
        if sql not in self._prepared:
            self._prepared[sql] = await self._driver.prepare(sql)
        return self._prepared[sql]

    async def execute(self, sql: str, *arguments: Any) -> int:
        """Runs a prepared statement; returns the number of rows that it wrote."""
        statement = await self.prepare(sql)
        await statement.fetch(*arguments)
        return int(statement.get_statusmsg().rpartition(" ")[2])

    async def drop(self) -> None:
        """Cuts the connection without a word to the server, which may not be listening."""
        self._driver.terminate()
        await self.close()

    async def close(self) -> None:
        await self._connection.invalidate()
        await self._connection.close()


def create_engine(url: str) -> AsyncEngine:
    """The engine that owns every connection to the database."""
    return create_async_engine(
        url,
        pool_size=READ_CONNECTIONS + 1,
        max_overflow=0,
        pool_pre_ping=True,
        connect_args={
            "timeout": CONNECT_TIMEOUT_S,
            "command_timeout": COMMAND_TIMEOUT_S,
            "server_settings": {"application_name": "plexrl-controller", "jit": "off"},
        },
    )


@asynccontextmanager
async def _translated() -> AsyncIterator[None]:
    """Errors of the driver and of SQLAlchemy, as the port's."""
    try:
        yield
    except DBAPIError as error:
        raise _translate(error.orig.__cause__ if error.orig and error.orig.__cause__ else error) from error
    # InternalClientError is what asyncpg raises when a connection dies in the middle of its protocol.
    except (asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError, OSError, TimeoutError) as error:
        raise _translate(error) from error


def _translate(error: BaseException) -> ControllerError:
    if isinstance(error, asyncpg.UniqueViolationError):
        return LeadershipLost(f"somebody else wrote: {error}")
    if isinstance(error, asyncpg.PostgresError) and error.sqlstate == statements.GUARD_FAILED:
        return LeadershipLost("rows are not at the revision that they were changed from: somebody else wrote")
    if isinstance(error, asyncpg.PostgresError) and not (error.sqlstate or "").startswith(_NOT_NOW):
        return ControllerError(f"the database refused what the controller wrote: {error}", reason="STORE_REFUSED")
    return Unavailable(f"the database does not answer: {type(error).__name__}: {error}", retry_after_s=1.0)


def _is_hot(writes: RowWrites, changes: Changes) -> bool:
    """Whether a commit writes what the path of a call writes and nothing else."""
    return (
        not changes.requests
        and {type(record) for record in writes.inserts} <= {Call}
        and {type(update.record) for update in writes.updates} <= {Call, Model}
    )


class _Inconsistent(ControllerError):
    """Changes that make no sense: nothing was written, and the connection is as good as before."""


async def _check_models(writer: _WriterConnection, writes: RowWrites) -> None:
    """Raises ControllerError when a new call names a model that is not stored."""
    named = {record.model_id for record in writes.inserts if isinstance(record, Call)}
    if named and not await (await writer.prepare(statements.HAVE_MODELS)).fetchval(list(named)):
        raise _Inconsistent(f"a call names a model that is not stored: {sorted(named)}", reason="INCONSISTENT_CHANGES")


async def _check_repeated(writer: _WriterConnection, term: int, commit_id: str) -> None:
    """The fence did not hold: fine when this very commit is there already. Raises LeadershipLost."""
    shown = await (await writer.prepare(statements.SHOW_FENCE)).fetchrow()
    newest, last = tuple(shown) if shown else (0, "")
    if newest != term:
        raise LeadershipLost(f"term {term} is over: the newest is {newest}")
    assert last == commit_id


async def _write_records(writer: _WriterConnection, writes: RowWrites) -> None:
    """Updates first: one may free a name that an insert takes."""
    for codec in rows.RECORDS:
        updates = [update for update in writes.updates if type(update.record) is codec.record]
        if not updates:
            continue
        statement = _UPDATES[codec.record]
        written = await writer.execute(statement.sql, *statement.arguments(updates, writer.columns[codec.table.name]))
        if written != len(updates):
            raise LeadershipLost(
                f"{len(updates) - written} of {len(updates)} rows of {codec.table.name} are not at the revision "
                "that they were changed from: somebody else wrote"
            )
    for codec in rows.RECORDS:
        inserts = [record for record in writes.inserts if type(record) is codec.record]
        await _insert(writer, _INSERTS[codec.record], codec, inserts)
    await _check_models(writer, writes)


async def _insert(writer: _WriterConnection, sql: str, codec: RowCodec[Any], records: Sequence[Any]) -> None:
    if records:
        await writer.execute(sql, row_tuples(codec.fields, records, writer.columns[codec.table.name]))


async def _accounts(
    connection: AsyncConnection, seconds: Select[Any], folded: Select[Any], succeeded: Select[Any]
) -> dict[JobId, Account]:
    """What stands in intervals, what was folded out of them, and the calls that succeeded; ordered by job."""
    accounts: dict[JobId, Account] = {}
    for query in (seconds, folded):
        for job_id, busy_s, swap_s, hold_s, swaps in await connection.execute(query):
            account = Account(job_id, float(busy_s), float(swap_s), float(hold_s), swaps)
            accounts[job_id] = accounts.get(job_id, Account(job_id)) + account
    for job_id, count in await connection.execute(succeeded):
        accounts[job_id] = replace(accounts.get(job_id, Account(job_id)), calls=count)
    return {job_id: accounts[job_id] for job_id in sorted(accounts)}


async def _all(
    connection: AsyncConnection, codec: RowCodec[R], query: Select[Any], absent: Sequence[str] = ()
) -> tuple[R, ...]:
    found = await connection.execute(query)
    return tuple(codec.decode(row, absent) for row in found.mappings())
