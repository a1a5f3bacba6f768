"""The SDK while its controller is away, refuses for now, or the process around it changes."""

import multiprocessing
import os
import random
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from google.rpc import code_pb2, status_pb2

import plexrl
from plexrl import wire
from plexrl.cluster import Cluster
from plexrl.connection import Connection, Retry, Target
from plexrl.job import Job
from plexrl.model import Model
from plexrl.v1 import call_pb2
from tests.support.client import cluster_fixture, controller_fixture  # noqa: F401
from tests.support.fake_calls import status
from tests.support.fake_controller import FakeController


@pytest.fixture
def job(cluster: Cluster) -> Iterator[Job]:
    with cluster.job("job") as job:
        yield job


@pytest.fixture
def model(job: Job) -> Model:
    return job.model("policy", base=plexrl.Init({"architectures": ["Qwen3ForCausalLM"]}))


def test_a_submit_that_is_refused_for_now_comes_again(controller: FakeController, model: Model) -> None:
    refused: list[str] = []

    def not_now(submit: call_pb2.SubmitCallRequest) -> status_pb2.Status | None:
        if submit.sequence == 2 and len(refused) < 3:
            refused.append(submit.request_id)
            return status(code_pb2.UNAVAILABLE, "UNAVAILABLE", "the object store does not answer")
        return None

    controller.refuse = not_now
    futures = [model.optim_step.submit(lr=0.1) for _ in range(4)]
    assert [future.result(10).step for future in futures] == [1, 2, 3, 4]
    assert len(set(refused)) == 1


def test_what_is_refused_for_now_for_too_long_fails(controller: FakeController) -> None:
    controller.refuse = lambda _: status(code_pb2.UNAVAILABLE, "UNAVAILABLE", "the object store does not answer")
    with Cluster(Connection(Target(controller.endpoint, controller.token), Retry(0.5, 0.005, 0.05))) as cluster:
        job = cluster.job("j")
        model = job.model("policy", base=plexrl.Init({"architectures": ["x"]}))
        with pytest.raises(plexrl.Unavailable, match="object store"):
            model.optim_step(lr=0.1)
        controller.refuse = lambda _: None
        assert model.optim_step(lr=0.1).step == 1
        job.finish()


def _in_child(model: Model, told: "multiprocessing.queues.Queue[str]") -> None:
    try:
        told.put(repr(model.optim_step.submit(lr=0.1).result(5)))
    except BaseException as error:  # noqa: BLE001
        told.put(f"{type(error).__name__}: {error}")
    told.close()
    told.join_thread()
    os._exit(0)


def test_a_forked_process_is_told_that_it_has_no_stream(model: Model) -> None:
    context = multiprocessing.get_context("fork")
    told = context.Queue()
    process = context.Process(target=_in_child, args=(model, told))
    process.start()
    assert "forked" in told.get(timeout=10)
    process.join(10)


def test_the_token_for_loopback_goes_to_no_proxy(controller: FakeController, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bytes] = []
    with socket.socket() as proxy:
        proxy.bind(("127.0.0.1", 0))
        proxy.listen()

        def serve() -> None:
            while True:
                try:
                    connection, _ = proxy.accept()
                except OSError:
                    return
                asked.append(connection.recv(100))
                connection.close()

        threading.Thread(target=serve, daemon=True).start()
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.getsockname()[1]}")
        with plexrl.connect(controller.endpoint, controller.token, retry_for_s=2.0):
            pass
    assert not asked


def test_a_controller_that_was_away_is_found_again_soon(controller: FakeController) -> None:
    """gRPC's own way would be 1, 1.6, 2.6 ... up to 120 s between two tries: longer than a lease."""
    assert dict(wire.CHANNEL_OPTIONS)["grpc.max_reconnect_backoff_ms"] <= 2000
    with Cluster(Connection(Target(controller.endpoint, controller.token), Retry(60.0, 0.05, 0.2))) as cluster:
        controller.stop()
        jobs: list[Job] = []
        thread = threading.Thread(target=lambda: jobs.append(cluster.job("late")))
        thread.start()
        time.sleep(17)
        controller.start()
        back = time.monotonic()
        thread.join(30)
        assert time.monotonic() - back < 3.0
        jobs[0].finish()


def test_many_cancels_take_one_thread(controller: FakeController, model: Model) -> None:
    controller.holding = True
    futures = [model.generate.submit([[1]], max_tokens=1) for _ in range(200)]
    controller.wait_for(lambda: len(controller.calls) == 200)
    while any(future.call_id is None for future in futures):
        time.sleep(0.01)
    controller.stop()
    before = threading.active_count()
    for future in futures:
        future.cancel()
    assert threading.active_count() <= before + 1
    controller.start()
    for future in futures:
        with pytest.raises(plexrl.CallCancelled):
            future.result(20)


def test_calls_end_when_the_streams_thread_does(job: Job, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    def defect(_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(job._stream, "_receive", defect)
    with pytest.raises(plexrl.PlexRLError, match="attach to the job again"):
        model.generate.submit([[1]], max_tokens=1).result(10)


def test_a_jobs_own_random_numbers_are_left_alone() -> None:
    """A job seeds `random` once and wants the same run again, however often the SDK had to wait for the controller."""
    before = random.getstate()
    assert Retry().delay_s(3) > 0
    assert random.getstate() == before
