"""What a worker does with the models on it: swap, prefetch, drop, and the truth about each when an engine dies.

One device, so one model is on it at a time; everything that touches the device holds `device.lock`. Knows no gRPC, no
orders' fences and no reports: what it did goes into the journal that the caller gives.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Collection
from pathlib import Path

import structlog

from plexrl.v1 import registry_pb2 as r
from plexrl.v1 import types_pb2 as t
from plexrl.v1 import worker_pb2 as w
from plexrl_worker import machine, statuses
from plexrl_worker.checkpoints import CheckpointStore
from plexrl_worker.deployment import Deployment, HostState
from plexrl_worker.device import Device
from plexrl_worker.engine import errors as engine_errors
from plexrl_worker.engine import port
from plexrl_worker.engine.client import EngineProcess
from plexrl_worker.errors import (
    Cancelled,
    HostStateCorrupt,
    NotDeployed,
    NoTokenizer,
    OverBudget,
    StateLost,
    WorkerError,
    of_engine,
)
from plexrl_worker.journal import Journal
from plexrl_worker.parked_files import DiskCopy, Interrupted, ParkedFiles
from plexrl_worker.preloads import Preloads
from plexrl_worker.residency import Residency
from plexrl_worker.settings import WorkerSettings
from plexrl_worker.snapshots import SnapshotStore
from plexrl_worker.supervisor import EngineSupervisor
from plexrl_worker.tiers import StateTiers

_log = structlog.get_logger(__name__)


class ModelHost:
    """The models of this worker and the device they share."""

    def __init__(self, settings: WorkerSettings, checkpoints: CheckpointStore, snapshots: SnapshotStore) -> None:
        self.device = Device()
        self.residency = Residency(settings.device_state_bytes)
        files = ParkedFiles(settings.state_dir / "parked")
        # States that an earlier life parked on disk, until their model is deployed again or known to be elsewhere.
        self._kept = {copy.facts.model_id: copy for copy in files.recover()}
        self.tiers = StateTiers(
            settings.host_state_bytes,
            settings.disk_state_bytes,
            files,
            in_use=self.residency.on_device,
            let_go=self._let_go,
        )
        self.preloads = Preloads(self.residency)
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
        self._deployments: dict[str, Deployment] = {}
        # Of the last status that was given.
        self.revision = 0

    # What is here.

    def model_ids(self) -> list[str]:
        """The models on this worker, and those of which it keeps an earlier life's state."""
        return list(self._deployments | self._kept)

    def kept(self, model_id: str) -> DiskCopy | None:
        """What an earlier life parked on disk of a model that is not deployed."""
        return self._kept.get(model_id)

    def forget_kept(self, model_id: str) -> None:
        """An earlier life's state is of no use any more; there may be none."""
        if self._kept.pop(model_id, None) is not None:
            self.tiers.forget_file(model_id)

    def models_of(self, engine_key: str) -> list[str]:
        """The models that share an engine."""
        return [d.model_id for d in self._deployments.values() if d.engine_key == engine_key]

    def models_of_process(self, process: EngineProcess | None) -> list[str]:
        """The models that an engine child knows."""
        return [d.model_id for d in self._deployments.values() if process is not None and d.attached is process]

    def find(self, model_id: str) -> Deployment | None:
        """A model's deployment, if it is here."""
        return self._deployments.get(model_id)

    async def engine_of(self, deployment: Deployment) -> EngineProcess:
        """The living child of a deployment's engine, started if need be. Raises what a failed start is."""
        return await self.supervisor.get(deployment.engine_key, deployment.engine_settings)

    def admit(self, deployment: Deployment, layout: port.StateLayout) -> None:
        """Takes a deployment in, with no state yet. Raises OverBudget; it is not here then."""
        self.residency.add(deployment.model_id, {c.component: c.size_bytes for c in layout.components})
        try:
            self.tiers.admit(deployment.model_id, layout)
        except OverBudget:
            self.residency.remove(deployment.model_id)
            raise
        self._deployments[deployment.model_id] = deployment

    def adopt(self, deployment: Deployment, copy: DiskCopy) -> None:
        """A deployment that was just admitted goes on with what an earlier life parked on disk."""
        self._kept.pop(deployment.model_id, None)
        self.tiers.adopt(deployment.model_id, copy)
        deployment.weights_version = copy.facts.weights_version
        self.image_holds(deployment, copy.parked)
        self.residency.parked(deployment.model_id)

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
        self.revision += 1
        if deployment is None:
            return statuses.of_kept(model_id, self._kept.get(model_id), self.revision)
        on_disk = self.tiers.on_disk_only(model_id)
        return statuses.of_deployment(deployment, self.residency.components(model_id), self.revision, on_disk=on_disk)

    def unsaved(self) -> bool:
        """Whether this worker's end would cost state: its own disk may not hold all."""
        return not self.tiers.all_fit_disk and any(not d.state_lost for d in self._deployments.values())

    def forget_execution(self, model_id: str, name: str) -> None:
        """Has a model's engine give up what a parked execution has sampled; both may be gone."""
        deployment = self._deployments.get(model_id)
        if deployment is not None and deployment.attached is not None and deployment.attached.death is None:
            deployment.attached.forget_execution(name)

    # Orders.

    async def drop(self, model_id: str, journal: Journal) -> None:
        """Forgets a model and frees all it holds; dropping one that is not here is fine."""
        async with self.device.lock:
            deployment = self._deployments.get(model_id)
            self.forget_kept(model_id)
            if deployment is None:
                return
            await self.forget(deployment)
            journal.touch(model_id)
        await self.spare_if_unused(deployment.engine_key)

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
                await self._clear(self.deployment(order.load_model_id), journal)
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
        with journal.timed(self.swap_interval(deployment, t.INTERVAL_KIND_SWAP_OUT, charged_to)) as interval:
            try:
                async with self._image_written(deployment):
                    report = await process.swap_out(model_id, deployment.components)
            except engine_errors.EngineDied as error:
                self.engine_failed(process, error, journal)
                return
            except engine_errors.EngineError as error:
                raise self.engine_failed(process, error, journal) from error
            interval.moved_bytes = report.bytes_moved
        self.image_holds(deployment, report.parked)
        self.residency.parked(model_id)
        journal.touch(model_id)
        await self._measure(process, report.held_bytes - process.description.kv_cache_bytes)

    async def write_back(
        self, deployment: Deployment, journal: Journal, components: Collection[port.Component] = port.ALL_COMPONENTS
    ) -> None:
        """Copies what is dirty of a model on the device to the host tier; it stays on the device.

        Of some components alone: the host image then holds no whole state, unless the others were clean.
        """
        model_id = deployment.model_id
        process = self.settle(deployment, journal)
        if process is None or not self.residency.on_device(model_id):
            return
        written = deployment.components & set(components)
        try:
            async with self._image_written(deployment):
                report = await process.write_back(model_id, written)
        except engine_errors.EngineError as error:
            raise self.engine_failed(process, error, journal) from error
        self.residency.written_back(model_id, written)
        if any(copies.dirty for copies in self.residency.components(model_id).values()):
            deployment.parked, deployment.host_state = report.parked, None
            self.tiers.forget_state(model_id)
        else:
            self.image_holds(deployment, report.parked)
        journal.touch(model_id)

    @contextlib.asynccontextmanager
    async def _image_written(self, deployment: Deployment) -> AsyncIterator[None]:
        """Around an engine's writing of the host image, which holds no whole state meanwhile."""
        async with deployment.image_lock:
            before, deployment.host_state = deployment.host_state, None
            yield
            deployment.host_state = before

    def image_holds(self, deployment: Deployment, parked: port.ParkedState) -> None:
        """Notes that the host image holds the model's state of this moment."""
        deployment.parked = parked
        deployment.host_state = HostState(parked, deployment.applied_sequence, deployment.weights_version)
        self.tiers.holds(deployment.model_id, deployment.facts(), parked)

    async def load(self, model_id: str, journal: Journal, *, charged_to: str = "") -> None:
        """Brings a model's state onto the device, verified; parks whatever else is there."""
        deployment = self.deployment(model_id)
        self.settle(deployment, journal)
        if self.residency.on_device(model_id):
            return
        if deployment.parked is None:
            raise StateLost(f"model {model_id} has no parked state: load a checkpoint or deploy it again")
        await self._clear(deployment, journal)
        await self.preloads.settle(model_id)
        with journal.timed(self.swap_interval(deployment, t.INTERVAL_KIND_SWAP_IN, charged_to)) as interval:
            self.tiers.note_load(model_id, preloaded=self.residency.preloaded(model_id))
            try:
                async with self.tiers.held(model_id):
                    process = await self._grant(deployment, journal)
                    try:
                        report = await process.swap_in(model_id, deployment.parked, deployment.components)
                    except engine_errors.EngineError as error:
                        raise self.engine_failed(process, error, journal) from error
                    finally:
                        self.residency.set_preloaded(model_id, preloaded=False)
                    self.residency.loaded(model_id)
            except HostStateCorrupt:
                self.corrupt(deployment, journal)
                raise
            interval.moved_bytes = report.bytes_moved
        journal.touch(model_id)

    @contextlib.asynccontextmanager
    async def coming(self, deployment: Deployment, journal: Journal) -> AsyncIterator[EngineProcess]:
        """Gives a model's engine the device, and the model a host image, for a new state that the block makes."""
        await self._clear(deployment, journal)
        await self.give_up_preload(deployment)
        async with self.tiers.reserved(deployment.model_id):
            yield await self._grant(deployment, journal)

    async def prefetch(self, order: w.PrefetchOrder) -> None:
        """Brings a parked state nearer to the device, beside what runs there.

        Raises Cancelled when an order's own moves came first.
        """
        deployment = self.deployment(order.model_id)
        if deployment.state_lost or deployment.parked is None:
            raise StateLost(f"model {order.model_id} has no parked state to prefetch")
        if self.residency.on_device(order.model_id):
            return
        try:
            await self.tiers.prefetch(order.model_id)
        except Interrupted:
            raise Cancelled("the prefetch gave way to a swap") from None
        except HostStateCorrupt:
            self.corrupt(deployment, Journal())
            self.on_unordered_change({order.model_id})
            raise
        process = self.supervisor.living(deployment.engine_key)
        if order.tier == t.TIER_DEVICE and process is not None and process is self.device.holder:
            async with self.tiers.held(order.model_id):
                await self.preloads.run(deployment, process, self._attach)

    async def give_up_preload(self, deployment: Deployment) -> None:
        """Frees the device memory that a model was prefetched into; there may be none."""
        await self.preloads.settle(deployment.model_id)
        if self.residency.preloaded(deployment.model_id):
            self.tiers.counters.prefetch_misses += 1
            await self._let_go(deployment.model_id)

    async def _clear(self, deployment: Deployment, journal: Journal) -> None:
        """Parks whatever else is on the device, and gives up prefetched states that the model would not fit beside."""
        for model_id in self.residency.resident_models():
            if model_id != deployment.model_id:
                await self.park(model_id, journal, charged_to=deployment.job_id)
        for model_id in self.residency.in_the_way(deployment.model_id):
            await self.give_up_preload(self.deployment(model_id))

    async def _grant(self, deployment: Deployment, journal: Journal) -> EngineProcess:
        """Grants the device to a model's engine, started if need be, which then knows the model and its host image."""
        process = await self.engine_of(deployment)
        try:
            former = self.device.holder
            if former is not process:
                for model_id in self.models_of_process(former):
                    await self.give_up_preload(self.deployment(model_id))
            released = await self.device.grant(process)
            for model_id in self.models_of_process(former) if former is not process else ():
                self.residency.set_preloaded(model_id, preloaded=False)
            if former is not None and released is not None:
                await self._measure(former, released.held_bytes)
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

    async def keep_states(self, limit_s: float) -> None:
        """Parks everything on disk, as before a planned end, for the next life to adopt.

        An engine that does not let go of its device within `limit_s` loses what it alone has.
        """
        try:
            async with asyncio.timeout(limit_s), self.device.lock:
                for model_id in self.residency.resident_models():
                    await self.park(model_id, Journal())
        except (TimeoutError, WorkerError) as error:
            _log.error("states_not_parked", model_ids=self.residency.resident_models(), error=repr(error))
        await self.tiers.write_all()

    async def close(self) -> None:
        """Ends the engines and frees the host tier."""
        await self.supervisor.close()
        self.tiers.close()

    async def _attach(self, deployment: Deployment, process: EngineProcess) -> None:
        """Tells a child of a deployment and its host image; a child that is new learns of each when it is needed."""
        if deployment.attached is process:
            return
        image = self.tiers.image(deployment.model_id)
        await process.declare(deployment.model_id, deployment.settings)
        await process.attach_host(deployment.model_id, image.fd, image.size_bytes)
        deployment.attached = process

    async def _let_go(self, model_id: str) -> None:
        """Has a model's engine give up its host image, and what was prefetched from it."""
        deployment = self.deployment(model_id)
        process, deployment.attached = deployment.attached, None
        self.residency.set_preloaded(model_id, preloaded=False)
        if process is not None:
            with contextlib.suppress(engine_errors.EngineDied):
                await process.detach_host(model_id)

    async def _measure(self, process: EngineProcess, held_bytes: int) -> None:
        """Compares what an engine holds with what it held when it was new; one that keeps too much is ended.

        The next swap starts another. Its models are parked, and stay so.
        """
        process.residue_bytes = max(0, held_bytes - process.floor_bytes)
        in_use = any(self.residency.on_device(model_id) for model_id in self.models_of_process(process))
        if process.residue_bytes > self._settings.residue_bytes and not in_use:
            _log.warning(
                "engine_replaced", pid=process.pid, residue_bytes=process.residue_bytes, held_bytes=held_bytes,
                floor_bytes=process.floor_bytes, limit_bytes=self._settings.residue_bytes,
            )  # fmt: skip
            self.tiers.counters.engines_replaced += 1
            await process.close()
            self._note_death(process)

    async def spare_if_unused(self, engine_key: str) -> None:
        """Keeps the child of a key that no model uses any more for a while."""
        if not self.models_of(engine_key):
            await self.supervisor.spare(engine_key)

    async def forget(self, deployment: Deployment) -> None:
        """Forgets a model and frees all it holds here. The caller holds the device's lock."""
        model_id = deployment.model_id
        await self.preloads.settle(model_id)
        process = self.supervisor.living(deployment.engine_key)
        if process is not None:
            try:
                await process.drop(model_id)
            except engine_errors.EngineDied:
                self._note_death(process)
        self._deployments.pop(model_id, None)
        self.residency.remove(model_id)
        await self.tiers.remove(model_id)
        deployment.base.discard()

    def _note_death(self, process: EngineProcess) -> set[str]:
        """Settles what a dead child leaves: states with a whole host copy are parked, others lost. Safe to repeat."""
        touched: set[str] = set()
        for deployment in self._deployments.values():
            if deployment.attached is not process:
                continue
            deployment.attached = None
            model_id = deployment.model_id
            self.residency.set_preloaded(model_id, preloaded=False)
            if self.residency.on_device(model_id):
                touched.add(model_id)
                if self.residency.device_gone(model_id):
                    deployment.parked, deployment.state_lost = None, True
                    _log.warning("state_lost", model=model_id, applied_sequence=deployment.applied_sequence)
        return touched

    def corrupt(self, deployment: Deployment, journal: Journal) -> None:
        """A model's parked state is not what was parked."""
        self.give_up_state(deployment, journal)
        _log.warning("parked_state_corrupt", model=deployment.model_id)

    def give_up_state(self, deployment: Deployment, journal: Journal) -> None:
        """No copy of a model's state may be used any more: its host image is damaged, or about to hold another."""
        deployment.parked, deployment.host_state, deployment.state_lost = None, None, True
        self.residency.state_gone(deployment.model_id)
        self.tiers.forget_state(deployment.model_id)
        journal.touch(deployment.model_id)

    def swap_interval(
        self, deployment: Deployment, kind: t.IntervalKind.ValueType, charged_to: str = ""
    ) -> t.DeviceInterval:
        """Device time of a move, to be timed; charged to the model's own job unless another one causes it."""
        return t.DeviceInterval(
            kind=kind,
            worker_id=self.worker_id,
            job_id=charged_to or deployment.job_id,
            model_id=deployment.model_id,
        )
