"""Rollout weights from one model's worker to another's: versions in order, whatever dies."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from plexrl.v1 import model_pb2, types_pb2, worker_pb2
from plexrl_controller.api.explain import explain
from plexrl_controller.dispatch import models
from plexrl_controller.dispatch.cascade import give_up_state
from plexrl_controller.dispatch.views import group_view
from plexrl_controller.domain.errors import FailedPrecondition, InvalidArgument
from plexrl_controller.domain.ids import WorkerId
from plexrl_controller.domain.records import Job, Model
from plexrl_controller.domain.states import CallKind, CallReason, CallState, ModelState
from plexrl_controller.lifecycle.models import ModelEvent
from plexrl_controller.scheduling.next_slice import waiting_since
from plexrl_controller.store.memory import MemoryStore
from tests.support import specs
from tests.support.leader import Leader, running_leader
from tests.support.worker_double import WorkerDouble, join


class Pair:
    """A policy on one worker and its rollouts on another."""

    def __init__(self, leader: Leader, rollout_worker: WorkerDouble, job: Job) -> None:
        self.leader, self.rollout_worker, self.job = leader, rollout_worker, job
        self.policy: Model
        self.rollouts: Model
        self.sequences: dict[str, int] = {}

    async def work(self) -> None:
        """Runs both workers until nothing moves."""
        await self.leader.work()
        while reports := self.rollout_worker.run(1):
            await self.tell(reports)
            await self.leader.work()

    async def tell(self, reports: Sequence[worker_pb2.Report]) -> None:
        """Reports of the rollouts' worker."""
        workers = self.leader.core.ledger.workers.values()
        worker = next(worker for worker in workers if worker.name == self.rollout_worker.name)
        await self.leader.dispatcher.reports_came(worker.worker_id, worker.incarnation, reports)
        await self.leader.settle()

    async def submit(self, model: Model, spec: types_pb2.CallSpec, *, sequenced: bool = True) -> str:
        number = self.sequences.get(model.model_id, 0) + sequenced
        self.sequences[model.model_id] = number
        return (await self.leader.submit(model, spec, number if sequenced else 0)).call_id

    async def sync(self) -> str:
        return await self.submit(self.policy, specs.sync())

    async def pull(self, version: int = 0) -> str:
        return await self.submit(self.rollouts, specs.pull(self.policy.model_id, version))

    async def generate(self) -> str:
        return await self.submit(self.rollouts, specs.generate(), sequenced=False)

    async def rejoin(self, double: WorkerDouble) -> None:
        """A new life of a worker."""
        await join(self.leader.core, self.leader.dispatcher, self.leader.transport, double)
        await self.leader.settle()

    def model(self, model: Model) -> Model:
        """Its present record."""
        return self.leader.core.ledger.models[model.model_id]

    def state(self, call_id: str) -> CallState:
        return self.leader.call(call_id).state

    def sampled_from(self) -> tuple[int, ...]:
        return self.rollout_worker.models[self.rollouts.model_id].rollout_state


@asynccontextmanager
async def pair(store: MemoryStore | None = None) -> AsyncIterator[Pair]:
    training, sampling = WorkerDouble("training"), WorkerDouble("sampling")
    sampling.address = "127.0.0.1:2"
    training.peers = sampling.peers = {training.address: training, sampling.address: sampling}
    async with running_leader(store, training) as leader:
        await leader.join()
        job = await leader.job()
        both = Pair(leader, sampling, job)
        both.policy = await leader.model(job)
        leader.transport.doubles["sampling"] = sampling
        await join(leader.core, leader.dispatcher, leader.transport, sampling)
        both.rollouts = await leader.model(job, "rollouts", model_pb2.MODEL_ROLE_ROLLOUT)
        await both.work()
        both.rollouts = leader.core.ledger.models[both.rollouts.model_id]
        assert both.rollouts.state is ModelState.PLACED
        assert both.rollouts.worker_id != both.policy.worker_id, "the emptier worker is the other one"
        yield both


async def test_what_was_synced_is_sampled_elsewhere() -> None:
    async with pair() as both:
        await both.submit(both.policy, specs.optim_step())
        await both.sync()
        pulled, generated = await both.pull(), await both.generate()
        await both.work()
        assert both.state(pulled) is both.state(generated) is CallState.SUCCEEDED
        assert both.sampled_from() == (1, 2)
        assert both.leader.call(pulled).weights_version == 2, "of the policy"
        assert both.leader.core.ledger.models[both.rollouts.model_id].weights_version == 1, "its own"


async def test_a_pull_waits_for_its_version_and_the_next_version_for_the_pull() -> None:
    """G06. Three in a row, all submitted at once: each version is sampled, none is passed over."""
    async with pair() as both:
        pulls = []
        for _ in range(3):
            await both.submit(both.policy, specs.optim_step())
            await both.sync()
            pulls.append(await both.pull())
            await both.generate()
        core = both.leader.core
        waits, _ = explain(core, both.leader.call(pulls[0]), core.clock.now())
        assert "VERSION_NOT_READY: it takes version 2 of model policy, which is at 0" in waits
        await both.work()
        assert [both.state(pull) for pull in pulls] == [CallState.SUCCEEDED] * 3
        assert [both.leader.call(pull).weights_version for pull in pulls] == [2, 4, 6]
        assert both.sampled_from() == (1, 2, 3, 4, 5, 6)


async def test_what_makes_the_next_version_says_what_it_waits_for() -> None:
    async with pair() as both:
        await both.sync()
        pull = await both.pull()
        later = await both.sync()
        await both.leader.work()
        core = both.leader.core
        waits, blocking = explain(core, both.leader.call(later), core.clock.now())
        assert "DRAINING_GENERATES: 1 generate or load call(s) at older versions finish first" in waits
        assert list(blocking) == [pull]
        await both.work()
        assert both.state(later) is CallState.SUCCEEDED


async def test_abort_ends_what_would_hold_the_next_version_up() -> None:
    async with pair() as both:
        await both.sync()
        pull = await both.pull()
        spec = types_pb2.CallSpec(sync_weights=types_pb2.SyncWeightsSpec(in_flight=types_pb2.IN_FLIGHT_ABORT))
        later = await both.submit(both.policy, spec)
        await both.work()
        assert both.state(later) is CallState.SUCCEEDED
        assert (both.state(pull), both.leader.call(pull).reason) == (CallState.CANCELLED, CallReason.VERSION_REPLACED)


async def test_a_version_that_is_replaced_or_not_submitted_is_refused() -> None:
    async with pair() as both:
        await both.sync()
        await both.sync()
        await both.work()
        with pytest.raises(FailedPrecondition, match="version 1 of policy is replaced by 2"):
            await both.leader.submit(both.rollouts, specs.pull(both.policy.model_id, 1), 1)
        with pytest.raises(InvalidArgument, match="version 9 is not submitted; the newest of policy is 2"):
            await both.leader.submit(both.rollouts, specs.pull(both.policy.model_id, 9), 1)
        assert (await both.leader.submit(both.rollouts, specs.pull(both.policy.model_id, 2), 1)).call_id


@pytest.mark.parametrize("spec", [specs.score(), specs.forward_backward(), specs.optim_step(), specs.sync()])
async def test_rollouts_only_sample(spec: types_pb2.CallSpec) -> None:
    async with pair() as both:
        with pytest.raises(InvalidArgument, match="model rollouts is of role rollout: it only generates"):
            await both.leader.submit(both.rollouts, spec, 1)
        with pytest.raises(InvalidArgument, match="only a model of role rollout takes"):
            await both.leader.submit(both.policy, specs.pull(both.policy.model_id), 1)
        with pytest.raises(InvalidArgument, match="the job has no live model 'nowhere'"):
            await both.leader.submit(both.rollouts, specs.pull("nowhere"), 1)
        with pytest.raises(InvalidArgument, match="model rollouts makes no versions"):
            await both.leader.submit(both.rollouts, specs.pull(both.rollouts.model_id), 1)


async def test_a_source_that_cannot_be_reached_is_asked_again() -> None:
    async with pair() as both:
        await both.sync()
        await both.leader.work()
        both.leader.worker.unreachable = True
        pull = await both.pull()
        await both.leader.settle()
        while not (reports := both.rollout_worker.run(1))[-1].finished.HasField("error"):
            await both.tell(reports)
        await both.tell(reports)
        core = both.leader.core
        said, _ = explain(core, both.leader.call(pull), core.clock.now())
        assert "the attempt before did not begin: PULL_FAILED: the double says PULL_FAILED" in said
        both.leader.worker.unreachable = False
        await both.work()
        call = both.leader.call(pull)
        assert (call.state, call.attempt, call.lost_attempts) == (CallState.SUCCEEDED, 2, 0)


async def test_rollouts_that_died_take_the_version_again() -> None:
    async with pair() as both:
        await both.submit(both.policy, specs.optim_step())
        await both.sync()
        await both.pull()
        await both.work()
        both.rollout_worker.die()
        await both.rejoin(both.rollout_worker)
        generated = await both.generate()
        await both.work()
        assert both.state(generated) is CallState.SUCCEEDED
        assert both.sampled_from() == (1, 2)


async def test_rollouts_that_died_when_their_version_was_gone_say_so_and_take_the_next() -> None:
    async with pair() as both:
        await both.sync()
        await both.pull()
        await both.sync()
        await both.work()
        both.rollout_worker.die()
        await both.rejoin(both.rollout_worker)
        await both.work()
        lost = both.leader.core.ledger.models[both.rollouts.model_id]
        assert lost.state is ModelState.STATE_LOST
        assert lost.message.endswith("Pull a policy's weights, or load the base, to go on")
        pull, generated = await both.pull(), await both.generate()
        await both.work()
        assert both.state(pull) is both.state(generated) is CallState.SUCCEEDED
        assert both.sampled_from() == (1, 2)


async def test_a_pull_of_a_version_that_is_given_up_fails_and_the_next_works() -> None:
    async with pair() as both:
        both.leader.worker.fail_next["optim_step"] = (3, "NON_FINITE")
        await both.submit(both.policy, specs.optim_step())
        await both.sync()
        pull, behind = await both.pull(), await both.generate()
        await both.work()
        for call_id in (pull, behind):
            reason = both.leader.call(call_id).reason
            assert (both.state(call_id), reason) == (CallState.FAILED, CallReason.PREDECESSOR_FAILED)
        core = both.leader.core
        for model in (both.policy, both.rollouts):
            next_sequence = await models.resume_sequence(
                core, both.leader.key("resume"), core.ledger.models[model.model_id]
            )
            both.sequences[model.model_id] = next_sequence - 1
        await both.sync()
        pull, behind = await both.pull(), await both.generate()
        await both.work()
        assert both.state(pull) is both.state(behind) is CallState.SUCCEEDED


async def test_a_pull_of_a_model_that_goes_fails() -> None:
    async with pair() as both:
        await both.sync()
        await both.leader.work()
        pull = await both.pull()
        await models.delete_model(both.leader.core, both.leader.core.ledger.models[both.policy.model_id])
        await both.work()
        assert (both.state(pull), both.leader.call(pull).reason) == (CallState.FAILED, CallReason.VERSION_GONE)


async def test_a_pull_hears_that_its_source_was_lost_where_nothing_else_moves() -> None:
    async with pair() as both:
        await both.submit(both.policy, specs.optim_step())
        await both.sync()
        await both.work()
        both.leader.worker.die()
        both.leader.worker.fail_next["optim_step"] = (3, "NON_FINITE")
        await both.rejoin(both.leader.worker)
        pull = await both.pull()
        assert both.state(pull) is CallState.PENDING
        await both.work()
        assert both.model(both.policy).state is ModelState.STATE_LOST
        assert (both.state(pull), both.leader.call(pull).reason) == (CallState.FAILED, CallReason.VERSION_GONE)
        with pytest.raises(FailedPrecondition, match="model policy: the state at sequence"):
            await both.pull()


async def test_a_pull_hears_that_its_source_could_not_be_built() -> None:
    async with pair() as both:
        core = both.leader.core
        base = model_pb2.ModelBase.FromString(both.policy.base)
        settings, affinity = model_pb2.ModelSettings(), types_pb2.Affinity()
        spec = models.ModelSpec("other", base, model_pb2.MODEL_ROLE_POLICY, settings, affinity)
        other = await models.create_model(core, both.leader.key("model"), both.job, spec)
        pull = await both.submit(both.rollouts, specs.pull(other.model_id))
        await both.leader.settle()
        batch = core.batch()
        batch.transition(core.ledger.models[other.model_id], ModelEvent.BUILD_FAILED, message="for a test")
        core.queue(batch)
        await both.leader.settle()
        while reports := both.rollout_worker.run(1):
            await both.tell(reports)
        assert both.state(pull) is CallState.FAILED


async def test_both_workers_die_and_the_rollouts_are_rebuilt_first() -> None:
    async with pair() as both:
        await both.submit(both.policy, specs.optim_step())
        await both.sync()
        await both.pull()
        await both.work()
        for double in (both.leader.worker, both.rollout_worker):
            double.die()
        for double in (both.leader.worker, both.rollout_worker):
            await both.rejoin(double)
        generated = await both.generate()
        while reports := both.rollout_worker.run(1):
            await both.tell(reports)
        await both.work()
        assert both.state(generated) is CallState.SUCCEEDED
        assert both.sampled_from() == (1, 2)


async def test_what_is_built_only_to_load_into_is_given_to_nobody() -> None:
    """G06: the base that stands for a lost policy until its checkpoint is loaded is no version of it."""
    async with pair() as both:
        core = both.leader.core
        await both.submit(both.policy, specs.optim_step())
        await both.sync()
        await both.leader.work()
        both.rollout_worker.die()
        core.ledger.groups[both.rollouts.worker_id or WorkerId("")].connected = False
        pull = await both.pull()
        batch = core.batch()
        give_up_state(batch, both.model(both.policy), "for a test")
        core.queue(batch)
        await both.leader.settle()
        both.leader.worker.die()
        await both.rejoin(both.leader.worker)
        await both.submit(both.policy, specs.load())
        await both.leader.work()
        await both.rejoin(both.rollout_worker)
        await both.work()
        assert (both.state(pull), both.leader.call(pull).reason) == (CallState.FAILED, CallReason.VERSION_GONE)


async def test_a_pull_over_a_lost_state_can_be_made_again() -> None:
    async with pair() as both:
        await both.sync()
        await both.pull()
        await both.sync()
        await both.work()
        for _ in range(2):
            both.rollout_worker.die()
            await both.rejoin(both.rollout_worker)
            await both.work()
            if both.model(both.rollouts).state is ModelState.STATE_LOST:
                await both.pull()
                await both.work()
        assert both.model(both.rollouts).state is ModelState.PLACED
        assert both.sampled_from() == (1, 2)


async def test_weights_that_come_damaged_each_time_end_the_pull() -> None:
    async with pair() as both:
        await both.sync()
        await both.leader.work()
        pull = await both.pull()
        for _ in range(40):
            await both.leader.settle()
            both.rollout_worker.fail_next["load_checkpoint"] = (15, "HOST_STATE_CORRUPT")
            reports = both.rollout_worker.run(1)
            for report in reports:
                if report.finished.HasField("error") and report.HasField("call"):
                    both.rollout_worker.models.pop(both.rollouts.model_id, None)
                    report.deployments.add(model_id=both.rollouts.model_id, state_lost=True)
            await both.tell(reports)
        assert (both.state(pull), both.leader.call(pull).reason) == (CallState.FAILED, CallReason.ATTEMPTS_EXHAUSTED)


async def test_a_restart_of_the_controller_forgets_no_pull() -> None:
    store = MemoryStore()
    async with pair(store) as both:
        await both.sync()
        await both.leader.work()
        pull = await both.pull()
        later = await both.sync()
        training, sampling = both.leader.worker, both.rollout_worker
        job, policy, rollouts = both.job, both.policy, both.rollouts
    async with running_leader(store, training) as leader:
        leader.transport.doubles["sampling"] = sampling
        await leader.join()
        await join(leader.core, leader.dispatcher, leader.transport, sampling)
        again = Pair(leader, sampling, job)
        again.policy, again.rollouts = policy, rollouts
        await again.work()
        assert again.state(pull) is again.state(later) is CallState.SUCCEEDED
        assert again.sampled_from() == (1,), "the version from before the later sync"


async def test_what_a_job_does_on_another_worker_is_no_turn_of_its_on_this_one() -> None:
    """The wait bound is a worker's: rollouts that end elsewhere, one by one, must not make a step wait anew."""
    async with pair() as both:
        leader, ledger = both.leader, both.leader.core.ledger
        policy, training = both.policy, both.policy.worker_id
        assert training is not None
        other = await leader.model(await leader.job("other"))
        while other.worker_id != training:
            other = await leader.model(await leader.job("another"))
        await leader.submit(other, specs.forward_backward(), 1)
        await leader.settle()
        step = await both.submit(policy, specs.forward_backward())
        asked = leader.clock.now()
        for _ in range(3):
            await both.generate()
            await leader.settle()
            leader.clock.time += 2.0
            await both.tell(both.rollout_worker.run(1))
        assert both.state(step) is CallState.PENDING
        seen = group_view(ledger, training, leader.clock.now()).job(policy.job_id)
        assert seen is not None
        assert waiting_since(seen) == pytest.approx(asked)
        await both.work()
        for _ in range(4):
            leader.clock.time += 2.0
            await both.generate()
            await both.work()
            leader.clock.time += 1.0
            await both.submit(policy, specs.forward_backward())
            await both.work()
        stall_s = ledger.groups[training].estimates.expected_stall_s(policy.job_id, CallKind.FORWARD_BACKWARD)
        assert stall_s == pytest.approx(3.0, rel=0.1)
