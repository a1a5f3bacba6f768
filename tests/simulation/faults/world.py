"""A cluster and its clients in virtual time, the faults that strike it, and the calm after them, all from one seed.

Every part draws from a random stream of its own (by seed and name), so that fewer faults or rounds leave the rest of
the run much as it was: that is how a failing seed is made short.
"""

import asyncio
import contextvars
import logging
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import structlog

from plexrl.v1 import call_pb2, job_pb2, model_pb2
from plexrl_controller.dispatch.replay_log import RecoveryPolicy
from plexrl_controller.dispatch.yielding import ask_to_yield
from plexrl_controller.domain.errors import ControllerError, LeadershipLost, Unavailable
from plexrl_controller.domain.ids import Tenant
from plexrl_controller.payloads.memory import MemoryPayloadStore
from plexrl_controller.scheduling.policy import Policy
from tests.simulation.faults import virtual_time
from tests.simulation.faults.client import LEASE_S, Client
from tests.simulation.faults.controller import LIFE, ControllerLife
from tests.simulation.faults.device import Device
from tests.simulation.faults.diagnosis import who_waits
from tests.simulation.faults.state import Shared
from tests.simulation.faults.store import Database
from tests.simulation.faults.strikes import Cut, strike
from tests.simulation.faults.truth import Truth
from tests.simulation.faults.worker import WorkerProcess

CALM_LIMIT_S = 900.0
"""Once nothing fails any more, everything must have ended after so long."""
WORKER = None
"""The tenant of workers."""


@dataclass(frozen=True)
class Plan:
    """What a run is made of. Everything follows from it."""

    seed: int
    faults: int | None = None
    """At most so many faults; None: as many as the seed says."""
    rounds: int | None = None


@dataclass(frozen=True)
class Verdict:
    """What a run showed."""

    plan: Plan
    violations: tuple[str, ...]
    history: tuple[str, ...]
    calls: int
    executions: int
    faults: tuple[str, ...]
    virtual_s: float

    @property
    def fingerprint(self) -> str:
        """Equal for equal runs."""
        return sha256("\n".join(self.history).encode()).hexdigest()


class World:
    """Everything that runs. Implements the clients' Service and the controllers' Network."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.rng = self.chance_of("network")
        self.violations: list[str] = []
        self.history: list[str] = []
        self.faults: list[str] = []
        self.calm = False
        self.database = Database(self.chance_of("store"))
        self.payloads = MemoryPayloadStore()
        self.shared = Shared()
        self.truth = Truth(self.shared, self.blame)
        self.lives: list[ControllerLife] = []
        chance = self.chance_of("plan")
        self.workers = [
            WorkerProcess(f"w{i}", f"10.0.0.{i}:1", self.shared, self.chance_of(f"w{i}"), self.note)
            for i in range(chance.randint(1, 3))
        ]
        for worker in self.workers:
            worker.device.peer_at = self.device_at
            worker.device.capacity, worker.device.failures = chance.choice([1, 1, 2]), chance.choice([0.0, 0.02])
        rounds = chance.randint(3, 8) if plan.rounds is None else plan.rounds
        self.clients = [
            Client(self, f"job{i}", Tenant("ab"[i % 2]), self.chance_of(f"job{i}"), rounds)
            for i in range(chance.randint(1, 3))
        ]
        self.fault_count = chance.randint(0, 10) if plan.faults is None else min(plan.faults, chance.randint(0, 10))
        # Mostly so that snapshots are due often: the default never is in so short a life.
        self.recovery = chance.choice([RecoveryPolicy(), RecoveryPolicy(log_calls=2), RecoveryPolicy(log_calls=5)])
        self.loss = chance.choice([0.0, 0.02, 0.08])
        """Share of rpcs that are lost on their way, and of replies on theirs."""
        # Mostly so that calls yield: nothing here runs for as long as the default's chunk.
        self.policy = chance.choice([Policy(), *[Policy(quantum_s=0.01, chunk_s=0.02, starvation_bound_s=0.03)] * 2])
        self.cuts: dict[str, Cut] = {}
        self._background: list[asyncio.Task[None]] = []
        self.client_tasks: dict[str, asyncio.Task[None]] = {}

    def chance_of(self, name: str) -> random.Random:
        """A part's own random stream."""
        return random.Random(f"{self.plan.seed}/{name}")

    # What clients and controllers see.

    def blame(self, what: str) -> None:
        """A violation."""
        self.note("VIOLATION", what)
        self.violations.append(what)

    def note(self, who: str, *what: object) -> None:
        """A line of history."""
        self.history.append(
            f"{asyncio.get_running_loop().time() - virtual_time.START_S:9.3f} {who}: " + " ".join(map(str, what))
        )

    def process_at(self, address: str) -> WorkerProcess | None:
        """The worker that listens there now, unless it cannot be reached."""
        found = next((w for w in self.workers if w.alive and w.address == address), None)
        return None if found is None or self._cut(f"{found.name}/stream") else found

    def device_at(self, address: str) -> Device | None:
        """What the worker holds that listens there now."""
        return next((w.device for w in self.workers if w.alive and w.address == address), None)

    async def lag(self) -> None:
        """A message's way."""
        slow = self.rng.random() < 0.03 and not self.calm
        await asyncio.sleep(self.rng.expovariate(1 / 0.3) if slow else self.rng.expovariate(1 / 0.002))

    async def ask(
        self, who: str, tenant: Tenant | None, service: str, method: str, request: Any, limit_s: float
    ) -> Any:
        """One rpc. Raises Unavailable when nothing is known of it."""
        await self.lag()
        life = self.leader()
        if life is None or self._lost(who):
            raise Unavailable("no controller answers")
        sent = type(request).FromString(request.SerializeToString())
        # A client that is calm waits as long as it takes.
        try:
            answer = await life.answer(tenant, service, method, sent, CALM_LIMIT_S if self.calm else limit_s)
        except ControllerError as error:
            if error.code in ("INTERNAL", "UNKNOWN"):
                self.blame(f"{method} by {who} was answered with {error.code}: {error.__cause__!r}")
            if not isinstance(error, Unavailable) and self._lost(who):
                raise Unavailable("the answer was lost") from error
            raise
        await self.lag()
        if life.dead.is_set() or self._lost(who):
            raise Unavailable("the answer was lost")
        return type(answer).FromString(answer.SerializeToString())

    def connect(
        self, who: str, tenant: Tenant, requests: AsyncIterator[call_pb2.ConnectRequest], frames: "asyncio.Queue[Any]"
    ) -> "asyncio.Task[None]":
        """A client's stream."""
        return self._stream_of(who, tenant, lambda life: life.services["CallService"].Connect(requests, None), frames)

    def watch(self, who: str, tenant: Tenant, call_id: str, frames: "asyncio.Queue[Any]") -> "asyncio.Task[None]":
        """A client's WatchCall."""
        request = call_pb2.WatchCallRequest(call_id=call_id)
        return self._stream_of(who, tenant, lambda life: life.services["CallService"].WatchCall(request, None), frames)

    def _stream_of(
        self,
        who: str,
        tenant: Tenant,
        open_on: Callable[[ControllerLife], AsyncIterator[Any]],
        frames: "asyncio.Queue[Any]",
    ) -> "asyncio.Task[None]":
        async def carry() -> None:
            await self.lag()
            life = self.leader()
            if life is None or self._cut(who):
                frames.put_nowait(None)
                return
            end: ControllerError | None = None

            async def serve() -> None:
                nonlocal end
                try:
                    async for frame in open_on(life):
                        if self._cut(who):
                            return
                        await self.lag()
                        frames.put_nowait(type(frame).FromString(frame.SerializeToString()))
                except ControllerError as error:
                    end = error

            task = life.spawn(serve(), tenant)
            try:
                await asyncio.wait({task})
            finally:
                task.cancel()
            if not task.cancelled() and task.exception() is not None:
                self.blame(f"a stream of {who} failed: {task.exception()!r}")
            frames.put_nowait(end)

        return asyncio.ensure_future(carry())

    def leader(self) -> ControllerLife | None:
        """The newest; one that was replaced still runs for a while, but nobody new is sent to it."""
        return self.lives[-1] if self.lives and self.lives[-1].serving else None

    def _lost(self, who: str) -> bool:
        return self._cut(who) or (not self.calm and self.rng.random() < self.loss)

    def _cut(self, who: str) -> bool:
        cut = self.cuts.get(who)
        return cut is not None and asyncio.get_running_loop().time() < cut.until_s

    # Running.

    async def run(self) -> Verdict:
        """The whole run: life, faults, calm, checks."""
        loop = asyncio.get_running_loop()
        loop.set_task_factory(_task_of_a_life)
        loop.set_exception_handler(self._task_failed)
        started_s = loop.time()
        await self.start_controller()
        for worker in self.workers:
            self.start_worker(worker)
        for client in self.clients:
            self._start_client(client)
        strangers = asyncio.ensure_future(self._strangers())
        yields = asyncio.ensure_future(self._yields())
        await strike(self)
        self._heal()
        try:
            async with asyncio.timeout(CALM_LIMIT_S):
                while not all(task.done() for task in self.client_tasks.values()):
                    await asyncio.wait(
                        [t for t in self.client_tasks.values() if not t.done()], return_when=asyncio.FIRST_COMPLETED
                    )
        except TimeoutError:
            for line in who_waits(self):
                self.blame(line)
        strangers.cancel()
        yields.cancel()
        for task in self.client_tasks.values():
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                self.blame(f"a client failed: {error!r}")
        if not self.violations:
            await self._after()
        virtual_s = loop.time() - started_s
        await self._stop()
        return Verdict(
            plan=self.plan,
            violations=tuple(self.violations),
            history=tuple(self.history),
            calls=sum(bool(r.call_id) for job in self.truth.jobs for r in job.requests.values()),
            executions=len(self.shared.made),
            faults=tuple(self.faults),
            virtual_s=virtual_s,
        )

    def _task_failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """A task that nobody awaits has failed."""
        if not isinstance(context.get("exception"), LeadershipLost | Unavailable):
            self.blame(f"{context.get('message')}: {context.get('exception')!r} in {context.get('future')!r}")

    async def start_controller(self) -> None:
        """Another controller process; returns when it leads, or died before."""
        life = ControllerLife(len(self.lives) + 1, self.database, self, self.note)
        self.lives.append(life)
        # In a context of its own: everything that it starts is of this life.
        starting = asyncio.get_running_loop().create_task(
            life.start(self.payloads, self.recovery, self.policy), context=contextvars.copy_context()
        )
        done, _ = await asyncio.wait(
            {starting, asyncio.ensure_future(life.dead.wait())}, return_when=asyncio.FIRST_COMPLETED
        )
        if starting in done and not starting.cancelled():
            starting.result()

    def start_worker(self, worker: WorkerProcess) -> None:
        """Its process, if it does not run."""
        if not worker.alive:
            worker.start(self.spawn)
            self.spawn(self._register(worker, worker.nonce), name=f"registration-{worker.name}")

    def spawn(self, work: Any, name: str = "") -> "asyncio.Task[None]":
        """Something that goes on beside the rest, until the world ends."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._background.append(task)
        return task

    def _start_client(self, client: Client) -> None:
        self.client_tasks[client.name] = asyncio.ensure_future(client.run())

    async def _register(self, worker: WorkerProcess, first_nonce: int) -> None:
        """As the daemon: registers, renews, and begins a new life when told that this one is over."""
        nonce, interval_s = first_nonce, 1.0
        while worker.alive and worker.nonce == nonce:
            try:
                if not worker.incarnation:
                    answer = await self._registry(worker, "Register", worker.announcement())
                    if worker.nonce != nonce:
                        return
                    worker.worker_id, worker.incarnation = answer.worker_id, answer.worker_incarnation
                    worker.term = max(worker.term, answer.leader_term)
                    interval_s = answer.sync_interval.ToNanoseconds() / 1e9
                    continue
                known = set(worker.device.models)
                answer = await self._registry(worker, "Synchronize", worker.situation())
                if worker.nonce != nonce:
                    return
                worker.term = max(worker.term, answer.leader_term)
                worker.drop_strangers(known - set(answer.model_ids))
                await asyncio.sleep(interval_s)
            except Unavailable:
                await asyncio.sleep(self.rng.uniform(0.2, 1.0))
            except ControllerError as error:
                if worker.nonce != nonce:
                    return
                if error.reason == "WORKER_NAME_TAKEN":
                    # It came back at another address before its end was noticed; it is one again once that has been.
                    await asyncio.sleep(self.rng.uniform(0.2, 1.0))
                    continue
                if error.reason != "STALE_INCARNATION":
                    self.blame(f"worker {worker.name} was answered {error.code}: {error.message}")
                worker.end_life()
                nonce = worker.nonce

    async def _registry(self, worker: WorkerProcess, method: str, request: Any) -> Any:
        return await self.ask(f"{worker.name}/registry", WORKER, "RegistryService", method, request, 4.0)

    async def _strangers(self) -> None:
        """Another tenant tries what it may not: it must find nothing."""
        rng = self.chance_of("strangers")
        while True:
            await asyncio.sleep(rng.expovariate(1 / 5.0))
            jobs = [job for job in self.truth.jobs if job.requests and job.models]
            if not jobs:
                continue
            job = rng.choice(jobs)
            other = Tenant("b" if job.tenant == "a" else "a")
            call_id = rng.choice(list(job.requests.values())).call_id or "none"
            service, method, request = rng.choice(
                [
                    ("CallService", "GetCall", call_pb2.GetCallRequest(call_id=call_id)),
                    ("CallService", "CancelCall", call_pb2.CancelCallRequest(request_id="x", call_id=call_id)),
                    ("CallService", "AckCalls", call_pb2.AckCallsRequest(job_id=job.job_id, call_ids=[call_id])),
                    ("CallService", "SubmitCall", next(iter(job.requests.values())).message),
                    ("JobService", "AttachJob", job_pb2.AttachJobRequest(job_id=job.job_id)),
                    ("JobService", "FinishJob", job_pb2.FinishJobRequest(request_id="x", job_id=job.job_id)),
                    (
                        "ModelService",
                        "ResumeSequence",
                        model_pb2.ResumeSequenceRequest(request_id="x", model_id=next(iter(job.models))),
                    ),
                ]
            )
            try:
                await self.ask("stranger", other, service, method, request, 5.0)
            except Unavailable:
                continue
            except ControllerError as error:
                if error.code == "NOT_FOUND":
                    continue
                self.blame(f"another tenant's {method} was answered with {error.code}: {error.message}")
            else:
                self.blame(f"another tenant's {method} was obeyed")

    async def _yields(self) -> None:
        """In half of the runs calls are asked to give way all the time, and not only when the policy wants it."""
        chance = self.chance_of("yields")
        often = chance.random() < 0.5
        while often:
            await asyncio.sleep(chance.expovariate(1 / 0.1))
            if (life := self.leader()) is None:
                continue
            for worker_id, group in life.core.ledger.groups.items():
                if group.connected and not group.yielding:
                    ask_to_yield(life.core, worker_id)

    def _heal(self) -> None:
        """Nothing fails from now on, and what is dead comes back."""
        self.note("WORLD", "calm")
        self.calm = True
        self.cuts.clear()
        self.database.failures.clear()
        self.database.kill = None
        self.database.stalled_until_s = 0.0
        for worker in self.workers:
            worker.device.failures = 0.0
            self.start_worker(worker)
        if self.leader() is None:
            self.spawn(self.start_controller())

    async def _after(self) -> None:
        """The state of the cluster when everybody has gone."""
        model_ids = [model_id for job in self.truth.jobs for model_id in job.models]
        events = [event for model_id in model_ids for event in await self.database.store.events(model_id)]
        self.truth.check(frozenset(event.record_id for event in events if event.event == "LOSE_STATE"))
        await asyncio.sleep(LEASE_S + 12.0)
        life = self.leader()
        assert life is not None
        # Jobs without a client have expired by now.
        for worker in self.workers:
            if left := set(worker.device.models):
                self.blame(f"worker {worker.name} still holds {left} of jobs that are over")
        for each in self.lives:
            if diverged := getattr(each.core, "replay_divergences", 0):
                self.blame(f"{diverged} replays gave another result than the first execution")
        if life.core.invariant_violations:
            self.blame(f"{life.core.invariant_violations} decisions broke an invariant")

    async def _stop(self) -> None:
        for life in self.lives:
            life.kill()
        for task in [*self._background, *self.client_tasks.values()]:
            task.cancel()
        await asyncio.gather(*self._background, *self.client_tasks.values(), return_exceptions=True)


def _task_of_a_life(
    loop: asyncio.AbstractEventLoop, work: Any, context: contextvars.Context | None = None
) -> "asyncio.Task[Any]":
    """Counts every task to the controller in whose context it runs."""
    task = asyncio.Task(work, loop=loop, context=context)
    life = LIFE.get() if context is None else context.get(LIFE)
    if life is not None:
        life.tasks[task] = None
        task.add_done_callback(lambda done: life.tasks.pop(done, None))
        if life.dead.is_set():
            task.cancel()
    return task


def run(plan: Plan) -> Verdict:
    """Runs one seed."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    try:
        return virtual_time.run(lambda: World(plan).run())
    finally:
        structlog.configure(**before)
