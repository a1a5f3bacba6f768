"""A rollout on two real workers, whose last responses go on together on one: the other worker serves another job
meanwhile, and a kill of the first costs nothing but time.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import plexrl
from plexrl.cli.timeline import read_intervals, read_names
from plexrl.v1 import call_pb2
from plexrl.v1 import types_pb2 as t
from plexrl_controller.embedded.cluster import LocalCluster
from plexrl_controller.embedded.settings import ClusterSettings

pytestmark = pytest.mark.fault

WAIT_S = 120.0
CONFIG = {"architectures": ["Qwen3ForCausalLM"], "vocab_size": 24, "max_position_embeddings": 64}
PROMPTS = [[1 + number, number % 5 + 1] for number in range(10)]
COMPLETIONS, STOPS = 4, (2, 3)
LEAVE, HELD_AT = 0.75, 10
"""Of forty responses of a worker thirty may be left: its part is over with the tenth, before those that are held."""
BATCH = plexrl.TrainingBatch.from_targets([[1, 2], [3]], [[4], [5]])

Rows = list[list[int]]


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    settings = ClusterSettings(
        data_dir=tmp_path_factory.mktemp("cluster") / "plexrl",
        engine="fake",
        workers=2,
        device_state_bytes="64K",
        kv_cache_bytes="1M",
        restart_delay_s=0.05,
        # Longer than the test: what is seen is not calls that give way.
        controller_flags=("--chunk-s", "600"),
    )
    with LocalCluster(settings) as cluster:
        yield cluster


@pytest.fixture
def cluster(local: LocalCluster) -> Iterator[plexrl.Cluster]:
    with plexrl.connect(local.endpoint, token=local.token) as cluster:
        yield cluster


class Seen:
    """What the cluster says of a job's calls, and what it recorded of its devices."""

    def __init__(self, cluster: plexrl.Cluster) -> None:
        self._connection = cluster.connection

    def worker(self, model: plexrl.Model) -> str:
        """The name of the worker that has a model."""
        return read_names(self._connection)[1][model._describe().worker_id]

    def generates(self, model: plexrl.Model) -> list[call_pb2.Call]:
        """Oldest first."""
        request = call_pb2.ListCallsRequest(job_id=model.job_id, page_size=1000)
        calls = self._connection.unary(self._connection.calls.ListCalls, request).calls
        own = [call for call in calls if call.model_id == model.model_id and call.kind == t.CALL_KIND_GENERATE]
        return sorted(own, key=lambda call: call.create_time.ToNanoseconds())

    def states(self, model: plexrl.Model) -> list[str]:
        """Of its generates, oldest first."""
        return [t.CallState.Name(call.state).removeprefix("CALL_STATE_") for call in self.generates(model)]

    def busy(self, call: call_pb2.Call) -> tuple[int, int]:
        """When its worker's device began to work on a call, and when it had done so last."""
        everything = read_intervals(self._connection, call.job_id)
        own = [i for i in everything if i.call_id == call.call_id and i.kind == t.INTERVAL_KIND_BUSY]
        return min(i.start_unix_ns for i in own), max(i.end_unix_ns for i in own)


class Rollouts:
    """A job with a model on each of the two workers; where a name is given, its tail is on that one."""

    def __init__(self, job: plexrl.Job, base: plexrl.Init, seen: Seen, *, on: str | None = None) -> None:
        one = job.model("one", base=base, role="rollout")
        other = job.model("other", base=base, role="rollout", affinity=plexrl.Affinity(avoid=[one]))
        for model in (one, other):
            model.wait_until_placed()
        self.tail, self.bulk = (one, other) if on in (None, seen.worker(one)) else (other, one)
        self.consolidated = plexrl.RolloutReplicas([self.tail, self.bulk], leave=LEAVE, tail_only=True)
        self.together = plexrl.RolloutReplicas([self.tail, self.bulk], leave=LEAVE)
        self.apart = plexrl.RolloutReplicas([self.tail, self.bulk], leave=0.0)


def sample(replicas: plexrl.RolloutReplicas, seed: int) -> plexrl.Completions:
    return replicas.generate(PROMPTS, n=COMPLETIONS, max_tokens=24, stop_token_ids=STOPS, seed=seed)


class Background:
    """A rollout in a thread."""

    def __init__(self, sample: Callable[[], plexrl.Completions]) -> None:
        self._made: list[plexrl.Completions | BaseException] = []
        self._thread = threading.Thread(target=self._run, args=(sample,), daemon=True)
        self._thread.start()

    def _run(self, sample: Callable[[], plexrl.Completions]) -> None:
        try:
            self._made.append(sample())
        except BaseException as error:  # noqa: BLE001 - raised where it is asked for
            self._made.append(error)

    @property
    def over(self) -> bool:
        return bool(self._made)

    def result(self) -> plexrl.Completions:
        self._thread.join(WAIT_S)
        (made,) = self._made
        if isinstance(made, BaseException):
            raise made
        return made


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def rows(completions: plexrl.Completions) -> list[tuple[Rows, str]]:
    parts = zip(completions.token_ids, completions.logprobs, completions.finish_reasons, strict=True)
    return [([ids.tolist(), scores.tolist()], reason) for ids, scores, reason in parts]


def held_base(held: Path) -> plexrl.Init:
    """A model whose generates stand before their eleventh completion as long as the file is there."""
    fault = {"function": f"completion-{HELD_AT}", "fault": "held", "flag_file": str(held)}
    return plexrl.Init({**CONFIG, "plexrl_fake": [fault]}, seed=3)


def test_another_job_has_the_vacated_worker_while_the_last_responses_end_elsewhere(
    cluster: plexrl.Cluster, tmp_path: Path
) -> None:
    """Two jobs with their rollouts on the same two workers. Who ran when is read from what the devices recorded."""
    held, seen = tmp_path / "held", Seen(cluster)
    with cluster.job("first", lease_s=300) as job, cluster.job("second", lease_s=300) as other_job:
        first = Rollouts(job, held_base(held), seen)
        second = Rollouts(other_job, plexrl.Init(CONFIG, seed=5), seen, on=seen.worker(first.tail))
        assert seen.worker(second.bulk) == seen.worker(first.bulk)

        held.touch()
        going = Background(lambda: sample(first.consolidated, seed=1))
        until(lambda: seen.states(first.tail) == ["RUNNING"])
        behind = Background(lambda: sample(second.consolidated, seed=2))
        # All that the second job has to sample, but what it leaves: that waits for the first's.
        until(lambda: seen.states(second.bulk) == ["SUCCEEDED"])
        assert seen.states(first.tail) == ["RUNNING"]
        assert not going.over
        held.unlink()
        for made in (going.result(), behind.result()):
            assert len(made) == len(PROMPTS) * COMPLETIONS
            assert set(made.finish_reasons) == {"stop", "length"}
        (bulk,), (tail,) = seen.generates(first.bulk), seen.generates(first.tail)
        (others_bulk,), (others_tail,) = seen.generates(second.bulk), seen.generates(second.tail)
        begun, ended = seen.busy(others_bulk)
        assert seen.busy(bulk)[1] <= begun < ended < seen.busy(tail)[1] <= seen.busy(others_tail)[0]

        # Without consolidation the second job's part waits until the first's last response has ended.
        held.touch()
        going = Background(lambda: sample(first.apart, seed=3))
        until(lambda: seen.states(first.bulk)[1:] == ["RUNNING"])
        behind = Background(lambda: sample(second.apart, seed=4))
        until(lambda: len(seen.states(second.bulk)) == 2)
        held.unlink()
        going.result()
        behind.result()
        assert seen.busy(seen.generates(first.bulk)[1])[1] <= seen.busy(seen.generates(second.bulk)[1])[0]


def test_a_killed_tail_worker_costs_time_alone(local: LocalCluster, cluster: plexrl.Cluster, tmp_path: Path) -> None:
    """G01, G06: with the weights of a pull, which are lost with the worker and come back before the tail goes on."""
    held, seen = tmp_path / "held", Seen(cluster)
    with cluster.job("killed", lease_s=300) as job:
        base = held_base(held)
        policy, rollouts = job.model("policy", base=base), Rollouts(job, base, seen)
        policy.forward_backward(BATCH, loss="cross_entropy")
        policy.optim_step(lr=0.5)
        policy.sync_weights()
        assert rollouts.together.pull_weights(policy) == 3
        undisturbed = sample(rollouts.together, seed=7)
        assert undisturbed.weights_version == 3
        before = len(seen.states(rollouts.tail))
        held.touch()
        going = Background(lambda: sample(rollouts.together, seed=7))
        # Its own part, and what the other worker has left.
        until(lambda: seen.states(rollouts.tail)[before:] == ["RUNNING"] * 2)
        os.kill(local.pids()[seen.worker(rollouts.tail)], signal.SIGKILL)
        until(lambda: all(call.attempt > 1 for call in seen.generates(rollouts.tail)[before:]))
        held.unlink()
        assert rows(going.result()) == rows(undisturbed)
