"""Pulls of rollout weights that fail: bad peers, aborts, a dying engine, a worker that stops."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import aio

from plexrl.v1 import worker_pb2 as w
from plexrl.v1 import worker_pb2_grpc
from plexrl_worker import weight_pull
from tests.support.rollout_weights import (
    WEIGHTS_BYTES,
    at,
    greedy,
    held,
    parts_of,
    policy,
    pull,
    rollouts,
    sampled,
    stream,
    two,
)
from tests.support.worker_daemon import Cluster, call, cluster, fake_config, reason, swap


class Peer(worker_pb2_grpc.WeightServiceServicer):
    """Answers the first pulls as it is told, then gives what a source gave."""

    def __init__(self, parts: Sequence[w.PullResponse], *answers: Any) -> None:
        self.parts = list(parts)
        self.answers = list(answers)
        self.asked = 0
        self.asked_twice = asyncio.Event()

    async def Pull(self, request: w.PullRequest, context: Any) -> AsyncIterator[w.PullResponse]:
        self.asked += 1
        if self.asked == 2:
            self.asked_twice.set()
        answer = self.answers.pop(0) if self.answers else len(self.parts)
        if isinstance(answer, grpc.StatusCode):
            await context.abort(answer, "told to")
        if isinstance(answer, asyncio.Event):
            yield self.parts[0]
            answer.set()
            await asyncio.Event().wait()
        for part in self.parts[:answer]:
            yield part
        if answer < len(self.parts):
            await context.abort(grpc.StatusCode.UNAVAILABLE, "died")


@contextlib.asynccontextmanager
async def serving(peer: Peer) -> AsyncIterator[str]:
    server = aio.server()
    worker_pb2_grpc.add_WeightServiceServicer_to_server(peer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


@dataclass(frozen=True)
class Given:
    """What a source gives, and what it samples."""

    header: w.WeightsHeader
    data: bytes
    version: int
    sampled: tuple[list[int], list[float]]

    def parts(self, size_bytes: int) -> list[w.PullResponse]:
        pieces = [self.data[at : at + size_bytes] for at in range(0, len(self.data), size_bytes)]
        return [w.PullResponse(header=self.header), *(w.PullResponse(data=piece) for piece in pieces)]


@pytest.fixture(scope="module", name="given")
def given_fixture(tmp_path_factory: pytest.TempPathFactory) -> Given:
    async def ask() -> Given:
        async with cluster(tmp_path_factory.mktemp("source")) as c:
            version = await policy(c)
            parts = await parts_of(stream(c.channel, "policy", version))
            data = b"".join(part.data for part in parts)
            return Given(parts[0].header, data, version, await sampled(c, "policy", version))

    return asyncio.run(ask())


@contextlib.asynccontextmanager
async def with_peer(
    directory: Path, given: Given, *answers: Any, **changes: Any
) -> AsyncIterator[tuple[Cluster, Peer, str]]:
    """A worker with a model to fill, on its device; and a peer that has weights for it, in eight pieces."""
    peer = Peer(given.parts(WEIGHTS_BYTES // 8), *answers)
    async with serving(peer) as address, cluster(directory, **changes) as c:
        await rollouts(c)
        await c.orders.ok(swap_weights=swap("rollouts"))
        yield c, peer, address


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses that no test needs to wait for, and patience that a slow machine does not wear out."""
    monkeypatch.setattr(weight_pull, "_FIRST_PAUSE_S", 0.005)
    monkeypatch.setattr(weight_pull, "_LONGEST_PAUSE_S", 0.02)
    monkeypatch.setattr(weight_pull, "PATIENCE_S", 600.0)
    monkeypatch.setattr(weight_pull, "UNANSWERED_PATIENCE_S", 600.0)


async def test_a_torn_stream_is_asked_for_again_from_its_beginning(tmp_path: Path, given: Given) -> None:
    unavailable = grpc.StatusCode.UNAVAILABLE
    async with with_peer(tmp_path, given, unavailable, 0, 1, 4, unavailable) as (c, peer, address):
        await c.orders.ok(run_call=pull(address, given.version))
        assert peer.asked == 6
        assert await sampled(c, "rollouts", 1) == given.sampled


async def test_a_peer_that_stays_dead_costs_nothing_but_the_pull(
    tmp_path: Path, given: Given, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_pull, "PATIENCE_S", 0.2)
    async with with_peer(tmp_path, given, *[4] * 100) as (c, peer, address):
        before = await sampled(c, "rollouts", 0)
        report = await c.orders.do(run_call=pull(address, given.version))
        assert reason(report) == "PULL_FAILED"
        assert "died" in report.finished.error.message
        assert peer.asked > 1
        status = await held(c, "rollouts")
        assert (status.state_lost, status.weights_version, status.applied_sequence) == (False, 0, 0)
        await c.orders.ok(swap_weights=swap("rollouts"))
        assert await sampled(c, "rollouts", 0) == before
        peer.answers.clear()
        await c.orders.ok(run_call=pull(address, given.version))
        assert await sampled(c, "rollouts", 1) == given.sampled


async def test_where_nobody_answers_the_controller_soon_hears_so(
    tmp_path: Path, given: Given, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It knows when the source's worker is back, and at which address; a source that answers is waited for longer."""
    monkeypatch.setattr(weight_pull, "UNANSWERED_PATIENCE_S", 0.1)
    async with with_peer(tmp_path, given, *[1] * 30) as (c, peer, address):
        await c.orders.ok(run_call=pull(address, given.version))
        assert peer.asked == 31
        peer.answers += [grpc.StatusCode.UNAVAILABLE] * 100
        report = await c.orders.do(run_call=pull(address, given.version, 2))
        assert reason(report) == "PULL_FAILED"
        assert "nobody answers" in report.finished.error.message
        await c.orders.ok(swap_weights=swap("rollouts"))
        assert await sampled(c, "rollouts", 1) == given.sampled


async def test_with_no_memory_to_spare_a_broken_pull_costs_the_state_and_says_so(
    tmp_path: Path, given: Given, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_pull, "PATIENCE_S", 0.1)
    async with with_peer(tmp_path, given, *[4] * 100, host_state_bytes=WEIGHTS_BYTES) as (c, peer, address):
        report = await c.orders.do(run_call=pull(address, given.version))
        assert reason(report) == "PULL_FAILED"
        (status,) = report.deployments
        assert (status.state_lost, status.host_image) == (True, False)
        assert reason(await c.orders.do(run_call=call("rollouts", greedy()))) == "STATE_LOST"
        peer.answers.clear()
        await c.orders.ok(run_call=pull(address, given.version))
        assert await sampled(c, "rollouts", 1) == given.sampled


async def test_a_flipped_bit_is_found_before_the_first_token(tmp_path: Path, given: Given) -> None:
    async with with_peer(tmp_path, given) as (c, peer, address):
        good = peer.parts[1]
        data = bytearray(good.data)
        data[100] ^= 4
        peer.parts[1] = w.PullResponse(data=bytes(data))
        report = await c.orders.do(run_call=pull(address, given.version))
        assert reason(report) == "HOST_STATE_CORRUPT"
        (status,) = report.deployments
        assert status.state_lost
        assert reason(await c.orders.do(run_call=call("rollouts", greedy()))) == "STATE_LOST"
        peer.parts[1] = good
        await c.orders.ok(run_call=pull(address, given.version))
        assert await sampled(c, "rollouts", 1) == given.sampled


async def test_a_stream_that_is_not_what_it_says_changes_nothing(tmp_path: Path, given: Given) -> None:
    async with with_peer(tmp_path, given) as (c, peer, address):
        header, *pieces = parts = peer.parts
        larger = w.PullResponse()
        larger.CopyFrom(header)
        larger.header.size_bytes += 1
        for wrong, expected in (
            ([*parts, w.PullResponse(data=b"x")], "PULL_FAILED"),
            ([*parts, header], "PULL_FAILED"),
            ([larger, *pieces], "INVALID_ARGUMENT"),
            (pieces, "CONDITIONS_DIFFER"),
        ):
            peer.parts = wrong
            assert reason(await c.orders.do(run_call=pull(address, given.version))) == expected
            assert not (await held(c, "rollouts")).state_lost
        peer.parts = parts
        await c.orders.ok(run_call=pull(address, given.version))
        assert await sampled(c, "rollouts", 1) == given.sampled


async def test_abort_ends_a_pull_whose_peer_says_nothing_more(tmp_path: Path, given: Given) -> None:
    hanging = asyncio.Event()
    async with with_peer(tmp_path, given, hanging) as (c, _, address):
        order = pull(address, given.version)
        running = await c.orders.send(run_call=order)
        await hanging.wait()
        await c.orders.ok(abort=w.AbortOrder(call=order.call))
        assert reason(await c.orders.finished(running)) == "CANCELLED"
        await c.orders.ok(swap_weights=swap("rollouts"))
        await sampled(c, "rollouts", 0)
        await c.orders.ok(run_call=pull(address, given.version))
        assert await sampled(c, "rollouts", 1) == given.sampled


async def test_abort_ends_a_pull_that_waits_to_ask_again(tmp_path: Path, given: Given) -> None:
    async with with_peer(tmp_path, given, *[grpc.StatusCode.UNAVAILABLE] * 10_000) as (c, peer, address):
        order = pull(address, given.version)
        running = await c.orders.send(run_call=order)
        await peer.asked_twice.wait()
        await c.orders.ok(abort=w.AbortOrder(call=order.call))
        assert reason(await c.orders.finished(running)) == "CANCELLED"
        await c.orders.ok(swap_weights=swap("rollouts"))
        await sampled(c, "rollouts", 0)


async def test_a_worker_that_stops_while_it_pulls_hands_the_call_back(tmp_path: Path, given: Given) -> None:
    hanging = asyncio.Event()
    async with with_peer(tmp_path, given, hanging) as (c, _, address):
        running = await c.orders.send(run_call=pull(address, given.version))
        await hanging.wait()
        c.daemon.stop()
        assert reason(await c.orders.finished(running)) == "SHUTTING_DOWN"


async def test_an_engine_that_dies_as_the_weights_come_onto_the_device_costs_the_state(tmp_path: Path) -> None:
    flag = tmp_path / "once"
    config = fake_config({"function": "swap_in", "fault": "crash", "flag_file": str(flag)})
    async with two(tmp_path) as (trainer, sampler):
        version = await policy(trainer, config_json=config)
        await rollouts(sampler, config_json=config)
        flag.touch()
        report = await sampler.orders.do(run_call=pull(at(trainer), version))
        assert reason(report) == "ENGINE_DIED"
        assert (await held(sampler, "rollouts")).state_lost
        await sampler.orders.ok(run_call=pull(at(trainer), version))
        assert await sampled(sampler, "rollouts", 1) == await sampled(trainer, "policy", version)


class HalfwayPeer(Peer):
    """Gives half of the weights, and the rest when it may."""

    def __init__(self, parts: Sequence[w.PullResponse]) -> None:
        super().__init__(parts)
        self.halfway, self.go_on = asyncio.Event(), asyncio.Event()

    async def Pull(self, request: w.PullRequest, context: Any) -> AsyncIterator[w.PullResponse]:
        for part in self.parts[:5]:
            yield part
        self.halfway.set()
        await self.go_on.wait()
        for part in self.parts[5:]:
            yield part


async def test_an_engine_that_dies_while_the_weights_come_costs_no_state(tmp_path: Path, given: Given) -> None:
    peer = HalfwayPeer(given.parts(WEIGHTS_BYTES // 8))
    async with serving(peer) as address, cluster(tmp_path) as c:
        await rollouts(c)
        await c.orders.ok(swap_weights=swap("rollouts"))
        before = await sampled(c, "rollouts", 0)
        running = await c.orders.send(run_call=pull(address, given.version))
        await peer.halfway.wait()
        engine = c.daemon._host.deployment("rollouts").attached
        assert engine is not None
        os.kill(engine.pid, signal.SIGKILL)
        await engine.wait_exit()
        peer.go_on.set()
        assert reason(await c.orders.finished(running)) == "ENGINE_DIED"
        assert not (await held(c, "rollouts")).state_lost
        await c.orders.ok(swap_weights=swap("rollouts"))
        assert await sampled(c, "rollouts", 0) == before


async def test_an_engine_that_kept_too_much_is_replaced_before_the_pull(tmp_path: Path) -> None:
    leaking = fake_config({"function": "generate", "fault": "leak", "leak_bytes": 48 * 2**20})
    async with (
        cluster(tmp_path / "a", name="trainer") as trainer,
        cluster(tmp_path / "b", name="sampler", residue_bytes=32 * 2**20) as sampler,
    ):
        version = await policy(trainer, config_json=leaking)
        await rollouts(sampler, config_json=leaking)
        await sampler.orders.ok(swap_weights=swap("rollouts"))
        await sampled(sampler, "rollouts", 0)
        await sampler.orders.ok(run_call=pull(at(trainer), version))
        assert (await sampler.status()).tiers.engines_replaced == 1


@pytest.mark.parametrize("code", [grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.UNAUTHENTICATED])
async def test_a_peer_that_will_always_refuse_is_asked_once(
    tmp_path: Path, given: Given, code: grpc.StatusCode
) -> None:
    async with with_peer(tmp_path, given, code, code) as (c, peer, address):
        report = await c.orders.do(run_call=pull(address, given.version))
        assert reason(report) == "PULL_REFUSED"
        assert code.name in report.finished.error.message
        assert peer.asked == 1
