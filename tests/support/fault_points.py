"""Named moments of a running cluster: a commit of the controller is held up at the moment that it writes a named thing.

A trigger in the cluster's own database waits there, within the transaction, for a lock that this process holds. So a
process can be killed exactly before what happened is durable, or right after, and no line of the product knows of it:
what runs is what users run. What it cannot name is what the controller never writes.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from enum import Enum

import asyncpg

from plexrl.v1 import model_pb2

KEY = 4711

POINTS = {
    "call accepted": ("events", "machine = 'call' AND event = 'CREATE'"),
    "call dispatched": ("events", "machine = 'call' AND event = 'DISPATCH'"),
    "call started": ("events", "machine = 'call' AND event = 'START'"),
    "call gave way": ("events", "machine = 'call' AND event = 'YIELD'"),
    "call goes on": ("events", "machine = 'call' AND event = 'CONTINUE'"),
    "cancel asked for": ("events", "machine = 'call' AND event = 'REQUEST_CANCEL'"),
    "call cancelled": ("events", "machine = 'call' AND event = 'CANCEL'"),
    "call succeeded": ("events", "machine = 'call' AND event = 'SUCCEED'"),
    "result acknowledged": ("calls", "acknowledged"),
    "swap begun": ("intervals", "kind = 'SWAP_OUT'"),
    "swap ended": ("intervals", "kind = 'SWAP_IN'"),
    "snapshot begun": ("snapshots", "NOT committed"),
    "snapshot committed": ("snapshots", "committed"),
    "checkpoint committed": ("checkpoints", "true"),
    "job accepted": ("events", "machine = 'job' AND event = 'CREATE'"),
    "job finishing": ("events", "machine = 'job' AND event = 'FINISH'"),
    "job finished": ("events", "machine = 'job' AND event = 'RELEASED'"),
    "model accepted": ("events", "machine = 'model' AND event = 'CREATE'"),
    "model built": ("events", "machine = 'model' AND event = 'DEPLOYED' AND source = 'CREATING'"),
    "model dropped": ("events", "machine = 'model' AND event = 'DROPPED'"),
    "recovery begun": ("events", "machine = 'model' AND event = 'RECOVER'"),
    "model restored": ("events", "machine = 'model' AND event = 'DEPLOYED' AND source = 'RECOVERING'"),
    "worker registered": ("events", "machine = 'worker' AND event = 'REGISTER'"),
    "session opened": ("events", "machine = 'session' AND event = 'CREATE'"),
    "session granted": ("calls", "session_id IS NOT NULL AND state = 'DISPATCHED'"),
    "session parked": ("calls", "session_id IS NOT NULL AND state = 'YIELDED'"),
    "session goes on": ("calls", "session_id IS NOT NULL AND state = 'RUNNING' AND OLD.state = 'YIELDED'"),
    "session closed": ("events", "machine = 'session' AND event = 'CLOSE'"),
    "session expired": ("events", "machine = 'session' AND event = 'EXPIRE'"),
}
"""Where each point is written: a table, and what its new row says. Whether a session's calls may run is never written:
that it was granted, revoked and granted again shows in its calls, which are given, parked and go on.
"""

_ROLLOUTS = f"role = {model_pb2.MODEL_ROLE_ROLLOUT}"
PULL_POINTS = {
    "pull accepted": ("new calls", "source_model_id IS NOT NULL"),
    "pull dispatched": ("calls", "source_model_id IS NOT NULL AND state = 'DISPATCHED'"),
    "pull started": ("calls", "source_model_id IS NOT NULL AND state = 'RUNNING' AND OLD.state <> 'RUNNING'"),
    "pull succeeded": ("calls", "source_model_id IS NOT NULL AND state = 'SUCCEEDED' AND NOT acknowledged"),
    "pull tried again": ("calls", "source_model_id IS NOT NULL AND state = 'PENDING' AND OLD.state <> 'PENDING'"),
    "version replaced": ("calls", "source_model_id IS NOT NULL AND state = 'CANCELLING'"),
    "version gone": ("calls", "source_model_id IS NOT NULL AND state = 'CANCELLED' AND NOT acknowledged"),
    "rollouts recovering": ("models", f"{_ROLLOUTS} AND state = 'RECOVERING' AND OLD.state <> 'RECOVERING'"),
    "rollouts restored": ("models", f"{_ROLLOUTS} AND state = 'PLACED' AND OLD.state = 'RECOVERING'"),
    "rollouts lost": ("models", f"{_ROLLOUTS} AND state = 'STATE_LOST' AND OLD.state <> 'STATE_LOST'"),
}
"""The same of weights that one worker takes from another's. What is between two workers alone is written nowhere:
`fault_transfers` holds it up.
"""


_LOST = (OSError, asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError)
"""What asyncpg raises of a server that is killed at any moment, while it connects too."""

_WAIT = f"""
CREATE OR REPLACE FUNCTION wait_at_point() RETURNS trigger AS $$
BEGIN
    IF EXISTS (SELECT FROM fault_point WHERE point = TG_NAME) THEN
        PERFORM pg_advisory_xact_lock_shared({KEY});
    END IF;
    RETURN NEW;
END
$$ LANGUAGE plpgsql;
CREATE UNLOGGED TABLE IF NOT EXISTS fault_point (point text);
"""
_HELD = "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND objid = $1 AND NOT granted"
_IN_TRANSACTION = "SELECT xact_start IS NOT NULL FROM pg_stat_activity WHERE pid = $1"
TRIGGER = "CREATE OR REPLACE TRIGGER {name} BEFORE {when} ON {table} FOR EACH ROW WHEN ({row}) EXECUTE FUNCTION {call}"


class Moment(Enum):
    """When the kill comes."""

    UNDONE = "before the commit, which is undone"
    LANDS = "before the commit, which lands all the same"
    AFTER = "after the commit"
    DURING = "while it lasts"
    """Of what no commit begins or ends: weights on their way."""


@dataclass
class HeldCommit:
    """A commit that waits at its point."""

    database: "FaultDatabase"
    backend: int

    async def let_land(self) -> None:
        """Lets it go on, and waits until it is durable."""
        await self.database.release()
        while await self.database.connection.fetchval(_IN_TRANSACTION, self.backend):  # noqa: ASYNC110
            await asyncio.sleep(0.001)

    async def undo(self) -> None:
        """Ends its session: nothing of it is durable."""
        await self.database.connection.execute("SELECT pg_terminate_backend($1)", self.backend)


class FaultDatabase:
    """The cluster's database, with triggers at every point."""

    def __init__(self, socket_folder: str, database: str) -> None:
        self._address = {"host": socket_folder, "database": database, "user": "plexrl"}
        self._connection: asyncpg.Connection[asyncpg.Record] | None = None

    @property
    def connection(self) -> "asyncpg.Connection[asyncpg.Record]":
        """Of this process, past every point."""
        assert self._connection is not None
        return self._connection

    def close(self) -> None:
        """Gives the connection up, whatever state it is in."""
        if self._connection is not None:
            self._connection.terminate()

    async def connect(self, limit_s: float = 240.0) -> None:
        """Connects, as often as it takes: Postgres may be starting."""
        self.close()
        deadline = time.monotonic() + limit_s
        while True:
            try:
                self._connection = await asyncpg.connect(**self._address)
                return
            except _LOST:
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(0.05)

    async def install(self) -> None:
        """Puts the triggers in place; none waits before it is armed."""
        await self.connection.execute(_WAIT)
        for point, (where, row) in (POINTS | PULL_POINTS).items():
            new = " ".join(f"NEW.{word}" if word in _COLUMNS else word for word in row.split())
            when, table = _WRITTEN.get(where, "INSERT OR UPDATE"), where.removeprefix("new ")
            trigger = TRIGGER.format(name=_name(point), when=when, table=table, row=new, call="wait_at_point()")
            await self.connection.execute(trigger)

    @asynccontextmanager
    async def held(
        self, point: str, provoke: Callable[[], Awaitable[object]] | None = None, limit_s: float = 240.0
    ) -> AsyncIterator[HeldCommit]:
        """Within the block, the first commit that writes the point waits. `provoke` is called again and again until one
        comes. Raises TimeoutError when none does.
        """
        await self.connection.execute("SELECT pg_advisory_lock($1)", KEY)
        await self.connection.execute("INSERT INTO fault_point VALUES ($1)", _name(point))
        try:
            async with asyncio.timeout(limit_s):
                while (backend := await self.connection.fetchval(_HELD, KEY)) is None:
                    if provoke is not None:
                        await provoke()
                    await asyncio.sleep(0.002)
            yield HeldCommit(self, backend)
        finally:
            await self.release()

    async def release(self) -> None:
        """Lets go of whatever waits; a database that died has let go by itself. So may the next."""
        for _ in range(9):
            with suppress(*_LOST):
                await self._release()
                return
            await self.connect()
        await self._release()

    async def _release(self) -> None:
        await self.connection.execute("DELETE FROM fault_point")
        await self.connection.execute("SELECT pg_advisory_unlock_all()")


_WRITTEN = {"new calls": "INSERT", "calls": "UPDATE", "models": "UPDATE", "events": "INSERT", "intervals": "INSERT"}
_COLUMNS = (
    *("machine", "event", "source", "kind", "acknowledged", "committed"),
    *("session_id", "state", "source_model_id", "role"),
)


def _name(point: str) -> str:
    return point.replace(" ", "_")
