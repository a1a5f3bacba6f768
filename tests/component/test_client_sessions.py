"""The client's sessions against a controller in memory: what is asked, what is heard, what a conversation says."""

import asyncio
import threading
from collections.abc import Iterator

import pytest
from google.rpc import code_pb2

import plexrl
from plexrl.cluster import Cluster
from plexrl.job import Job
from plexrl.model import Model
from plexrl.v1 import session_pb2
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


def test_calls_carry_the_session_from_threads_and_tasks(controller: FakeController, model: Model) -> None:
    async def converse(session: plexrl.Session) -> list[plexrl.Completions]:
        return await asyncio.gather(*(session.generate.submit([[n]], max_tokens=2) for n in range(1, 9)))

    with model.session(max_concurrent=8, grace_s=1.5) as session:
        assert controller.sessions.opened[session.session_id].grace.ToNanoseconds() == 1_500_000_000
        turns = asyncio.run(converse(session))
        assert [int(turn.token_ids[0][0]) for turn in turns] == list(range(1, 9))
        assert session.generate([[9]], max_tokens=2).token_ids
        assert model.generate([[9]], max_tokens=2).token_ids
    sent = [submit.session_id for submit in controller.submits.values()]
    assert sent == [session.session_id] * 9 + [""]
    assert session.state == "CLOSED"


def test_a_revocation_is_told_once_and_a_grant_ends_it(controller: FakeController, model: Model) -> None:
    told: list[str] = []
    heard = threading.Event()

    def revoked() -> None:
        told.append(session.state)
        heard.set()

    session = model.session(on_revoked=revoked)
    # The stream is open once a call has gone through.
    session.generate([[1]], max_tokens=1)
    assert (session.state, session.revoked) == ("WAITING", False)
    for grant in (
        session_pb2.SESSION_GRANT_GRANTED,
        session_pb2.SESSION_GRANT_REVOKED,
        session_pb2.SESSION_GRANT_WAITING,
    ):
        controller.sessions.grant(session.session_id, grant)
    assert heard.wait(10)
    session.generate([[1]], max_tokens=1)
    assert (told, session.state, session.revoked) == (["REVOKED"], "WAITING", True)
    controller.sessions.grant(session.session_id, session_pb2.SESSION_GRANT_GRANTED)
    session.generate([[1]], max_tokens=1)
    assert (session.state, session.revoked) == ("GRANTED", False)


def test_a_revocation_is_told_though_the_grant_was_not_heard(controller: FakeController, model: Model) -> None:
    """Updates coalesce, and one may come before the session is watched."""
    heard = threading.Event()
    session = model.session(on_revoked=heard.set)
    session.generate([[1]], max_tokens=1)
    controller.sessions.grant(session.session_id, session_pb2.SESSION_GRANT_REVOKED)
    assert heard.wait(10)
    assert session.revoked


def test_to_wait_for_a_worker_that_is_away_is_no_revocation(controller: FakeController, model: Model) -> None:
    told: list[str] = []
    session = model.session(on_revoked=lambda: told.append(session.state))
    session.generate([[1]], max_tokens=1)
    for grant in (session_pb2.SESSION_GRANT_GRANTED, session_pb2.SESSION_GRANT_WAITING):
        controller.sessions.grant(session.session_id, grant)
    session.generate([[1]], max_tokens=1)
    assert (session.state, session.revoked, told) == ("WAITING", False, [])


def test_what_was_told_before_it_was_closed_opens_it_no_more(controller: FakeController, model: Model) -> None:
    told: list[str] = []
    session = model.session(on_revoked=lambda: told.append(session.state))
    session.generate([[1]], max_tokens=1)
    late = session_pb2.Session()
    late.CopyFrom(controller.sessions.opened[session.session_id])
    late.grant = session_pb2.SESSION_GRANT_REVOKED
    # The end is known from the answer; the stream's word of it has not come.
    controller.sessions.silent = True
    session.close()
    controller.tell(late)
    model.generate([[1]], max_tokens=1)
    assert (session.state, session.revoked, told) == ("CLOSED", False, [])


def test_an_end_that_came_while_there_was_no_stream_is_heard(controller: FakeController, model: Model) -> None:
    session, other = model.session(), model.session()
    session.generate([[1]], max_tokens=1)
    controller.sessions.grant(session.session_id, session_pb2.SESSION_GRANT_REVOKED)
    session.generate([[1]], max_tokens=1)
    assert session.revoked
    controller.sessions.expire(session.session_id)
    controller.cut_streams()
    # Told on the stream that opens then, ahead of what is submitted there.
    model.generate([[1]], max_tokens=1)
    assert (session.state, session.revoked, other.state) == ("EXPIRED", False, "WAITING")


def test_the_device_may_go_when_the_last_conversation_sleeps(controller: FakeController, model: Model) -> None:
    controller.holding = True
    session = model.session()
    running = session.generate.submit([[1]], max_tokens=1)
    with session.sleeping(30):
        assert controller.sessions.yielded == []
        controller.release()
        running.result(10)
        with session.sleeping(10):
            controller.wait_for(lambda: len(controller.sessions.yielded) == 1)
    session.idle(7)
    controller.wait_for(lambda: len(controller.sessions.yielded) == 2)
    first, second = controller.sessions.yielded
    assert 5 < first <= 10
    assert second == 7


def test_what_the_server_refuses_is_typed(controller: FakeController, model: Model) -> None:
    session = model.session()
    refusal = status(code_pb2.FAILED_PRECONDITION, "SESSION_NOT_OPEN", "it expired; open one")
    controller.refuse = lambda request: refusal if request.session_id else None
    with pytest.raises(plexrl.SessionEnded, match="open one"):
        session.generate([[1]], max_tokens=1)
    with pytest.raises(plexrl.InvalidArgument, match="max_concurrent: 0"):
        model.session(max_concurrent=0)
