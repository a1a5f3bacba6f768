"""G18: what is not ready yet is retryable and never NOT_FOUND; a result stays until it is acknowledged."""

from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from plexrl import wire
from plexrl.v1 import call_pb2, model_pb2, types_pb2
from plexrl_controller.api.models import ModelService
from plexrl_controller.dispatch import reaper
from plexrl_controller.dispatch.uploads import UPLOAD_HOLD_S
from plexrl_controller.domain.errors import FailedPrecondition, Unavailable
from plexrl_controller.domain.ids import WorkerId
from plexrl_controller.domain.states import ModelState
from plexrl_controller.payloads.directory import DirectoryPayloadStore
from plexrl_controller.store.memory import MemoryStore
from tests.support import specs
from tests.support.leader import Leader, running_leader
from tests.support.worker_daemon import METADATA, Cluster, cluster
from tests.support.worker_double import WorkerDouble

LARGE_TOKENS = 40_000


async def read(leader: Leader, call_id: str) -> call_pb2.Call:
    return await leader.calls.GetCall(call_pb2.GetCallRequest(call_id=call_id), None)


@pytest.mark.parametrize("tokens", [4, LARGE_TOKENS], ids=["small", "large"])
async def test_a_result_is_there_until_it_is_acknowledged_whoever_asks(tmp_path: Path, tokens: int) -> None:
    """G18: fetched twice, fetched from the next controller, an hour later; large ones lie in the payload store."""
    store, worker = MemoryStore(), WorkerDouble()
    payloads = await DirectoryPayloadStore.open(tmp_path)
    async with running_leader(store, worker, payloads=payloads) as leader:
        worker_id = await leader.join()
        model = await leader.model(await leader.job(lease_s=3600.0))
        call = await leader.submit(model, specs.generate())
        await leader.settle()
        while reports := worker.run(1):
            for report in reports:
                if report.HasField("call") and report.HasField("finished"):
                    completions = wire.token_batch([[7] * tokens])
                    report.finished.result.generate.CopyFrom(types_pb2.GenerateResult(completions=completions))
            await leader.dispatcher.reports_came(worker_id, 1, reports)
            await leader.settle()
        first = await read(leader, call.call_id)
        assert wire.batch_arrays(first.result.generate.completions)[0].tolist() == [7] * tokens
        assert await read(leader, call.call_id) == first
    payloads = await DirectoryPayloadStore.open(tmp_path)  # of the next controller
    async with running_leader(store, worker, payloads=payloads) as leader:
        job = leader.core.ledger.jobs[model.job_id]
        leader.clock.time += UPLOAD_HOLD_S + 1
        leader.core.ledger.facts[job.job_id].lease_end = leader.clock.time + 60
        for group in leader.core.ledger.groups.values():
            group.last_sync = leader.clock.time
        await reaper.reap(leader.core)  # sweeps what nobody holds
        assert (await read(leader, call.call_id)).result == first.result
        await leader.calls.AckCalls(call_pb2.AckCallsRequest(job_id=job.job_id, call_ids=[call.call_id]), None)
        gone = await read(leader, call.call_id)
        assert (gone.state, gone.HasField("result")) == (types_pb2.CALL_STATE_SUCCEEDED, False)


async def test_what_is_submitted_before_its_model_is_built_waits_and_is_found() -> None:
    """G18: a slow start drops no id."""
    async with running_leader() as leader:
        await leader.join()
        job = await leader.job()
        service = ModelService(leader.core, NoWorker())  # type: ignore[arg-type]
        base = model_pb2.ModelBase(
            init=model_pb2.InitBase(config_json='{"architectures": ["Qwen3ForCausalLM"]}', seed=1)
        )
        request = model_pb2.CreateModelRequest(request_id="once", job_id=job.job_id, name="policy", base=base)
        created = await service.CreateModel(request, None)
        assert created.state == model_pb2.MODEL_STATE_CREATING
        model = leader.core.ledger.models[created.model_id]  # type: ignore[index]
        call = await leader.submit(model, specs.generate())
        early = await read(leader, call.call_id)
        assert (early.state, early.reason) == (types_pb2.CALL_STATE_PENDING, types_pb2.CALL_REASON_MODEL_NOT_READY)
        texts = model_pb2.TokenizeRequest(model_id=created.model_id, texts=["a"])
        with pytest.raises(Unavailable) as refused:
            await service.Tokenize(texts, None)
        assert (refused.value.reason, refused.value.retry_after_s) == ("MODEL_NOT_READY", 0.5)
        await leader.work()
        assert (await read(leader, call.call_id)).state == types_pb2.CALL_STATE_SUCCEEDED


async def test_before_any_worker_is_there_a_model_is_refused_for_now() -> None:
    """G18."""
    async with running_leader() as leader:
        with pytest.raises(Unavailable) as refused:
            await leader.model(await leader.job())
        assert refused.value.reason == "NO_WORKER_READY"
        assert refused.value.retry_after_s


async def test_a_tokenizer_that_is_away_with_its_model_is_retryable(tmp_path: Path) -> None:
    """G18: a worker that does not have the model yet says so of a model that it is about to get."""
    async with cluster(tmp_path) as c, running_leader() as leader:
        await leader.join()
        model = await leader.model(await leader.job())
        ledger, service = leader.core.ledger, ModelService(leader.core, AtWorker(c))  # type: ignore[arg-type]
        ledger.models[model.model_id] = replace(ledger.models[model.model_id], has_tokenizer=True)
        texts = model_pb2.TokenizeRequest(model_id=model.model_id, texts=["a"])
        with pytest.raises(FailedPrecondition):
            await service.Tokenize(texts, None)
        leader.worker.die()
        await leader.join()
        assert ledger.models[model.model_id].state is ModelState.RECOVERING
        with pytest.raises(Unavailable) as refused:
            await service.Tokenize(texts, None)
        assert (refused.value.reason, refused.value.retry_after_s) == ("MODEL_NOT_READY", 0.5)


class NoWorker:
    """A transport without connections."""

    def channel(self, worker_id: WorkerId) -> None:
        return None


class AtWorker:
    """A transport whose every worker is a real daemon that has no models."""

    metadata = METADATA

    def __init__(self, c: Cluster) -> None:
        self._cluster = c

    def channel(self, worker_id: WorkerId) -> grpc.aio.Channel:
        return self._cluster.channel
