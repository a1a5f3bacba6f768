"""Puts models on this worker: builds them from a base or checkpoint, or restores what a snapshot or host image holds.

What is built is parked when it is done, and what was on the device before is there again. Knows no reports.
"""

import asyncio

import structlog

from plexrl.v1 import types_pb2 as t
from plexrl.v1 import worker_pb2 as w
from plexrl_worker import machine
from plexrl_worker.bases import BaseLibrary
from plexrl_worker.deployment import Deployment, check_settings, configuration_sha256, fingerprint, make_deployment
from plexrl_worker.engine import errors as engine_errors
from plexrl_worker.engine import port
from plexrl_worker.engine.client import EngineProcess
from plexrl_worker.errors import EngineDied, StateLost, WorkerError
from plexrl_worker.host import ModelHost
from plexrl_worker.journal import Journal
from plexrl_worker.parked_files import DiskCopy
from plexrl_worker.settings import WorkerSettings

_log = structlog.get_logger(__name__)


class Placement:
    """Deploy orders of a host."""

    def __init__(self, host: ModelHost, bases: BaseLibrary, settings: WorkerSettings) -> None:
        self._host = host
        self._bases = bases
        self._settings = settings

    def stands(self, order: w.DeployOrder) -> bool:
        """Whether the model is here as ordered: the order again changes nothing, as calls may have run since."""
        present = self._host.find(order.model_id)
        return present is not None and present.order == order and not present.state_lost

    async def deploy(self, order: w.DeployOrder, journal: Journal) -> w.DeployedModel:
        """Builds or restores a model and parks it. Leaves on the device what was there.

        The same order again, for a model whose state is not lost, changes nothing: calls may have run since.
        """
        host = self._host
        present = host.find(order.model_id)
        if present is not None and self.stands(order):
            journal.touch(order.model_id)
            return present.description()
        if order.from_host_image:
            return await self._restore_host_image(order, journal)
        check_settings(order.settings)
        directory = None
        if order.checkpoint_id:
            directory = (await asyncio.to_thread(host.checkpoints.open, order.checkpoint_id)).directory
        host.forget_kept(order.model_id)
        base = await self._bases.resolve(order.model_id, order.base)
        if present is not None:
            async with host.device.lock:
                await host.forget(present)
        deployment = make_deployment(order, base, self._settings)
        try:
            if order.HasField("snapshot"):
                await self._restore_snapshot(deployment, order.snapshot, journal)
                return deployment.description()
            # Before the lock: a start takes seconds, and the device works meanwhile.
            await host.engine_of(deployment)
            async with host.device.lock:
                former = host.residency.resident_models()
                for other in former:
                    await host.park(other, journal, charged_to=deployment.job_id)
                try:
                    await self._build(deployment, str(directory) if directory else None, journal)
                except BaseException:
                    await host.forget(deployment)
                    raise
                finally:
                    await self._load_back(former, journal, charged_to=deployment.job_id)
        finally:
            if host.find(order.model_id) is None:
                deployment.base.discard()
                await host.spare_if_unused(deployment.engine_key)
        return deployment.description()

    async def _build(self, deployment: Deployment, checkpoint: str | None, journal: Journal) -> None:
        host, model_id = self._host, deployment.model_id
        await self._declare(deployment, journal)
        with journal.timed(host.swap_interval(deployment, t.INTERVAL_KIND_SWAP_IN)):
            async with host.coming(deployment, journal) as process:
                try:
                    if checkpoint is None:
                        state = await process.initialize(model_id, deployment.base.weights, deployment.weights_version)
                    else:
                        state = await process.load(model_id, checkpoint, deployment.weights_version)
                except engine_errors.EngineError as error:
                    raise host.engine_failed(process, error, journal) from error
                host.residency.built(model_id)
        deployment.weights_version = state.rollout_version
        await host.park(model_id, journal)
        if deployment.state_lost:
            raise EngineDied(f"the engine of model {model_id} ended before the new state was parked")

    async def _restore_snapshot(self, deployment: Deployment, snapshot: w.SnapshotRef, journal: Journal) -> None:
        """Fills the host image from disk; the device is not needed. The first swap checks it once more."""
        host = self._host
        try:
            layout = await self._declare(deployment, journal)
            async with host.tiers.reserved(deployment.model_id) as image, deployment.image_lock:
                restored = await asyncio.to_thread(
                    host.snapshots.restore,
                    snapshot.snapshot_id,
                    snapshot.manifest_sha256,
                    image.fd,
                    layout,
                    deployment.conditions,
                )
                deployment.weights_version = restored.state.weights_version
                host.image_holds(deployment, restored.state.parked)
        except BaseException:
            async with host.device.lock:
                await host.forget(deployment)
            raise
        host.residency.parked(deployment.model_id)

    async def _restore_host_image(self, order: w.DeployOrder, journal: Journal) -> w.DeployedModel:
        """Goes back to what the host image holds, after the engine died with what was newer."""
        host = self._host
        if host.find(order.model_id) is None and (kept := host.kept(order.model_id)) is not None:
            return await self._adopt(order, kept, journal)
        async with host.device.lock:
            deployment = host.find(order.model_id)
            held = deployment.host_state if deployment is not None and deployment.state_lost else None
            if deployment is None or held is None or held.applied_sequence != order.host_image_sequence:
                raise StateLost(
                    f"this worker holds no host image of model {order.model_id} at sequence {order.host_image_sequence}"
                )
            deployment.order, deployment.state_lost = order, False
            deployment.applied_sequence, deployment.weights_version = order.applied_sequence, held.weights_version
            host.image_holds(deployment, held.parked)
            host.residency.parked(order.model_id)
            journal.touch(order.model_id)
            return deployment.description()

    async def _adopt(self, order: w.DeployOrder, kept: DiskCopy, journal: Journal) -> w.DeployedModel:
        """Goes on with what an earlier life of this worker parked on disk."""
        host = self._host
        if kept.facts.fingerprint != fingerprint(order) or kept.facts.applied_sequence != order.host_image_sequence:
            host.forget_kept(order.model_id)
            raise StateLost(
                f"what this worker's earlier life parked of model {order.model_id} stands at sequence "
                f"{kept.facts.applied_sequence}, or was built otherwise"
            )
        base = await self._bases.resolve(order.model_id, order.base)
        deployment = make_deployment(order, base, self._settings)
        try:
            layout = await self._declare(deployment, journal)
            if layout != kept.layout or deployment.conditions != kept.facts.conditions:
                raise StateLost(f"the parked state of model {order.model_id} was made under other conditions than here")
        except BaseException:
            async with host.device.lock:
                await host.forget(deployment)
            host.forget_kept(order.model_id)
            raise
        host.adopt(deployment, kept)
        _log.info("state_adopted", model=order.model_id, applied_sequence=kept.facts.applied_sequence)
        return deployment.description()

    async def _declare(self, deployment: Deployment, journal: Journal) -> port.StateLayout:
        """Makes a deployment known to its engine and to this worker, with no state yet."""
        host = self._host
        process: EngineProcess = await host.engine_of(deployment)
        try:
            layout = deployment.layout = await process.declare(deployment.model_id, deployment.settings)
        except engine_errors.EngineError as error:
            raise host.engine_failed(process, error, journal) from error
        configuration = configuration_sha256(deployment.base.config_json)
        deployment.conditions = machine.conditions(host.machine_type, configuration, process.description)
        host.admit(deployment, layout)
        journal.touch(deployment.model_id)
        return layout

    async def _load_back(self, model_ids: list[str], journal: Journal, charged_to: str) -> None:
        """Loads what was on the device before a deploy. What does not come back is reported as parked or lost."""
        for model_id in model_ids:
            deployment = self._host.find(model_id)
            if deployment is not None and not deployment.state_lost:
                try:
                    await self._host.load(model_id, journal, charged_to=charged_to)
                except WorkerError as error:
                    _log.warning("not_loaded_back", model=model_id, reason=error.reason, message=error.message)
