"""The models of a worker in virtual time, and what orders do to them: everything or nothing, at once.

A model's training state is a digest over everything that was ever applied to it, in order. Results carry it, so whoever
knows which calls succeeded can say what each result must be: a call applied twice, left out, or run on another state
shows at once. A result also carries the number of the execution that made it. No stream or fence is known here.
"""

import random
from collections.abc import Callable

from google.rpc import code_pb2

from plexrl.v1 import types_pb2, worker_pb2
from tests.simulation.faults.deployed import STATE_BYTES, Deployed, failed, follows, result_of
from tests.simulation.faults.state import Copy, Made, Shared, State, digest


class Device:
    """What one life of a worker holds."""

    def __init__(self, name: str, shared: Shared, rng: random.Random, note: Callable[..., None]) -> None:
        self.name, self.shared, self.rng, self.note = name, shared, rng, note
        self.capacity = 1
        """Models that are on the device at a time."""
        self.failures = 0.0
        """Share of calls that the engine refuses with NON_FINITE."""
        self.models: dict[str, Deployed] = {}
        self.peer_at: Callable[[str], Device | None] = lambda _: None
        """The device whose worker listens at an address."""

    def held_on_device(self) -> set[str]:
        """The models that are on the device."""
        return {model_id for model_id, held in self.models.items() if held.on_device}

    def deploy(self, deploy: worker_pb2.DeployOrder) -> tuple[worker_pb2.OrderFinished, list[str]]:
        """Builds or restores a model; one that is there as ordered stays."""
        present = self.models.get(deploy.model_id)
        if present is None or present.order != deploy or present.lost:
            copy = self._copy_for(deploy, present)
            if isinstance(copy, str):
                return failed(code_pb2.DATA_LOSS, copy), []
            present = Deployed(deploy, copy.state, copy.version, deploy.applied_sequence, copy)
            self.models[deploy.model_id] = present
        built = worker_pb2.DeployedModel(parameter_count=10, state_bytes=STATE_BYTES, applied_sequence=present.applied)
        return worker_pb2.OrderFinished(deployed=built), [deploy.model_id]

    def _copy_for(self, deploy: worker_pb2.DeployOrder, present: Deployed | None) -> Copy | str:
        """What a deploy restores, or the reason why it cannot."""
        version, applied = deploy.weights_version, deploy.applied_sequence
        if deploy.HasField("snapshot"):
            manifest, copy = self.shared.snapshots.get(deploy.snapshot.snapshot_id, ("", None))
            if copy is None:
                return "CHECKPOINT_NOT_FOUND"
            return copy if manifest == deploy.snapshot.manifest_sha256 else "CHECKPOINT_CORRUPT"
        if deploy.from_host_image:
            if present is None or present.image.applied != deploy.host_image_sequence:
                return "STATE_LOST"
            return present.image
        if deploy.checkpoint_id:
            if deploy.checkpoint_id not in self.shared.checkpoints:
                return "CHECKPOINT_NOT_FOUND"
            return Copy(self.shared.checkpoints[deploy.checkpoint_id][2], version, applied)
        return Copy(State.base(deploy.base.init.seed), version, applied)

    def snapshot(self, order: worker_pb2.SnapshotOrder) -> worker_pb2.OrderFinished:
        """Copies a model to where every worker finds it."""
        held = self.models.get(order.model_id)
        if held is None or held.lost:
            return failed(code_pb2.FAILED_PRECONDITION, "NOT_DEPLOYED" if held is None else "STATE_LOST")
        if self.rng.random() < self.failures:
            return failed(code_pb2.RESOURCE_EXHAUSTED, "STORAGE_FAILED")
        manifest = f"{digest(order.snapshot_id, held.state, held.applied):064x}"
        self.shared.snapshots[order.snapshot_id] = manifest, Copy(held.state, held.version, held.applied)
        self.note(self.name, "snapshot of", order.model_id[-4:], "at", held.applied)
        written = worker_pb2.WrittenSnapshot(
            snapshot_id=order.snapshot_id,
            sequence=held.applied,
            step=held.state.step,
            weights_version=held.version,
            size_bytes=STATE_BYTES,
            manifest_sha256=manifest,
            device_s=0.001,
            write_s=0.01,
        )
        return worker_pb2.OrderFinished(snapshot=written)

    def swap(self, swap: worker_pb2.SwapWeightsOrder) -> tuple[worker_pb2.OrderFinished, list[str]]:
        """Models leave the device, another comes."""
        for model_id in swap.evict_model_ids:
            self._park(model_id)
        if not swap.load_model_id:
            return worker_pb2.OrderFinished(), list(self.models)
        held = self.models.get(swap.load_model_id)
        if held is None:
            return failed(code_pb2.FAILED_PRECONDITION, "NOT_DEPLOYED"), list(self.models)
        staying = [m for m in self.models if self.models[m].on_device and m != swap.load_model_id]
        if len(staying) + 1 > self.capacity:
            return failed(code_pb2.RESOURCE_EXHAUSTED, "OVER_BUDGET"), list(self.models)
        if not held.lost:
            held.on_device = True
        return worker_pb2.OrderFinished(), list(self.models)

    def _park(self, model_id: str) -> None:
        if (held := self.models.get(model_id)) is not None:
            held.park()

    def engine_died(self) -> set[str]:
        """What was only on the device is lost. Returns the models that were there."""
        touched = {model_id for model_id, held in self.models.items() if held.on_device}
        for model_id in touched:
            held = self.models[model_id]
            held.on_device, held.lost = False, not held.clean
        return touched

    def refusal(self, run: worker_pb2.RunCallOrder) -> worker_pb2.OrderFinished | None:
        """Why a call cannot run now, if it cannot."""
        held, function = self.models.get(run.model_id), run.spec.WhichOneof("function")
        if held is None:
            return failed(code_pb2.FAILED_PRECONDITION, "NOT_DEPLOYED")
        if held.lost and function != "load_checkpoint":
            return failed(code_pb2.FAILED_PRECONDITION, "STATE_LOST")
        if function == "generate":
            if run.weights_version != held.version:
                return failed(code_pb2.FAILED_PRECONDITION, "VERSION_GONE")
        elif run.sequence <= held.applied or not follows(run, held):
            return failed(code_pb2.FAILED_PRECONDITION, "SEQUENCE_MISMATCH", applied_sequence=str(held.applied))
        if function != "load_checkpoint" and not held.on_device:
            return failed(code_pb2.FAILED_PRECONDITION, "NOT_RESIDENT")
        return self.not_pulled(run) if run.spec.load_checkpoint.HasField("rollout") else None

    def not_pulled(self, run: worker_pb2.RunCallOrder) -> worker_pb2.OrderFinished | None:
        """Why another worker does not give the weights, if it does not."""
        source = run.weight_source
        if not source.model_id:
            return failed(code_pb2.FAILED_PRECONDITION, "VERSION_GONE")
        peer = self.peer_at(source.address)
        held = peer.models.get(source.model_id) if peer is not None else None
        if held is None or held.lost or held.version < source.weights_version or self.rng.random() < self.failures:
            return failed(code_pb2.UNAVAILABLE, "PULL_FAILED")
        if held.version > source.weights_version:
            return failed(code_pb2.FAILED_PRECONDITION, "VERSION_GONE")
        return None

    def execute(self, run: worker_pb2.RunCallOrder, incarnation: int) -> types_pb2.CallResult:
        """Executes: everything or nothing. The result carries the state's digest and the number of this execution."""
        held, function = self.models[run.model_id], run.spec.WhichOneof("function") or ""
        number = self._number(run, incarnation)
        again = "again" if run.replay else ""
        self.note(self.name, "executes", again, function, run.sequence, f"{run.call.call_id[-4:]}/{run.call.attempt}")
        before = held.state
        match function:
            case "save_checkpoint":
                self.shared.checkpoints.setdefault(run.new_checkpoint_id, (run.model_id, run.sequence, held.state))
            case "load_checkpoint":
                self._load(held, run)
            case _:
                held.state = held.state.after(function, run.spec)
        if run.sequence:
            held.applied = max(run.sequence, run.through_sequence)
        if function in ("sync_weights", "load_checkpoint"):
            held.version = run.sequence
        if held.state != before or function in ("sync_weights", "load_checkpoint"):
            held.clean = False
        return result_of(run, function, held, number)

    def _number(self, run: worker_pb2.RunCallOrder, incarnation: int) -> int:
        call = run.call
        if run.replay and call.call_id in self.shared.last:
            self.shared.replayed.add(self.shared.last[call.call_id])
            return self.shared.last[call.call_id]
        self.shared.last[call.call_id] = len(self.shared.made)
        self.shared.made.append(Made(call.call_id, call.attempt, self.name, incarnation))
        return self.shared.last[call.call_id]

    def _load(self, held: Deployed, run: worker_pb2.RunCallOrder) -> None:
        others = [m for m in self.models if self.models[m].on_device and m != run.model_id]
        if len(others) >= self.capacity:
            for model_id in others:
                self._park(model_id)
        source = run.spec.load_checkpoint.checkpoint_id
        if run.spec.load_checkpoint.HasField("rollout"):
            peer = self.peer_at(run.weight_source.address)
            assert peer is not None, "see refusal"
            rollout = peer.models[run.weight_source.model_id].state.rollout
            held.state = State(rollout, rollout)
        else:
            held.state = self.shared.checkpoints[source][2] if source else State.base(held.order.base.init.seed)
        held.lost, held.on_device = False, True
