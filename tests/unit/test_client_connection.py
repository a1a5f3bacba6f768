"""Where tokens may go, how long retries wait, and how numbers of a sequence are counted."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import plexrl
from plexrl.connection import Retry, Target, resolve_target
from plexrl.errors import BY_REASON
from plexrl.sequence import SequenceCounter
from plexrl.v1 import types_pb2 as t


@pytest.mark.parametrize("endpoint", ["127.0.0.1:1", "127.3.2.1:1", "localhost:1", "[::1]:1", "unix:/tmp/socket"])
def test_clear_text_is_fine_on_loopback(endpoint: str) -> None:
    Target(endpoint, "secret")


@pytest.mark.parametrize("endpoint", ["10.0.0.1:1", "example.com:1", "localhost.example.com:1", "[::2]:1", "0.0.0.0:1"])
def test_a_token_never_leaves_the_machine_in_clear_text(endpoint: str) -> None:
    with pytest.raises(plexrl.ConfigurationError, match="clear text"):
        Target(endpoint, "secret")
    Target(endpoint, "secret", tls=True)
    Target(endpoint)


def test_the_embedded_token_is_not_sent_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PLEXRL_TOKEN", raising=False)
    monkeypatch.delenv("PLEXRL_TOKEN_FILE", raising=False)
    Path(".plexrl").mkdir()
    Path(".plexrl/token").write_text("embedded")
    assert resolve_target("example.com:1", None, None, True).token is None
    assert resolve_target("127.0.0.1:1", None, None, None).token == "embedded"


def test_two_tokens_are_one_too_many() -> None:
    with pytest.raises(plexrl.ConfigurationError, match="give one"):
        resolve_target("127.0.0.1:1", "a", "b", None)


@pytest.mark.parametrize("token", ["two words", "line\nline", "tökén"])
def test_what_cannot_be_a_token_is_refused_before_it_is_sent(token: str) -> None:
    with pytest.raises(plexrl.ConfigurationError, match="single word"):
        Target("127.0.0.1:1", token)


def test_a_token_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "token").write_bytes(b"\xff\xfe")
    with pytest.raises(plexrl.ConfigurationError, match="token is no text"):
        resolve_target("127.0.0.1:1", None, tmp_path / "token", None)


def test_the_authority_of_the_environment_is_not_for_the_embedded_controller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PLEXRL_ENDPOINT", raising=False)
    monkeypatch.setenv("PLEXRL_TLS_CA", "ca.pem")
    Path(".plexrl").mkdir()
    Path(".plexrl/endpoint").write_text("127.0.0.1:1")
    assert resolve_target(None, "secret", None, None).tls is None
    assert resolve_target("127.0.0.1:1", "secret", None, None).tls == Path("ca.pem")
    assert resolve_target("127.0.0.1:1", "secret", None, "other.pem").tls == Path("other.pem")
    monkeypatch.setenv("PLEXRL_TLS_CA", "system")
    assert resolve_target("127.0.0.1:1", "secret", None, None).tls is True


@given(st.integers(1, 200), st.one_of(st.none(), st.floats(0, 60)))
def test_delays_grow_to_a_bound_and_honour_hints(failures: int, hint_s: float | None) -> None:
    retry = Retry(first_s=0.1, most_s=5.0)
    delay_s = retry.delay_s(failures, hint_s)
    assert min(5.0, 0.1 * 2 ** (failures - 1)) / 2 <= max(delay_s, 0.0)
    assert delay_s <= max(5.0, hint_s or 0.0)
    assert delay_s >= (hint_s or 0.0)


def test_every_final_reason_of_a_call_has_an_exception() -> None:
    waiting = {
        "UNSPECIFIED",
        "SEQUENCE_GAP",
        "PREDECESSOR_UNFINISHED",
        "VERSION_NOT_READY",
        "DRAINING_GENERATES",
        "GROUP_BUSY",
        "MODEL_NOT_READY",
        "WORKER_UNAVAILABLE",
        "SESSION_FULL",
    }
    final = {name.removeprefix("CALL_REASON_") for name in t.CallReason.keys()} - waiting  # noqa: SIM118
    assert final <= set(BY_REASON)


class TestSequenceCounter:
    def test_the_last_number_is_given_back(self) -> None:
        counter = SequenceCounter()
        assert [counter.take(), counter.take()] == [1, 2]
        counter.refuse(2)
        assert (counter.hole, counter.take()) == (None, 2)

    def test_a_hole_stays_until_it_is_reset(self) -> None:
        counter = SequenceCounter(5)
        assert [counter.take() for _ in range(3)] == [5, 6, 7]
        counter.refuse(6)
        assert counter.hole == 6
        counter.reset(9)
        assert counter.next_number == 9
        assert counter.take() == 9

    @given(st.permutations(list(range(3, 9))))
    def test_refusals_in_any_order_give_all_back(self, order: list[int]) -> None:
        counter = SequenceCounter()
        for _ in range(8):
            counter.take()
        for number in order:
            counter.refuse(number)
        assert (counter.hole, counter.next_number) == (None, 3)
