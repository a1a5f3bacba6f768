"""One life of a controller in virtual time: the real services, dispatcher and cycles, over a network that fails."""

import asyncio
import contextvars
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, Protocol, cast

from plexrl.v1 import call_pb2, worker_pb2
from plexrl_controller.api.admin import RegistryService
from plexrl_controller.api.calls import CallService
from plexrl_controller.api.jobs import JobService
from plexrl_controller.api.models import ModelService
from plexrl_controller.api.sessions import SessionService
from plexrl_controller.api.status import normalize
from plexrl_controller.dispatch.core import Core
from plexrl_controller.dispatch.dispatcher import Dispatcher
from plexrl_controller.dispatch.replay_log import RecoveryPolicy
from plexrl_controller.dispatch.transport import ReportHandler
from plexrl_controller.domain.errors import LeadershipLost, Unavailable
from plexrl_controller.domain.ids import Tenant, WorkerId
from plexrl_controller.domain.records import Worker
from plexrl_controller.domain.states import Role
from plexrl_controller.payloads.memory import MemoryPayloadStore
from plexrl_controller.scheduling.policy import Policy
from plexrl_controller.store.port import Store
from tests.simulation.faults.store import Connection, Database
from tests.simulation.faults.virtual_time import LoopClock
from tests.simulation.faults.worker import Link, Refused, WorkerProcess
from tests.support.leader import act_as, start_leader

MAX_QUEUED_FRAMES = 64

LIFE: contextvars.ContextVar["ControllerLife | None"] = contextvars.ContextVar("life", default=None)


class Network(Protocol):
    """What connects the parts."""

    rng: random.Random

    def blame(self, what: str) -> None:
        """A violation."""
        ...

    def process_at(self, address: str) -> WorkerProcess | None:
        """Whoever listens there now and can be reached."""
        ...

    async def lag(self) -> None:
        """The time that a message takes."""
        ...


class ControllerLife:
    """A controller process from its start until it is killed or gives up."""

    def __init__(self, number: int, database: Database, network: Network, note: Callable[..., None]) -> None:
        self.number, self.note, self.network = number, note, network
        self.dead = asyncio.Event()
        self.serving = False
        self.tasks: dict[asyncio.Task[Any], None] = {}
        self.connection = Connection(database, self.kill)
        self.transport = SimulatedTransport(self)
        self.core: Core
        self.services: dict[str, Any] = {}

    async def start(self, payloads: MemoryPayloadStore, recovery: RecoveryPolicy, policy: Policy) -> None:
        """Takes leadership and serves. Everything of this life runs in its context, so that it can be killed whole."""
        LIFE.set(self)
        core, dispatcher = await start_leader(
            cast(Store, self.connection),
            self.transport,
            LoopClock(),
            policy,
            payloads=payloads,
            recovery_policy=recovery,
            on_made=self.transport.use,
        )
        self.core, self.transport.term = core, core.term
        self.services = {
            "JobService": JobService(core),
            "ModelService": ModelService(core, cast(Any, self.transport)),
            "CallService": CallService(core),
            "SessionService": SessionService(core),
            "RegistryService": RegistryService(core),
        }
        self.serving = True
        self.note("controller", f"life {self.number} leads term {core.term}")
        self.spawn(self._give_up(core, dispatcher), None)

    async def _give_up(self, core: Core, dispatcher: Dispatcher) -> None:
        """As the server does: a writer or task that ended ends the process."""
        stopped = asyncio.ensure_future(core.writer.stopped())
        ends: set[asyncio.Future[Any]] = {stopped, dispatcher.failed}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        self.note("controller", f"life {self.number} gives up")
        if dispatcher.failed.done() and not isinstance(dispatcher.failed.result(), LeadershipLost | Unavailable):
            self.network.blame(f"a task of the controller failed: {dispatcher.failed.result()!r}")
        if stopped.done() and not isinstance(stopped.result(), LeadershipLost):
            self.network.blame(f"the store writer failed: {stopped.result()!r}")
        self.kill()

    def kill(self) -> None:
        """Kill -9: nothing that it has not sent yet leaves it."""
        if self.dead.is_set():
            return
        self.note("controller", f"life {self.number} dies")
        self.dead.set()
        self.serving = False
        self.connection.cut = True
        self.transport.cut()
        for task in list(self.tasks):
            task.cancel()

    def spawn(self, work: Coroutine[Any, Any, Any], tenant: Tenant | None) -> asyncio.Task[Any]:
        """Runs something inside this process, as a caller of a tenant's or (None) a worker's."""
        context = contextvars.copy_context()
        context.run(LIFE.set, self)
        context.run(act_as, Role.WORKER if tenant is None else Role.TENANT, tenant)
        return asyncio.get_running_loop().create_task(work, context=context)

    async def answer(self, tenant: Tenant | None, service: str, method: str, request: Any, limit_s: float) -> Any:
        """A unary rpc that its caller waits for no longer than `limit_s`: then the handler is cancelled, as gRPC does.

        Raises Unavailable when this process dies meanwhile or the time is over.
        """
        task = self.spawn(getattr(self.services[service], method)(request, None), tenant)
        try:
            await asyncio.wait({task}, timeout=limit_s)
        finally:
            if not task.done():
                task.cancel()
        await asyncio.wait({task})
        if task.cancelled():
            raise Unavailable("no answer in time")
        if (error := task.exception()) is not None:
            raise normalize(cast(Exception, error)) from error
        return task.result()

    def connect(
        self, tenant: Tenant, requests: AsyncIterator[call_pb2.ConnectRequest], hear: Callable[[Any], None]
    ) -> asyncio.Task[None]:
        """A client's long-lived stream; `hear` gets the frames. Cancelling the task breaks it."""

        async def serve() -> None:
            async for frame in self.services["CallService"].Connect(requests, None):
                hear(frame)

        return self.spawn(serve(), tenant)


class SimulatedTransport:
    """The dispatcher's Transport over worker processes: keeps connecting; broken streams lose what they held."""

    def __init__(self, life: ControllerLife) -> None:
        self._life = life
        self._handler: ReportHandler | None = None
        self._tasks: dict[WorkerId, tuple[Worker, asyncio.Task[None]]] = {}
        self._links: dict[WorkerId, Link] = {}
        self.term = 0

    def use(self, dispatcher: Dispatcher) -> None:
        """Who hears of streams and reports."""
        self._handler, self.term = dispatcher, dispatcher.core.term

    def open(self, worker: Worker) -> None:
        known = self._tasks.get(worker.worker_id)
        if known is not None and (known[0].incarnation, known[0].address) == (worker.incarnation, worker.address):
            return
        self.close(worker.worker_id)
        task = asyncio.get_running_loop().create_task(self._keep_connected(worker), name=f"link-{worker.name}")
        self._tasks[worker.worker_id] = worker, task

    def close(self, worker_id: WorkerId) -> None:
        known = self._tasks.pop(worker_id, None)
        if known is not None:
            known[1].cancel()

    def send(self, worker_id: WorkerId, orders: Sequence[worker_pb2.Order]) -> None:
        link = self._links.get(worker_id)
        if link is None or self._life.dead.is_set():
            self._life.note("controller", "cannot send", len(orders), "orders")
            return
        self._life.note("controller", f"sends to {link.process.name}", *(_short(order) for order in orders))
        # As bytes on a wire: what the sender does to its objects afterwards changes nothing.
        link.orders.extend(worker_pb2.Order.FromString(order.SerializeToString()) for order in orders)
        link.queued.set()

    def channel(self, worker_id: WorkerId) -> None:
        """No unary rpcs to workers here."""

    async def shutdown(self) -> None:
        for worker_id in list(self._tasks):
            self.close(worker_id)

    def cut(self) -> None:
        """The controller died: its streams break."""
        for link in self._links.values():
            if link.process.link is link:
                link.process.break_stream()
            link.broken.set()

    async def _keep_connected(self, worker: Worker) -> None:
        while True:
            await self._life.network.lag()
            process = self._life.network.process_at(worker.address)
            if process is not None:
                try:
                    link = process.open(self.term, worker.incarnation, worker.worker_id)
                except Refused as refused:
                    self._life.note("controller", f"stream to {worker.name} refused", refused.reason)
                else:
                    await self._serve(worker, link)
            await asyncio.sleep(self._life.network.rng.uniform(0.05, 1.0))

    async def _serve(self, worker: Worker, link: Link) -> None:
        handler, network = self._handler, self._life.network
        assert handler is not None
        status, frames = link.process.status(), asyncio.Queue[Any](MAX_QUEUED_FRAMES)
        ways = [asyncio.ensure_future(self._forward(link)), asyncio.ensure_future(self._read(link, frames))]
        try:
            await network.lag()
            if link.broken.is_set():
                return
            self._links[worker.worker_id] = link
            self._life.note("controller", f"stream to {worker.name} open, term {self.term}")
            await handler.stream_opened(worker.worker_id, worker.incarnation, status)
            ended = False
            while not ended:
                came = [await frames.get()]
                while not frames.empty() and network.rng.random() < 0.5:
                    came.append(frames.get_nowait())
                ended = came[-1] is None
                if reports := [report for frame in came if frame is not None for report in frame]:
                    await handler.reports_came(worker.worker_id, worker.incarnation, reports)
        finally:
            for way in ways:
                way.cancel()
            if link.process.link is link:
                link.process.break_stream()
            link.broken.set()
            self._life.note("controller", f"stream to {worker.name} closed, term {self.term}")
            if self._links.get(worker.worker_id) is link:
                del self._links[worker.worker_id]
            if not self._life.dead.is_set():
                handler.stream_closed(worker.worker_id, worker.incarnation)

    async def _read(self, link: Link, frames: "asyncio.Queue[Any]") -> None:
        while (reports := await link.process.take(link)) is not None:
            await self._life.network.lag()
            if link.broken.is_set():
                break
            await frames.put([worker_pb2.Report.FromString(report.SerializeToString()) for report in reports])
        await frames.put(None)

    async def _forward(self, link: Link) -> None:
        while True:
            await link.queued.wait()
            link.queued.clear()
            while link.orders:
                orders = list(link.orders)
                link.orders.clear()
                await self._life.network.lag()
                if link.broken.is_set():
                    return
                for order in orders:
                    link.process.submit(order)


def _short(order: worker_pb2.Order) -> str:
    action = order.WhichOneof("action") or ""
    named = order.run_call if action == "run_call" else order.yield_call if action == "yield_call" else order.abort
    call = named.call
    model_id = order.deploy.model_id or order.drop.model_id or order.swap_weights.load_model_id
    what = f"{call.call_id[-4:]}/{call.attempt}" if call.call_id else model_id[-4:]
    return f"{order.order_id}:{action} {what}"
