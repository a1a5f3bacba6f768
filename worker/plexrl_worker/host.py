"""What a worker does with models: deploy, drop, swap, and the truth about each when an engine dies.

One device, so one model is on it at a time; everything that touches the device holds `device.lock`. Knows no gRPC, no
orders' fences and no reports: what it did goes into the journal that the caller gives.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import structlog

from plexrl.v1 import model_pb2 as m
from plexrl.v1 import registry_pb2 as r
from plexrl.v1 import types_pb2 as t
from plexrl.v1 import worker_pb2 as w
from plexrl_worker import machine
from plexrl_worker.arena import HostArena
from plexrl_worker.bases import BaseLibrary
from plexrl_worker.checkpoints import CheckpointStore
from plexrl_worker.deployment import Deployment, HostState, check_settings, configuration_sha256, make_deployment
from plexrl_worker.device import Device
from plexrl_worker.engine import errors as engine_errors
from plexrl_worker.engine import port
from plexrl_worker.engine.client import EngineProcess
from plexrl_worker.errors import (
    EngineDied,
    HostStateCorrupt,
    NotDeployed,
    NoTokenizer,
    StateLost,
    WorkerError,
    of_engine,
)
from plexrl_worker.journal import Journal
from plexrl_worker.residency import Residency
from plexrl_worker.settings import WorkerSettings
from plexrl_worker.snapshots import SnapshotStore
from plexrl_worker.supervisor import EngineSupervisor

_log = structlog.get_logger(__name__)


class ModelHost:
    """The models of this worker and the device they share."""

    def __init__(
        self, settings: WorkerSettings, bases: BaseLibrary, checkpoints: CheckpointStore, snapshots: SnapshotStore
    ) -> None:
        self.device = Device()
        self.residency = Residency(settings.device_state_bytes)
        self.arena = HostArena(settings.host_state_bytes)
        self.checkpoints = checkpoints
        self.snapshots = snapshots
        self.machine_type = machine.machine_type(settings.device)
        self.supervisor = EngineSupervisor(
            settings.engine,
            settings.device,
            settings.state_dir / "engines",
            start_limit_s=settings.engine_start_timeout_s,
            hang_limit_s=settings.hang_timeout_s,
            on_death=lambda process, _: self.engine_gone(process),
        )
        self.worker_id = ""
        # Told of models whose state changed without an order: an idle engine died.
        self.on_unordered_change: Callable[[set[str]], None] = lambda _: None
        self._settings = settings
        self._bases = bases
        self._deployments: dict[str, Deployment] = {}

    # What is here.

    def model_ids(self) -> list[str]:
        """The models on this worker."""
        return list(self._deployments)

    def models_of(self, engine_key: str) -> list[str]:
        """The models that share an engine."""
        return [d.model_id for d in self._deployments.values() if d.engine_key == engine_key]

    def deployment(self, model_id: str) -> Deployment:
        """A model's deployment. Raises NotDeployed."""
        try:
            return self._deployments[model_id]
        except KeyError:
            raise NotDeployed(f"model {model_id} is not on this worker") from None

    def tokenizer_file(self, model_id: str) -> Path:
        """A model's tokenizer. Raises NotDeployed, NoTokenizer."""
        file = self.deployment(model_id).base.tokenizer_file
        if file is None:
            raise NoTokenizer(f"the base of model {model_id} came without a tokenizer.json: send token ids")
        return file

    def status(self, model_id: str) -> r.DeploymentStatus:
        """A model as the controller hears of it. A model that is not here has no components."""
        deployment = self._deployments.get(model_id)
        if deployment is None:
            return r.DeploymentStatus(model_id=model_id)
        return r.DeploymentStatus(
            model_id=model_id,
            residency=[
                m.ComponentResidency(
                    component=name,
                    tier=t.TIER_DEVICE if copies.on_device else t.TIER_HOST if copies.parked else t.TIER_ABSENT,
                    dirty=copies.dirty,
                    size_bytes=copies.size_bytes,
                )
                for name, copies in self.residency.components(model_id).items()
            ],
            weights_version=deployment.weights_version,
            applied_sequence=deployment.applied_sequence,
            state_lost=deployment.state_lost,
            host_image=deployment.state_lost and deployment.host_state is not None,
            host_image_sequence=deployment.host_state.applied_sequence if deployment.host_state else 0,
            host_image_weights_version=deployment.host_state.weights_version if deployment.host_state else 0,
        )

    def unsaved(self) -> bool:
        """Whether this worker's end would cost state that is nowhere else, as far as it knows."""
        return any(not d.state_lost for d in self._deployments.values())

    # Orders.

    async def deploy(self, order: w.DeployOrder, journal: Journal) -> w.DeployedModel:
        """Builds or restores a model and parks it. Leaves on the device what was there.

        The same order again, for a model whose state is not lost, changes nothing: calls may have run since.
        """
        present = self._deployments.get(order.model_id)
        if present is not None and present.order == order and not present.state_lost:
            journal.touch(order.model_id)
            return present.description()
        if order.from_host_image:
            return await self._restore_host_image(order, journal)
        check_settings(order.settings)
        directory = None
        if order.checkpoint_id:
            directory = (await asyncio.to_thread(self.checkpoints.open, order.checkpoint_id)).directory
        base = await self._bases.resolve(order.model_id, order.base)
        if present is not None:
            async with self.device.lock:
                await self._forget(present)
        deployment = make_deployment(order, base, self._settings)
        try:
            process = await self.supervisor.get(deployment.engine_key, deployment.engine_settings)
            if order.HasField("snapshot"):
                await self._restore_snapshot(deployment, process, order.snapshot, journal)
                return deployment.description()
            async with self.device.lock:
                former = self.residency.resident_models()
                for other in former:
                    await self.park(other, journal, charged_to=deployment.job_id)
                try:
                    await self._build(deployment, process, str(directory) if directory else None, journal)
                except BaseException:
                    await self._forget(deployment)
                    raise
                finally:
                    await self._restore(former, journal, charged_to=deployment.job_id)
        finally:
            if order.model_id not in self._deployments:
                deployment.base.discard()
                await self._spare_if_unused(deployment.engine_key)
        return deployment.description()

    async def drop(self, model_id: str, journal: Journal) -> None:
        """Forgets a model and frees all it holds; dropping one that is not here is fine."""
        async with self.device.lock:
            deployment = self._deployments.get(model_id)
            if deployment is None:
                return
            await self._forget(deployment)
            journal.touch(model_id)
        await self._spare_if_unused(deployment.engine_key)

    async def swap(self, order: w.SwapWeightsOrder, journal: Journal) -> None:
        """Evictions, then the load. Raises OverBudget before anything moves.

        For a model whose state is lost there is nothing to load; room is made, for a load_checkpoint to come.
        """
        async with self.device.lock:
            if order.load_model_id:
                self.residency.check_fits(order.load_model_id, order.evict_model_ids)
            for model_id in order.evict_model_ids:
                if model_id in self._deployments and model_id != order.load_model_id:
                    await self.park(model_id, journal)
            if order.load_model_id and self.deployment(order.load_model_id).state_lost:
                await self.make_room(self.deployment(order.load_model_id), journal)
            elif order.load_model_id:
                await self.load(order.load_model_id, journal)

    # Moves. The caller holds the device's lock.

    async def park(self, model_id: str, journal: Journal, *, charged_to: str = "") -> None:
        """Moves a model's state to the host tier; what is clean is not copied again.

        An engine's death leaves the device as free as this does, so it is noted and does not raise: what comes onto the
        device next is not to blame for it.
        """
        deployment = self.deployment(model_id)
        process = self.settle(deployment, journal)
        if process is None or not self.residency.on_device(model_id):
            return
        with journal.timed(self._swap_interval(deployment, t.INTERVAL_KIND_SWAP_OUT, charged_to)) as interval:
            try:
                async with self._image_written(deployment):
                    report = await process.swap_out(model_id, deployment.components)
            except engine_errors.EngineDied as error:
                self.engine_failed(process, error, journal)
                return
            except engine_errors.EngineError as error:
                raise self.engine_failed(process, error, journal) from error
            interval.moved_bytes = report.bytes_moved
        self._image_holds(deployment, report.parked)
        self.residency.parked(model_id)
        journal.touch(model_id)

    async def write_back(self, deployment: Deployment, journal: Journal) -> None:
        """Copies what is dirty of a model on the device to the host tier; it stays on the device."""
        model_id = deployment.model_id
        process = self.settle(deployment, journal)
        if process is None or not self.residency.on_device(model_id):
            return
        try:
            async with self._image_written(deployment):
                report = await process.write_back(model_id, deployment.components)
        except engine_errors.EngineError as error:
            raise self.engine_failed(process, error, journal) from error
        self._image_holds(deployment, report.parked)
        self.residency.written_back(model_id)
        journal.touch(model_id)

    @contextlib.asynccontextmanager
    async def _image_written(self, deployment: Deployment) -> AsyncIterator[None]:
        """Around an engine's writing of the host image, which holds no whole state meanwhile."""
        async with deployment.image_lock:
            before, deployment.host_state = deployment.host_state, None
            yield
            deployment.host_state = before

    def _image_holds(self, deployment: Deployment, parked: port.ParkedState) -> None:
        deployment.parked = parked
        deployment.host_state = HostState(parked, deployment.applied_sequence, deployment.weights_version)

    async def load(self, model_id: str, journal: Journal, *, charged_to: str = "") -> None:
        """Brings a model's state onto the device, verified; parks whatever else is there."""
        deployment = self.deployment(model_id)
        self.settle(deployment, journal)
        if self.residency.on_device(model_id):
            return
        process = await self.make_room(deployment, journal)
        if deployment.parked is None:
            raise StateLost(f"model {model_id} has no parked state: load a checkpoint or deploy it again")
        with journal.timed(self._swap_interval(deployment, t.INTERVAL_KIND_SWAP_IN, charged_to)) as interval:
            try:
                report = await process.swap_in(model_id, deployment.parked, deployment.components)
            except engine_errors.EngineError as error:
                failure = self.engine_failed(process, error, journal)
                if isinstance(failure, HostStateCorrupt):
                    self._lose(deployment, journal)
                raise failure from error
            interval.moved_bytes = report.bytes_moved
        self.residency.loaded(model_id)
        journal.touch(model_id)

    async def make_room(self, deployment: Deployment, journal: Journal) -> EngineProcess:
        """Parks whatever else is on the device, and grants it to the model's engine, started if need be."""
        for model_id in self.residency.resident_models():
            if model_id != deployment.model_id:
                await self.park(model_id, journal, charged_to=deployment.job_id)
        process = await self.supervisor.get(deployment.engine_key, deployment.engine_settings)
        try:
            await self.device.grant(process)
            if deployment.attached is not process:
                await self._attach(deployment, process)
        except engine_errors.EngineError as error:
            raise self.engine_failed(process, error, journal) from error
        return process

    # Truth about engines.

    def settle(self, deployment: Deployment, journal: Journal) -> EngineProcess | None:
        """The living child that knows the model, if there is one; notes first what died with one that ended."""
        process = deployment.attached
        if process is not None and process.death is not None:
            journal.touched.update(self._note_death(process))
        return deployment.attached

    def engine_failed(
        self, process: EngineProcess, error: engine_errors.EngineError, journal: Journal | None = None
    ) -> WorkerError:
        """The worker's error for an engine's; when the engine died, notes first what died with it."""
        if process.death is not None:
            touched = self._note_death(process)
            if journal is not None:
                journal.touched.update(touched)
        return of_engine(error)

    def engine_gone(self, process: EngineProcess) -> None:
        """Notes an engine's death that no order has noticed, and tells of it."""
        if touched := self._note_death(process):
            self.on_unordered_change(touched)

    async def drop_all(self, journal: Journal) -> None:
        """Forgets every model, as after the loss of the worker's lease."""
        for model_id in self.model_ids():
            await self.drop(model_id, journal)

    async def close(self) -> None:
        """Ends the engines and frees the host tier."""
        await self.supervisor.close()
        self.arena.close()

    async def _build(
        self, deployment: Deployment, process: EngineProcess, checkpoint: str | None, journal: Journal
    ) -> None:
        model_id = deployment.model_id
        await self._declare(deployment, process, journal)
        with journal.timed(self._swap_interval(deployment, t.INTERVAL_KIND_SWAP_IN)):
            process = await self.make_room(deployment, journal)
            try:
                if checkpoint is None:
                    state = await process.initialize(model_id, deployment.base.weights, deployment.weights_version)
                else:
                    state = await process.load(model_id, checkpoint, deployment.weights_version)
            except engine_errors.EngineError as error:
                raise self.engine_failed(process, error, journal) from error
        self.residency.built(model_id)
        deployment.weights_version = state.rollout_version
        await self.park(model_id, journal)
        if deployment.state_lost:
            raise EngineDied(f"the engine of model {model_id} ended before the new state was parked")

    async def _restore_snapshot(
        self, deployment: Deployment, process: EngineProcess, snapshot: w.SnapshotRef, journal: Journal
    ) -> None:
        """Fills the host image from disk; the device is not needed. The first swap checks it once more."""
        try:
            layout = await self._declare(deployment, process, journal)
            async with deployment.image_lock:
                restored = await asyncio.to_thread(
                    self.snapshots.restore,
                    snapshot.snapshot_id,
                    snapshot.manifest_sha256,
                    self.arena.image(deployment.model_id).fd,
                    layout,
                    deployment.conditions,
                )
        except BaseException:
            async with self.device.lock:
                await self._forget(deployment)
            raise
        deployment.weights_version = restored.state.weights_version
        self._image_holds(deployment, restored.state.parked)
        self.residency.parked(deployment.model_id)

    async def _restore_host_image(self, order: w.DeployOrder, journal: Journal) -> w.DeployedModel:
        """Goes back to what the host image holds, after the engine died with what was newer."""
        async with self.device.lock:
            deployment = self._deployments.get(order.model_id)
            held = deployment.host_state if deployment is not None and deployment.state_lost else None
            if deployment is None or held is None or held.applied_sequence != order.host_image_sequence:
                raise StateLost(
                    f"this worker holds no host image of model {order.model_id} at sequence {order.host_image_sequence}"
                )
            deployment.order, deployment.state_lost = order, False
            deployment.applied_sequence, deployment.weights_version = order.applied_sequence, held.weights_version
            self._image_holds(deployment, held.parked)
            self.residency.parked(order.model_id)
            journal.touch(order.model_id)
            return deployment.description()

    async def _declare(self, deployment: Deployment, process: EngineProcess, journal: Journal) -> port.StateLayout:
        """Makes a deployment known to its engine and to this worker, with no state yet."""
        model_id = deployment.model_id
        try:
            layout = deployment.layout = await process.declare(model_id, deployment.settings)
        except engine_errors.EngineError as error:
            raise self.engine_failed(process, error, journal) from error
        configuration = configuration_sha256(deployment.base.config_json)
        deployment.conditions = machine.conditions(self.machine_type, configuration, process.description)
        self.residency.add(model_id, {c.component: c.size_bytes for c in layout.components})
        self.arena.allocate(model_id, layout.host_bytes)
        self._deployments[model_id] = deployment
        journal.touch(model_id)
        return layout

    async def _restore(self, model_ids: list[str], journal: Journal, charged_to: str) -> None:
        """Loads back what was on the device before a deploy. What does not come back is reported as parked or lost."""
        for model_id in model_ids:
            if model_id in self._deployments and not self.deployment(model_id).state_lost:
                try:
                    await self.load(model_id, journal, charged_to=charged_to)
                except WorkerError as error:
                    _log.warning("not_loaded_back", model_id=model_id, reason=error.reason, message=error.message)

    async def _attach(self, deployment: Deployment, process: EngineProcess) -> None:
        """Tells a child of a deployment and its host image; a child that is new learns of each when it is needed."""
        image = self.arena.image(deployment.model_id)
        await process.declare(deployment.model_id, deployment.settings)
        await process.attach_host(deployment.model_id, image.fd, image.size_bytes)
        deployment.attached = process

    async def _spare_if_unused(self, engine_key: str) -> None:
        if not self.models_of(engine_key):
            await self.supervisor.spare(engine_key)

    async def _forget(self, deployment: Deployment) -> None:
        model_id = deployment.model_id
        process = self.supervisor.living(deployment.engine_key)
        if process is not None:
            try:
                await process.drop(model_id)
            except engine_errors.EngineDied:
                self._note_death(process)
        self._deployments.pop(model_id, None)
        self.residency.remove(model_id)
        self.arena.release(model_id)
        deployment.base.discard()

    def _note_death(self, process: EngineProcess) -> set[str]:
        """Settles what a dead child leaves: states with a whole host copy are parked, others lost. Safe to repeat."""
        touched: set[str] = set()
        for deployment in self._deployments.values():
            if deployment.attached is not process:
                continue
            deployment.attached = None
            model_id = deployment.model_id
            if self.residency.on_device(model_id):
                touched.add(model_id)
                if self.residency.device_gone(model_id):
                    deployment.parked, deployment.state_lost = None, True
                    _log.warning("state_lost", model_id=model_id, applied_sequence=deployment.applied_sequence)
        return touched

    def _lose(self, deployment: Deployment, journal: Journal) -> None:
        deployment.parked, deployment.host_state, deployment.state_lost = None, None, True
        self.residency.state_gone(deployment.model_id)
        journal.touch(deployment.model_id)
        _log.warning("parked_state_corrupt", model_id=deployment.model_id)

    def _swap_interval(
        self, deployment: Deployment, kind: t.IntervalKind.ValueType, charged_to: str = ""
    ) -> t.DeviceInterval:
        return t.DeviceInterval(
            kind=kind,
            worker_id=self.worker_id,
            job_id=charged_to or deployment.job_id,
            model_id=deployment.model_id,
        )
