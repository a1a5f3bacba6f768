"""A whole leader in memory: real core, cycle, writer and recorder over the memory store and worker doubles."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from plexrl.v1 import call_pb2, model_pb2, types_pb2
from plexrl_controller.api.auth import Identity, _current
from plexrl_controller.api.calls import CallService
from plexrl_controller.dispatch import jobs, models
from plexrl_controller.dispatch.clock import Clock
from plexrl_controller.dispatch.core import Core
from plexrl_controller.dispatch.dispatcher import Dispatcher
from plexrl_controller.dispatch.replay_log import RecoveryPolicy
from plexrl_controller.dispatch.transport import Transport
from plexrl_controller.domain.ids import CallId, RequestId, Tenant, WorkerId
from plexrl_controller.domain.records import Call, Job, Model
from plexrl_controller.domain.states import Role
from plexrl_controller.payloads.memory import MemoryPayloadStore
from plexrl_controller.payloads.port import PayloadStore
from plexrl_controller.scheduling.policy import Policy
from plexrl_controller.store.memory import MemoryStore
from plexrl_controller.store.port import Store
from plexrl_controller.store.writer import GroupWriter
from tests.support.worker_double import TransportDouble, WorkerDouble, join

TENANT = Tenant("alpha")


class ManualClock:
    """A clock that tests move."""

    def __init__(self) -> None:
        self.time = 1000.0

    def now(self) -> float:
        """The present."""
        return self.time


@dataclass
class Leader:
    """The running parts, and short forms of what tests do."""

    core: Core
    dispatcher: Dispatcher
    transport: TransportDouble
    worker: WorkerDouble
    clock: ManualClock
    calls: CallService
    worker_id: WorkerId | None = None
    _keys: "itertools.count[int]" = field(default_factory=itertools.count)

    async def join(self) -> WorkerId:
        """Registers and connects the worker's present life."""
        self.worker_id = await join(self.core, self.dispatcher, self.transport, self.worker)
        await self.settle()
        return self.worker_id

    async def settle(self) -> None:
        """Lets every task run until nothing moves."""
        for _ in range(40):
            await asyncio.sleep(0)

    async def work(self) -> None:
        """Runs the worker and the leader until the queue is empty."""
        assert self.worker_id is not None
        await self.settle()
        while reports := self.worker.run(1):
            incarnation = self.core.ledger.workers[self.worker_id].incarnation
            await self.dispatcher.reports_came(self.worker_id, incarnation, reports)
            await self.settle()

    def call(self, call_id: str) -> Call:
        """A call's record, as memory has it."""
        return self.core.ledger.calls[CallId(call_id)]

    async def job(self, name: str = "job", lease_s: float = 60.0) -> Job:
        """A new job."""
        return await jobs.create_job(self.core, self.key("job"), jobs.JobSpec(TENANT, name, lease_s))

    async def model(
        self, job: Job, name: str = "policy", role: model_pb2.ModelRole.ValueType = model_pb2.MODEL_ROLE_POLICY
    ) -> Model:
        """A new model, built."""
        base = model_pb2.ModelBase(
            init=model_pb2.InitBase(config_json='{"architectures": ["Qwen3ForCausalLM"]}', seed=1)
        )
        spec = models.ModelSpec(name, base, role, model_pb2.ModelSettings(), types_pb2.Affinity())
        model = await models.create_model(self.core, self.key("model"), job, spec)
        await self.work()
        return self.core.ledger.models[model.model_id]

    def key(self, scope: str) -> jobs.Key:
        """A fresh idempotency key."""
        number = next(self._keys)
        return jobs.Key(scope, RequestId(f"{scope}-{number}"), f"hash-{number}")

    async def submit(
        self,
        model: Model,
        spec: types_pb2.CallSpec,
        sequence: int = 0,
        request_id: str | None = None,
        session_id: str = "",
    ) -> call_pb2.Call:
        """Submits through the service's checks."""
        request = call_pb2.SubmitCallRequest(
            request_id=request_id or f"request-{next(self._keys)}",
            job_id=model.job_id,
            model_id=model.model_id,
            sequence=sequence,
            spec=spec,
            session_id=session_id,
        )
        return await self.calls.SubmitCall(request, None)


@asynccontextmanager
async def running_leader(
    store: Store | None = None,
    worker: WorkerDouble | None = None,
    clock: ManualClock | None = None,
    policy: Policy | None = None,
    payloads: PayloadStore | None = None,
    recovery_policy: RecoveryPolicy | None = None,
) -> AsyncIterator[Leader]:
    """Takes leadership of `store` and runs; the same store again is the same database after a restart."""
    worker, clock = worker or WorkerDouble(), clock or ManualClock()
    transport = TransportDouble(worker)
    core, dispatcher = await start_leader(store or MemoryStore(), transport, clock, policy, payloads, recovery_policy)
    token = _current.set(Identity(Role.TENANT, TENANT))
    try:
        yield Leader(core, dispatcher, transport, worker, clock, CallService(core))
    finally:
        _current.reset(token)
        await dispatcher.stop()
        await core.writer.close()
        if dispatcher.failed.done():
            raise dispatcher.failed.result()


async def start_leader(
    store: Store,
    transport: Transport,
    clock: Clock,
    policy: Policy | None = None,
    payloads: PayloadStore | None = None,
    recovery_policy: RecoveryPolicy | None = None,
    on_made: Callable[[Dispatcher], None] = lambda _: None,
) -> tuple[Core, Dispatcher]:
    """The parts of a leader, put together and started the way the server does it; `on_made` comes before the start."""
    term = await store.acquire_term("test")
    core = Core(
        store=store,
        writer=GroupWriter(store, term),
        payloads=payloads or MemoryPayloadStore(),
        transport=transport,
        clock=clock,
        term=term,
        policy=policy or Policy(),
        recovery_policy=recovery_policy,
        new_id=_ids(term),
    )
    dispatcher = Dispatcher(core)
    on_made(dispatcher)
    await dispatcher.start()
    return core, dispatcher


def act_as(role: Role, tenant: Tenant | None) -> None:
    """Makes the running task a caller of the services, as the interceptor does for an rpc."""
    _current.set(Identity(role, tenant))


def _ids(term: int) -> Callable[[], str]:
    counter = itertools.count(1)
    return lambda: f"{term:04x}{next(counter):028x}"
