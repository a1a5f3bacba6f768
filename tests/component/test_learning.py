"""The leader learns from what its worker measures, and decides and explains with it."""

from dataclasses import replace

import pytest

from plexrl.v1 import model_pb2, types_pb2
from plexrl_controller.api.explain import explain
from plexrl_controller.dispatch import jobs, models
from plexrl_controller.dispatch.learning import known_demand
from plexrl_controller.dispatch.views import cluster_view, group_view
from plexrl_controller.domain.errors import ResourceExhausted
from plexrl_controller.domain.ids import CallId, JobId, WorkerId
from plexrl_controller.domain.records import Job, Model
from plexrl_controller.domain.states import CallKind, CallState
from plexrl_controller.scheduling.fairness import Quota
from plexrl_controller.scheduling.policy import Policy
from plexrl_controller.scheduling.views import Demand
from tests.support import specs
from tests.support.leader import TENANT, Leader, running_leader
from tests.support.worker_double import WorkerDouble, join

# Simulated seconds stay below a worker's lease: the reaper looks at the clock whenever the machine lets it.


async def create(leader: Leader, job: Job) -> Model:
    """A new model, placed."""
    base = model_pb2.ModelBase(init=model_pb2.InitBase(config_json='{"architectures": ["Qwen3ForCausalLM"]}', seed=1))
    spec = models.ModelSpec(
        "policy", base, model_pb2.MODEL_ROLE_POLICY, model_pb2.ModelSettings(), types_pb2.Affinity()
    )
    return await models.create_model(leader.core, leader.key("model"), job, spec)


async def iterate(leader: Leader, model: Model, first: int, stall_s: float, hint_s: float | None = None) -> None:
    """One iteration: a rollout, a stall, a step, a sync."""
    await leader.submit(model, specs.generate())
    await leader.work()
    if hint_s is not None:
        jobs.heartbeat(leader.core, leader.core.ledger.jobs[model.job_id], hint_s)
    leader.clock.time += stall_s
    await leader.submit(model, specs.forward_backward(), first)
    await leader.submit(model, specs.optim_step(), first + 1)
    await leader.submit(model, specs.sync(), first + 2)
    await leader.work()


async def test_a_job_is_known_after_three_iterations_and_forgotten_at_its_end() -> None:
    async with running_leader() as leader:
        worker_id = await leader.join()
        job = await leader.job()
        model = await leader.model(job)
        for i in range(3):
            await iterate(leader, model, 3 * i + 1, stall_s=2.0)
        view = cluster_view(leader.core.ledger, leader.clock.now())
        demand = view.groups[0].members[0].demand
        assert demand is not None
        assert demand.iteration_s == pytest.approx(2.0, abs=0.1)
        assert demand.busy_s == pytest.approx(0.004, rel=0.1)
        seen = group_view(leader.core.ledger, worker_id, leader.clock.now()).jobs[0]
        assert seen.attained_s >= 12 * 0.001
        estimates = leader.core.ledger.groups[worker_id].estimates
        assert estimates.expected_stall_s(job.job_id, CallKind.GENERATE) == pytest.approx(2.0, rel=0.05)
        assert estimates.expected_s(job.job_id, CallKind.SYNC_WEIGHTS) == pytest.approx(0.001, rel=0.05)
        leader.core.ledger.forget_job(job.job_id)
        assert estimates.demand(job.job_id) is None
        assert known_demand(leader.core.ledger, replace(job, job_id=JobId("again"))) == demand


async def test_a_known_job_goes_where_every_target_is_kept_and_an_unknown_one_where_most_is_free() -> None:
    """Its name and tenant tell what it asked for last time: it packs; unknown jobs spread."""
    async with running_leader() as leader:
        first, other = await leader.join(), WorkerDouble("w1")
        leader.transport.doubles[other.name] = other
        second = await join(leader.core, leader.dispatcher, leader.transport, other)
        ledger = leader.core.ledger
        jobs_ = {}
        for name, share in (("heavy", 0.6), ("light", 0.1), ("middle", 0.55)):
            ledger.demands[TENANT, name] = Demand(100.0, 100.0 * share, variation=0.02)
            jobs_[name] = await leader.job(name)
        heavy = await create(leader, jobs_["heavy"])
        light = await create(leader, jobs_["light"])
        assert (heavy.worker_id, light.worker_id) == (first, first), "the fullest worker that keeps the targets"
        middle = await create(leader, jobs_["middle"])
        assert middle.worker_id == second, "with the heavy one it would ask for 1.25 of the worker's time"
        unknown = await create(leader, await leader.job("unknown"))
        assert unknown.worker_id == second


async def test_hints_that_are_always_too_short_are_corrected_in_the_view() -> None:
    async with running_leader() as leader:
        worker_id = await leader.join()
        model = await leader.model(await leader.job())
        for i in range(6):
            await iterate(leader, model, 3 * i + 1, stall_s=0.6, hint_s=0.2)
        await leader.submit(model, specs.generate())
        await leader.work()
        now = leader.clock.now()
        jobs.heartbeat(leader.core, leader.core.ledger.jobs[model.job_id], 1.0)
        seen = group_view(leader.core.ledger, worker_id, now).jobs[0]
        assert seen.idle_until == pytest.approx(now + 3.0, abs=0.01)


async def test_explain_names_the_job_that_has_the_group_and_the_numbers() -> None:
    """G13."""
    async with running_leader(policy=Policy(quantum_s=10.0)) as leader:
        await leader.join()
        a = await leader.model(await leader.job("a"))
        b = await leader.model(await leader.job("b"))
        await leader.submit(a, specs.generate())
        await leader.settle()
        waiting = await leader.submit(b, specs.generate())
        await leader.settle()
        leader.clock.time += 2.5
        call = leader.core.ledger.calls[CallId(waiting.call_id)]
        sentence, blocking = explain(leader.core, call, leader.clock.now())
        assert call.state is CallState.PENDING
        assert "a runs 1 call(s), 2.5 s into a slice of 10.0 s; 1 job(s) wait, this one for 2.5 s" in sentence
        assert "it comes before all others in 598 s" in sentence
        assert len(blocking) == 1


async def test_a_tenant_over_its_quota_gets_no_new_model_and_is_told_until_when() -> None:
    async with running_leader() as leader:
        await leader.join()
        leader.core.ledger.tenant_accounts.default_quota = Quota(0.003, 5.0)
        job = await leader.job()
        model = await leader.model(job)
        await iterate(leader, model, 1, stall_s=1.0)
        seen = group_view(leader.core.ledger, leader.worker_id or WorkerId(""), leader.clock.now()).jobs[0]
        assert seen.over_quota
        with pytest.raises(ResourceExhausted, match=r"used 0 of its 0 device seconds; the account resets in 4 s"):
            await leader.model(job, "second")
        leader.clock.time += 5.0
        await leader.model(job, "second")
