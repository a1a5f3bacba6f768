"""Jobs, leases, attaching, connecting and exporting, against a controller in memory."""

import hashlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import plexrl
from plexrl.cluster import Cluster
from plexrl.connection import Connection, Target
from plexrl.job import Job
from plexrl.v1 import job_pb2, model_pb2
from tests.support.client import QUICK, cluster_fixture, controller_fixture  # noqa: F401
from tests.support.fake_controller import FakeController

BASE = plexrl.Init({"architectures": ["Qwen3ForCausalLM"]}, seed=3)


# --- connecting ------------------------------------------------------------------------------------------------------


def test_connect_reads_the_files_of_an_embedded_cluster(
    controller: FakeController, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(".plexrl").mkdir()
    Path(".plexrl/endpoint").write_text(f"{controller.endpoint}\n")
    Path(".plexrl/token").write_text(f"{controller.token}\n")
    with plexrl.connect() as cluster:
        assert cluster.endpoint == controller.endpoint
        assert cluster.functions == {"generate", "optim_step"}
        assert cluster.losses == {"grpo"}


def test_connect_reads_the_environment(
    controller: FakeController, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "secret").write_text(controller.token)
    monkeypatch.setenv("PLEXRL_ENDPOINT", controller.endpoint)
    monkeypatch.setenv("PLEXRL_TOKEN_FILE", str(tmp_path / "secret"))
    with plexrl.connect() as cluster:
        assert cluster.server_version == "0.1.0"


def test_nothing_to_connect_to_is_said_plainly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(plexrl.ConfigurationError, match="plexrl up"):
        plexrl.connect()


def test_a_wrong_token_is_told_so(controller: FakeController) -> None:
    with pytest.raises(plexrl.Unauthenticated, match="PLEXRL_TOKEN"):
        plexrl.connect(controller.endpoint, "wrong")


def test_an_absent_controller_is_told_so_within_the_bound(controller: FakeController) -> None:
    controller.stop()
    with pytest.raises(plexrl.Unavailable, match="plexrl up"):
        plexrl.connect(controller.endpoint, "any", retry_for_s=0.05)


# --- jobs and leases -------------------------------------------------------------------------------------------------


def test_a_job_is_finished_on_exit(controller: FakeController, cluster: Cluster) -> None:
    with cluster.job("one", weight=2.0, lease_s=30, labels={"team": "a"}) as job:
        assert controller.jobs[job.job_id].lease.seconds == 30
        future = job.model("policy", base=BASE).generate.submit([[1]], max_tokens=1)
        future.result(10)
    assert controller.finished == [job.job_id]
    with pytest.raises(plexrl.JobEnded):
        job.models["policy"].optim_step(lr=0.1)


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()])
def test_an_error_finishes_the_job_and_stays_the_error(
    controller: FakeController, cluster: Cluster, error: BaseException
) -> None:
    with pytest.raises(type(error)), cluster.job("one"):
        raise error
    assert controller.finished == ["job-1"]


def test_a_name_in_use_is_refused_with_advice(cluster: Cluster) -> None:
    with cluster.job("one"), pytest.raises(plexrl.AlreadyExists, match="attach") as refusal:
        cluster.job("one")
    assert refusal.value.reason == "JOB_NAME_TAKEN"


def test_the_lease_is_renewed_while_calls_wait(controller: FakeController, cluster: Cluster) -> None:
    controller.holding = True
    with cluster.job("one", lease_s=0.06) as job:
        future = job.model("policy", base=BASE).optim_step.submit(lr=0.1)
        controller.wait_for(lambda: len(controller.heartbeats) >= 3)
        assert not future.done()
        assert all(not beat.HasField("idle_hint") for beat in controller.heartbeats)


def test_idle_sends_a_hint_at_once(controller: FakeController, cluster: Cluster) -> None:
    with cluster.job("one", lease_s=3600) as job:
        job.idle(90)
        controller.wait_for(lambda: len(controller.heartbeats) == 1)
    assert 80 < controller.heartbeats[0].idle_hint.ToSeconds() <= 90


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1.0, 1e300])
def test_seconds_that_are_none_are_refused_at_once_and_the_job_lives(
    controller: FakeController, cluster: Cluster, seconds: float
) -> None:
    """Some are sent by the thread that renews the lease: one that it cannot write must not end it."""
    with pytest.raises(plexrl.InvalidArgument, match="lease_s"):
        cluster.job("none", lease_s=seconds)
    with cluster.job("one", lease_s=0.06) as job:
        model = job.model("policy", base=BASE)
        asked: dict[str, Callable[[], object]] = {
            "seconds": lambda: job.idle(seconds),
            "timeout_s": lambda: model.generate.submit([[1]], max_tokens=1, timeout_s=seconds),
            "grace_s": lambda: model.session(grace_s=seconds),
            "idle_limit_s": lambda: model.session(idle_limit_s=seconds),
        }
        for name, ask in asked.items():
            with pytest.raises(plexrl.InvalidArgument, match=f"{name}: .* seconds, want a number from 0"):
                ask()
        with model.session() as session, pytest.raises(plexrl.InvalidArgument, match="seconds"):
            session.idle(seconds)
        heard = len(controller.heartbeats)
        controller.wait_for(lambda: len(controller.heartbeats) >= heard + 2)


def test_a_lost_lease_ends_what_waits(controller: FakeController, cluster: Cluster) -> None:
    controller.holding = True
    job = cluster.job("one", lease_s=0.06)
    future = job.model("policy", base=BASE).optim_step.submit(lr=0.1)
    controller.wait_for(lambda: len(controller.calls) == 1)
    with controller.changed:
        controller.jobs[job.job_id].state = job_pb2.JOB_STATE_EXPIRED
    with pytest.raises(plexrl.JobEnded):
        future.result(10)
    job.detach()


def test_heartbeats_outlive_a_restart(controller: FakeController, cluster: Cluster) -> None:
    with cluster.job("one", lease_s=0.06):
        controller.wait_for(lambda: len(controller.heartbeats) >= 1)
        controller.stop()
        controller.heartbeats.clear()
        controller.start()
        controller.wait_for(lambda: len(controller.heartbeats) >= 2)


# --- attaching -------------------------------------------------------------------------------------------------------


def test_another_client_goes_on_where_the_first_left(controller: FakeController, cluster: Cluster) -> None:
    first = cluster.job("one")
    policy = first.model("policy", base=BASE)
    policy.optim_step(lr=0.1)
    first.save_client_state(b"step 1")
    controller.wait_for(lambda: len(controller.acknowledged) == 1)
    not_taken = policy.optim_step.submit(lr=0.1)
    controller.wait_for(lambda: len(controller.executed) == 2)
    controller.holding = True
    unfinished = policy.sync_weights.submit()
    controller.wait_for(lambda: len(controller.calls) == 3)
    first.detach()
    for future in (not_taken, unfinished):
        future.exception(10)

    connection = Connection(Target(controller.endpoint, controller.token), QUICK)
    with Cluster(connection) as elsewhere, elsewhere.attach("one") as second:
        assert second.client_state == b"step 1"
        stepped, synced = second.unacknowledged
        controller.release()
        assert stepped.result(10) == plexrl.OptimStep(grad_norm=1.5, step=2)
        assert synced.result(10) == plexrl.SyncWeights(weights_version=3)
        assert second.models["policy"].optim_step(lr=0.1).step == 4
    assert len(controller.executed) == 4


def test_attach_by_id_and_to_nothing(cluster: Cluster) -> None:
    job = cluster.job("one")
    cluster.attach(job_id=job.job_id).detach()
    job.detach()
    with pytest.raises(plexrl.NotFound):
        cluster.attach("two")
    with pytest.raises(plexrl.InvalidArgument):
        cluster.attach()


# --- models ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def job(cluster: Cluster) -> Job:
    return cluster.job("one")


def test_text_becomes_tokens_and_back(job: Job) -> None:
    with job, job.model("policy", base=BASE) as model:
        tokens = model.tokenize(["ab", "c"])
        assert [list(ids) for ids in tokens] == [[97, 98], [99]]
        assert model.detokenize(tokens) == ["ab", "c"]
        with pytest.raises(plexrl.InvalidArgument, match="tokenize"):
            model.generate(["text"], max_tokens=1)  # type: ignore[list-item]


def test_a_model_is_deleted_on_exit(controller: FakeController, job: Job) -> None:
    with job:
        with job.model("policy", base=BASE) as model:
            model.wait_until_placed(10)
        assert controller.models[model.model_id].state == model_pb2.MODEL_STATE_DELETED
        with pytest.raises(plexrl.ModelEnded):
            model.wait_until_placed(10)


def test_affinity_and_settings_travel(controller: FakeController, job: Job) -> None:
    with job:
        first = job.model("policy", base=BASE, precision="bfloat16", micro_batch_tokens=512)
        affinity = plexrl.Affinity(require={"gpu": "h200"}, avoid=[first])
        second = job.model("reference", base=plexrl.Catalogue("tiny"), role="reference", affinity=affinity)
    settings = controller.models[first.model_id].settings
    assert (settings.precision, settings.micro_batch_tokens) == (model_pb2.PRECISION_BFLOAT16, 512)
    placed = controller.models[second.model_id].affinity
    assert (dict(placed.require), list(placed.avoid_model_ids)) == ({"gpu": "h200"}, [first.model_id])


def test_a_bundle_is_uploaded_in_pieces(controller: FakeController, job: Job, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(bytes(range(256)) * 10_000)
    (tmp_path / "pytorch_model.bin").write_bytes(b"never sent")
    with job:
        job.model("policy", base=plexrl.Bundle(tmp_path))
    assert sorted(map(len, controller.payloads.values())) == [2, 2_560_000]


def chunk(name: str, data: bytes, whole: bytes | None = None) -> model_pb2.FileChunk:
    digest = "" if whole is None else hashlib.sha256(whole).hexdigest()
    return model_pb2.FileChunk(name=name, data=data, sha256=digest)


def test_an_export_is_written_and_checked(controller: FakeController, job: Job, tmp_path: Path) -> None:
    controller.exports["good"] = [
        chunk("config.json", b"{}", b"{}"),
        chunk("model.safetensors", b"ab"),
        chunk("model.safetensors", b"cd", b"abcd"),
    ]
    with job:
        directory = job.model("policy", base=BASE).export("good", tmp_path / "out")
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == {
        "config.json": b"{}",
        "model.safetensors": b"abcd",
    }


@pytest.mark.parametrize(
    "chunks",
    [
        [chunk("config.json", b"{}", b"{}"), chunk("model.safetensors", b"ab", b"ax")],
        [chunk("config.json", b"{}", b"{}"), chunk("model.safetensors", b"ab")],
        [chunk("model.safetensors", b"ab"), chunk("config.json", b"{}", b"{}")],
        [chunk("../evil", b"{}", b"{}")],
        [chunk(".hidden", b"{}", b"{}")],
        [],
    ],
    ids=["flipped", "cut", "interleaved", "path", "hidden", "empty"],
)
def test_a_bad_export_leaves_nothing(
    controller: FakeController, job: Job, tmp_path: Path, chunks: list[model_pb2.FileChunk]
) -> None:
    controller.exports["bad"] = chunks
    with job, pytest.raises(plexrl.DataLoss):
        job.model("policy", base=BASE).export("bad", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


# --- a process -------------------------------------------------------------------------------------------------------


def test_ctrl_c_ends_a_waiting_program_and_its_job(controller: FakeController) -> None:
    controller.holding = True
    program = f"""
import faulthandler, signal
faulthandler.register(signal.SIGUSR1, all_threads=True)
# It may be ignored where these tests run in the background.
signal.signal(signal.SIGINT, signal.default_int_handler)
import plexrl
with plexrl.connect({controller.endpoint!r}, {controller.token!r}) as cluster, cluster.job("one") as job:
    job.model("policy", base=plexrl.Catalogue("tiny")).optim_step(lr=0.1)
"""
    process = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True)
    try:
        controller.wait_for(lambda: len(controller.calls) == 1)
        for _ in range(3):
            # Python drops an interrupt that strikes within a destructor: people press again.
            process.send_signal(signal.SIGINT)
            try:
                _, stderr = process.communicate(timeout=10)
                break
            except subprocess.TimeoutExpired:
                continue
        else:
            process.send_signal(signal.SIGUSR1)
            time.sleep(1.0)
            process.kill()
            pytest.fail(f"it goes on, with these threads:\n{process.communicate()[1]}")
    finally:
        process.kill()
        process.wait()
    assert "KeyboardInterrupt" in stderr
    assert controller.finished == ["job-1"]


def test_nothing_of_a_finished_job_keeps_running(cluster: Cluster) -> None:
    before = {thread for thread in threading.enumerate() if thread.name.startswith("plexrl-")}
    with cluster.job("one") as job:
        job.model("policy", base=BASE).optim_step(lr=0.1)
    after = {thread for thread in threading.enumerate() if thread.name.startswith("plexrl-")}
    assert after <= before
