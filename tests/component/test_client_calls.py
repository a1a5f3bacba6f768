"""The client's calls against a controller in memory: once each, in order, through lost replies and restarts."""

import asyncio
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from google.rpc import code_pb2, status_pb2

import plexrl
from plexrl import call_stream
from plexrl.cluster import Cluster
from plexrl.connection import Connection, Retry, Target
from plexrl.job import Job
from plexrl.model import Model
from plexrl.v1 import call_pb2
from plexrl.v1 import types_pb2 as t
from tests.support.client import QUICK, cluster_fixture, controller_fixture  # noqa: F401
from tests.support.fake_calls import echo, status
from tests.support.fake_controller import FakeController


@pytest.fixture
def job(cluster: Cluster) -> Iterator[Job]:
    with cluster.job("job") as job:
        yield job


@pytest.fixture
def model(job: Job) -> Model:
    return job.model("policy", base=plexrl.Init({"architectures": ["Qwen3ForCausalLM"]}))


def sequences(controller: FakeController) -> list[int]:
    return [controller.submits[request_id].sequence for request_id in controller.executed]


def test_every_function_returns_its_record(model: Model) -> None:
    prompts = [[1, 2, 3], [4]]
    completions = model.generate(prompts, n=2, max_tokens=4, seed=7, version=plexrl.AtLeast(0))
    assert [list(tokens) for tokens in completions.token_ids] == [[1, 2, 3], [1, 2, 3], [4], [4]]
    assert [len(logprobs) for logprobs in completions.logprobs] == [3, 3, 1, 1]
    assert completions.finish_reasons == ("stop",) * 4

    assert model.score(prompts).flat_logprobs.dtype == np.float32
    batch = plexrl.TrainingBatch.from_completions(prompts, completions, [1.0, -1.0, 0.5, 0.0])
    trained = model.forward_backward(batch, loss="grpo", clip_low=0.1)
    assert (trained.loss, trained.token_count, len(batch.split(trained.flat_logprobs))) == (0.25, 3, 4)
    assert model.optim_step(lr=1e-3).step == 3
    assert model.sync_weights().weights_version == 4
    saved = model.save_checkpoint("first")
    assert (saved.label, saved.sequence) == ("first", 5)
    assert model.load_checkpoint(saved).weights_version == 6
    assert model.load_checkpoint(plexrl.BASE).weights_version == 7


def test_sequenced_calls_are_numbered_in_the_order_of_submission(controller: FakeController, model: Model) -> None:
    controller.holding = True
    futures = [model.optim_step.submit(lr=0.1) for _ in range(300)]
    generated = model.generate.submit([[1]], max_tokens=1)
    controller.wait_for(lambda: len(controller.calls) == 301)
    controller.release()
    assert [future.result(10).step for future in futures] == list(range(1, 301))
    assert generated.result(10).weights_version == 0
    assert [number for number in sequences(controller) if number] == list(range(1, 301))


def test_threads_share_a_model(controller: FakeController, model: Model) -> None:
    threads = [threading.Thread(target=lambda: model.optim_step(lr=0.1)) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert sequences(controller) == list(range(1, 17))


def test_g01_a_reply_lost_after_execution_does_not_execute_again(controller: FakeController, model: Model) -> None:
    controller.lost_replies = 3
    assert [model.optim_step(lr=0.1).step for _ in range(5)] == [1, 2, 3, 4, 5]
    assert controller.lost_replies == 0
    assert sequences(controller) == [1, 2, 3, 4, 5]


def test_calls_outlive_a_restart_of_the_controller(controller: FakeController, model: Model) -> None:
    controller.holding = True
    before = model.optim_step.submit(lr=0.1)
    controller.wait_for(lambda: len(controller.calls) == 1)
    controller.stop()
    during = model.optim_step.submit(lr=0.2)
    assert during.call_id is None
    assert "not accepted" in during.explain()
    controller.holding = False
    controller.start()
    assert (before.result(10).step, during.result(10).step) == (1, 2)
    assert sequences(controller) == [1, 2]


def test_calls_fail_once_the_controller_is_away_for_too_long(controller: FakeController) -> None:
    impatient = Retry(bound_s=0.2, first_s=0.01, most_s=0.05)
    cluster = Cluster(Connection(Target(controller.endpoint, controller.token), impatient))
    job = cluster.job("impatient")
    model = job.model("policy", base=plexrl.Catalogue("tiny"))
    controller.holding = True
    future = model.optim_step.submit(lr=0.1)
    controller.stop()
    with pytest.raises(plexrl.Unavailable, match="plexrl up"):
        future.result(10)
    with pytest.raises(plexrl.Unavailable):
        model.optim_step(lr=0.1)
    job.detach()
    cluster.close()


def test_calls_fail_when_their_own_process_closes_the_connection(controller: FakeController) -> None:
    """G03: nobody waits for ever for what cannot be heard any more."""
    cluster = Cluster(Connection(Target(controller.endpoint, controller.token), QUICK))
    model = cluster.job("left").model("policy", base=plexrl.Catalogue("tiny"))
    controller.holding = True
    future = model.optim_step.submit(lr=0.1)
    controller.wait_for(lambda: bool(controller.submits))
    cluster.close()
    with pytest.raises(plexrl.errors.ConfigurationError, match="has closed its connection"):
        future.result(10)


def test_results_are_acknowledged_once_taken(controller: FakeController, model: Model) -> None:
    future = model.optim_step.submit(lr=0.1)
    controller.wait_for(lambda: len(controller.executed) == 1)
    assert controller.acknowledged == []
    assert future.result(10) == future.result(10)
    controller.wait_for(lambda: controller.acknowledged == ["call-1"])


def test_acknowledgements_travel_with_submits_and_the_last_before_the_job_is_let_go(
    controller: FakeController, job: Job, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_stream, "ACK_WITHIN_S", 3600.0)
    model.optim_step(lr=0.1)
    model.optim_step(lr=0.1)
    controller.wait_for(lambda: controller.acknowledged == ["call-1"])
    job.detach()
    assert controller.acknowledged == ["call-1", "call-2"]


def test_a_lost_acknowledgement_is_sent_again(controller: FakeController, model: Model) -> None:
    controller.lost_acks = 1
    model.optim_step(lr=0.1)
    controller.wait_for(lambda: controller.lost_acks == 0)
    assert controller.acknowledged == []
    controller.cut_streams()
    controller.wait_for(lambda: controller.acknowledged == ["call-1"])


def test_dropped_futures_are_acknowledged_too(controller: FakeController, model: Model) -> None:
    model.optim_step.submit(lr=0.1)
    model.optim_step.submit(lr=0.1)
    model.optim_step(lr=0.1)
    controller.wait_for(lambda: sorted(controller.acknowledged) == ["call-1", "call-2", "call-3"])


def test_futures_can_be_awaited(controller: FakeController, model: Model) -> None:
    async def both() -> list[int]:
        steps = await asyncio.gather(*(as_coroutine(model.optim_step.submit(lr=0.1)) for _ in range(2)))
        return [step.step for step in steps]

    async def as_coroutine(future: plexrl.CallFuture[plexrl.OptimStep]) -> plexrl.OptimStep:
        return await future

    assert asyncio.run(both()) == [1, 2]
    controller.wait_for(lambda: len(controller.acknowledged) == 2)


def test_a_wait_that_is_given_up_leaves_the_call_running(controller: FakeController, model: Model) -> None:
    controller.holding = True
    future = model.optim_step.submit(lr=0.1)
    controller.wait_for(lambda: len(controller.calls) == 1)
    with pytest.raises(TimeoutError, match="optim_step"):
        future.result(0.01)

    async def impatient() -> None:
        async with asyncio.timeout(0.01):
            await future

    with pytest.raises(TimeoutError):
        asyncio.run(impatient())
    controller.release()
    assert future.result(10).step == 1


def test_cancel_ends_a_call_and_resume_frees_its_sequence(controller: FakeController, model: Model) -> None:
    controller.holding = True
    first, second = model.optim_step.submit(lr=0.1), model.optim_step.submit(lr=0.1)
    first.cancel()
    with pytest.raises(plexrl.CallCancelled):
        first.result(10)
    with pytest.raises(plexrl.PredecessorFailed):
        second.result(10)
    assert first.state == "CANCELLED"
    with pytest.raises(plexrl.PredecessorFailed):
        model.optim_step(lr=0.1)
    controller.holding = False
    assert model.resume() == 3
    assert model.optim_step(lr=0.1).step == 3


def test_explain_asks_the_controller(controller: FakeController, model: Model) -> None:
    controller.holding = True
    future = model.optim_step.submit(lr=0.1)
    controller.wait_for(lambda: len(controller.calls) == 1)
    controller.cut_streams()  # the acceptance is surely read once the stream is open again
    while future.call_id is None:
        pass
    assert "waits for 1 earlier call" in future.explain()


def test_a_refused_call_gives_its_number_back(controller: FakeController, model: Model) -> None:
    def refuse_nonsense(submit: call_pb2.SubmitCallRequest) -> status_pb2.Status | None:
        if submit.spec.optim_step.adamw.lr < 0:
            return status(code_pb2.INVALID_ARGUMENT, "INVALID_ARGUMENT", "optim_step.lr: -1 is not above 0")
        return None

    controller.refuse = refuse_nonsense
    with pytest.raises(plexrl.InvalidArgument, match=r"lr: -1"):
        model.optim_step(lr=-1)
    assert model.optim_step(lr=0.1).step == 1


def test_calls_behind_a_refused_one_end_and_resume_goes_on(controller: FakeController, model: Model) -> None:
    def refuse_nonsense(submit: call_pb2.SubmitCallRequest) -> status_pb2.Status | None:
        if submit.spec.optim_step.adamw.lr < 0:
            return status(code_pb2.INVALID_ARGUMENT, "INVALID_ARGUMENT", "optim_step.lr: -1 is not above 0")
        return None

    controller.refuse = refuse_nonsense
    controller.stop()  # so that both are on their way before the first is refused
    refused, behind = model.optim_step.submit(lr=-1), model.optim_step.submit(lr=0.1)
    controller.start()
    with pytest.raises(plexrl.InvalidArgument):
        refused.result(10)
    with pytest.raises(plexrl.CallCancelled):
        behind.result(10)
    with pytest.raises(plexrl.PredecessorFailed, match=r"resume\(\)"):
        model.optim_step(lr=0.1)
    number = model.resume()
    assert model.optim_step(lr=0.1).step == number
    assert behind.call_id is not None


@pytest.mark.parametrize(
    ("code", "reason", "raised"),
    [
        (code_pb2.INVALID_ARGUMENT, "INVALID_ARGUMENT", plexrl.InvalidArgument),
        (code_pb2.INTERNAL, "NON_FINITE", plexrl.NonFinite),
        (code_pb2.DATA_LOSS, "STATE_LOST", plexrl.StateLost),
        (code_pb2.INTERNAL, "ENGINE_ERROR", plexrl.EngineError),
        (code_pb2.RESOURCE_EXHAUSTED, "OUT_OF_MEMORY", plexrl.OutOfMemory),
        (code_pb2.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED", plexrl.CallExpired),
        (code_pb2.FAILED_PRECONDITION, "VERSION_GONE", plexrl.VersionGone),
        (code_pb2.INTERNAL, "SOMETHING_NEW", plexrl.PlexRLError),
    ],
)
def test_errors_of_calls_are_typed(
    controller: FakeController, model: Model, code: int, reason: str, raised: type[plexrl.PlexRLError]
) -> None:
    controller.execute = lambda _: status(code, reason, "what happened, and what to do")
    with pytest.raises(raised, match="what to do") as failure:
        model.optim_step(lr=0.1)
    assert failure.value.reason == reason
    assert type(failure.value) is raised


def test_progress_is_seen(controller: FakeController, model: Model) -> None:
    controller.holding = True
    future = model.generate.submit([[1]], max_tokens=100)
    controller.wait_for(lambda: len(controller.calls) == 1)
    call = next(iter(controller.calls.values()))
    with controller.changed:
        call.state, call.progress_done, call.progress_total = t.CALL_STATE_RUNNING, 40, 100
        controller.publish(call)
        call.state = t.CALL_STATE_PENDING
    while future.progress != (40, 100):
        assert not future.done()
    controller.release()
    future.result(10)


def test_what_no_message_holds_is_refused_here(model: Model) -> None:
    with pytest.raises(plexrl.InvalidArgument, match="split it"):
        model.score([np.zeros(17_000_000, np.int32)])
    assert model.optim_step(lr=0.1).step == 1


def test_large_results_arrive_whole(controller: FakeController, model: Model) -> None:
    size = 4_000_000
    controller.execute = lambda submit: echo(submit)
    assert model.score([np.ones(size, np.int32)]).flat_logprobs.size == size
