"""What is on a device, as a controller believes it: what it ordered, over what the worker said last (G13).

A report can be older than a swap that is on its way, or than what the worker said when its stream opened.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
from google.rpc import code_pb2

from plexrl import wire
from plexrl.v1 import model_pb2, registry_pb2, types_pb2, worker_pb2
from plexrl_controller.domain.ids import CallId, ModelId
from plexrl_controller.domain.records import Model
from plexrl_controller.domain.states import CallState
from tests.support import specs
from tests.support.leader import Leader, running_leader
from tests.support.worker_double import STATE_BYTES

TIERS = (types_pb2.TIER_DEVICE, types_pb2.TIER_HOST, types_pb2.TIER_ABSENT)


def status(model: Model, tier: types_pb2.Tier.ValueType, revision: int = 0) -> registry_pb2.DeploymentStatus:
    """Where a worker says that a model is."""
    residency = [model_pb2.ComponentResidency(component="train_weights", tier=tier, size_bytes=STATE_BYTES)]
    return registry_pb2.DeploymentStatus(model_id=model.model_id, residency=residency, revision=revision)


@dataclass
class Shared:
    """Two jobs' models on a device that holds one; the first is there."""

    leader: Leader
    first: Model
    second: Model

    @property
    def on_device(self) -> set[ModelId]:
        """What the controller believes."""
        assert self.leader.worker_id is not None
        return self.leader.core.ledger.groups[self.leader.worker_id].on_device

    async def hear(self, *reports: worker_pb2.Report) -> None:
        """The worker's stream brings reports."""
        assert self.leader.worker_id is not None
        incarnation = self.leader.core.ledger.workers[self.leader.worker_id].incarnation
        await self.leader.dispatcher.reports_came(self.leader.worker_id, incarnation, reports)
        await self.leader.settle()

    async def order_swap(self) -> str:
        """The second job's turn: a swap is on its way, with a call behind it."""
        self.leader.clock.time += 60.0
        call = await self.leader.submit(self.second, specs.generate())
        await self.leader.settle()
        assert [order.WhichOneof("action") for order in self.leader.worker.queue] == ["swap_weights", "run_call"]
        return call.call_id

    def state(self, call_id: str) -> CallState:
        """Of a call."""
        return self.leader.core.ledger.calls[CallId(call_id)].state


@asynccontextmanager
async def shared_device() -> AsyncIterator[Shared]:
    async with running_leader() as leader:
        await leader.join()
        first = await leader.model(await leader.job("a", lease_s=3600.0))
        second = await leader.model(await leader.job("b", lease_s=3600.0))
        await leader.submit(first, specs.generate())
        await leader.work()
        made = Shared(leader, first, second)
        assert made.on_device == {first.model_id}
        yield made
        assert leader.core.invariant_violations == 0


@pytest.mark.parametrize("first_tier", TIERS)
@pytest.mark.parametrize("second_tier", TIERS)
async def test_what_is_said_while_a_swap_is_on_its_way_does_not_undo_it(
    first_tier: types_pb2.Tier.ValueType, second_tier: types_pb2.Tier.ValueType
) -> None:
    async with shared_device() as made:
        calls = [await made.order_swap()]
        await made.hear(
            worker_pb2.Report(deployments=[status(made.first, first_tier), status(made.second, second_tier)])
        )
        assert made.on_device == {made.second.model_id}
        calls.append((await made.leader.submit(made.second, specs.generate())).call_id)
        await made.leader.work()
        assert made.on_device == {made.second.model_id}
        assert [made.state(call_id) for call_id in calls] == [CallState.SUCCEEDED] * 2


async def test_after_a_swap_that_failed_the_device_holds_what_the_worker_says() -> None:
    async with shared_device() as made:
        await made.order_swap()
        swap = made.leader.worker.queue[0]
        error = wire.error_status(wire.ErrorInfo(code_pb2.RESOURCE_EXHAUSTED, "OVER_BUDGET", "there is no room for it"))
        await made.hear(
            worker_pb2.Report(order_id=swap.order_id, finished=worker_pb2.OrderFinished(error=error)),
        )
        assert made.on_device == {made.first.model_id}
        await made.leader.work()


async def test_a_swap_whose_report_never_came_is_over_once_a_later_one_is() -> None:
    async with shared_device() as made:
        await made.order_swap()
        # An outbox over its bound drops the oldest.
        await made.hear(*[r for r in made.leader.worker.run() if r.HasField("call")])
        made.leader.clock.time += 60.0
        await made.leader.submit(made.first, specs.generate())
        await made.leader.work()
        assert made.on_device == {made.first.model_id}
        await made.hear(worker_pb2.Report(deployments=[status(made.first, types_pb2.TIER_HOST)]))
        assert not made.on_device


async def test_a_report_of_before_the_stream_opened_is_older_than_what_the_worker_said_then() -> None:
    async with shared_device() as made:
        leader = made.leader
        assert leader.worker_id is not None
        worker = leader.core.ledger.workers[leader.worker_id]
        said = leader.worker.status()
        said.revision = 7
        await leader.dispatcher.stream_opened(worker.worker_id, worker.incarnation, said)
        lost = status(made.first, types_pb2.TIER_ABSENT, revision=5)
        lost.state_lost = True
        await made.hear(worker_pb2.Report(deployments=[lost, status(made.second, types_pb2.TIER_DEVICE, revision=6)]))
        assert made.on_device == {made.first.model_id}
        moved = [status(made.first, types_pb2.TIER_HOST, revision=8), status(made.second, types_pb2.TIER_DEVICE, 9)]
        await made.hear(worker_pb2.Report(deployments=moved))
        assert made.on_device == {made.second.model_id}
