"""A worker process in virtual time: lanes, fences, engine deaths and outbox as the daemon has them.

What its models are and what a call does to them is the device's business (`device`).
"""

import asyncio
import random
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from google.rpc import code_pb2

from plexrl import wire
from plexrl.v1 import model_pb2, registry_pb2, types_pb2, worker_pb2
from tests.simulation.faults.deployed import STATE_BYTES, failed
from tests.simulation.faults.device import Device
from tests.simulation.faults.state import Shared


@dataclass
class Execution:
    """An attempt that is queued or runs."""

    order: worker_pb2.Order
    order_id: int
    number: int
    begun: bool = False
    aborted: bool = False
    yielding: bool = False
    parked: bool = False
    """It gave way, and waits to be ordered again."""
    outcome: worker_pb2.OrderFinished | None = None


class Refused(Exception):
    """An order or stream of an older controller, or for another life."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Link:
    """One Execute stream. `broken` loses whatever is on its way."""

    def __init__(self, process: "WorkerProcess", term: int) -> None:
        self.process = process
        self.term = term
        self.broken = asyncio.Event()
        self.orders: deque[worker_pb2.Order] = deque()
        self.queued = asyncio.Event()


class WorkerProcess:
    """One worker daemon, which can be killed and started again."""

    def __init__(self, name: str, address: str, shared: Shared, rng: random.Random, note: Callable[..., None]) -> None:
        self.name, self.address = name, address
        self.rng, self.note = rng, note
        self.device = Device(name, shared, rng, note)
        self.alive = False
        self._tasks: list[asyncio.Task[None]] = []
        self._clear()

    def _clear(self) -> None:
        self.worker_id, self.incarnation, self.term = "", 0, 0
        self.nonce = self.rng.getrandbits(62) + 1
        self.link: Link | None = None
        self.reports: deque[worker_pb2.Report] = deque()
        self.changed = asyncio.Event()
        self.engine_died = asyncio.Event()
        self.revision = 0
        self._begin_life()

    def _begin_life(self) -> None:
        self.steps_left: dict[tuple[str, int], int] = {}
        """Of executions that are parked in the engine."""
        self.device.models = {}
        self.running: dict[str, Execution] = {}
        self.finished: dict[str, Execution] = {}
        self.lane: asyncio.Queue[tuple[worker_pb2.Order, Execution | None]] = asyncio.Queue()
        self.reports.clear()

    def start(self, spawn: Callable[..., "asyncio.Task[None]"]) -> None:
        """A fresh process."""
        self._clear()
        self.alive = True
        self._tasks = [spawn(self._run_lane(), name=f"lane-{self.name}")]
        self.note(self.name, "started")

    def kill(self) -> None:
        """Kill -9."""
        self.alive = False
        for task in self._tasks:
            task.cancel()
        self.break_stream()
        self._clear()
        self.note(self.name, "killed")

    def end_life(self) -> None:
        """The lease was lost: everything is void, and the next registration is another life."""
        self.incarnation, self.nonce = 0, self.rng.getrandbits(62) + 1
        for execution in self.running.values():
            execution.aborted = True
        lane = self.lane
        self._begin_life()
        self.lane = lane
        while not lane.empty():
            lane.get_nowait()
        self.note(self.name, "life ended")

    def break_stream(self) -> None:
        """The connection is gone with all that was on it."""
        if self.link is not None:
            self.link.broken.set()
            self.link = None
            self.changed.set()

    def kill_engine(self) -> None:
        """The engine child dies; what was only on the device is lost."""
        self.note(self.name, "engine dies")
        self.engine_died.set()
        self.engine_died = asyncio.Event()
        if touched := self.device.engine_died():
            self._put(
                worker_pb2.Report(
                    worker_incarnation=self.incarnation, deployments=[self._deployment(m) for m in sorted(touched)]
                )
            )

    # The wire.

    def check(self, term: int, incarnation: int, worker_id: str) -> None:
        """The fences of streams and orders. Raises Refused."""
        if not self.incarnation or incarnation != self.incarnation or worker_id not in ("", self.worker_id):
            raise Refused("STALE_INCARNATION")
        if term < self.term:
            raise Refused("STALE_TERM")
        self.term = term

    def open(self, term: int, incarnation: int, worker_id: str) -> Link:
        """An Execute stream; a newer one replaces the one before. Raises Refused."""
        self.check(term, incarnation, worker_id)
        self.break_stream()
        self.link = Link(self, term)
        return self.link

    async def take(self, link: Link) -> list[worker_pb2.Report] | None:
        """The next frame of reports; None when the stream ended."""
        while self.link is link and not self.reports:
            self.changed.clear()
            await self.changed.wait()
        if self.link is not link:
            self.changed.set()
            return None
        count = self.rng.randint(1, len(self.reports))
        return [self.reports.popleft() for _ in range(count)]

    def status(self) -> worker_pb2.WorkerStatus:
        """GetStatus."""
        return worker_pb2.WorkerStatus(
            worker_id=self.worker_id,
            name=self.name,
            worker_incarnation=self.incarnation,
            leader_term=self.term,
            deployments=[self._deployment(model_id) for model_id in self.device.models],
            attempts=[registry_pb2.CallAttempt(call_id=c, attempt=e.number) for c, e in self.running.items()],
            revision=self.revision,
        )

    def announcement(self) -> registry_pb2.RegisterRequest:
        """Register."""
        return registry_pb2.RegisterRequest(
            name=self.name,
            address=self.address,
            capabilities=registry_pb2.WorkerCapabilities(
                architectures=["Qwen3ForCausalLM"],
                call_kinds=list(range(1, 8)),  # type: ignore[arg-type]
                losses=list(range(1, 6)),  # type: ignore[arg-type]
                device_state_bytes=STATE_BYTES * self.device.capacity,
                host_state_bytes=1 << 30,
                machine_type="simulated",
                checkpoint_store_id="shared",
                yields=True,
                max_concurrent_generates=64,
            ),
            life_nonce=self.nonce,
            version="0",
        )

    def situation(self) -> registry_pb2.SynchronizeRequest:
        """Synchronize."""
        status = self.status()
        return registry_pb2.SynchronizeRequest(
            worker_id=self.worker_id,
            worker_incarnation=self.incarnation,
            deployments=status.deployments,
            attempts=status.attempts,
        )

    def drop_strangers(self, strangers: Iterable[str]) -> None:
        """Drops models that the controller does not list."""
        for model_id in sorted(strangers):
            self.note(self.name, "drops stranger", model_id[-4:])
            self.lane.put_nowait((worker_pb2.Order(drop=worker_pb2.DropOrder(model_id=model_id)), None))

    def submit(self, order: worker_pb2.Order) -> None:
        """Takes an order; every outcome, refusal included, is a report."""
        try:
            self.check(order.leader_term, order.worker_incarnation, "")
            match order.WhichOneof("action"):
                case "run_call":
                    self._accept(order)
                case "abort":
                    self._abort(order)
                case "yield_call":
                    self._yield(order)
                case "drop":
                    for execution in list(self.running.values()):
                        if execution.order.run_call.model_id == order.drop.model_id:
                            self._stop(execution)
                    self.lane.put_nowait((order, None))
                case _:
                    self.lane.put_nowait((order, None))
        except Refused as refused:
            self._put(self._report(order, finished=failed(code_pb2.FAILED_PRECONDITION, refused.reason)))

    def _accept(self, order: worker_pb2.Order) -> None:
        call = order.run_call.call
        known = self.running.get(call.call_id) or self.finished.get(call.call_id)
        if known is not None and known.number > call.attempt:
            raise Refused("STALE_ATTEMPT")
        if known is not None and known.number == call.attempt and not known.parked:
            if known.outcome is not None:
                self._put(self._report(order, finished=known.outcome))
            else:
                known.order_id = order.order_id
            return
        if (older := self.running.get(call.call_id)) is not None and older.number != call.attempt:
            self._stop(older)
        execution = Execution(order, order.order_id, call.attempt)
        self.finished.pop(call.call_id, None)
        self.running[call.call_id] = execution
        self.lane.put_nowait((order, execution))

    def _abort(self, order: worker_pb2.Order) -> None:
        execution = self.running.get(order.abort.call.call_id)
        if execution is not None and execution.number == order.abort.call.attempt:
            self._stop(execution)
        self._put(worker_pb2.Report(order_id=order.order_id, finished=worker_pb2.OrderFinished()))

    def _yield(self, order: worker_pb2.Order) -> None:
        call = order.yield_call.call
        known = self.running.get(call.call_id) or self.finished.get(call.call_id)
        if known is not None and known.number > call.attempt:
            raise Refused("STALE_ATTEMPT")
        if known is None or known.number < call.attempt:
            report = worker_pb2.Report(order_id=order.order_id, call=call, yielded=worker_pb2.OrderYielded())
            report.worker_incarnation = order.worker_incarnation
            self._put(report)
        elif known.outcome is not None:
            self._put(self._report(known.order, finished=known.outcome))
        elif known.parked or (not known.begun and known.order.run_call.spec.HasField("generate")):
            self._give_way(known)
        else:
            known.yielding = known.order.run_call.spec.HasField("generate")

    def _give_way(self, execution: Execution) -> None:
        call = execution.order.run_call.call
        execution.parked = True
        self.note(self.name, "yields", f"{call.call_id[-4:]}/{call.attempt}")
        report = self._report(execution.order, yielded=worker_pb2.OrderYielded())
        report.order_id = execution.order_id
        self._put(report)

    def _stop(self, execution: Execution) -> None:
        execution.aborted = True
        if (not execution.begun or execution.parked) and execution.outcome is None:
            self._end(execution, failed(code_pb2.CANCELLED, "CANCELLED"), [])

    def _end(self, execution: Execution, outcome: worker_pb2.OrderFinished, touched: Iterable[str]) -> None:
        if execution.outcome is not None:
            return
        execution.outcome = outcome
        if (error := wire.error_info(outcome.error)) is not None:
            call = execution.order.run_call.call
            self.note(self.name, "fails", f"{call.call_id[-4:]}/{call.attempt}", error.reason)
        call_id = execution.order.run_call.call.call_id
        if self.running.get(call_id) is execution:
            del self.running[call_id]
            self.finished[call_id] = execution
        report = self._report(execution.order, finished=outcome)
        report.order_id = execution.order_id
        report.deployments.extend(self._deployment(model_id) for model_id in sorted(touched))
        self._put(report)

    def _put(self, report: worker_pb2.Report) -> None:
        self.reports.append(report)
        self.changed.set()

    def _report(self, order: worker_pb2.Order, **event: object) -> worker_pb2.Report:
        return worker_pb2.Report(
            order_id=order.order_id,
            worker_incarnation=order.worker_incarnation,
            call=order.run_call.call if order.HasField("run_call") else None,
            **event,  # type: ignore[arg-type]
        )

    def _deployment(self, model_id: str) -> registry_pb2.DeploymentStatus:
        held = self.device.models.get(model_id)
        self.revision += 1
        if held is None:
            return registry_pb2.DeploymentStatus(model_id=model_id, revision=self.revision)
        tier = types_pb2.TIER_DEVICE if held.on_device else types_pb2.TIER_ABSENT if held.lost else types_pb2.TIER_HOST
        return registry_pb2.DeploymentStatus(
            model_id=model_id,
            residency=[model_pb2.ComponentResidency(component="all", tier=tier, size_bytes=STATE_BYTES)],
            weights_version=held.version,
            applied_sequence=held.applied,
            state_lost=held.lost,
            host_image=held.lost,
            host_image_sequence=held.image.applied if held.lost else 0,
            host_image_weights_version=held.image.version if held.lost else 0,
            revision=self.revision,
        )

    # The device.

    async def _run_lane(self) -> None:
        together: dict[asyncio.Task[None], str] = {}
        """Concurrent calls that run, with their model."""
        while True:
            order, execution = await self.lane.get()
            together = {task: model_id for task, model_id in together.items() if not task.done()}
            joins = execution is not None and order.run_call.concurrent
            if together and not (joins and set(together.values()) == {order.run_call.model_id}):
                await asyncio.wait(together)
            incarnation = self.incarnation
            if joins and execution is not None:
                if execution.outcome is None and not execution.parked:
                    task = asyncio.ensure_future(self._run_call(order, execution))
                    self._tasks.append(task)
                    together[task] = order.run_call.model_id
                continue
            if execution is not None:
                if execution.outcome is None and not execution.parked:
                    await self._run_call(order, execution)
                continue
            outcome, touched = await self._place(order)
            if self.incarnation == incarnation and order.order_id:
                report = self._report(order, finished=outcome)
                report.deployments.extend(self._deployment(model_id) for model_id in touched)
                self._put(report)

    async def _place(self, order: worker_pb2.Order) -> tuple[worker_pb2.OrderFinished, list[str]]:
        action, incarnation = order.WhichOneof("action"), self.incarnation
        await asyncio.sleep(self.rng.uniform(0.001, 0.4 if action == "deploy" else 0.03))
        if self.incarnation != incarnation:
            return worker_pb2.OrderFinished(), []
        match action:
            case "deploy":
                return self._deploy(order.deploy)
            case "drop":
                self.device.models.pop(order.drop.model_id, None)
                return worker_pb2.OrderFinished(), [order.drop.model_id]
            case "swap_weights":
                return self.device.swap(order.swap_weights)
            case "snapshot":
                return self.device.snapshot(order.snapshot), []
            case "expire_snapshots":
                for snapshot_id in order.expire_snapshots.snapshot_ids:
                    self.device.shared.snapshots.pop(snapshot_id, None)
                return worker_pb2.OrderFinished(), []
            case _:
                return worker_pb2.OrderFinished(), []

    def _deploy(self, deploy: worker_pb2.DeployOrder) -> tuple[worker_pb2.OrderFinished, list[str]]:
        before = self.device.models.get(deploy.model_id)
        outcome, touched = self.device.deploy(deploy)
        if self.device.models.get(deploy.model_id) is not before:
            for call_id in [c for c, e in self.finished.items() if e.order.run_call.model_id == deploy.model_id]:
                # They had their effect on the state that goes now.
                del self.finished[call_id]
        return outcome, touched

    async def _run_call(self, order: worker_pb2.Order, execution: Execution) -> None:
        run, incarnation, engine_died = order.run_call, self.incarnation, self.engine_died
        refusal = self.device.refusal(run)
        if refusal is not None:
            self._end(execution, refusal, [])
            return
        execution.begun = True
        self._put(self._report(order, started=worker_pb2.OrderStarted()))
        name = run.call.call_id, run.call.attempt
        steps = self.steps_left.pop(name, None) or self.rng.randint(1, 4)
        for left in range(steps, 0, -1):
            died = asyncio.ensure_future(engine_died.wait())
            await asyncio.wait([died], timeout=self.rng.uniform(0.001, 0.05))
            died.cancel()
            if self.incarnation != incarnation:
                return
            if engine_died.is_set():
                self.steps_left.clear()
                touched = self.device.engine_died() | {run.model_id} & set(self.device.models)
                self._end(execution, failed(code_pb2.UNAVAILABLE, "ENGINE_DIED"), touched)
                return
            if execution.aborted and self.rng.random() < 0.7:
                self._end(execution, failed(code_pb2.CANCELLED, "CANCELLED"), [])
                return
            if execution.yielding and not execution.aborted and left > 1:
                self.steps_left[name] = left - 1
                self._give_way(execution)
                return
        if self.rng.random() < self.device.failures:
            self._end(execution, failed(code_pb2.INVALID_ARGUMENT, "NON_FINITE"), [])
            return
        if run.spec.load_checkpoint.HasField("rollout") and (failure := self.device.not_pulled(run)) is not None:
            # What was there when it began may have gone.
            self._end(execution, failure, [])
            return
        before = self.device.held_on_device()
        result = self.device.execute(run, self.incarnation)
        moved = before ^ self.device.held_on_device()
        self._end(execution, worker_pb2.OrderFinished(result=result), {run.model_id} | moved)
