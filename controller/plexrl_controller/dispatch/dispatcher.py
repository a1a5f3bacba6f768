"""The running dispatcher: one cycle per group, the reaper, and the handler of what transports bring."""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

from plexrl.v1 import worker_pb2
from plexrl_controller.dispatch import reaper, retention, workers
from plexrl_controller.dispatch.core import Core, log
from plexrl_controller.dispatch.cycle import GroupCycle
from plexrl_controller.dispatch.reports import ReportRecorder
from plexrl_controller.domain.errors import LeadershipLost
from plexrl_controller.domain.ids import WorkerId
from plexrl_controller.domain.states import WorkerState

REAP_INTERVAL_S = 0.5


class Dispatcher:
    """Starts and stops the tasks of the leader. Implements ReportHandler."""

    def __init__(self, core: Core, history_s: float = retention.HISTORY_S) -> None:
        self.core = core
        self._history_s = history_s
        self._recorder = ReportRecorder(core)
        self._cycles: dict[WorkerId, GroupCycle] = {}
        self._reads: set[asyncio.Task[None]] = set()
        self._reaper: asyncio.Task[None] | None = None
        self._pruner: asyncio.Task[None] | None = None
        self.failed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        """Resolves when a task ended that must not: the process stops then, and a fresh one reloads."""

    async def start(self) -> None:
        """Loads what the store holds, reconnects workers and begins to schedule."""
        core = self.core
        core.ledger.restore(await core.store.load(), core.clock.now())
        core.hold_payloads()
        for worker in core.ledger.workers.values():
            if worker.state is not WorkerState.LOST:
                core.transport.open(worker)
        core.turns.start(self._turn)
        core.writer.before_commit = core.turns.run
        self._reaper = self._spawn(self._reap_for_ever(), "reaper")
        self._pruner = self._spawn(self._prune_for_ever(), "pruner")
        log.info(
            "leader_started", term=core.term, jobs=len(core.ledger.jobs), models=len(core.ledger.models),
            calls=len(core.ledger.calls), workers=len(core.ledger.workers),
        )  # fmt: skip

    async def stop(self) -> None:
        """Stops scheduling; what is durable stays for the next leader."""
        self.core.turns.stop()
        tasks = [*self._reads, *(task for task in (self._reaper, self._pruner) if task is not None)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.core.transport.shutdown()

    async def stream_opened(self, worker_id: WorkerId, incarnation: int, status: worker_pb2.WorkerStatus) -> None:
        """Orders can be sent to a worker."""
        await workers.stream_opened(self.core, worker_id, incarnation, status)

    async def reports_came(self, worker_id: WorkerId, incarnation: int, reports: Sequence[worker_pb2.Report]) -> None:
        """A worker reported."""
        await self._recorder.record(worker_id, incarnation, reports)

    def stream_closed(self, worker_id: WorkerId, incarnation: int, why: str = "") -> None:
        """Orders cannot be sent to a worker for now."""
        worker = self.core.ledger.workers.get(worker_id)
        if worker is not None and worker.incarnation == incarnation:
            group = self.core.ledger.groups[worker_id]
            group.connected, group.trouble = False, why

    def _turn(self, worker_id: WorkerId) -> None:
        if worker_id not in self._cycles:
            self._cycles[worker_id] = GroupCycle(self.core, worker_id, self._spawn_read)
        try:
            self._cycles[worker_id].turn()
        except Exception as error:  # noqa: BLE001 - whatever it is: a group that is not served any more must not go unseen
            self._fail(f"cycle-{worker_id}", error)

    def _spawn_read(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._reads.add(task)
        task.add_done_callback(self._read_ended)
        return task

    def _read_ended(self, task: asyncio.Task[None]) -> None:
        self._reads.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(task.get_name(), error)

    async def _reap_for_ever(self) -> None:
        while True:
            await reaper.reap(self.core)
            await asyncio.sleep(REAP_INTERVAL_S)

    async def _prune_for_ever(self) -> None:
        while True:
            await asyncio.sleep(retention.PRUNE_INTERVAL_S)
            await retention.prune(self.core, self._history_s)

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            return
        self._fail(task.get_name(), task.exception() or RuntimeError(f"{task.get_name()} ended"))

    def _fail(self, name: str, error: BaseException) -> None:
        level = log.warning if isinstance(error, LeadershipLost) else log.error
        level("task_ended", task=name, error=repr(error), exc_info=error)
        if not self.failed.done():
            self.failed.set_result(error)
