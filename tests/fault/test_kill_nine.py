"""Kill -9 of every part while two jobs run: nothing hangs, each accepted call ends, the system works again by itself.

| part killed | what must hold |
|---|---|
| engine child | parked models of other engines survive bit for bit; the engine's own is restored or said lost |
| worker daemon | calls end or are tried again; models without later training come back by themselves |
| controller | no accepted call is lost or doubled; clients notice only time |
| client | its lease frees what it held |
| Postgres | nothing accepted is lost; commits wait for it |

Engines are the numpy double: what is tested here is the control plane, with every process real.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import plexrl
from plexrl.v1 import job_pb2
from plexrl_controller.embedded.cluster import LocalCluster
from plexrl_controller.embedded.settings import ClusterSettings

KILLS = int(os.environ.get("PLEXRL_FAULT_KILLS", "2"))
"""Of each part (`make faults`: more)."""
HANG_S = 60.0


def config(vocab_size: int) -> dict[str, object]:
    return {"architectures": ["Qwen3ForCausalLM"], "vocab_size": vocab_size, "max_position_embeddings": 64}


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    settings = ClusterSettings(
        data_dir=tmp_path_factory.mktemp("cluster") / "plexrl",
        engine="fake",
        workers=1,
        device_state_bytes="24K",
        kv_cache_bytes="1M",
        restart_delay_s=0.1,
    )
    with LocalCluster(settings) as cluster:
        yield cluster


class Training(threading.Thread):
    """A job that trains, samples and remembers what became of every call."""

    def __init__(self, local: LocalCluster, name: str, vocab_size: int) -> None:
        super().__init__(name=name, daemon=True)
        self.ended: list[str] = []
        self.recoveries = 0
        self.failure: BaseException | None = None
        self.rounds = 0
        self._stop_asked = threading.Event()
        self._local, self._vocab_size = local, vocab_size

    def stop_after(self, rounds: int) -> None:
        """Asks for the end once so many more rounds are done, and waits for it."""
        target, deadline = self.rounds + rounds, time.monotonic() + HANG_S
        while self.is_alive() and self.rounds < target and time.monotonic() < deadline:
            time.sleep(0.02)
        self._stop_asked.set()
        self.join(HANG_S)
        assert not self.is_alive(), f"job {self.name} hangs after {self.rounds} rounds"
        if self.failure is not None:
            raise self.failure
        assert self.rounds >= target

    def run(self) -> None:
        try:
            with (
                plexrl.connect(self._local.endpoint, token=self._local.token) as cluster,
                cluster.job(self.name, lease_s=30) as job,
            ):
                model = job.model("policy", base=plexrl.Init(config(self._vocab_size), seed=3))
                while not self._stop_asked.is_set():
                    self._round(model)
        except BaseException as error:  # noqa: BLE001 - told to the test's thread
            self.failure = error

    def _round(self, model: plexrl.Model) -> None:
        batch = plexrl.TrainingBatch.from_targets([[1, 2]], [[3, 4]])
        try:
            futures = [
                model.forward_backward.submit(batch, loss="cross_entropy"),
                model.optim_step.submit(lr=1e-2),
                model.sync_weights.submit(),
                model.generate.submit([[1, 2], [3]], max_tokens=4, seed=self.rounds),
            ]
        except plexrl.errors.FailedPrecondition as error:
            self._recover(model, error)
            return
        failures = []
        for future in futures:
            try:
                self.ended.append(type(future.result(HANG_S)).__name__)
            except plexrl.errors.Unavailable:
                raise
            except plexrl.PlexRLError as error:
                self.ended.append(type(error).__name__)
                failures.append(error)
        if failures:
            self._recover(model, failures[0])
        else:
            self.rounds += 1

    def _recover(self, model: plexrl.Model, error: plexrl.PlexRLError) -> None:
        """What a client does about a state that is lost: go on from the base."""
        assert isinstance(
            error, plexrl.errors.StateLost | plexrl.errors.PredecessorFailed | plexrl.errors.CallFailed
        ), error
        self.recoveries += 1
        model.load_checkpoint(plexrl.BASE)


def disturb(local: LocalCluster, kill: Callable[[], None]) -> tuple[Training, Training]:
    """Two jobs run; `kill` strikes KILLS times; both go on after each."""
    jobs = (Training(local, "a", 24), Training(local, "b", 32))
    for job in jobs:
        job.start()
    for _ in range(KILLS):
        before = [job.rounds for job in jobs]
        deadline = time.monotonic() + HANG_S
        while any(job.rounds < n + 3 for job, n in zip(jobs, before, strict=True)) and time.monotonic() < deadline:
            assert all(job.is_alive() for job in jobs), [job.failure for job in jobs]
            time.sleep(0.02)
        kill()
    for job in jobs:
        job.stop_after(3)
    return jobs


def test_engine_killed(local: LocalCluster) -> None:
    """G04, G12: an engine's death is told as it is, and costs the other job nothing but time."""

    def kill() -> None:
        os.kill(local.engine_pids("worker-0")[0], signal.SIGKILL)

    a, b = disturb(local, kill)
    assert a.recoveries + b.recoveries <= KILLS, "only the job whose engine died may lose state"


def test_worker_killed(local: LocalCluster) -> None:
    """G10: the daemon's next life reaps its orphans before it says ready."""

    def kill() -> None:
        engines = local.engine_pids("worker-0")
        pid = local.kill("worker-0")
        local.wait_replaced("worker-0", pid)
        local.wait_ready()
        alive = [e for e in engines if Path(f"/proc/{e}/stat").exists() and not _zombie(e)]
        assert alive == []

    disturb(local, kill)


def test_worker_restarted(local: LocalCluster) -> None:
    """SIGTERM, as an upgrade sends it: the next life goes on with every state, and jobs notice only time."""

    def restart() -> None:
        pid = local.kill("worker-0", signal.SIGTERM)
        local.wait_replaced("worker-0", pid)
        local.wait_ready()

    a, b = disturb(local, restart)
    assert a.recoveries == b.recoveries == 0
    assert set(a.ended + b.ended) <= {"ForwardBackward", "OptimStep", "SyncWeights", "Completions"}


def test_controller_killed(local: LocalCluster) -> None:
    """G14, G20: no accepted call is lost or doubled, and no training state is lost."""

    def kill() -> None:
        pid = local.kill("controller")
        local.wait_replaced("controller", pid)

    a, b = disturb(local, kill)
    assert a.recoveries == b.recoveries == 0
    assert set(a.ended + b.ended) <= {"ForwardBackward", "OptimStep", "SyncWeights", "Completions"}


def test_postgres_killed(local: LocalCluster) -> None:
    """G05, G20: commits wait for the database; nothing that was accepted is lost."""

    def kill() -> None:
        pid = local.kill("postgres")
        local.wait_replaced("postgres", pid)

    a, b = disturb(local, kill)
    assert a.recoveries == b.recoveries == 0


def test_client_killed(local: LocalCluster) -> None:
    """G11: a lost client frees what it held within its lease; its checkpoint stays; the other job goes on."""
    script = f"""
import plexrl, sys
cluster = plexrl.connect({local.endpoint!r}, token={local.token!r})
job = cluster.job("doomed", lease_s=5)
job.__enter__()
model = job.model("policy", base=plexrl.Init({config(24)!r}, seed=3))
model.forward_backward(plexrl.TrainingBatch.from_targets([[1, 2]], [[3, 4]]), loss="cross_entropy")
print(model.save_checkpoint("kept").checkpoint_id, flush=True)
while True:
    model.generate([[1, 2]], max_tokens=4)
"""
    doomed = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert doomed.stdout is not None
    checkpoint_id = doomed.stdout.readline().strip()
    other = Training(local, "other", 32)
    other.start()
    doomed.kill()
    doomed.wait()
    doomed.stdout.close()
    with plexrl.connect(local.endpoint, token=local.token) as cluster:
        deadline = time.monotonic() + HANG_S
        # A listing renews no lease, as attaching would.
        live = job_pb2.ListJobsRequest(live_only=True)
        while "doomed" in {job.name for job in cluster.connection.unary(cluster.connection.jobs.ListJobs, live).jobs}:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        with pytest.raises(plexrl.errors.NotFound):
            cluster.attach("doomed")
        with cluster.job("successor") as job:
            model = job.model("policy", base=plexrl.Init(config(24), seed=9))
            model.load_checkpoint(checkpoint_id)
            assert model.generate([[1, 2]], max_tokens=4).token_ids
    other.stop_after(3)


def test_a_parked_model_survives_the_death_of_another_engine_bit_for_bit(local: LocalCluster) -> None:
    """The host tier is the daemon's: what is parked there does not die with any engine."""
    batch = plexrl.TrainingBatch.from_targets([[1, 2]], [[3, 4]])
    with (
        plexrl.connect(local.endpoint, token=local.token) as cluster,
        cluster.job("parked") as first,
        cluster.job("killed") as second,
    ):
        parked = first.model("policy", base=plexrl.Init(config(24), seed=3))
        parked.forward_backward(batch, loss="cross_entropy")
        parked.optim_step(lr=1e-2)
        before = parked.score([[1, 2, 3, 4, 5]]).flat_logprobs
        other = second.model("policy", base=plexrl.Init(config(32), seed=3))
        other.score([[1, 2, 3]])  # swaps `parked` out
        for pid in local.engine_pids("worker-0"):
            os.kill(pid, signal.SIGKILL)
        after = parked.score([[1, 2, 3, 4, 5]]).flat_logprobs
        assert before.any()
        assert np.array_equal(before, after)


def _zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True
