"""Rollout weights between two workers: real daemons with the numpy engine, over loopback gRPC.

Where a peer has to fail at a certain byte, a peer that does stands in for the source.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
from pathlib import Path

import grpc
import numpy as np
import pytest
from grpc import aio
from safetensors.numpy import save_file

from plexrl.v1 import model_pb2 as m
from plexrl.v1 import types_pb2 as t
from plexrl.v1 import worker_pb2 as w
from plexrl_worker import weight_pull, weight_serving
from plexrl_worker.channel import open_channel
from plexrl_worker.errors import VersionGone
from plexrl_worker.journal import Journal
from plexrl_worker.registration import reason_of
from plexrl_worker.settings import TlsFiles
from tests.support.rollout_weights import (
    ROLLOUT,
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
from tests.support.worker_daemon import (
    STATE_BYTES,
    VOCAB_SIZE,
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

ISSUE = Path(__file__).parents[2] / "deploy" / "tls" / "issue.sh"
# Room for two states, on the device and in host memory; others lie on disk.
TIGHT = {"device_state_bytes": 2 * STATE_BYTES, "host_state_bytes": 2 * STATE_BYTES + 4096}


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


async def test_weights_that_are_all_zero_need_no_bytes(tmp_path: Path) -> None:
    table = np.zeros((VOCAB_SIZE, VOCAB_SIZE), np.float32)
    folder = tmp_path / "zeros"
    folder.mkdir()
    save_file({"table": table}, folder / "model.safetensors")
    (folder / "config.json").write_text(fake_config())
    base = m.ModelBase(catalogue="zeros")
    async with cluster(tmp_path / "a", catalogue={"zeros": folder}) as a, cluster(tmp_path / "b") as b:
        await a.orders.ok(deploy=deploy("policy", base=base))
        parts = await parts_of(stream(a.channel, "policy", 0))
        assert (len(parts), parts[0].header.is_zero, parts[0].header.size_bytes) == (1, True, 0)
        await rollouts(b)
        await b.orders.ok(run_call=pull(at(a), 0))
        await a.orders.ok(swap_weights=swap("policy"))
        assert await sampled(b, "rollouts", 1) == await sampled(a, "policy", 0)


# What is refused.


async def test_what_the_source_has_not_is_said_and_nothing_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_pull, "PATIENCE_S", 0.1)
    async with two(tmp_path) as (trainer, sampler):
        version = await policy(trainer)
        await rollouts(sampler)
        await rollouts(sampler, "other", config_json=fake_config(salt=1))
        for order, expected, words in (
            (pull(at(trainer), version - 1), "VERSION_GONE", str(version - 1)),
            (pull(at(trainer), version + 1), "PULL_FAILED", str(version + 1)),
            (pull(at(trainer), 1, source="nobody"), "PULL_FAILED", "NOT_DEPLOYED"),
            (pull(at(trainer), version, model_id="other"), "CONDITIONS_DIFFER", "model configuration"),
        ):
            report = await sampler.orders.do(run_call=order)
            assert reason(report) == expected
            assert words in report.finished.error.message
        for model_id in ("rollouts", "other"):
            assert not (await held(sampler, model_id)).state_lost
            await sampler.orders.ok(swap_weights=swap(model_id))
            await sampled(sampler, model_id, 0)
            await sampler.orders.ok(swap_weights=swap("", model_id))
        await sampler.orders.ok(run_call=pull(at(trainer), version))


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
        other_version,
    ]
    async with cluster(tmp_path) as c:
        await rollouts(c)
        await c.orders.ok(swap_weights=swap("rollouts"))
        for order in orders:
            report = await c.orders.do(run_call=order)
            assert reason(report) == "INVALID_ARGUMENT", order
            assert "weight_source" in report.finished.error.message
        report = await c.orders.do(run_call=call("rollouts", t.CallSpec(load_checkpoint=no_source), 1))
        assert reason(report) == "VERSION_GONE"
        await sampled(c, "rollouts", 0)


# The source's side of the wire.


@pytest.fixture(name="small_pieces")
def small_pieces_fixture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_serving, "PIECE_BYTES", 512)


@pytest.mark.usefixtures("small_pieces")
async def test_a_swap_does_not_wait_for_who_reads_and_what_is_read_stays_the_same(tmp_path: Path) -> None:
    async with cluster(tmp_path, **TIGHT) as c:
        version = await policy(c)
        expected = await parts_of(stream(c.channel, "policy", version))
        assert len(expected) == 1 + WEIGHTS_BYTES // 512
        reading = c.daemon._weights.read("policy", version)
        parts = [await anext(reading) for _ in range(3)]
        # The policy leaves the device, then host memory.
        for model_id in ("second", "third"):
            await c.orders.ok(deploy=deploy(model_id))
            await c.orders.ok(swap_weights=swap(model_id))
            parts.append(await anext(reading))
        assert (await c.status()).tiers.spills > 0
        parts.extend([part async for part in reading])
        assert parts == expected


async def test_who_waits_for_the_device_hears_that_the_model_has_left_it(tmp_path: Path) -> None:
    """The device's holder may wait for a peer that waits for these very weights."""
    async with cluster(tmp_path) as c:
        version = await policy(c)
        host = c.daemon._host
        async with asyncio.timeout(20), host.device.lock:
            reading = asyncio.ensure_future(anext(c.daemon._weights.read("policy", version)))
            await asyncio.sleep(0)
            assert host.device.lock.wanted
            await host.park("policy", Journal())
            assert (await reading).header.size_bytes == WEIGHTS_BYTES


@pytest.mark.usefixtures("small_pieces")
async def test_a_version_that_goes_while_it_is_read_ends_the_stream(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        version = await policy(c)
        reading = c.daemon._weights.read("policy", version)
        for _ in range(2):
            await anext(reading)
        await c.orders.ok(run_call=call("policy", sync(), version + 1))
        with pytest.raises(VersionGone):
            await anext(reading)


async def test_a_source_says_why_not(tmp_path: Path) -> None:
    """G06: never another version than the one that is asked for."""
    async with cluster(tmp_path) as c:
        version = await policy(c, steps=1)
        for model_id, asked, code, why in (
            ("nobody", 0, grpc.StatusCode.NOT_FOUND, "NOT_DEPLOYED"),
            ("policy", version - 1, grpc.StatusCode.FAILED_PRECONDITION, "VERSION_GONE"),
            # Perhaps it is being restored, and will be there again.
            ("policy", version + 1, grpc.StatusCode.UNAVAILABLE, "SOURCE_BUSY"),
        ):
            with pytest.raises(aio.AioRpcError) as caught:
                await parts_of(stream(c.channel, model_id, asked))
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
        both = [parts_of(stream(c.channel, "policy", version)) for _ in range(2)]
        for error in await asyncio.gather(*both, return_exceptions=True):
            assert isinstance(error, aio.AioRpcError)
            assert (error.code(), reason_of(error)) == (grpc.StatusCode.FAILED_PRECONDITION, "STATE_LOST")
        assert (await held(c, "policy")).state_lost


async def test_an_engine_that_dies_as_it_writes_weights_back_is_said_to_who_asked(tmp_path: Path) -> None:
    flag = tmp_path / "once"
    config = fake_config({"function": "write_back", "fault": "crash", "flag_file": str(flag)})
    async with cluster(tmp_path) as c:
        version = await policy(c, config_json=config)
        flag.touch()
        with pytest.raises(aio.AioRpcError) as caught:
            await parts_of(stream(c.channel, "policy", version))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        await c.orders.report(lambda report: any(d.state_lost for d in report.deployments))
        with pytest.raises(aio.AioRpcError) as caught:
            await parts_of(stream(c.channel, "policy", version))
        assert reason_of(caught.value) == "STATE_LOST"


# Who may ask.


async def test_a_worker_of_another_cluster_is_given_nothing(tmp_path: Path) -> None:
    async with two(tmp_path) as (trainer, _):
        version = await policy(trainer)
        with pytest.raises(aio.AioRpcError) as caught:
            await parts_of(stream(trainer.channel, "policy", version, metadata=(("authorization", "Bearer other"),)))
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_workers_talk_mutual_tls_to_each_other(tmp_path: Path) -> None:
    """G23: a peer with a certificate of another authority, or none, is given nothing and gives nothing."""
    for folder, name in (("ours", "a"), ("ours", "b"), ("others", "c")):
        await asyncio.to_thread(
            subprocess.run,
            [str(ISSUE), str(tmp_path / folder), name, "127.0.0.1"],
            check=True,
            capture_output=True,
        )
    files = {
        name: TlsFiles(*(tmp_path / folder / file for file in (f"{name}.pem", f"{name}.key", "ca.pem")))
        for folder, name in (("ours", "a"), ("ours", "b"), ("others", "c"))
    }
    async with contextlib.AsyncExitStack() as stack:
        a, b, c = [
            await stack.enter_async_context(cluster(tmp_path / name, name=name, tls=files[name])) for name in files
        ]
        version = await policy(a)
        for stranger in (aio.insecure_channel(at(a)), open_channel(c.daemon.settings, at(a))):
            async with stranger:
                with pytest.raises(aio.AioRpcError) as caught:
                    await parts_of(stream(stranger, "policy", version))
                assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        await rollouts(b)
        await b.orders.ok(run_call=pull(at(a), version))
        assert await sampled(b, "rollouts", 1) == await sampled(a, "policy", version)
