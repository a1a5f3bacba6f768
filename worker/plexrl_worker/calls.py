"""Executes calls on a model that is on the device: checks sequence and version, runs the engine's function, keeps the
books of what changed. All of a call is applied, or none of it.
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from google.protobuf.timestamp_pb2 import Timestamp

from plexrl.v1 import types_pb2 as t
from plexrl.v1 import worker_pb2 as w
from plexrl_worker.checkpoints import CheckpointFacts, CheckpointFile, CommittedCheckpoint
from plexrl_worker.deployment import Deployment
from plexrl_worker.engine import errors as engine_errors
from plexrl_worker.engine.call import EngineCall
from plexrl_worker.engine.client import EngineProcess
from plexrl_worker.engine.port import Component
from plexrl_worker.errors import (
    Cancelled,
    EngineDied,
    InvalidOrder,
    SequenceMismatch,
    StateLost,
    Unsupported,
    VersionGone,
    WorkerError,
)
from plexrl_worker.execution import Execution, execution_name
from plexrl_worker.host import ModelHost
from plexrl_worker.weight_pull import WeightPuller

# What each function changes on the device. A function that raises has changed nothing.
_CHANGES: dict[str, frozenset[Component]] = {
    "generate": frozenset(),
    "score": frozenset(),
    "forward_backward": frozenset({Component.GRADIENTS}),
    "optim_step": frozenset({Component.TRAIN_WEIGHTS, Component.GRADIENTS, Component.OPTIMIZER}),
    "sync_weights": frozenset({Component.ROLLOUT_WEIGHTS}),
    "save_checkpoint": frozenset(),
    "load_checkpoint": frozenset(Component),
}
_REPLAYED = frozenset({"forward_backward", "optim_step", "sync_weights", "load_checkpoint"})
HOLD_S = 0.1
"""Generate calls that follow each other keep the device for so long at most, then others have their turn."""
AHEAD_S = 0.02
MOST_AHEAD = 64
"""Seconds and number of generate calls that lie ready in the engine's child."""
MOST_CONCURRENT = 64
"""Generate calls that run together."""
_KINDS = {function: t.CallKind.Value(f"CALL_KIND_{function.upper()}") for function in _CHANGES}
_NEEDS_TRAINABLE = frozenset({"forward_backward", "optim_step"})


@dataclass(frozen=True)
class GaveWay:
    """A generate was parked: units done, and units in all, 0 where that is not known."""

    done: int
    total: int


Outcome = t.GenerateResult | WorkerError | GaveWay


class CallRunner:
    """Runs calls on the models of a host."""

    def __init__(self, host: ModelHost, puller: WeightPuller) -> None:
        self._host = host
        self._puller = puller
        self._ahead = 1

    async def run_generates(
        self,
        first: Execution,
        following: Callable[[], Execution | None],
        ended: Callable[[Execution, Outcome], None],
    ) -> None:
        """Runs generate calls of one model one after the other under one hold of the device, for as long as `following`
        has another and at most HOLD_S; tells `ended` of each.

        They change nothing, so that the next may lie ready in the child while one runs. Short calls do, as many as
        AHEAD_S of work; before a long one the device could not be had for so much longer.
        """
        window: deque[tuple[Execution, EngineCall[t.GenerateResult]]] = deque()
        async with self._host.device.lock:
            until_s = time.monotonic() + HOLD_S
            upcoming: Execution | None = first
            while True:
                while upcoming is not None:
                    try:
                        window.append((upcoming, self._send_generate(upcoming)))
                    except WorkerError as error:
                        ended(upcoming, error)
                    more = len(window) < self._ahead and time.monotonic() < until_s
                    upcoming = following() if more else None
                if not window:
                    return
                execution, call = window[0]
                waited_since_ns = time.time_ns()
                if not call.done():
                    execution.begin()
                    with contextlib.suppress(engine_errors.EngineError):
                        await call
                # What ends in one burst is told in one pass.
                while window and window[0][1].done():
                    execution, call = window.popleft()
                    execution.begun = True
                    ended(execution, self._generated(execution, call, waited_since_ns))
                    took_s = (call.end_unix_ns - call.start_unix_ns) / 1e9
                    self._ahead = max(1, min(2 * self._ahead, MOST_AHEAD, int(AHEAD_S / max(took_s, 1e-6))))
                if len(window) < self._ahead and time.monotonic() < until_s:
                    upcoming = following()

    async def run_concurrent(
        self,
        first: Execution,
        following: Callable[[], Execution | None],
        ended: Callable[[Execution, Outcome], None],
        came: asyncio.Event,
    ) -> None:
        """Runs generate calls of one model together: `first`, and every other that `following` has when `came` is set.

        Each is told of at its own end. For as long as nobody else waits for the device others may join, then, after
        HOLD_S, they are let run to their ends.
        """
        running: list[tuple[Execution, EngineCall[t.GenerateResult]]] = []
        async with self._host.device.lock:
            until_s = time.monotonic() + HOLD_S
            upcoming: Execution | None = first
            while True:
                came.clear()
                while upcoming is not None:
                    try:
                        call = self._send_generate(upcoming)
                    except WorkerError as error:
                        ended(upcoming, error)
                    else:
                        call.on_end = came.set
                        upcoming.begin()
                        running.append((upcoming, call))
                        if call.done():
                            came.set()
                    upcoming = following() if self._may_join(len(running), until_s) else None
                if not running:
                    return
                await came.wait()
                done, running = [each for each in running if each[1].done()], [e for e in running if not e[1].done()]
                for execution, call in done:
                    ended(execution, self._generated(execution, call, time.time_ns()))
                if self._may_join(len(running), until_s):
                    upcoming = following()

    def _may_join(self, running: int, until_s: float) -> bool:
        """Whether another call may join those that run together."""
        free = not self._host.device.lock.wanted or time.monotonic() < until_s
        return running < MOST_CONCURRENT and free

    def _send_generate(self, execution: Execution) -> EngineCall[t.GenerateResult]:
        if execution.aborted:
            raise Cancelled("the call was stopped before it began")
        order = execution.order
        deployment = self._host.deployment(order.model_id)
        self._host.settle(deployment, execution.journal)
        _check(order, deployment)
        self._host.residency.require_on_device(order.model_id)
        if deployment.attached is None:
            raise EngineDied(f"the engine of model {order.model_id} has ended: swap it in again")
        name = execution_name(order)
        call = deployment.attached.generate(
            order.model_id, order.spec.generate, order.weights_version, name, concurrent=order.concurrent
        )
        call.on_progress = execution.on_progress
        execution.running = call
        return call

    def _generated(self, execution: Execution, call: EngineCall[t.GenerateResult], waited_since_ns: int) -> Outcome:
        """The outcome of a call that is done, and the device time that it took into its journal."""
        deployment = self._host.deployment(execution.order.model_id)
        execution.running = None
        interval = self._busy_interval(deployment, execution.order)
        # What the child says, where it lived to say it, leaves out the way there and back.
        interval.start_unix_ns = call.start_unix_ns or waited_since_ns
        interval.end_unix_ns = call.end_unix_ns or time.time_ns()
        execution.journal.intervals.append(interval)
        try:
            return call.result()
        except engine_errors.Yielded:
            return GaveWay(call.done_units, call.total_units)
        except engine_errors.EngineError as error:
            return self._host.engine_failed(call.process, error, execution.journal)

    async def run(self, execution: Execution) -> t.CallResult:
        """Runs one call. Raises WorkerError kinds; nothing was applied then, unless the state is said to be lost."""
        order, journal = execution.order, execution.journal
        async with self._host.device.lock:
            if execution.aborted:
                raise Cancelled("the call was stopped before it began")
            deployment = self._host.deployment(order.model_id)
            self._host.settle(deployment, journal)
            function = _check(order, deployment)
            pulls = order.spec.load_checkpoint.HasField("rollout")
            if pulls:
                self._puller.check(order)
            execution.begin()
            if pulls:
                # Before a peer is asked, so that nobody who asks this worker waits for the device meanwhile; and before
                # an engine is granted: parking may end one that keeps too much.
                await self._host.park(order.model_id, journal)
            async with contextlib.AsyncExitStack() as coming:
                if function == "load_checkpoint":
                    process = await coming.enter_async_context(self._host.coming(deployment, journal))
                else:
                    self._host.residency.require_on_device(order.model_id)
                    if deployment.attached is None:
                        raise EngineDied(f"the engine of model {order.model_id} has ended: swap it in again")
                    process = deployment.attached
                with journal.timed(self._busy_interval(deployment, order)):
                    try:
                        result = await self._execute(execution, deployment, process)
                    except engine_errors.EngineError as error:
                        raise self._host.engine_failed(process, error, journal) from error
                if not pulls:
                    self._apply(deployment, order, function)
            journal.touch(order.model_id)
            return result

    async def _execute(self, execution: Execution, deployment: Deployment, process: EngineProcess) -> t.CallResult:
        order, spec, model_id = execution.order, execution.order.spec, deployment.model_id
        follow = execution.follow
        match spec.WhichOneof("function"):
            case "score":
                scored = await follow(process.score(model_id, spec.score))
                return t.CallResult(score=scored)
            case "forward_backward":
                trained = await follow(process.forward_backward(model_id, spec.forward_backward))
                return t.CallResult(forward_backward=trained)
            case "optim_step":
                stepped = await follow(process.optim_step(model_id, spec.optim_step))
                return t.CallResult(optim_step=stepped)
            case "sync_weights":
                await follow(process.sync(model_id, order.sequence))
                return t.CallResult(sync_weights=t.SyncWeightsResult(weights_version=order.sequence))
            case "save_checkpoint":
                saved = await self._save(execution, deployment, process)
                return t.CallResult(save_checkpoint=t.SaveCheckpointResult(checkpoint=saved))
            case "load_checkpoint":
                if spec.load_checkpoint.HasField("rollout"):
                    return t.CallResult(load_checkpoint=await self._puller.pull(execution, deployment, process))
                return t.CallResult(load_checkpoint=await self._load(execution, deployment, process))
            case _:
                raise InvalidOrder("spec.function: not set, want one of the functions of CallSpec")

    async def _save(self, execution: Execution, deployment: Deployment, process: EngineProcess) -> t.Checkpoint:
        order, store, checkpoint_id = execution.order, self._host.checkpoints, execution.order.new_checkpoint_id
        present = await asyncio.to_thread(store.find, checkpoint_id)
        if present is not None:
            # An earlier attempt of this call committed it, and its report was lost.
            if (present.facts.model_id, present.facts.sequence) != (order.model_id, order.sequence):
                raise InvalidOrder(f"checkpoint {checkpoint_id} exists and is another call's")
            return _checkpoint(present, order)
        directory = await asyncio.to_thread(store.begin, checkpoint_id)
        try:
            saved = await execution.follow(process.save(deployment.model_id, str(directory)))
            facts = CheckpointFacts(
                checkpoint_id=checkpoint_id,
                model_id=order.model_id,
                sequence=order.sequence,
                step=saved.optimizer_step,
                weights_version=saved.rollout_version,
                architecture=deployment.base.architecture,
            )
            known = {file.name: CheckpointFile(file.name, file.size_bytes, file.sha256) for file in saved.files}
            committed = await asyncio.to_thread(store.commit, facts, known)
        except BaseException:
            store.abandon(checkpoint_id)
            raise
        return _checkpoint(committed, order)

    async def _load(
        self, execution: Execution, deployment: Deployment, process: EngineProcess
    ) -> t.LoadCheckpointResult:
        spec, version = execution.order.spec.load_checkpoint, execution.order.sequence
        match spec.WhichOneof("source"):
            case "checkpoint_id":
                checkpoint = await asyncio.to_thread(self._host.checkpoints.open, spec.checkpoint_id)
                if checkpoint.facts.architecture != deployment.base.architecture:
                    raise InvalidOrder(
                        f"checkpoint {spec.checkpoint_id} is of {checkpoint.facts.architecture}, the model is of "
                        f"{deployment.base.architecture}"
                    )
                call = process.load(deployment.model_id, str(checkpoint.directory), version)
            case "base":
                call = process.initialize(deployment.model_id, deployment.base.weights, version)
            case _:
                raise InvalidOrder("load_checkpoint.source: not set, want checkpoint_id, base or rollout")
        state = await execution.follow(call)
        return t.LoadCheckpointResult(weights_version=version, step=state.optimizer_step)

    def _apply(self, deployment: Deployment, order: w.RunCallOrder, function: str) -> None:
        """Keeps the books of a call that succeeded."""
        if function == "load_checkpoint":
            deployment.state_lost = False
            self._host.residency.built(deployment.model_id)
        else:
            self._host.residency.changed(deployment.model_id, _CHANGES[function])
        if function in ("load_checkpoint", "sync_weights"):
            deployment.weights_version = order.sequence
        if function != "generate":
            deployment.applied_sequence = max(order.sequence, order.through_sequence)

    def _busy_interval(self, deployment: Deployment, order: w.RunCallOrder) -> t.DeviceInterval:
        return t.DeviceInterval(
            kind=t.INTERVAL_KIND_BUSY,
            worker_id=self._host.worker_id,
            job_id=deployment.job_id,
            model_id=deployment.model_id,
            call_id=order.call.call_id,
            call_kind=_KINDS[str(order.spec.WhichOneof("function"))],
        )


def _check(order: w.RunCallOrder, deployment: Deployment) -> str:
    """The function to run. Raises the typed error of a call that must not run on this state."""
    function = order.spec.WhichOneof("function")
    if function is None:
        raise InvalidOrder("spec.function: not set, want one of the functions of CallSpec")
    if deployment.state_lost and function != "load_checkpoint":
        raise StateLost(f"the state of model {order.model_id} is lost: load a checkpoint first")
    if function == "generate":
        if order.weights_version != deployment.weights_version:
            raise VersionGone(
                f"generate asks for version {order.weights_version} of model {order.model_id}, which is at "
                f"{deployment.weights_version}"
            )
        return function
    # A lost state is loaded over whatever was applied to it, but never ahead of a call that was to come first.
    over_lost = deployment.state_lost and order.after_sequence <= deployment.applied_sequence
    follows = order.after_sequence == deployment.applied_sequence or over_lost
    if order.sequence <= deployment.applied_sequence or not follows:
        raise SequenceMismatch(
            f"call {order.sequence} of model {order.model_id} is to follow {order.after_sequence}, the last applied is "
            f"{deployment.applied_sequence}; nothing was applied",
            metadata={"applied_sequence": str(deployment.applied_sequence)},
        )
    if order.replay and function not in _REPLAYED:
        raise InvalidOrder(f"{function}: changes no state, so that it is never replayed")
    _check_role(order, function, deployment)
    if function in _NEEDS_TRAINABLE and not deployment.settings.trainable:
        raise InvalidOrder(f"{function}: model {order.model_id} is a reference, which is frozen")
    if function == "sync_weights" and order.spec.sync_weights.in_flight == t.IN_FLIGHT_KEEP:
        raise Unsupported("sync_weights.in_flight: KEEP is not offered: use DRAIN or ABORT")
    return str(function)


def _check_role(order: w.RunCallOrder, function: str, deployment: Deployment) -> None:
    source = order.spec.load_checkpoint.WhichOneof("source")
    if deployment.settings.rollout_only:
        if function != "load_checkpoint":
            raise InvalidOrder(f"{function}: model {order.model_id} is of role ROLLOUT, which is sampled alone")
        if source == "checkpoint_id":
            raise InvalidOrder(
                f"load_checkpoint.checkpoint_id: model {order.model_id} is of role ROLLOUT: want base or rollout"
            )
    elif source == "rollout":
        raise InvalidOrder(f"load_checkpoint.rollout: model {order.model_id} is not of role ROLLOUT")


def _checkpoint(committed: CommittedCheckpoint, order: w.RunCallOrder) -> t.Checkpoint:
    create_time = Timestamp()
    create_time.FromNanoseconds(committed.commit_unix_ns)
    return t.Checkpoint(
        checkpoint_id=committed.facts.checkpoint_id,
        model_id=committed.facts.model_id,
        label=order.spec.save_checkpoint.label,
        sequence=committed.facts.sequence,
        step=committed.facts.step,
        size_bytes=committed.size_bytes,
        manifest_sha256=committed.manifest_sha256,
        create_time=create_time,
    )
