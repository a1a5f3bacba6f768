"""Rollout weights between two workers: real daemons with the numpy engine, over loopback gRPC.

Where a peer has to fail at a certain byte, a peer that does stands in for the source.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc import aio

from plexrl import wire
from plexrl.v1 import model_pb2 as m
from plexrl.v1 import types_pb2 as t
from plexrl.v1 import worker_pb2 as w
from plexrl.v1 import worker_pb2_grpc
from plexrl_worker import weight_pull, weight_serving
from plexrl_worker.errors import VersionGone
from plexrl_worker.registration import reason_of
from tests.support.worker_daemon import (
    METADATA,
    STATE_BYTES,
    VOCAB_SIZE,
    Cluster,
    call,
    cluster,
    deploy,
    fake_config,
    forward_backward,
    load,
    optim_step,
    reason,
    save,
    score,
    swap,
    sync,
    tiers,
    train,
)

WEIGHTS_BYTES = 4 * VOCAB_SIZE**2
ROLLOUT = "rollout_weights"
# Room for two states, on the device and in host memory; others lie on disk.
TIGHT = {"device_state_bytes": 2 * STATE_BYTES, "host_state_bytes": 2 * STATE_BYTES + 4096}


def greedy() -> t.CallSpec:
    sampling = t.SamplingParams(n=1, temperature=0.0, max_tokens=8, seed=1, logprobs=True)
    # What comes after these tokens is what `train` changes.
    return t.CallSpec(generate=t.GenerateSpec(prompts=wire.token_batch([[1], [2], [4]]), sampling=sampling))


async def sampled(c: Cluster, model_id: str, version: int) -> tuple[list[int], list[float]]:
    """Greedy tokens of a model on the device, and their log-probabilities to the last bit."""
    report = await c.orders.ok(run_call=call(model_id, greedy(), weights_version=version))
    result = report.finished.result.generate
    assert result.weights_version == version
    return wire.batch_arrays(result.completions)[0].tolist(), wire.float32s(result.logprobs).tolist()


async def policy(c: Cluster, model_id: str = "policy", *, steps: int = 2, **fields: Any) -> int:
    """A policy on the device whose rollout weights the device alone has; returns their version."""
    await c.orders.ok(deploy=deploy(model_id, role=m.MODEL_ROLE_POLICY, **fields))
    await c.orders.ok(swap_weights=swap(model_id))
    return await train(c.orders, model_id, 1, steps)


async def rollouts(c: Cluster, model_id: str = "rollouts", **fields: Any) -> None:
    """A model that is sampled alone, parked; its own weights are others than the policy's."""
    await c.orders.ok(deploy=deploy(model_id, role=m.MODEL_ROLE_ROLLOUT, **({"seed": 9} | fields)))


def pull(
    address: str, version: int, sequence: int = 1, model_id: str = "rollouts", source: str = "policy", **fields: Any
) -> w.RunCallOrder:
    spec = t.LoadCheckpointSpec(rollout=t.RolloutSource(model_id=source))
    weights = w.WeightSource(address=address, model_id=source, weights_version=version)
    return call(model_id, t.CallSpec(load_checkpoint=spec), sequence, weight_source=weights, **fields)


def at(c: Cluster) -> str:
    return c.daemon.server.address


@contextlib.asynccontextmanager
async def two(directory: Path, **changes: Any) -> AsyncIterator[tuple[Cluster, Cluster]]:
    """A worker to train on and one to sample on."""
    async with (
        cluster(directory / "trainer", name="trainer", **changes) as trainer,
        cluster(directory / "sampler", name="sampler") as sampler,
    ):
        yield trainer, sampler


async def held(c: Cluster, model_id: str) -> Any:
    return next(d for d in (await c.status()).deployments if d.model_id == model_id)


async def test_a_pulled_version_samples_as_the_policy_does_on_the_other_worker(tmp_path: Path) -> None:
    async with two(tmp_path) as (trainer, sampler):
        version = await policy(trainer)
        await rollouts(sampler)
        await sampler.orders.ok(swap_weights=swap("rollouts"))
        before = await sampled(sampler, "rollouts", 0)
        result = (await sampler.orders.ok(run_call=pull(at(trainer), version))).finished.result.load_checkpoint
        assert (result.weights_version, result.step, result.source_version) == (1, 0, version)
        expected = await sampled(trainer, "policy", version)
        assert await sampled(sampler, "rollouts", 1) == expected != before
        status = await held(sampler, "rollouts")
        assert tiers(status) == {ROLLOUT: (t.TIER_DEVICE, False)}
        assert (status.weights_version, status.applied_sequence) == (1, 1)
        # Parked and back it is the same: its host image has it, and nothing had to be copied there.
        parked = await sampler.orders.ok(swap_weights=swap("", "rollouts"))
        assert [interval.moved_bytes for interval in parked.intervals] == [0]
        await sampler.orders.ok(swap_weights=swap("rollouts"))
        assert await sampled(sampler, "rollouts", 1) == expected

        newer = await train(trainer.orders, "policy", version + 1)
        await sampler.orders.ok(run_call=pull(at(trainer), newer, 2))
        assert await sampled(sampler, "rollouts", 2) == await sampled(trainer, "policy", newer) != expected
        assert reason(await sampler.orders.do(run_call=call("rollouts", greedy(), weights_version=1))) == "VERSION_GONE"


async def test_of_a_policy_on_its_device_the_rollout_weights_alone_are_written_back(tmp_path: Path) -> None:
    """And it goes on as one that was never asked does, through its host image too."""
    async with two(tmp_path, device_state_bytes=2 * STATE_BYTES) as (trainer, sampler):
        undisturbed = await policy(trainer, "undisturbed")
        await trainer.orders.ok(run_call=call("undisturbed", forward_backward(), undisturbed + 1))
        version = await policy(trainer)
        await trainer.orders.ok(run_call=call("policy", forward_backward(), version + 1))
        await rollouts(sampler)
        await sampler.orders.ok(run_call=pull(at(trainer), version))
        residency = tiers(await held(trainer, "policy"))
        assert {tier for tier, _ in residency.values()} == {t.TIER_DEVICE}
        assert {name for name, (_, dirty) in residency.items() if not dirty} == {ROLLOUT}
        outcomes = []
        for model_id in ("undisturbed", "policy", "undisturbed"):
            await trainer.orders.ok(swap_weights=swap(model_id))
        for model_id in ("undisturbed", "policy"):
            await trainer.orders.ok(swap_weights=swap(model_id))
            await trainer.orders.ok(run_call=call(model_id, optim_step(), version + 2))
            await trainer.orders.ok(run_call=call(model_id, sync(), version + 3))
            outcomes.append(await sampled(trainer, model_id, version + 3))
        assert outcomes[0] == outcomes[1]


async def test_an_engine_that_dies_after_weights_were_given_takes_the_state_and_offers_no_torn_image(
    tmp_path: Path,
) -> None:
    async with two(tmp_path) as (trainer, sampler):
        version = await policy(trainer)
        await rollouts(sampler)
        await sampler.orders.ok(run_call=pull(at(trainer), version))
        os.kill((await trainer.status()).engines[0].pid, signal.SIGKILL)
        await trainer.orders.report(lambda report: any(d.state_lost for d in report.deployments))
        lost = await held(trainer, "policy")
        assert (lost.state_lost, lost.host_image) == (True, False)
        report = await sampler.orders.do(run_call=pull(at(trainer), version, 2, after_sequence=1))
        assert reason(report) == "PULL_FAILED"
        assert "STATE_LOST" in report.finished.error.message
        # The parked weights are still good.
        await sampler.orders.ok(swap_weights=swap("rollouts"))
        await sampled(sampler, "rollouts", 1)


async def test_a_parked_policy_gives_its_weights_while_another_has_the_device(tmp_path: Path) -> None:
    slow = fake_config({"function": "score", "fault": "slow", "delay_s": 60}, salt=1)
    async with two(tmp_path) as (trainer, sampler):
        version = await policy(trainer)
        expected = await sampled(trainer, "policy", version)
        await trainer.orders.ok(deploy=deploy("slow", config_json=slow))
        await trainer.orders.ok(swap_weights=swap("slow", "policy"))
        running = await trainer.orders.send(run_call=call("slow", score(), 1))
        await trainer.orders.report(lambda report: report.order_id == running and report.HasField("started"))
        await rollouts(sampler)
        await sampler.orders.ok(run_call=pull(at(trainer), version))
        assert await sampled(sampler, "rollouts", 1) == expected
        await trainer.orders.ok(drop=w.DropOrder(model_id="slow"))


async def test_a_policy_whose_state_lies_on_disk_gives_its_weights(tmp_path: Path) -> None:
    async with two(tmp_path, **TIGHT) as (trainer, sampler):
        version = await policy(trainer)
        expected = await sampled(trainer, "policy", version)
        for model_id in ("second", "third"):
            await trainer.orders.ok(deploy=deploy(model_id))
            await trainer.orders.ok(swap_weights=swap(model_id))
        assert {tier for tier, _ in tiers(await held(trainer, "policy")).values()} == {t.TIER_DISK}
        await rollouts(sampler)
        await sampler.orders.ok(run_call=pull(at(trainer), version))
        assert await sampled(sampler, "rollouts", 1) == expected


async def test_both_may_be_on_one_worker(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        version = await policy(c)
        expected = await sampled(c, "policy", version)
        await rollouts(c)
        await c.orders.ok(run_call=pull(at(c), version))
        assert await sampled(c, "rollouts", 1) == expected
        await c.orders.ok(swap_weights=swap("policy", "rollouts"))
        assert await sampled(c, "policy", version) == expected


async def test_a_lost_state_is_replaced_by_a_pull_and_by_the_base(tmp_path: Path) -> None:
    async with two(tmp_path) as (trainer, sampler):
        version = await policy(trainer)
        await rollouts(sampler)
        await sampler.orders.ok(run_call=call("rollouts", load(), 1))
        os.kill((await sampler.status()).engines[0].pid, signal.SIGKILL)
        await sampler.orders.report(lambda report: any(d.state_lost for d in report.deployments))
        await sampler.orders.ok(run_call=pull(at(trainer), version, 2))
        assert not (await held(sampler, "rollouts")).state_lost
        assert await sampled(sampler, "rollouts", 2) == await sampled(trainer, "policy", version)
        await sampler.orders.ok(run_call=call("rollouts", load(), 3))
        assert await sampled(sampler, "rollouts", 3) != await sampled(trainer, "policy", version)


async def test_two_jobs_that_pull_crosswise_both_get_there(tmp_path: Path) -> None:
    """Each pull holds the device that the other one's source is on, with weights that nothing else has."""
    async with cluster(tmp_path / "a", name="a") as a, cluster(tmp_path / "b", name="b") as b:
        workers = ((a, b), (b, a))
        version = 0
        for c, _ in workers:
            await rollouts(c)
            version = await policy(c)
        ends = [other.orders.ok(run_call=pull(at(c), version)) for c, other in workers]
        async with asyncio.timeout(20):
            await asyncio.gather(*ends)
        for c, _ in workers:
            assert tiers(await held(c, "rollouts")) == {ROLLOUT: (t.TIER_DEVICE, False)}


# What is refused.


async def test_a_version_that_is_not_there_any_more_is_said_and_nothing_changes(tmp_path: Path) -> None:
    async with two(tmp_path) as (trainer, sampler):
        version = await policy(trainer)
        await rollouts(sampler)
        for asked in (version - 1, version + 1):
            report = await sampler.orders.do(run_call=pull(at(trainer), asked))
            assert reason(report) == "VERSION_GONE"
            assert str(asked) in report.finished.error.message
        await sampler.orders.ok(swap_weights=swap("rollouts"))
        await sampled(sampler, "rollouts", 0)
        await sampler.orders.ok(run_call=pull(at(trainer), version))


async def test_a_source_that_is_not_there_is_said_and_nothing_changes(tmp_path: Path) -> None:
    async with two(tmp_path) as (trainer, sampler):
        await rollouts(sampler)
        report = await sampler.orders.do(run_call=pull(at(trainer), 1))
        assert reason(report) == "PULL_FAILED"
        assert "NOT_DEPLOYED" in report.finished.error.message
        assert not (await held(sampler, "rollouts")).state_lost


async def test_models_that_are_not_made_alike_are_refused_with_what_differs(tmp_path: Path) -> None:
    async with two(tmp_path) as (trainer, sampler):
        version = await policy(trainer)
        await rollouts(sampler, config_json=fake_config(salt=1))
        report = await sampler.orders.do(run_call=pull(at(trainer), version))
        assert reason(report) == "CONDITIONS_DIFFER"
        assert "model configuration" in report.finished.error.message
        await sampler.orders.ok(swap_weights=swap("rollouts"))
        await sampled(sampler, "rollouts", 0)


async def test_roles_have_their_functions(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        await rollouts(c)
        await c.orders.ok(swap_weights=swap("rollouts"))
        for spec in (score(), forward_backward(), optim_step(), sync(), save(), load("0" * 32)):
            report = await c.orders.do(run_call=call("rollouts", spec, 1, new_checkpoint_id="0" * 32))
            assert reason(report) == "INVALID_ARGUMENT", spec
            assert "ROLLOUT" in report.finished.error.message
        version = await policy(c)
        report = await c.orders.do(run_call=pull(at(c), 0, version + 1, model_id="policy", source="rollouts"))
        assert reason(report) == "INVALID_ARGUMENT"
        assert "not of role ROLLOUT" in report.finished.error.message
        await sampled(c, "policy", version)


async def test_what_cannot_be_a_source_is_refused(tmp_path: Path) -> None:
    no_source = t.LoadCheckpointSpec(rollout=t.RolloutSource(model_id="policy"))
    other_version = pull("127.0.0.1:1", 1)
    other_version.spec.load_checkpoint.rollout.weights_version = 2
    orders = [
        pull("", 1),
        pull("unix:/tmp/socket", 1),
        pull("dns:///127.0.0.1:1", 1),
        pull("10.0.0.1:7001", 1),
        pull("127.0.0.1:1", 1, source="rollouts"),
        call("rollouts", t.CallSpec(load_checkpoint=no_source), 1),
        other_version,
    ]
    async with cluster(tmp_path) as c:
        await rollouts(c)
        await c.orders.ok(swap_weights=swap("rollouts"))
        for order in orders:
            report = await c.orders.do(run_call=order)
            assert reason(report) == "INVALID_ARGUMENT", order
            assert "weight_source" in report.finished.error.message
        await sampled(c, "rollouts", 0)


# The source's side of the wire.


def stream(c: Cluster, model_id: str, version: int, metadata: Any = METADATA) -> Any:
    request = w.PullRequest(model_id=model_id, weights_version=version)
    return worker_pb2_grpc.WeightServiceStub(c.channel).Pull(request, metadata=metadata)


async def parts_of(stream: Any) -> list[w.PullResponse]:
    return [part async for part in stream]


@pytest.fixture(name="small_pieces")
def small_pieces_fixture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_serving, "PIECE_BYTES", 512)


@pytest.mark.usefixtures("small_pieces")
async def test_a_swap_does_not_wait_for_who_reads_and_the_stream_goes_on(tmp_path: Path) -> None:
    async with cluster(tmp_path, **TIGHT) as c:
        version = await policy(c)
        expected = await parts_of(stream(c, "policy", version))
        assert len(expected) == 1 + WEIGHTS_BYTES // 512
        slow = stream(c, "policy", version)
        parts = [await slow.read() for _ in range(3)]
        # The policy leaves the device, then host memory.
        for model_id in ("second", "third"):
            await c.orders.ok(deploy=deploy(model_id))
            await c.orders.ok(swap_weights=swap(model_id))
        while (part := await slow.read()) is not aio.EOF:
            parts.append(part)
        assert parts == expected


async def test_a_version_that_goes_while_it_is_read_ends_the_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces that lie in the connection come; the weights are large enough that they do not all."""
    monkeypatch.setattr(weight_serving, "PIECE_BYTES", 4)
    async with cluster(tmp_path) as c:
        version = await policy(c)
        await parts_of(stream(c, "policy", version))
        serving = c.daemon._weights.read("policy", version)
        header = await anext(serving)
        assert header.header.size_bytes == WEIGHTS_BYTES
        await anext(serving)
        await c.orders.ok(run_call=call("policy", sync(), version + 1))
        with pytest.raises(VersionGone):
            await anext(serving)


async def test_a_source_says_why_not(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        version = await policy(c, steps=1)
        for model_id, asked, code, why in (
            ("nobody", 0, grpc.StatusCode.NOT_FOUND, "NOT_DEPLOYED"),
            ("policy", version + 1, grpc.StatusCode.FAILED_PRECONDITION, "VERSION_GONE"),
        ):
            with pytest.raises(aio.AioRpcError) as caught:
                await parts_of(stream(c, model_id, asked))
            assert (caught.value.code(), reason_of(caught.value)) == (code, why)


async def test_damage_on_disk_is_found_before_a_byte_is_given(tmp_path: Path) -> None:
    async with cluster(tmp_path, **TIGHT) as c:
        version = await policy(c)
        for model_id in ("second", "third"):
            await c.orders.ok(deploy=deploy(model_id))
            await c.orders.ok(swap_weights=swap(model_id))
        for file in (tmp_path / "state" / "parked").glob("*.state"):
            content = bytearray(file.read_bytes())
            content[100] ^= 1
            file.write_bytes(content)
        both = await asyncio.gather(*(parts_of(stream(c, "policy", version)) for _ in range(2)), return_exceptions=True)
        for error in both:
            assert isinstance(error, aio.AioRpcError)
            assert (error.code(), reason_of(error)) == (grpc.StatusCode.FAILED_PRECONDITION, "STATE_LOST")
        assert (await held(c, "policy")).state_lost


# Peers that fail.


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
            parts = await parts_of(stream(c, "policy", version))
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


@pytest.mark.parametrize("change", ["longer", "size", "no header"])
async def test_a_stream_that_is_not_what_it_says_changes_nothing(tmp_path: Path, given: Given, change: str) -> None:
    async with with_peer(tmp_path, given) as (c, peer, address):
        parts = list(peer.parts)
        match change:
            case "longer":
                peer.parts.append(w.PullResponse(data=b"x"))
            case "size":
                peer.parts[0] = w.PullResponse()
                peer.parts[0].CopyFrom(parts[0])
                peer.parts[0].header.size_bytes += 1
            case "no header":
                del peer.parts[0]
        report = await c.orders.do(run_call=pull(address, given.version))
        assert reason(report) in ("PULL_FAILED", "INVALID_ARGUMENT", "CONDITIONS_DIFFER")
        assert not (await held(c, "rollouts")).state_lost
        peer.parts = parts
        await c.orders.ok(run_call=pull(address, given.version))
        assert await sampled(c, "rollouts", 1) == given.sampled


async def test_weights_that_are_all_zero_need_no_bytes(tmp_path: Path) -> None:
    table = np.zeros((VOCAB_SIZE, VOCAB_SIZE), np.float32)
    folder = tmp_path / "zeros"
    folder.mkdir()
    from safetensors.numpy import save_file

    save_file({"table": table}, folder / "model.safetensors")
    (folder / "config.json").write_text(fake_config())
    base = m.ModelBase(catalogue="zeros")
    async with cluster(tmp_path / "a", catalogue={"zeros": folder}) as a, cluster(tmp_path / "b") as b:
        await a.orders.ok(deploy=deploy("policy", base=base))
        parts = await parts_of(stream(a, "policy", 0))
        assert (len(parts), parts[0].header.is_zero, parts[0].header.size_bytes) == (1, True, 0)
        await rollouts(b)
        await b.orders.ok(run_call=pull(at(a), 0))
        await a.orders.ok(swap_weights=swap("policy"))
        assert await sampled(b, "rollouts", 1) == await sampled(a, "policy", 0)


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


async def test_abort_ends_a_pull_that_waits_to_ask_again(
    tmp_path: Path, given: Given, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_pull, "PATIENCE_S", 600.0)
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


async def test_an_engine_that_dies_as_it_writes_weights_back_is_said_to_who_asked(tmp_path: Path) -> None:
    flag = tmp_path / "once"
    config = fake_config({"function": "write_back", "fault": "crash", "flag_file": str(flag)})
    async with cluster(tmp_path) as c:
        version = await policy(c, config_json=config)
        flag.touch()
        with pytest.raises(aio.AioRpcError) as caught:
            await parts_of(stream(c, "policy", version))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        await c.orders.report(lambda report: any(d.state_lost for d in report.deployments))
        with pytest.raises(aio.AioRpcError) as caught:
            await parts_of(stream(c, "policy", version))
        assert reason_of(caught.value) == "STATE_LOST"


# Who may ask.


async def test_a_worker_of_another_cluster_is_given_nothing(tmp_path: Path) -> None:
    async with two(tmp_path) as (trainer, _):
        version = await policy(trainer)
        with pytest.raises(aio.AioRpcError) as caught:
            await parts_of(stream(trainer, "policy", version, metadata=(("authorization", "Bearer other"),)))
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
