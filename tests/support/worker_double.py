"""A worker in memory, behind the dispatcher's transport port: keeps the rules of the wire, computes nothing.

It executes orders in order when told to (`run`), refuses stale fences and wrong sequences, recognises attempts that it
knows, holds one model on its device, and can die.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from google.rpc import code_pb2, status_pb2

from plexrl import wire
from plexrl.v1 import model_pb2, registry_pb2, types_pb2, worker_pb2
from plexrl_controller.dispatch.core import Core
from plexrl_controller.dispatch.dispatcher import Dispatcher
from plexrl_controller.dispatch.workers import Announcement, register
from plexrl_controller.domain.ids import WorkerId
from plexrl_controller.domain.records import Worker

STATE_BYTES = 1000
CHANGES = ("forward_backward", "optim_step", "sync_weights")


@dataclass(frozen=True)
class OnDisk:
    """A snapshot."""

    state: tuple[int, ...]
    version: int
    manifest: str
    rollout_state: tuple[int, ...]


Disk = tuple[dict[str, OnDisk], dict[str, tuple[int, ...]]]


@dataclass
class HeldModel:
    """What the double keeps of a deployed model."""

    applied: int
    version: int
    on_device: bool = False
    order: worker_pb2.DeployOrder | None = None
    applied_calls: list[str] = field(default_factory=list)
    state: tuple[int, ...] = ()
    """The state itself: which calls' effects are in it, in order."""
    rollout_state: tuple[int, ...] = ()
    """What the version was made of."""


class WorkerDouble:
    """One life after another of one worker."""

    def __init__(self, name: str = "w0", device_state_bytes: int = 1500, disk: "Disk | None" = None) -> None:
        self.name = name
        self.disk, self.saved = disk if disk is not None else ({}, {})
        """Snapshots and checkpoints: they survive every life, and other workers may share them."""
        self.models: dict[str, HeldModel] = {}
        self.kept: dict[str, HeldModel] = {}
        """States that the last life parked before a planned end."""
        self.queue: deque[worker_pb2.Order] = deque()
        self.outcomes: dict[tuple[str, int], worker_pb2.OrderFinished] = {}
        self.executed: list[str] = []
        """Call ids in the order in which their effect happened."""
        self.swaps = 0
        self.drift = 0.0
        """Added to every loss: what another machine type would do."""
        self.address = "127.0.0.1:1"
        self.peers: dict[str, WorkerDouble] = {self.address: self}
        """By address, where rollout weights are pulled from."""
        self.unreachable = False
        """Peers do not get through to it."""
        self.nonce = 1
        self.clock_ns = 1_000_000_000
        self.fail_next: dict[str, tuple[int, str]] = {}
        """Function name to (code, reason) of its next execution."""
        self.capabilities = registry_pb2.WorkerCapabilities(
            architectures=["Qwen3ForCausalLM", "LlamaForCausalLM"],
            call_kinds=list(range(1, 8)),  # type: ignore[arg-type]
            losses=list(range(1, 6)),  # type: ignore[arg-type]
            device_state_bytes=device_state_bytes,
            host_state_bytes=1 << 30,
            yields=True,
            max_concurrent_generates=64,
        )

    def announcement(self) -> Announcement:
        """This life's registration."""
        return Announcement(self.name, self.address, {"gpu": "none"}, self.capabilities, self.nonce, "0")

    def die(self) -> None:
        """Kill -9: everything is gone; the next registration is another life."""
        self.models.clear()
        self.queue.clear()
        self.outcomes.clear()
        self.nonce += 1

    def synchronize(self, worker: Worker, *, stopping: bool = False) -> registry_pb2.SynchronizeRequest:
        """What Synchronize says."""
        return registry_pb2.SynchronizeRequest(
            worker_id=worker.worker_id,
            worker_incarnation=worker.incarnation,
            deployments=[self._deployment(m) for m in self.models],
            stopping=stopping,
        )

    def restart(self) -> None:
        """A planned end: the next life has every state."""
        kept = self.models.copy()
        self.die()
        self.kept = kept

    def status(self) -> worker_pb2.WorkerStatus:
        """What GetStatus answers."""
        kept = [
            registry_pb2.DeploymentStatus(
                model_id=model_id,
                state_lost=True,
                host_image=True,
                host_image_sequence=held.applied,
                host_image_weights_version=held.version,
            )
            for model_id, held in self.kept.items()
        ]
        return worker_pb2.WorkerStatus(deployments=[*(self._deployment(m) for m in self.models), *kept])

    def run(self, orders: int | None = None) -> list[worker_pb2.Report]:
        """Executes queued orders and returns their reports."""
        reports: list[worker_pb2.Report] = []
        while self.queue and (orders is None or orders > 0):
            reports.extend(self._execute(self.queue.popleft()))
            orders = orders - 1 if orders is not None else None
        return reports

    def _execute(self, order: worker_pb2.Order) -> list[worker_pb2.Report]:
        action = order.WhichOneof("action")
        report = worker_pb2.Report(order_id=order.order_id)
        self.clock_ns += 1_000_000
        match action:
            case "deploy":
                deploy = order.deploy
                report.finished.CopyFrom(self._deploy(deploy))
                if deploy.model_id in self.models:
                    report.deployments.append(self._deployment(deploy.model_id))
            case "snapshot":
                report.finished.CopyFrom(self._snapshot(order.snapshot))
            case "expire_snapshots":
                for snapshot_id in order.expire_snapshots.snapshot_ids:
                    self.disk.pop(snapshot_id, None)
                report.finished.SetInParent()
            case "drop":
                self.models.pop(order.drop.model_id, None)
                report.finished.SetInParent()
            case "swap_weights":
                self._swap(order.swap_weights, report)
            case "run_call":
                return self._run_call(order)
            case "yield_call":
                report.call.CopyFrom(order.yield_call.call)
                outcome = self.outcomes.get((report.call.call_id, report.call.attempt))
                if outcome is not None:
                    report.finished.CopyFrom(outcome)
                else:
                    report.yielded.SetInParent()
            case _:
                report.finished.SetInParent()
        return [report]

    def _deploy(self, deploy: worker_pb2.DeployOrder) -> worker_pb2.OrderFinished:
        present = self.models.get(deploy.model_id)
        if present is not None and present.order == deploy:
            held = present
        else:
            held = HeldModel(deploy.applied_sequence, deploy.weights_version, order=deploy)
            kept = self.kept.pop(deploy.model_id, None)
            if deploy.from_host_image:
                if kept is None or kept.applied != deploy.host_image_sequence:
                    return _failed(code_pb2.DATA_LOSS, "STATE_LOST")
                held.state, held.version, held.rollout_state = kept.state, kept.version, kept.rollout_state
            elif deploy.HasField("snapshot"):
                written = self.disk.get(deploy.snapshot.snapshot_id)
                if written is None:
                    return _failed(code_pb2.NOT_FOUND, "CHECKPOINT_NOT_FOUND")
                if written.manifest != deploy.snapshot.manifest_sha256:
                    return _failed(code_pb2.DATA_LOSS, "CHECKPOINT_CORRUPT")
                held.state, held.version, held.rollout_state = written.state, written.version, written.rollout_state
            elif deploy.checkpoint_id:
                if deploy.checkpoint_id not in self.saved:
                    return _failed(code_pb2.NOT_FOUND, "CHECKPOINT_NOT_FOUND")
                held.state = held.rollout_state = self.saved[deploy.checkpoint_id]
            self.models[deploy.model_id] = held
        built = worker_pb2.DeployedModel(parameter_count=10, state_bytes=STATE_BYTES, applied_sequence=held.applied)
        return worker_pb2.OrderFinished(deployed=built)

    def _snapshot(self, order: worker_pb2.SnapshotOrder) -> worker_pb2.OrderFinished:
        if (failure := self.fail_next.pop("snapshot", None)) is not None:
            return _failed(*failure)
        held = self.models[order.model_id]
        manifest = f"{order.snapshot_id}@{held.applied}"
        self.disk[order.snapshot_id] = OnDisk(held.state, held.version, manifest, held.rollout_state)
        return worker_pb2.OrderFinished(
            snapshot=worker_pb2.WrittenSnapshot(
                snapshot_id=order.snapshot_id,
                sequence=held.applied,
                weights_version=held.version,
                size_bytes=STATE_BYTES,
                manifest_sha256=manifest,
            )
        )

    def _swap(self, swap: worker_pb2.SwapWeightsOrder, report: worker_pb2.Report) -> None:
        for model_id in swap.evict_model_ids:
            if model_id in self.models:
                self.models[model_id].on_device = False
        resident = sum(STATE_BYTES for m in self.models.values() if m.on_device)
        if swap.load_model_id and resident + STATE_BYTES > self.capabilities.device_state_bytes:
            report.finished.error.CopyFrom(_status(code_pb2.RESOURCE_EXHAUSTED, "OVER_BUDGET"))
            return
        if swap.load_model_id:
            self.models[swap.load_model_id].on_device = True
            self.swaps += 1
        report.finished.SetInParent()
        report.deployments.extend(self._deployment(m) for m in self.models)

    def _run_call(self, order: worker_pb2.Order) -> list[worker_pb2.Report]:
        run = order.run_call
        key = (run.call.call_id, run.call.attempt)
        finished = self.outcomes.get(key)
        started = worker_pb2.Report(order_id=order.order_id, call=run.call, started=worker_pb2.OrderStarted())
        if finished is None:
            finished = self._outcome(run)
            self.outcomes[key] = finished
        done = worker_pb2.Report(order_id=order.order_id, call=run.call, finished=finished)
        done.intervals.append(
            types_pb2.DeviceInterval(
                kind=types_pb2.INTERVAL_KIND_BUSY,
                job_id=run.job_id,
                model_id=run.model_id,
                call_id=run.call.call_id,
                call_kind=types_pb2.CallKind.ValueType(wire.kind_of(run.spec)),
                start_unix_ns=self.clock_ns - 1_000_000,
                end_unix_ns=self.clock_ns,
            )
        )
        return [started, done]

    def _outcome(self, run: worker_pb2.RunCallOrder) -> worker_pb2.OrderFinished:
        model = self.models.get(run.model_id)
        function = run.spec.WhichOneof("function") or ""
        if model is None:
            return _failed(code_pb2.FAILED_PRECONDITION, "NOT_DEPLOYED")
        if not model.on_device:
            return _failed(code_pb2.FAILED_PRECONDITION, "NOT_RESIDENT")
        if run.sequence and model.applied != run.after_sequence:
            return _failed(code_pb2.FAILED_PRECONDITION, "SEQUENCE_MISMATCH", applied_sequence=str(model.applied))
        if not run.sequence and run.weights_version != model.version:
            return _failed(code_pb2.FAILED_PRECONDITION, "VERSION_GONE")
        if (failure := self.fail_next.pop(function, None)) is not None:
            return _failed(*failure)
        pulls = function == "load_checkpoint" and run.spec.load_checkpoint.HasField("rollout")
        if pulls and (failure := self._not_pulled(run.weight_source)) is not None:
            return _failed(*failure)
        self.executed.append(run.call.call_id)
        if run.sequence:
            model.applied = max(run.sequence, run.through_sequence)
            model.applied_calls.append(run.call.call_id)
        if function in CHANGES:
            model.state = (*model.state, run.sequence)
        if pulls:
            model.state = self.peers[run.weight_source.address].models[run.weight_source.model_id].rollout_state
        elif function == "load_checkpoint":
            model.state = self.saved.get(run.spec.load_checkpoint.checkpoint_id, ())
        if function == "save_checkpoint":
            self.saved[run.new_checkpoint_id] = model.state
        if function in ("sync_weights", "load_checkpoint"):
            model.version, model.rollout_state = run.sequence, model.state
        result = _result(run, function, model)
        if function == "forward_backward":
            result.forward_backward.loss = len(model.state) + self.drift
        return worker_pb2.OrderFinished(result=result)

    def _not_pulled(self, source: worker_pb2.WeightSource) -> tuple[int, str] | None:
        """Why the weights cannot be had, in the words of a worker; None where they can."""
        peer = self.peers.get(source.address)
        held = peer.models.get(source.model_id) if peer is not None else None
        if peer is not None and peer.unreachable:
            return code_pb2.UNAVAILABLE, "PULL_FAILED"
        if held is None or held.version != source.weights_version:
            return code_pb2.FAILED_PRECONDITION, "VERSION_GONE"
        return None

    def _deployment(self, model_id: str) -> registry_pb2.DeploymentStatus:
        held = self.models[model_id]
        tier = types_pb2.TIER_DEVICE if held.on_device else types_pb2.TIER_HOST
        return registry_pb2.DeploymentStatus(
            model_id=model_id,
            residency=[model_pb2.ComponentResidency(component="train_weights", tier=tier, size_bytes=STATE_BYTES)],
            weights_version=held.version,
            applied_sequence=held.applied,
        )


class TransportDouble:
    """Implements the dispatcher's Transport over WorkerDoubles."""

    def __init__(self, *workers: WorkerDouble) -> None:
        self.doubles = {worker.name: worker for worker in workers}
        self.opened: dict[WorkerId, Worker] = {}
        self.sent: list[worker_pb2.Order] = []

    def open(self, worker: Worker) -> None:
        """Remembers who is meant; `connect` opens the stream."""
        self.opened[worker.worker_id] = worker

    def close(self, worker_id: WorkerId) -> None:
        """Forgets it."""
        self.opened.pop(worker_id, None)

    def send(self, worker_id: WorkerId, orders: Sequence[worker_pb2.Order]) -> None:
        """Queues orders of the present life; aborts act at once."""
        worker = self.opened.get(worker_id)
        if worker is None:
            return
        double = self.doubles[worker.name]
        self.sent.extend(orders)
        for order in orders:
            if order.WhichOneof("action") == "abort":
                self._abort(double, order)
            elif order.WhichOneof("action") == "yield_call":
                # What is queued gives way at once; a generate that runs would at its next step.
                mine = [o for o in double.queue if o.HasField("run_call") and o.run_call.call == order.yield_call.call]
                for queued in mine:
                    double.queue.remove(queued)
                double.queue.appendleft(order)
            else:
                double.queue.append(order)

    async def shutdown(self) -> None:
        """Nothing to close."""

    def _abort(self, double: WorkerDouble, order: worker_pb2.Order) -> None:
        call = order.abort.call
        key = (call.call_id, call.attempt)
        if key not in double.outcomes:
            double.outcomes[key] = _failed(code_pb2.CANCELLED, "CANCELLED")


async def join(core: Core, dispatcher: Dispatcher, transport: TransportDouble, double: WorkerDouble) -> WorkerId:
    """Registers a life of the double and opens its stream."""
    worker = await register(core, double.announcement())
    await dispatcher.stream_opened(worker.worker_id, worker.incarnation, double.status())
    return worker.worker_id


def _status(code: int, reason: str, **metadata: str) -> status_pb2.Status:
    return wire.error_status(wire.ErrorInfo(code, reason, f"the double says {reason}", metadata))


def _failed(code: int, reason: str, **metadata: str) -> worker_pb2.OrderFinished:
    return worker_pb2.OrderFinished(error=_status(code, reason, **metadata))


def _result(run: worker_pb2.RunCallOrder, function: str, model: HeldModel) -> types_pb2.CallResult:
    result = types_pb2.CallResult()
    getattr(result, function).SetInParent()
    match function:
        case "generate":
            result.generate.weights_version = model.version
        case "save_checkpoint":
            result.save_checkpoint.checkpoint.label = run.spec.save_checkpoint.label
            result.save_checkpoint.checkpoint.manifest_sha256 = "0" * 64
        case "sync_weights":
            result.sync_weights.weights_version = run.sequence
        case "load_checkpoint":
            result.load_checkpoint.weights_version = run.sequence
        case _:
            pass
    return result
