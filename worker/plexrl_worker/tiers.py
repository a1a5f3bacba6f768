"""Where parked states lie, within a byte budget per tier: host memory, and the disk for what has been used least.

A state comes back from disk through host memory. It is written to disk once: a copy that is still true is not written
again, and one of the two is dropped when room is needed. Moves between the two tiers happen one at a time; a move in
the background gives way to one that an order waits for. Knows no device, and of engines only the callback that has one
let go of an image.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import structlog

from plexrl_worker.arena import HostArena, HostImage
from plexrl_worker.engine import port
from plexrl_worker.errors import HostStateCorrupt, NotDeployed, OverBudget, StorageFailed
from plexrl_worker.parked_files import DiskCopy, Interrupt, Interrupted, ParkedFiles, StateFacts

T = TypeVar("T")

_log = structlog.get_logger(__name__)

LetGo = Callable[[str], Awaitable[None]]
InUse = Callable[[str], bool]

_BORROWED = "borrowed"


@dataclass
class Counters:
    """What the tiers did in this life."""

    loads_from_device: int = 0
    loads_from_host: int = 0
    loads_from_disk: int = 0
    prefetch_hits: int = 0
    prefetch_misses: int = 0
    spills: int = 0
    disk_writes: int = 0
    disk_write_bytes: int = 0
    engines_replaced: int = 0


@dataclass
class _Place:
    """Where one model's parked state is.

    image: its host memory, if it has any. facts, parked: what the image, or else the disk, holds; None when that is no
    state. disk: a copy of exactly that `parked`. pins: how many need the image to stay. leaving: it is being given up.
    arriving: it is being filled from disk.
    """

    layout: port.StateLayout
    image: HostImage | None = None
    facts: StateFacts | None = None
    parked: port.ParkedState | None = None
    disk: DiskCopy | None = None
    pins: int = 0
    leaving: bool = False
    arriving: bool = False
    prefetched: bool = False
    used_at: int = 0

    @property
    def settled(self) -> bool:
        """Whether it has host memory that can be used now."""
        return self.image is not None and not self.leaving and not self.arriving

    @property
    def dirty(self) -> bool:
        """Whether host memory has the only copy."""
        return self.image is not None and self.parked is not None and self.disk is None


class StateTiers:
    """The host and disk tiers of a worker."""

    def __init__(
        self, host_budget_bytes: int, disk_budget_bytes: int, files: ParkedFiles, in_use: InUse, let_go: LetGo
    ) -> None:
        """in_use: whether a model is on the device, so that its image is where it will be parked. let_go: has a model's
        engine give up its image.
        """
        self.counters = Counters()
        self._arena = HostArena(host_budget_bytes)
        self._in_use = in_use
        self._host_budget_bytes = host_budget_bytes
        self._disk_budget_bytes = disk_budget_bytes
        self._files = files
        self._let_go = let_go
        self._places: dict[str, _Place] = {}
        self._lock = asyncio.Lock()
        # Models for which an order waits for the lock.
        self._wanted: list[str] = []
        self._ticks = 0
        self._wake = asyncio.Event()
        self._given_back = asyncio.Event()
        self._given_back.set()

    @property
    def host_used_bytes(self) -> int:
        """Bytes of host memory given to models."""
        return self._arena.used_bytes

    @property
    def disk_used_bytes(self) -> int:
        """Bytes of parked state on disk."""
        return sum(place.disk.size_bytes for place in self._places.values() if place.disk is not None)

    def admit(self, model_id: str, layout: port.StateLayout) -> None:
        """Takes a model in. Raises OverBudget unless every state has a place when all are parked: all of them in host
        memory, or each on disk.
        """
        needed, taken = layout.host_bytes, self._taken_bytes
        roomy = max(self._host_budget_bytes, self._disk_budget_bytes)
        if needed > self._host_budget_bytes or taken + needed > roomy:
            raise OverBudget(
                f"model {model_id} needs {needed} bytes when parked; the models here take {taken}, this worker holds "
                f"{self._host_budget_bytes} in host memory and {self._disk_budget_bytes} on disk: delete models, or "
                "raise --host-state-bytes or --disk-state-bytes",
                metadata={
                    "needed_bytes": str(needed),
                    "used_bytes": str(taken),
                    "host_budget_bytes": str(self._host_budget_bytes),
                    "disk_budget_bytes": str(self._disk_budget_bytes),
                },
            )
        self._places[model_id] = _Place(layout)

    def image(self, model_id: str) -> HostImage:
        """A model's host memory, within `held` or `reserved` or while it is on the device."""
        image = self._place(model_id).image
        assert image is not None
        return image

    def on_disk_only(self, model_id: str) -> bool:
        """Whether a model's parked state would have to come from disk."""
        place = self._places.get(model_id)
        return place is not None and place.image is None and place.disk is not None

    @contextlib.asynccontextmanager
    async def held(self, model_id: str) -> AsyncIterator[HostImage]:
        """A model's parked state in host memory, where it stays within the block.

        It comes from disk, verified, and others go there for it.

        Raises HostStateCorrupt (no copy is left then), StorageFailed, OverBudget when what is in use leaves no room.
        """
        place = self._touch(model_id)
        place.pins += 1
        try:
            if not place.settled:
                async with self._moving(model_id) as stop:
                    await self._read(model_id, place, stop)
            if place.image is None:
                raise HostStateCorrupt(f"the parked state of model {model_id} was given up: no copy of it is left")
            yield self.image(model_id)
        finally:
            place.pins -= 1
            self._wake.set()

    @contextlib.asynccontextmanager
    async def reserved(self, model_id: str) -> AsyncIterator[HostImage]:
        """The same for a model that gets a new state: host memory, whatever is in it.

        Raises StorageFailed, OverBudget.
        """
        place = self._touch(model_id)
        place.pins += 1
        try:
            if not place.settled:
                async with self._moving(model_id) as stop:
                    # A state on disk stays the model's until the new one is there.
                    with contextlib.suppress(HostStateCorrupt):
                        await self._read(model_id, place, stop)
                    await self._allocate(model_id, place, stop)
            yield self.image(model_id)
        finally:
            place.pins -= 1
            self._wake.set()

    @contextlib.contextmanager
    def borrowed(self, size_bytes: int) -> Iterator[HostImage | None]:
        """Host memory that no model needs now, for a short while; None when there is none to spare."""
        if self._crowded or _BORROWED in self._arena or self._arena.used_bytes + size_bytes > self._host_budget_bytes:
            yield None
            return
        self._given_back.clear()
        try:
            yield self._arena.allocate(_BORROWED, size_bytes)
        finally:
            self._arena.release(_BORROWED)
            self._given_back.set()

    async def prefetch(self, model_id: str) -> None:
        """The same ahead of need, in the background. Raises Interrupted when it gave way to an order."""
        place = self._touch(model_id)
        if place.image is not None or place.disk is None:
            return
        async with self._moving(model_id, background=True, fetching=True) as stop:
            if place.image is None:
                await self._read(model_id, place, stop)
                place.prefetched = True

    def note_load(self, model_id: str, *, preloaded: bool) -> None:
        """Counts a load, before it fetches: where the state was, and whether a prefetch had brought it there."""
        place = self._place(model_id)
        if preloaded:
            self.counters.loads_from_device += 1
        elif self.on_disk_only(model_id):
            self.counters.loads_from_disk += 1
        else:
            self.counters.loads_from_host += 1
        self.counters.prefetch_hits += preloaded or place.prefetched
        place.prefetched = False

    def holds(self, model_id: str, facts: StateFacts, parked: port.ParkedState) -> None:
        """A model's host image holds this state now."""
        place = self._touch(model_id)
        if place.parked != parked:
            self._drop_disk(model_id, place)
        place.facts, place.parked = facts, parked
        self._wake.set()

    def adopt(self, model_id: str, copy: DiskCopy) -> None:
        """A model that was just admitted has its state on disk."""
        place = self._touch(model_id)
        place.disk, place.facts, place.parked = copy, copy.facts, copy.parked

    def forget_file(self, model_id: str) -> None:
        """Removes what an earlier life left on disk of a model that is not here."""
        self._files.remove(model_id)

    def forget_state(self, model_id: str) -> None:
        """No parked copy of a model's state may be used any more; the model stays."""
        place = self._place(model_id)
        place.facts, place.parked = None, None
        self._drop_disk(model_id, place)

    async def remove(self, model_id: str) -> None:
        """Forgets a model and frees its room; one that is not here is fine."""
        if model_id not in self._places:
            return
        async with self._moving(model_id):
            place = self._places.pop(model_id, None)
            if place is not None:
                self._arena.release(model_id)
                self._drop_disk(model_id, place)

    async def run(self) -> None:
        """Writes parked states to disk ahead of need, least recently used first, until cancelled.

        Only where host memory cannot hold all models: elsewhere none will have to leave it.
        """
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._crowded and (model_id := self._oldest_dirty()) is not None:
                place = self._places[model_id]
                try:
                    async with self._moving(model_id, background=True) as stop:
                        if place.dirty and self._spillable(model_id):
                            await self._write(model_id, place, stop)
                except Interrupted:
                    continue
                except StorageFailed as error:
                    _log.error("write_back_failed", model=model_id, message=error.message)
                    break

    async def write_all(self) -> None:
        """Writes every parked state that has no copy on disk, as before a planned end; says which it could not."""
        for model_id, place in list(self._places.items()):
            try:
                if place.disk is not None and place.facts is not None:
                    await asyncio.to_thread(self._files.restate, place.disk, place.facts)
                if not place.dirty:
                    continue
                if self.disk_used_bytes + place.layout.host_bytes > self._disk_budget_bytes:
                    raise StorageFailed(f"the disk tier's {self._disk_budget_bytes} bytes do not hold it as well")
                async with self._moving(model_id) as stop:
                    await self._write(model_id, place, stop)
            except StorageFailed as error:
                _log.error("state_not_kept", model=model_id, message=error.message)

    def close(self) -> None:
        """Frees host memory; what is on disk stays for the next life."""
        self._arena.close()

    # With `_moving` held.

    async def _read(self, model_id: str, place: _Place, stop: Interrupt) -> None:
        if place.image is not None or place.disk is None:
            return
        image = await self._allocate(model_id, place, stop)
        place.arriving = True
        try:
            await _in_thread(self._files.read, place.disk, image.fd, stop)
        except BaseException as error:
            self._release(model_id, place)
            if isinstance(error, HostStateCorrupt):
                self.forget_state(model_id)
            raise
        finally:
            place.arriving = False

    async def _allocate(self, model_id: str, place: _Place, stop: Interrupt) -> HostImage:
        if place.image is None:
            await self._make_room(model_id, place.layout.host_bytes, stop)
            place.image = self._arena.allocate(model_id, place.layout.host_bytes)
        return place.image

    async def _make_room(self, model_id: str, size_bytes: int, stop: Interrupt) -> None:
        while self._arena.used_bytes + size_bytes > self._host_budget_bytes:
            candidates = [other for other in self._places if other != model_id and self._spillable(other)]
            if candidates:
                await self._spill(min(candidates, key=lambda other: self._places[other].used_at), stop)
            elif not self._given_back.is_set():
                await self._given_back.wait()
            else:
                # The arena refuses, with the numbers.
                return

    async def _spill(self, model_id: str, stop: Interrupt) -> None:
        place = self._places[model_id]
        if place.dirty:
            await self._write(model_id, place, stop)
        if place.disk is None or not self._spillable(model_id):
            return
        place.leaving = True
        try:
            await self._let_go(model_id)
        finally:
            place.leaving = False
        self.counters.prefetch_misses += place.prefetched
        place.prefetched = False
        self._release(model_id, place)
        self.counters.spills += 1
        _log.info("state_spilled", model=model_id, size_bytes=place.layout.host_bytes)

    async def _write(self, model_id: str, place: _Place, stop: Interrupt) -> None:
        assert place.image is not None
        assert place.facts is not None
        assert place.parked is not None
        facts, parked = place.facts, place.parked
        copy = await _in_thread(self._files.write, facts, parked, place.layout, place.image.fd, stop)
        self.counters.disk_writes += 1
        self.counters.disk_write_bytes += copy.size_bytes
        if place.parked == parked and not self._in_use(model_id):
            place.disk = copy
        else:
            # Needed meanwhile, and perhaps parked anew while it was read: it may be torn.
            self._files.remove(model_id)

    def _spillable(self, model_id: str) -> bool:
        """Whether a model's host memory can be given to another."""
        place = self._places[model_id]
        in_host = place.image is not None and place.parked is not None and not place.leaving
        return in_host and not place.pins and not self._in_use(model_id)

    def _release(self, model_id: str, place: _Place) -> None:
        self._arena.release(model_id)
        place.image = None

    def _drop_disk(self, model_id: str, place: _Place) -> None:
        if place.disk is not None:
            self._files.remove(model_id)
            place.disk = None

    @contextlib.asynccontextmanager
    async def _moving(
        self, model_id: str, *, background: bool = False, fetching: bool = False
    ) -> AsyncIterator[Interrupt]:
        """The right to move states. Gives what says whether to stop: never, but in the background when an order waits,
        unless that is for the very state that is being fetched.
        """
        if not background:
            self._wanted.append(model_id)
        try:
            await self._lock.acquire()
        finally:
            if not background:
                self._wanted.remove(model_id)
        try:
            yield lambda: background and any(other != model_id or not fetching for other in self._wanted)
        finally:
            self._lock.release()

    @property
    def all_fit_disk(self) -> bool:
        """Whether the disk tier can hold every model's state."""
        return self._taken_bytes <= self._disk_budget_bytes

    @property
    def _taken_bytes(self) -> int:
        return sum(place.layout.host_bytes for place in self._places.values())

    @property
    def _crowded(self) -> bool:
        return self._taken_bytes > self._host_budget_bytes

    def _oldest_dirty(self) -> str | None:
        dirty = [model_id for model_id, place in self._places.items() if place.dirty and self._spillable(model_id)]
        return min(dirty, key=lambda model_id: self._places[model_id].used_at) if dirty else None

    def _place(self, model_id: str) -> _Place:
        try:
            return self._places[model_id]
        except KeyError:
            raise NotDeployed(f"model {model_id} is not on this worker") from None

    def _touch(self, model_id: str) -> _Place:
        place = self._place(model_id)
        self._ticks += 1
        place.used_at = self._ticks
        return place


async def _in_thread(move: Callable[..., T], *arguments: object) -> T:
    """Runs a move of bytes, whose last argument is its interrupt. Cancelled, it stops the move and sees it end first:
    nothing may write to a file or an image that is given to another.
    """
    *values, stop = arguments
    cancelled = False
    moving = asyncio.ensure_future(asyncio.to_thread(move, *values, lambda: cancelled or stop()))  # type: ignore[operator]
    try:
        return await asyncio.shield(moving)
    except asyncio.CancelledError:
        cancelled = True
        with contextlib.suppress(Interrupted, StorageFailed, HostStateCorrupt):
            await moving
        raise
