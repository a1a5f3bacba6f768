"""What an operator asks the controller about tokens, workers and jobs."""

from typing import Any

import pytest

from plexrl.v1 import admin_pb2, job_pb2, registry_pb2
from plexrl_controller.api.admin import AdminService
from plexrl_controller.api.jobs import JobService
from plexrl_controller.api.messages import worker_message
from plexrl_controller.dispatch import jobs, limits, workers
from plexrl_controller.domain.errors import FailedPrecondition, Unavailable
from plexrl_controller.domain.records import Job, Worker
from plexrl_controller.domain.states import WorkerState
from plexrl_controller.store.memory import MemoryStore
from tests.support import specs
from tests.support.leader import Leader, running_leader
from tests.support.worker_double import WorkerDouble

NO_CONTEXT: Any = None


async def register(leader: Leader, address: str, life_nonce: int) -> Worker:
    """Another daemon comes under the name of the leader's worker."""
    assert leader.worker_id is not None
    name = leader.core.ledger.workers[leader.worker_id].name
    life = workers.Announcement(name, address, {}, registry_pb2.WorkerCapabilities(), life_nonce, "0")
    return await workers.register(leader.core, life)


async def test_tokens_that_hold_are_listed_and_revoked_ones_are_not() -> None:
    async with running_leader() as leader:
        admin = AdminService(leader.core)
        made = {}
        for label in ("bob", "alice"):
            request = admin_pb2.CreateTokenRequest(label=label, tenant="research", role=admin_pb2.ROLE_TENANT)
            made[label] = (await admin.CreateToken(request, NO_CONTEXT)).token_id
        listed = (await admin.ListTokens(admin_pb2.ListTokensRequest(), NO_CONTEXT)).tokens
        assert [(token.label, token.token_id, token.tenant) for token in listed] == [
            ("alice", made["alice"], "research"),
            ("bob", made["bob"], "research"),
        ]
        await admin.RevokeToken(admin_pb2.RevokeTokenRequest(token_id=made["bob"]), NO_CONTEXT)
        listed = (await admin.ListTokens(admin_pb2.ListTokensRequest(), NO_CONTEXT)).tokens
        assert [token.label for token in listed] == ["alice"]


async def test_a_worker_that_cannot_be_reached_says_why() -> None:
    async with running_leader() as leader:
        worker = leader.core.ledger.workers[await leader.join()]
        assert worker_message(leader.core, worker).message == ""
        leader.dispatcher.stream_closed(worker.worker_id, worker.incarnation, "node1:7410: connection refused")
        assert worker_message(leader.core, worker).message == "node1:7410: connection refused"
        leader.dispatcher.stream_closed(worker.worker_id, worker.incarnation - 1, "of an earlier life")
        assert worker_message(leader.core, worker).message == "node1:7410: connection refused"


async def test_a_cordon_outlives_the_daemon_and_the_leader() -> None:
    store, worker = MemoryStore(), WorkerDouble()
    async with running_leader(store, worker) as leader:
        worker_id = await leader.join()
        admin = AdminService(leader.core)
        await admin.CordonWorker(admin_pb2.CordonWorkerRequest(worker_id=worker_id), NO_CONTEXT)
        worker.die()
        await leader.join()
        assert leader.core.ledger.workers[worker_id].state is WorkerState.CORDONED
    async with running_leader(store, worker) as leader:
        worker.die()
        await leader.join()
        assert leader.core.ledger.workers[worker_id].state is WorkerState.CORDONED
        admin = AdminService(leader.core)
        await admin.UncordonWorker(admin_pb2.UncordonWorkerRequest(worker_id=worker_id), NO_CONTEXT)
        worker.die()
        await leader.join()
        assert leader.core.ledger.workers[worker_id].state is WorkerState.READY


async def test_a_model_that_finds_no_worker_is_told_which_and_why() -> None:
    async with running_leader() as leader:
        worker_id = await leader.join()
        admin = AdminService(leader.core)
        await admin.CordonWorker(admin_pb2.CordonWorkerRequest(worker_id=worker_id), NO_CONTEXT)
        name = leader.core.ledger.workers[worker_id].name
        with pytest.raises(Unavailable, match=rf"of 1 worker\(s\) 1 cannot take it for not ready: {name}: .*cordoned"):
            await leader.model(await leader.job())


async def test_a_daemon_on_another_host_does_not_take_a_name_that_is_in_use() -> None:
    async with running_leader() as leader:
        worker = leader.core.ledger.workers[await leader.join()]
        host = worker.address.rpartition(":")[0]
        with pytest.raises(FailedPrecondition, match="another --name"):
            await register(leader, "elsewhere:7410", worker.life_nonce + 1)
        assert leader.core.ledger.workers[worker.worker_id] == worker
        # On its own host a daemon that starts again is the same worker, whatever its port is now.
        again = await register(leader, f"{host}:1", worker.life_nonce + 1)
        assert (again.worker_id, again.incarnation) == (worker.worker_id, worker.incarnation + 1)


@pytest.mark.parametrize("gone", ["stream", "lease"])
async def test_a_worker_whose_daemon_is_gone_may_move_to_another_host(gone: str) -> None:
    async with running_leader() as leader:
        worker = leader.core.ledger.workers[await leader.join()]
        if gone == "stream":
            leader.dispatcher.stream_closed(worker.worker_id, worker.incarnation)
        else:
            leader.clock.time += limits.WORKER_LEASE_S
        moved = await register(leader, "elsewhere:7410", worker.life_nonce + 1)
        assert (moved.worker_id, moved.address) == (worker.worker_id, "elsewhere:7410")


async def test_what_a_job_used_is_known_after_it_ended_and_to_the_next_leader() -> None:
    store, worker = MemoryStore(), WorkerDouble()
    async with running_leader(store, worker) as old:
        await old.join()
        ended, running = await old.job("ended"), await old.job("running")
        await old.submit(await old.model(ended), specs.generate())
        await old.work()
        of_ended = _durable(await _account(old, ended))
        await jobs.finish_job(old.core, ended)
        await old.submit(await old.model(running), specs.generate())
        await old.work()
        of_running = _durable(await _account(old, running))
        for busy_s, *_, calls in (of_ended, of_running):
            assert busy_s > 0
            assert calls == 1
        old.core.ledger.forget_job(ended.job_id)
        assert _durable(await _account(old, ended)) == of_ended
    async with running_leader(store, worker) as new:
        assert _durable(await _account(new, running)) == of_running
        listed = (await JobService(new.core).ListJobs(job_pb2.ListJobsRequest(), NO_CONTEXT)).jobs
        assert {job.name: _durable(job.account) for job in listed} == {"running": of_running, "ended": of_ended}


async def _account(leader: Leader, job: Job) -> job_pb2.JobAccount:
    return (await JobService(leader.core).GetJob(job_pb2.GetJobRequest(job_id=job.job_id), NO_CONTEXT)).account


def _durable(account: job_pb2.JobAccount) -> tuple[float, ...]:
    """All but the waiting, which is counted since the controller leads."""
    return account.busy_s, account.swap_s, account.hold_s, account.swaps, account.calls
