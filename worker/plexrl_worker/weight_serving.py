"""Gives other workers a model's rollout weights, as they lie in its host image, piece by piece.

Between two pieces nothing of this worker is held: a peer that stops reading delays no swap, and weights that a swap
leaves as they are go on to be read. What has changed since the header ends the stream. Weights that the device alone
has are written back first; the device's holder may be waiting for a peer that waits for this worker, and parks the very
model before it does, so that whoever waits for the device looks again and again.
"""

import asyncio
import os
from collections.abc import AsyncIterator

from plexrl import wire
from plexrl.v1 import worker_pb2 as w
from plexrl_worker.deployment import Deployment
from plexrl_worker.engine import port
from plexrl_worker.engine.port import Component
from plexrl_worker.errors import (
    HostStateCorrupt,
    NotDeployed,
    OverBudget,
    ShuttingDown,
    SourceBusy,
    SourceNotDeployed,
    SourceStateLost,
    StorageFailed,
    VersionGone,
    WorkerError,
)
from plexrl_worker.host import ModelHost
from plexrl_worker.journal import Journal
from plexrl_worker.machine import weight_conditions

PIECE_BYTES = wire.CHUNK_BYTES
_LOOK_AGAIN_S = 0.2


class WeightServing:
    """Reads rollout weights of the models of a host."""

    def __init__(self, host: ModelHost) -> None:
        self._host = host
        self._closed = False
        self._writing: set[asyncio.Future[None]] = set()

    def close(self) -> None:
        """Ends what is being read at its next piece."""
        self._closed = True

    async def read(self, model_id: str, weights_version: int) -> AsyncIterator[w.PullResponse]:
        """The header, then the bytes in order.

        Raises SourceNotDeployed, VersionGone, SourceStateLost; SourceBusy, ShuttingDown: another time they can be read.
        """
        while (copy := self._copy(model_id, weights_version)) is None:
            await self._write_back(model_id, weights_version)
        extent = _extent(self._found(model_id, weights_version))
        # Its state comes from disk, if that is where it lies, before anything is said of it.
        await self._piece(model_id, weights_version, copy, extent.offset, 0)
        size_bytes = 0 if copy.is_zero else extent.size_bytes
        conditions = weight_conditions(self._found(model_id, weights_version).conditions)
        yield w.PullResponse(
            header=w.WeightsHeader(
                size_bytes=size_bytes, checksum=copy.checksum, is_zero=copy.is_zero, conditions=conditions
            )
        )
        done = 0
        while done < size_bytes:
            left = min(PIECE_BYTES, size_bytes - done)
            data = await self._piece(model_id, weights_version, copy, extent.offset + done, left)
            yield w.PullResponse(data=data)
            done += len(data)

    def _found(self, model_id: str, weights_version: int) -> Deployment:
        if self._closed:
            raise ShuttingDown("this worker is stopping; ask again when the model is elsewhere, or in its next life")
        deployment = self._host.find(model_id)
        if deployment is None:
            raise SourceNotDeployed(f"model {model_id} is not on this worker")
        journal = Journal()
        self._host.settle(deployment, journal)
        self._tell(journal)
        if deployment.state_lost:
            raise SourceStateLost(f"the state of model {model_id} is lost: there are no weights to give")
        if deployment.weights_version < weights_version:
            raise SourceBusy(
                f"version {weights_version} of model {model_id} is asked for, and its rollout weights are at "
                f"{deployment.weights_version} yet: it is being restored, ask again"
            )
        if deployment.weights_version > weights_version:
            raise VersionGone(
                f"version {weights_version} of model {model_id} is asked for, its rollout weights are at "
                f"{deployment.weights_version}"
            )
        return deployment

    def _copy(self, model_id: str, weights_version: int) -> port.ParkedComponent | None:
        """What the host image, or the disk, has of the weights; None when the device alone has them."""
        deployment = self._found(model_id, weights_version)
        copies = self._host.residency.components(model_id)[Component.ROLLOUT_WEIGHTS]
        if copies.dirty:
            return None
        parked = deployment.parked.components if copies.parked and deployment.parked is not None else ()
        for copy in parked:
            if copy.component is Component.ROLLOUT_WEIGHTS:
                return copy
        raise SourceBusy(f"the state of model {model_id} is being made: ask again")

    async def _piece(
        self, model_id: str, weights_version: int, copy: port.ParkedComponent, offset: int, size_bytes: int
    ) -> bytes:
        """Bytes of the host image that still are of `copy`."""
        try:
            async with self._host.tiers.held(model_id) as image:
                # From here to the end nothing else runs: while they are clean nobody writes them, and what is read is
                # what was looked at. A piece takes less long to copy than to hand to a thread.
                if self._copy(model_id, weights_version) != copy:
                    raise SourceBusy(f"the weights of model {model_id} were written anew meanwhile: ask again")
                return os.pread(image.fd, size_bytes, offset)
        except NotDeployed as error:
            raise SourceNotDeployed(error.message) from error
        except HostStateCorrupt as error:
            deployment = self._host.find(model_id)
            if deployment is not None and not deployment.state_lost:
                journal = Journal()
                self._host.corrupt(deployment, journal)
                self._tell(journal)
            raise SourceStateLost(error.message) from error
        except (OverBudget, StorageFailed) as error:
            raise SourceBusy(f"the state of model {model_id} cannot come from disk now: {error.message}") from error

    async def _write_back(self, model_id: str, weights_version: int) -> None:
        """Has the device's copy written to the host image, once the device is free; returns also when it was not."""
        try:
            async with asyncio.timeout(_LOOK_AGAIN_S):
                await self._host.device.lock.acquire()
        except TimeoutError:
            return
        # On its own: the engine writes to the end, and nobody may touch the device or the image before that, also when
        # the peer has gone away.
        writing = asyncio.ensure_future(self._write_back_and_release(model_id, weights_version))
        self._writing.add(writing)
        writing.add_done_callback(self._written)
        await asyncio.shield(writing)

    def _written(self, writing: asyncio.Future[None]) -> None:
        self._writing.discard(writing)
        if not writing.cancelled():
            # Heard, though the one who asked has gone.
            writing.exception()

    async def _write_back_and_release(self, model_id: str, weights_version: int) -> None:
        journal = Journal()
        try:
            deployment = self._found(model_id, weights_version)
            if self._copy(model_id, weights_version) is None:
                await self._host.write_back(deployment, journal, {Component.ROLLOUT_WEIGHTS})
        except (SourceNotDeployed, SourceStateLost, VersionGone, SourceBusy, ShuttingDown):
            raise
        except WorkerError as error:
            self._tell(journal)
            raise SourceBusy(f"the weights of model {model_id} were not written back: {error.message}") from error
        finally:
            self._host.device.lock.release()

    def _tell(self, journal: Journal) -> None:
        if journal.touched:
            self._host.on_unordered_change(journal.touched)


def _extent(deployment: Deployment) -> port.ComponentLayout:
    assert deployment.layout is not None
    return next(e for e in deployment.layout.components if e.component is Component.ROLLOUT_WEIGHTS)
