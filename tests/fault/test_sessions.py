"""Sessions over real processes and the numpy engine: conversations outlive kills, and the device changes hands."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import plexrl
from plexrl.v1 import session_pb2
from plexrl_controller.embedded.cluster import LocalCluster
from plexrl_controller.embedded.settings import ClusterSettings

pytestmark = pytest.mark.fault

WAIT_S = 60.0
CONVERSATIONS = 12


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    settings = ClusterSettings(
        data_dir=tmp_path_factory.mktemp("cluster") / "plexrl",
        engine="fake",
        device_state_bytes="24K",
        kv_cache_bytes="1M",
        controller_flags=("--chunk-s", "0.5"),
    )
    with LocalCluster(settings) as cluster:
        yield cluster


@pytest.fixture
def cluster(local: LocalCluster) -> Iterator[plexrl.Cluster]:
    with plexrl.connect(local.endpoint, token=local.token) as cluster:
        yield cluster


def base(held: Path, vocab_size: int = 24) -> plexrl.Init:
    """A model whose generates stand before their second completion as long as the file is there."""
    fault = {"function": "completion-1", "fault": "held", "flag_file": str(held)}
    config = {"architectures": ["Qwen3ForCausalLM"], "vocab_size": vocab_size, "max_position_embeddings": 64}
    return plexrl.Init({**config, "plexrl_fake": [fault]}, seed=3)


def turn(generate: Callable[..., plexrl.Completions], number: int) -> list[list[int]]:
    """What a conversation asks for: two completions of its own prompt."""
    return tokens(generate([[1 + number % 20, 2]], n=2, max_tokens=6, seed=number))


def tokens(completions: plexrl.Completions) -> list[list[int]]:
    return [list(map(int, row)) for row in completions.token_ids]


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def running(cluster: plexrl.Cluster, session: plexrl.Session) -> int:
    request = session_pb2.GetSessionRequest(session_id=session.session_id)
    return cluster.connection.unary(cluster.connection.sessions.GetSession, request).running


def test_conversations_notice_only_time_when_worker_and_controller_are_killed(
    local: LocalCluster, cluster: plexrl.Cluster, tmp_path: Path
) -> None:
    """G01, G20, G21: each turn is answered once, with what it samples alone."""
    held = tmp_path / "held"
    with cluster.job("talk", lease_s=120) as job, ThreadPoolExecutor(CONVERSATIONS) as threads:
        model = job.model("policy", base=base(held))
        alone = [turn(model.generate, number) for number in range(2 * CONVERSATIONS)]
        with model.session(max_concurrent=8) as session:

            def converse(number: int) -> list[list[list[int]]]:
                return [turn(session.generate, number), turn(session.generate, CONVERSATIONS + number)]

            held.touch()
            conversations = [threads.submit(converse, number) for number in range(CONVERSATIONS)]
            until(lambda: running(cluster, session) == 8)
            until(lambda: session.state == "GRANTED")
            pid = local.kill("worker-0")
            local.wait_replaced("worker-0", pid)
            until(lambda: running(cluster, session) == 8)
            pid = local.kill("controller")
            local.wait_replaced("controller", pid)
            until(lambda: running(cluster, session) == 8)
            assert not any(conversation.done() for conversation in conversations)
            held.unlink()
            for number, conversation in enumerate(conversations):
                assert conversation.result(WAIT_S) == [alone[number], alone[CONVERSATIONS + number]]
        with pytest.raises(plexrl.SessionEnded):
            session.generate([[1]], max_tokens=2)


def test_another_job_gets_the_device_in_the_middle_of_all_turns_and_nobody_loses_a_token(
    cluster: plexrl.Cluster, tmp_path: Path
) -> None:
    held, revoked = tmp_path / "held", threading.Event()
    with cluster.job("long", lease_s=120) as long, cluster.job("short", lease_s=120) as short:
        model = long.model("policy", base=base(held))
        other = short.model("policy", base=base(tmp_path / "never", vocab_size=32))
        alone = [turn(model.generate, number) for number in range(6)]
        turn(other.generate, 0)

        async def converse(session: plexrl.Session) -> list[list[list[int]]]:
            futures = [
                session.generate.submit([[1 + number % 20, 2]], n=2, max_tokens=6, seed=number) for number in range(6)
            ]
            await asyncio.to_thread(until, lambda: running(cluster, session) == 6)
            # Held: they would never end by themselves.
            assert tokens(await other.generate.submit([[1, 2]], n=2, max_tokens=6, seed=0))
            assert held.exists()
            held.unlink()
            return [tokens(await future) for future in futures]

        with model.session(max_concurrent=6, grace_s=0.2, on_revoked=revoked.set) as session:
            held.touch()
            assert asyncio.run(asyncio.wait_for(converse(session), WAIT_S)) == alone
            assert revoked.wait(WAIT_S)
            until(lambda: not session.revoked)
