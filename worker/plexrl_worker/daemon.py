"""Puts the worker together, runs it, and stops it. Never touches the device: engine children do."""

import asyncio
import fcntl
import gc
import os
import signal
from collections.abc import Callable
from dataclasses import asdict
from importlib import metadata as package_metadata
from pathlib import Path

import psutil
import structlog

from plexrl.v1 import model_pb2 as m
from plexrl.v1 import registry_pb2 as r
from plexrl.v1 import registry_pb2_grpc
from plexrl.v1 import types_pb2 as t
from plexrl.v1 import worker_pb2 as w
from plexrl_worker import channel
from plexrl_worker.bases import BaseLibrary
from plexrl_worker.calls import MOST_CONCURRENT
from plexrl_worker.checkpoints import CheckpointStore
from plexrl_worker.engine.settings import MAX_LORA_RANK, TESTED_ARCHITECTURES
from plexrl_worker.errors import SettingsError
from plexrl_worker.fences import Fences
from plexrl_worker.host import ModelHost
from plexrl_worker.orders import OrderDesk
from plexrl_worker.outbox import Outbox
from plexrl_worker.placement import Placement
from plexrl_worker.registration import Registration
from plexrl_worker.server import WorkerServer
from plexrl_worker.service import WeightService, WorkerService
from plexrl_worker.settings import WorkerSettings
from plexrl_worker.snapshots import SnapshotStore
from plexrl_worker.supervisor import reap_orphans
from plexrl_worker.systemd_notify import notify, watchdog_interval_s
from plexrl_worker.weight_pull import WeightPuller
from plexrl_worker.weight_serving import WeightServing

_log = structlog.get_logger(__name__)

_STOP_GRACE_S = 1.0
VERSION = package_metadata.version("plexrl")


class WorkerDaemon:
    """One daemon: one device, one state directory."""

    def __init__(self, settings: WorkerSettings) -> None:
        self.settings = settings
        self._fences = Fences()
        self._outbox = Outbox()
        payloads = channel.PayloadSource(settings)
        bases = BaseLibrary(settings.state_dir / "bases", settings.catalogue, payloads.read, settings.host_state_bytes)
        checkpoints = CheckpointStore(settings.checkpoint_dir, settings.name)
        checkpoints.remove_partial()
        self._snapshots = SnapshotStore(settings.checkpoint_dir / "snapshots", settings.name, settings.snapshot_bytes)
        self._snapshots.remove_partial()
        self._host = ModelHost(settings, checkpoints, self._snapshots)
        placement = Placement(self._host, bases, settings)
        self._weights = WeightServing(self._host)
        puller = WeightPuller(self._host, settings)
        self._desk = OrderDesk(self._host, placement, puller, self._fences, self._outbox)
        service = WorkerService(self._desk, self._host, self._fences, self._outbox, checkpoints, self.status)
        self.server = WorkerServer(settings, service, WeightService(self._weights))
        self._stopping = asyncio.Event()
        self._asked_to_stop = False
        self._hurry: Callable[[], None] = lambda: None

    async def run(self) -> None:
        """Serves until SIGTERM, SIGINT or the controller's word; raises when a part that must run has ended."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled)
        async with channel.open_channel(self.settings) as registry_channel:
            stub = registry_pb2_grpc.RegistryServiceStub(registry_channel)
            registration = Registration(stub, channel.metadata(self.settings), self._fences, self)
            self._hurry = registration.hurry
            self._desk.start()
            await self.server.start()
            await self.server.set_serving(True)
            # What the start made stays: looking through it again and again would stop all calls for a moment each time.
            gc.collect()
            gc.freeze()
            _log.info("serving", address=self.server.address, pid=os.getpid(), engine=self.settings.engine)
            parts = [
                loop.create_task(registration.run(), name="registration"),
                loop.create_task(self._feed_watchdog(registration), name="watchdog"),
                loop.create_task(self._host.tiers.run(), name="write-back"),
                loop.create_task(self._stop_wanted(), name="stop"),
                *self._desk.lanes,
            ]
            try:
                ended, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
            finally:
                await self._shut_down(parts[:3])
            for part in ended:
                part.result()

    def stop(self) -> None:
        """Asks the daemon to end: calls are handed back, states parked on its disk for its next life.

        Where its disk may not hold them all, it ends once the controller says that its models are saved, or after the
        grace.
        """
        grace_s = self.settings.stop_grace_s
        if self._asked_to_stop or not grace_s or not self._host.unsaved() or not self._fences.worker_incarnation:
            self._stopping.set()
            return
        _log.info("stop_asked", grace_s=grace_s, models=len(self._host.model_ids()))
        self._asked_to_stop = True
        self._hurry()
        asyncio.get_running_loop().call_later(grace_s, self._stopping.set)

    def unheard(self) -> None:
        """The controller does not answer: nobody orders what would be waited for."""
        if self._asked_to_stop:
            self._stopping.set()

    def _signalled(self) -> None:
        if self._stopping.is_set() or self._asked_to_stop:
            _log.warning("stopped_at_once")
            # Engines die with their parent.
            os._exit(1)
        self.stop()

    async def _stop_wanted(self) -> None:
        await self._stopping.wait()

    async def _shut_down(self, parts: list[asyncio.Task[None]]) -> None:
        notify("STOPPING=1")
        _log.info("stopping")
        await self.server.set_serving(False)
        await self._desk.hand_back(self.settings.stop_grace_s)
        await self._desk.close()
        await self._host.keep_states(self.settings.stop_grace_s)
        # The lease is renewed until here: what was handed back must be heard before the life ends.
        if not await self._outbox.drained(_STOP_GRACE_S):
            _log.warning("reports_not_heard")
        for part in parts:
            part.cancel()
        await asyncio.gather(*parts, return_exceptions=True)
        self._weights.close()
        await self._host.close()
        await self.server.stop(_STOP_GRACE_S)
        _log.info("stopped")

    async def _feed_watchdog(self, registration: Registration) -> None:
        """Tells systemd that the loop turns; a registration that stands still starves it."""
        interval_s = watchdog_interval_s()
        if interval_s is None:
            await asyncio.Event().wait()
            return
        seen = -1
        while True:
            if registration.turns != seen:
                seen = registration.turns
                notify("WATCHDOG=1")
            await asyncio.sleep(interval_s)

    # What the registration asks and says: registration.Lives.

    def announcement(self, life_nonce: int) -> r.RegisterRequest:
        """Who this worker is."""
        return r.RegisterRequest(
            name=self.settings.name,
            address=self.server.address,
            labels=dict(self.settings.labels),
            capabilities=self.capabilities(),
            life_nonce=life_nonce,
            version=VERSION,
        )

    def situation(self) -> r.SynchronizeRequest:
        """What it holds and does."""
        return r.SynchronizeRequest(
            deployments=[self._host.status(model_id) for model_id in self._host.model_ids()],
            attempts=self._desk.running(),
            resident_bytes=_resident_bytes(os.getpid()) + sum(e.resident_bytes for e in self._engines()),
            stopping=self._asked_to_stop,
        )

    def known_models(self) -> set[str]:
        """Models that are here, but for those that a queued order places or drops anyway."""
        return set(self._host.model_ids()) - self._desk.placing()

    async def drop_models(self, model_ids: set[str]) -> None:
        """These models do not belong here."""
        await self._desk.drop_models(model_ids)

    async def end_life(self) -> None:
        """Everything of this life is void."""
        await self._desk.reset()

    def registered(self, worker_id: str) -> None:
        """A life began: only now is the worker ready."""
        self._host.worker_id = worker_id
        notify("READY=1")

    def capabilities(self) -> r.WorkerCapabilities:
        """What this worker can do."""
        return r.WorkerCapabilities(
            architectures=TESTED_ARCHITECTURES,
            call_kinds=[kind for kind in t.CallKind.values() if kind],
            losses=[loss for loss in t.Loss.values() if loss],
            precisions=[precision for precision in m.Precision.values() if precision],
            catalogue=sorted(self.settings.catalogue),
            device_state_bytes=self.settings.device_state_bytes,
            host_state_bytes=self.settings.host_state_bytes,
            disk_state_bytes=self.settings.disk_state_bytes,
            prefetch=True,
            yields=True,
            max_concurrent_generates=MOST_CONCURRENT,
            kv_cache_bytes=self.settings.kv_cache_bytes,
            device_name=self.settings.device,
            threads=self.settings.threads,
            machine_type=self._host.machine_type,
            max_lora_rank=MAX_LORA_RANK if self.settings.engine == "vllm" else 0,
            checkpoint_store_id=self._snapshots.store_id(),
        )

    def status(self) -> w.WorkerStatus:
        """What the worker is, holds and does."""
        return w.WorkerStatus(
            worker_id=self._fences.worker_id,
            name=self.settings.name,
            worker_incarnation=self._fences.worker_incarnation,
            leader_term=self._fences.leader_term,
            capabilities=self.capabilities(),
            engines=self._engines(),
            deployments=[self._host.status(model_id) for model_id in self._host.model_ids()],
            attempts=self._desk.running(),
            device_used_bytes=self._host.residency.device_used_bytes,
            host_used_bytes=self._host.tiers.host_used_bytes,
            disk_used_bytes=self._host.tiers.disk_used_bytes,
            tiers=w.TierCounters(**asdict(self._host.tiers.counters)),
            version=VERSION,
            revision=self._host.revision,
        )

    def _engines(self) -> list[w.EngineStatus]:
        engines = []
        for facts in self._host.supervisor.facts():
            process = facts.process
            state = "starting" if facts.starting else "dead" if process is None else "busy" if process.busy else "idle"
            engines.append(
                w.EngineStatus(
                    engine_key=facts.key,
                    architecture=facts.architecture,
                    pid=process.pid if process else 0,
                    state=state,
                    model_ids=self._host.models_of(facts.key),
                    has_device=process is not None and self._host.device.holder is process,
                    resident_bytes=_resident_bytes(process.pid) if process else 0,
                    starts=facts.starts,
                    residue_bytes=process.residue_bytes if process else 0,
                )
            )
        return engines


def lock_state_directory(directory: Path) -> int:
    """Makes this process the directory's only daemon while the returned descriptor is open. Raises SettingsError."""
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    fd = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise SettingsError(f"--state-dir {directory}: another worker daemon runs there") from None
    return fd


async def serve(settings: WorkerSettings) -> None:
    """Runs a daemon from lock to last engine. Raises SettingsError."""
    lock = lock_state_directory(settings.state_dir)
    try:
        if reaped := reap_orphans(settings.state_dir / "engines"):
            _log.warning("orphans_reaped", pids=reaped)
        await WorkerDaemon(settings).run()
    finally:
        os.close(lock)


def _resident_bytes(pid: int) -> int:
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.NoSuchProcess:
        return 0
