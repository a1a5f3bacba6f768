"""Takes snapshots beside the calls: a copy to the host between two of them, and the write in the background.

What the host image holds is written, so that a parked model needs no device at all. Should a swap of the same model
want the image meanwhile, what is left of it is copied to host memory that is to spare; with none the swap waits.
"""

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

import structlog

from plexrl.v1 import worker_pb2 as w
from plexrl_worker.checkpoints import CheckpointFacts, CommittedCheckpoint
from plexrl_worker.deployment import Deployment, HostState
from plexrl_worker.errors import StateLost
from plexrl_worker.host import ModelHost
from plexrl_worker.journal import Journal

_log = structlog.get_logger(__name__)
T = TypeVar("T")

# Hashing and writing yield to whatever computes on the same cores.
_NICE = 10


class Snapshotter:
    """Writes one snapshot at a time, and deletes those that are named."""

    def __init__(self, host: ModelHost) -> None:
        self._host = host
        self._writer = ThreadPoolExecutor(1, "snapshot-writer", initializer=_be_nice)

    def close(self) -> None:
        """Lets the write that runs go on in its thread; takes no more."""
        self._writer.shutdown(wait=False, cancel_futures=True)

    async def expire(self, snapshot_ids: list[str]) -> None:
        """Deletes snapshots; unknown ones are passed over."""
        for snapshot_id in snapshot_ids:
            await self._in_thread(self._host.snapshots.expire, snapshot_id)

    async def take(self, order: w.SnapshotOrder, journal: Journal) -> w.WrittenSnapshot:
        """Commits the model's state of this moment. Raises NotDeployed, StateLost, StorageFailed, EngineDied."""
        host, deployment = self._host, self._host.deployment(order.model_id)
        device_s = 0.0
        if self._must_write_back(deployment):
            async with host.device.lock:
                started_s = time.monotonic()
                await host.write_back(deployment, journal)
                device_s = time.monotonic() - started_s
                # Before the device is free: whatever comes next, the image is that of this moment.
                await deployment.image_lock.acquire()
        else:
            await deployment.image_lock.acquire()
        started_s = time.monotonic()
        with contextlib.ExitStack() as image_held:
            image_held.callback(deployment.image_lock.release)
            state = deployment.host_state
            if deployment.state_lost or state is None:
                raise StateLost(f"the state of model {order.model_id} is lost: there is nothing to save")
            if not self._must_write_back(deployment):
                # Calls that change nothing may have run since the image was written.
                state = replace(state, applied_sequence=deployment.applied_sequence)
            cpu_before_s = await self._in_thread(time.thread_time)
            committed = await self._write(deployment, state, order.snapshot_id, image_held)
            cpu_s = await self._in_thread(time.thread_time) - cpu_before_s
        write_s = time.monotonic() - started_s
        _log.info(
            "snapshot_committed", model=order.model_id, sequence=state.applied_sequence, bytes=committed.size_bytes,
            device_s=round(device_s, 4), write_s=round(write_s, 3), cpu_s=round(cpu_s, 3),
        )  # fmt: skip
        return w.WrittenSnapshot(
            snapshot_id=order.snapshot_id,
            sequence=state.applied_sequence,
            step=state.parked.optimizer_step,
            weights_version=state.weights_version,
            size_bytes=committed.size_bytes,
            manifest_sha256=committed.manifest_sha256,
            device_s=device_s,
            write_s=write_s,
        )

    def _must_write_back(self, deployment: Deployment) -> bool:
        copies = self._host.residency.components(deployment.model_id).values()
        return not deployment.state_lost and any(copy.dirty for copy in copies)

    async def _write(
        self, deployment: Deployment, state: HostState, snapshot_id: str, image_held: contextlib.ExitStack
    ) -> CommittedCheckpoint:
        """Writes the image; lets it go early when it is wanted and there is memory for a copy of the rest."""
        host, layout, parked = self._host, deployment.layout, state.parked
        assert layout is not None
        facts = CheckpointFacts(
            checkpoint_id=snapshot_id,
            model_id=deployment.model_id,
            sequence=state.applied_sequence,
            step=state.parked.optimizer_step,
            weights_version=state.weights_version,
            architecture=deployment.base.architecture,
        )
        async with host.tiers.held(deployment.model_id) as image:
            own = os.dup(image.fd)
            writing = await self._in_thread(host.snapshots.begin, facts, own, layout, parked, deployment.conditions)
            try:
                with contextlib.ExitStack() as lent:
                    staged = False
                    while not writing.done:
                        if deployment.image_lock.wanted and not staged:
                            staging = lent.enter_context(host.tiers.borrowed(image.size_bytes))
                            if staging is not None:
                                await self._in_thread(writing.move_to, os.dup(staging.fd))
                                image_held.close()
                                staged = True
                        await self._in_thread(writing.step)
                    return await self._in_thread(writing.commit)
            except BaseException:
                # A step that a cancelled wait left behind comes first in the same thread.
                with contextlib.suppress(RuntimeError):
                    self._writer.submit(writing.abandon)
                raise

    async def _in_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._writer, work, *arguments)


def _be_nice() -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
