"""The latency engine over HTTP: on a simulated cluster in real time, or on a real one whose nodes have no agents.

It is a client with a watch per kind and one task that sleeps until something is due.
"""

import asyncio
import contextlib
import datetime
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec

from plexrl.waiting.cluster.objects import Object
from plexrl.waiting.cluster.resources import ResourceType
from plexrl.waiting.latency.kubeconfig import Credentials
from plexrl.waiting.latency.stages import WATCHED, Call, StageEngine

USER_AGENT = "plexrl-latency"
# A refusal that says that what the call was about has gone or moved on, which the watch tells too.
_MOVED_ON = (403, 404, 409)
_LINE_LIMIT_BYTES = 16 * 2**20
_RETRY_S = 1.0


class CallRefused(RuntimeError):
    """The server refused a call for a reason that time will not cure."""


class RemoteLatency:
    """Runs an engine against a server. `speed` is how fast the server's time passes against the wall's.

    With `begin` false the nodes are those that the cluster has.
    """

    def __init__(
        self,
        credentials: Credentials,
        engine: StageEngine,
        *,
        speed: float = 1.0,
        begin: bool = True,
    ) -> None:
        self._credentials = credentials
        self._engine = engine
        self._speed = speed
        self._begin = begin
        self._wake = asyncio.Event()
        self._synced = {kind: asyncio.Event() for kind in WATCHED}
        self._began_s = 0.0

    async def run(self) -> None:
        """Works until cancelled. Raises CallRefused; aiohttp.ClientError if the server cannot be reached at first."""
        headers = {"User-Agent": USER_AGENT}
        if self._credentials.token:
            headers["Authorization"] = f"Bearer {self._credentials.token}"
        self._began_s = asyncio.get_running_loop().time()
        connector = aiohttp.TCPConnector(ssl=self._credentials.tls or True)
        async with aiohttp.ClientSession(
            self._credentials.url, headers=headers, connector=connector, read_bufsize=_LINE_LIMIT_BYTES
        ) as session:
            if self._begin:
                for call in self._engine.begin(_timestamp()):
                    await self._make(session, call)
            try:
                async with asyncio.TaskGroup() as tasks:
                    for kind in WATCHED:
                        tasks.create_task(self._follow(session, kind))
                    tasks.create_task(self._work(session))
            except ExceptionGroup as group:
                raise group.exceptions[0] from group

    def _now_s(self) -> float:
        return (asyncio.get_running_loop().time() - self._began_s) * self._speed

    async def _work(self, session: aiohttp.ClientSession) -> None:
        for synced in self._synced.values():
            await synced.wait()
        while True:
            self._wake.clear()
            calls = self._engine.step(self._now_s(), _timestamp())
            if calls is not None:
                for call in calls:
                    await self._make(session, call)
                continue
            due_s = self._engine.next_due_s()
            wait_s = None if due_s is None else max(0.0, due_s - self._now_s()) / self._speed
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), wait_s)

    async def _follow(self, session: aiohttp.ClientSession, kind: ResourceType) -> None:
        """Watches a kind for ever; after an interruption it lists again."""
        known: dict[str, Object] = {}
        while True:
            try:
                await self._list_and_watch(session, kind, known)
            except (aiohttp.ClientError, TimeoutError):
                await asyncio.sleep(_RETRY_S)

    async def _list_and_watch(
        self, session: aiohttp.ClientSession, kind: ResourceType, known: dict[str, Object]
    ) -> None:
        path = _path(kind)
        async with session.get(path) as response:
            response.raise_for_status()
            listed: Any = msgspec.json.decode(await response.read())
        fresh = {item["metadata"]["uid"]: item for item in listed["items"]}
        for uid in [uid for uid in known if uid not in fresh]:
            self._take(kind, "DELETED", known.pop(uid))
        for uid, item in fresh.items():
            if known.get(uid) != item:
                # Lists of real servers leave out what each item is.
                item = {"apiVersion": kind.api_version, "kind": kind.kind, **item}
                known[uid] = item
                self._take(kind, "MODIFIED", item)
        self._synced[kind].set()
        query = {"watch": "true", "resourceVersion": listed["metadata"]["resourceVersion"]}
        async with session.get(path, params=query, timeout=aiohttp.ClientTimeout(total=None)) as response:
            response.raise_for_status()
            async for line in _lines(response):
                event: Any = msgspec.json.decode(line)
                if event["type"] == "ERROR":
                    return
                item = event["object"]
                uid = item["metadata"].get("uid", "")
                if event["type"] == "DELETED":
                    known.pop(uid, None)
                else:
                    known[uid] = item
                self._take(kind, event["type"], item)

    def _take(self, kind: ResourceType, event: str, item: Object) -> None:
        self._engine.observe(kind, event, item, self._now_s())
        self._wake.set()

    async def _make(self, session: aiohttp.ClientSession, call: Call) -> None:
        body = None if call.value is None else msgspec.json.encode(call.value)
        headers = {"Content-Type": call.content_type}
        async with session.request(call.method, call.path, data=body, headers=headers) as response:
            if response.status < 400:
                return
            if response.status not in _MOVED_ON:
                text = (await response.text())[:500]
                raise CallRefused(f"{call.method} {call.path}: {response.status} {text}")
            if call.on_refusal is not None:
                call.on_refusal()


def _path(kind: ResourceType) -> str:
    root = f"/apis/{kind.group}/{kind.version}" if kind.group else f"/api/{kind.version}"
    return f"{root}/{kind.plural}"


async def _lines(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    while line := await response.content.readline():
        yield line


def _timestamp() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
