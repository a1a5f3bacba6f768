"""Gets a model's state, rollout weights alone, from another worker that has them, and brings it onto the device.

The bytes come into host memory that is to spare, and only when all are there into the model's host image: a pull that
fails before leaves the old state parked. With none to spare they go into the image at once, and a failure costs the
state, which is said. The engine compares the checksum as it does for any parked state.
"""

import asyncio
import contextlib
import os
import time

import structlog
from grpc import StatusCode, aio

from plexrl.v1 import types_pb2 as t
from plexrl.v1 import worker_pb2 as w
from plexrl.v1 import worker_pb2_grpc
from plexrl_worker import channel
from plexrl_worker.arena import HostImage
from plexrl_worker.deployment import Deployment
from plexrl_worker.engine import errors as engine_errors
from plexrl_worker.engine import port
from plexrl_worker.engine.call import ProgressListener
from plexrl_worker.engine.client import EngineProcess
from plexrl_worker.engine.port import Component
from plexrl_worker.errors import (
    ConditionsDiffer,
    EngineDied,
    HostStateCorrupt,
    InvalidOrder,
    PullFailed,
    PullRefused,
    VersionGone,
    WorkerError,
)
from plexrl_worker.execution import Execution
from plexrl_worker.host import ModelHost
from plexrl_worker.journal import Journal
from plexrl_worker.machine import weight_conditions
from plexrl_worker.registration import reason_of
from plexrl_worker.settings import WorkerSettings

_log = structlog.get_logger(__name__)

PATIENCE_S = 10.0
"""A source that cannot be had is asked again for so long after the first time."""
UNANSWERED_PATIENCE_S = 2.0
"""The same where nobody answers at its address: the controller knows when its worker is back, and where."""
_REFUSALS = (StatusCode.UNIMPLEMENTED, StatusCode.UNAUTHENTICATED, StatusCode.PERMISSION_DENIED)
"""What a peer says that will say it again: it is of an older version, or has another token."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0


class _Again(Exception):
    """The source cannot be had now, or the stream broke: why."""


class _Unanswered(_Again):
    """Nobody is at its address."""


class WeightPuller:
    """Loads of rollout weights from other workers, on the models of a host."""

    def __init__(self, host: ModelHost, settings: WorkerSettings) -> None:
        self._host = host
        self._settings = settings

    def check(self, order: w.RunCallOrder) -> None:
        """Raises InvalidOrder for what cannot be a source, VersionGone where there is none any more."""
        wanted, source = order.spec.load_checkpoint.rollout, order.weight_source
        if not order.HasField("weight_source"):
            raise VersionGone(f"no worker has rollout weights of model {wanted.model_id} any more")
        if not source.model_id or source.model_id != wanted.model_id or source.model_id == order.model_id:
            raise InvalidOrder(
                f"weight_source.model_id: {source.model_id!r}; want the other model that the call names, "
                f"{wanted.model_id!r}"
            )
        if wanted.weights_version not in (0, source.weights_version):
            raise InvalidOrder(
                f"weight_source.weights_version: {source.weights_version}, the call asks for {wanted.weights_version}"
            )
        channel.check_peer(self._settings, source.address)

    async def pull(
        self, execution: Execution, deployment: Deployment, process: EngineProcess
    ) -> t.LoadCheckpointResult:
        """Makes a parked model's state the source's weights, on the device and in the host image, under the call's
        number. The caller holds the device's lock, within `host.coming`.

        Raises Cancelled, VersionGone, ConditionsDiffer, InvalidOrder, PullFailed, HostStateCorrupt, EngineError kinds.
        """
        order, source, host = execution.order, execution.order.weight_source, self._host
        started_s = time.monotonic()
        async with contextlib.AsyncExitStack() as stack:
            landing = _Landing(host, deployment, execution.journal, stack)
            copy = await execution.unless_aborted(self._fetch(source, deployment, landing, execution.on_progress))
            if process.death is not None:
                raise EngineDied(f"the engine of model {deployment.model_id} ended while the weights came")
            # What was prefetched meanwhile is of the old state, and reads the image.
            await host.give_up_preload(deployment)
            # From here on it is a matter of moments, and the old state goes: nobody stops it any more.
            await landing.complete()
            parked = port.ParkedState((copy,), 0, order.sequence)
            try:
                report = await process.swap_in(deployment.model_id, parked, deployment.components)
            except engine_errors.ParkedStateCorrupt as error:
                raise HostStateCorrupt(
                    f"what came of model {source.model_id} from {source.address} does not have the checksum that it "
                    f"was given with; the state of model {deployment.model_id} is lost: load again"
                ) from error
            deployment.state_lost = False
            deployment.weights_version = order.sequence
            deployment.applied_sequence = max(order.sequence, order.through_sequence)
            host.residency.loaded(deployment.model_id)
            host.image_holds(deployment, report.parked)
        _log.info(
            "weights_pulled", model=deployment.model_id, source_model=source.model_id, address=source.address,
            version=source.weights_version, bytes=report.bytes_moved, pull_s=round(time.monotonic() - started_s, 3),
        )  # fmt: skip
        return t.LoadCheckpointResult(weights_version=order.sequence, source_version=source.weights_version)

    async def _fetch(
        self, source: w.WeightSource, deployment: Deployment, landing: "_Landing", progress: ProgressListener
    ) -> port.ParkedComponent:
        """Has the bytes land; asks again for a while where the source cannot be had."""
        async with channel.open_channel(self._settings, source.address) as to_peer:
            stub = worker_pb2_grpc.WeightServiceStub(to_peer)
            began_s, answered_s, pause_s = 0.0, 0.0, _FIRST_PAUSE_S
            while True:
                try:
                    return await self._fetch_once(stub, source, deployment, landing, progress)
                except _Again as reason:
                    now_s = time.monotonic()
                    began_s = began_s or now_s
                    if not answered_s or not isinstance(reason, _Unanswered):
                        answered_s = now_s
                    if now_s + pause_s > min(began_s + PATIENCE_S, answered_s + UNANSWERED_PATIENCE_S):
                        raise PullFailed(
                            f"version {source.weights_version} of model {source.model_id} could not be had from "
                            f"{source.address}: {reason}"
                        ) from reason
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _fetch_once(
        self,
        stub: "worker_pb2_grpc.WeightServiceAsyncStub",
        source: w.WeightSource,
        deployment: Deployment,
        landing: "_Landing",
        progress: ProgressListener,
    ) -> port.ParkedComponent:
        request = w.PullRequest(model_id=source.model_id, weights_version=source.weights_version)
        header: w.WeightsHeader | None = None
        done = 0
        try:
            async for part in stub.Pull(request, metadata=channel.metadata(self._settings)):
                if header is None:
                    header = part.header
                    _check(header, source, deployment)
                    await landing.begin(header.size_bytes)
                elif part.WhichOneof("part") != "data" or done + len(part.data) > header.size_bytes:
                    raise PullFailed(f"{source.address} sends what is not announced by its header")
                else:
                    landing.write(part.data, done)
                    done += len(part.data)
                    progress(done, header.size_bytes)
        except aio.AioRpcError as error:
            raise _of_peer(error, source, answered=header is not None) from error
        if header is None or done != header.size_bytes:
            raise _Again(f"the stream ended after {done} bytes")
        return port.ParkedComponent(Component.ROLLOUT_WEIGHTS, header.checksum, header.is_zero)


class _Landing:
    """Where the bytes of one pull go."""

    def __init__(
        self, host: ModelHost, deployment: Deployment, journal: Journal, stack: contextlib.AsyncExitStack
    ) -> None:
        self._host = host
        self._deployment = deployment
        self._journal = journal
        self._stack = stack
        self._image = host.tiers.image(deployment.model_id)
        self._extent = _extent(deployment)
        self._spare: HostImage | None = None
        self._image_open = False

    async def begin(self, size_bytes: int) -> None:
        """So many bytes come, perhaps again."""
        if self._spare is not None or self._image_open or not size_bytes:
            return
        if not self._deployment.state_lost:
            # Only now: who waits for a source that cannot be read must hold nothing that others may need.
            self._spare = self._stack.enter_context(self._host.tiers.borrowed(size_bytes))
        if self._spare is None:
            await self._open_image()

    def write(self, data: bytes, offset: int) -> None:
        """Puts bytes where they belong. In place: a thread could still be writing when the memory is another's."""
        fd, start = (self._image.fd, self._extent.offset) if self._spare is None else (self._spare.fd, 0)
        piece = memoryview(data)
        while piece:
            count = os.pwrite(fd, piece, start + offset)
            piece, offset = piece[count:], offset + count

    async def complete(self) -> None:
        """All has come: the host image holds it, and no state that could be used before the books say so."""
        if not self._image_open:
            await self._open_image()
        if self._spare is not None:
            copying = asyncio.ensure_future(asyncio.to_thread(_copy, self._spare.fd, self._image.fd, self._extent))
            try:
                await asyncio.shield(copying)
            except asyncio.CancelledError:
                await copying
                raise

    async def _open_image(self) -> None:
        # A snapshot that reads the image is let end first.
        await self._stack.enter_async_context(self._deployment.image_lock)
        self._host.give_up_state(self._deployment, self._journal)
        self._image_open = True


def _copy(source_fd: int, image_fd: int, extent: port.ComponentLayout) -> None:
    os.lseek(image_fd, extent.offset, os.SEEK_SET)
    done = 0
    while done < extent.size_bytes:
        done += os.sendfile(image_fd, source_fd, done, extent.size_bytes - done)


def _extent(deployment: Deployment) -> port.ComponentLayout:
    assert deployment.layout is not None
    return next(e for e in deployment.layout.components if e.component is Component.ROLLOUT_WEIGHTS)


def _check(header: w.WeightsHeader, source: w.WeightSource, deployment: Deployment) -> None:
    """Raises ConditionsDiffer, InvalidOrder for weights that are not this model's kind."""
    here, there = weight_conditions(deployment.conditions), header.conditions
    for name in sorted({*here, *there}):
        if here.get(name) != there.get(name):
            raise ConditionsDiffer(
                f"the {name} of model {source.model_id} at {source.address} is {there.get(name)}, here it is "
                f"{here.get(name)}: both models must be made alike, by alike workers"
            )
    wanted = 0 if header.is_zero else _extent(deployment).size_bytes
    if header.size_bytes != wanted:
        raise InvalidOrder(
            f"the rollout weights of model {source.model_id} have {header.size_bytes} bytes, those of model "
            f"{deployment.model_id} {wanted}: both models must be made alike"
        )


def _of_peer(error: aio.AioRpcError, source: w.WeightSource, *, answered: bool) -> WorkerError | _Again:
    """What a peer's answer means for the pull, or that there is none."""
    reason, said = reason_of(error), error.details() or error.code().name
    if reason == "VERSION_GONE":
        return VersionGone(f"{source.address} answers: {said}")
    if error.code() in _REFUSALS:
        return PullRefused(f"{source.address} answers {error.code().name}: {said}")
    if reason == StatusCode.UNAVAILABLE.name and not answered:
        return _Unanswered(f"nobody answers: {said}")
    # What is lost or absent there says nothing of the model here: it is not named as its own fate would be.
    return _Again(f"it answers {error.code().name} {reason}: {said}")
