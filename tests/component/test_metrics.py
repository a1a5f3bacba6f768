"""What an operator's metrics say of a leader: its live records, its workers, and nothing once it no longer leads."""

import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.core import Metric

from plexrl.v1 import admin_pb2
from plexrl_controller.api.admin import AdminService
from plexrl_controller.api.metrics import figures
from plexrl_controller.dispatch import limits, reaper
from plexrl_controller.domain.errors import LeadershipLost
from plexrl_controller.payloads.memory import MemoryPayloadStore
from plexrl_controller.store.memory import MemoryStore
from tests.support import specs
from tests.support.leader import TENANT, Leader, running_leader
from tests.support.worker_double import STATE_BYTES

OPERATIONS = Path(__file__).parents[2] / "docs" / "operations.md"
OF_THE_PROCESS = {"plexrl_build_info", "plexrl_leader", "plexrl_tls_certificate_expiry_timestamp_seconds"}


class Read:
    """The figures of a moment, by name and labels."""

    def __init__(self, leader: Leader) -> None:
        self.families: list[Metric] = figures(leader.core, None)
        self.samples = {(s.name, *sorted(s.labels.items())): s.value for f in self.families for s in f.samples}

    def __call__(self, name: str, **labels: str) -> float | None:
        return self.samples.get((f"plexrl_{name}", *sorted(labels.items())))


class SealedStore(MemoryStore):
    """Cannot be touched while it is sealed."""

    sealed = False

    def __getattribute__(self, name: str) -> Any:
        if object.__getattribute__(self, "sealed") and name != "sealed":
            raise AssertionError(f"the store was asked: {name}")
        return object.__getattribute__(self, name)


async def test_a_call_is_seen_waiting_then_on_its_worker_then_ended() -> None:
    async with running_leader() as leader:
        await leader.join()
        model = await leader.model(await leader.job("sevens"))
        # The first of the sequence is missing: the second waits.
        await leader.submit(model, specs.optim_step(), 2)
        await leader.settle()
        leader.clock.time += 7.0
        read = Read(leader)
        assert (read("leader"), read("leader_term")) == (1, 1)
        assert (read("jobs", state="active"), read("models", state="placed")) == (1, 1)
        assert (read("calls", state="pending"), read("calls", state="running")) == (1, 0)
        assert read("worker_pending_calls", worker="w0") == 1
        assert read("worker_oldest_pending_call_age_seconds", worker="w0") == 7.0
        assert read("worker_calls_in_flight", worker="w0") == 0
        await leader.submit(model, specs.forward_backward(), 1)
        await leader.settle()
        read = Read(leader)
        assert (read("worker_pending_calls", worker="w0"), read("worker_calls_in_flight", worker="w0")) == (0, 2)
        await leader.work()
        read = Read(leader)
        # Its client has not acknowledged what came of them: memory still has both.
        assert (read("calls", state="pending"), read("calls", state="succeeded")) == (0, 2)
        assert read("worker_oldest_pending_call_age_seconds", worker="w0") == 0.0
        assert read("job_calls_succeeded_total", tenant=TENANT, job_name="sevens") == 2
        busy_s = read("job_device_seconds_total", tenant=TENANT, job_name="sevens", kind="busy")
        assert busy_s == pytest.approx(0.002)
        assert read("worker_models_on_device", worker="w0") == 1
        assert read("worker_model_bytes", worker="w0", tier="device") == STATE_BYTES
        assert read("worker_model_bytes", worker="w0", tier="disk") == 0
        assert read("store_queued_rows") == 0
        assert read("store_commits_total") == leader.core.writer.counters.commits


async def test_a_worker_that_is_lost_is_shown_as_such_and_holds_nothing() -> None:
    async with running_leader() as leader:
        await leader.join()
        model = await leader.model(await leader.job())
        leader.clock.time += 3.0
        read = Read(leader)
        assert (read("worker_connected", worker="w0"), read("workers", state="ready")) == (1, 1)
        assert read("worker_synchronize_age_seconds", worker="w0") == 3.0
        assert read("worker_models_on_device", worker="w0") is not None
        await leader.submit(model, specs.optim_step(), 2)
        leader.clock.time += limits.WORKER_LEASE_S
        await reaper.reap(leader.core)
        await leader.settle()
        read = Read(leader)
        assert (read("worker_connected", worker="w0"), read("workers", state="lost")) == (0, 1)
        assert read("worker_synchronize_age_seconds", worker="w0") == 3.0 + limits.WORKER_LEASE_S
        for held in ("worker_models_on_device", "worker_resident_memory_bytes"):
            assert read(held, worker="w0") is None
        assert read("worker_model_bytes", worker="w0", tier="device") is None
        # What waits for it is still seen.
        assert read("worker_oldest_pending_call_age_seconds", worker="w0") == limits.WORKER_LEASE_S


async def test_a_cordon_is_seen() -> None:
    async with running_leader() as leader:
        worker_id = await leader.join()
        assert Read(leader)("worker_cordoned", worker="w0") == 0
        await AdminService(leader.core).CordonWorker(admin_pb2.CordonWorkerRequest(worker_id=worker_id), None)
        assert Read(leader)("worker_cordoned", worker="w0") == 1


async def test_stored_payloads_are_shown_beside_the_quota() -> None:
    async with running_leader(payloads=MemoryPayloadStore(quota_bytes=1000)) as leader:
        await leader.job()
        await leader.core.payloads.put(TENANT, b"a" * 600)
        read = Read(leader)
        assert (read("payload_stored_bytes", tenant=TENANT), read("payload_quota_bytes")) == (600, 1000)


async def test_what_should_not_be_is_counted() -> None:
    async with running_leader() as leader:
        assert Read(leader)("scheduling_invariant_violations_total") == 0
        leader.core.invariant_violations += 1
        leader.core.replay_divergences += 2
        read = Read(leader)
        assert (read("scheduling_invariant_violations_total"), read("replay_divergences_total")) == (1, 2)


async def test_the_figures_of_an_ended_job_go_and_a_new_one_of_its_name_is_no_duplicate() -> None:
    async with running_leader() as leader:
        await leader.join()
        first = await leader.job("again", lease_s=5.0)
        leader.clock.time += 6.0
        await reaper.reap(leader.core)
        assert first.job_id in leader.core.ledger.jobs
        assert Read(leader)("job_swaps_total", tenant=TENANT, job_name="again") is None
        await leader.job("again")
        swaps = next(family for family in figures(leader.core, None) if family.name == "plexrl_job_swaps")
        assert [sample.labels["job_name"] for sample in swaps.samples] == ["again"]


async def test_a_controller_that_does_not_lead_says_so_and_nothing_of_its_memory() -> None:
    assert {sample.name for family in figures(None, 1e9) for sample in family.samples} == OF_THE_PROCESS
    store = MemoryStore()
    async with running_leader(store) as leader:
        await leader.join()
        assert Read(leader)("leader") == 1
        await store.acquire_term("another")
        batch = leader.core.batch()
        batch.update(next(iter(leader.core.ledger.workers.values())), cordoned=True)
        with pytest.raises(LeadershipLost):
            await leader.core.commit(batch)
        read = Read(leader)
        assert read("leader") == 0
        assert {name for name, *_ in read.samples} < OF_THE_PROCESS


async def test_calls_of_before_a_failover_still_count() -> None:
    store = MemoryStore()
    async with running_leader(store) as leader:
        await leader.join()
        model = await leader.model(await leader.job("sevens"))
        await leader.submit(model, specs.forward_backward(), 1)
        await leader.work()
        before = Read(leader)
    async with running_leader(store) as leader:
        read = Read(leader)
        for figure in ("job_calls_succeeded_total", "job_swaps_total"):
            assert read(figure, tenant=TENANT, job_name="sevens") == before(figure, tenant=TENANT, job_name="sevens")
        assert read("job_calls_succeeded_total", tenant=TENANT, job_name="sevens") == 1


async def test_thousands_of_calls_are_counted_without_the_store_and_make_no_more_series() -> None:
    store = SealedStore()
    async with running_leader(store) as leader:
        await leader.join()
        job = await leader.job()
        of_job = [await leader.model(job, name) for name in ("one", "other")]
        few = Read(leader)
        for model in of_job:
            for sequence in range(2, 1002):
                await leader.submit(model, specs.optim_step(), sequence)
        store.sealed = True
        try:
            read = Read(leader)
        finally:
            store.sealed = False
        assert read("calls", state="pending") == read("worker_pending_calls", worker="w0") == 2000
        assert read.samples.keys() == few.samples.keys()
        ids = {*leader.core.ledger.calls, *leader.core.ledger.models, *leader.core.ledger.jobs}
        assert not ids & {value for _, *labels in read.samples for _, value in labels}


async def test_the_manual_has_a_row_for_every_metric_and_its_alerts_ask_for_no_other() -> None:
    section = OPERATIONS.read_text().partition("\n## Metrics\n")[2].partition("\n## ")[0]
    async with running_leader() as leader:
        suffixes = {"counter": "_total", "info": "_info"}
        names = {family.name + suffixes.get(family.type, "") for family in figures(leader.core, 1e9)}
    assert set(re.findall(r"^\| `(plexrl_\w+)", section, re.MULTILINE)) == names
    assert set(re.findall(r"plexrl_\w+", section)) <= names
