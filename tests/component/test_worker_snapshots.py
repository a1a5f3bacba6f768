"""Automatic snapshots of a worker: written beside calls, committed by their hashes, restored bit for bit or refused."""

import asyncio
import json
import os
import signal
import threading
import time
import uuid
from pathlib import Path

import pytest

from plexrl.v1 import worker_pb2 as w
from plexrl_worker import image_writer
from plexrl_worker.snapshots import STATE_FILE
from plexrl_worker.wanted_lock import WantedLock
from tests.support.worker_daemon import (
    Cluster,
    call,
    cluster,
    deploy,
    fake_config,
    forward_backward,
    optim_step,
    reason,
    score,
    scores,
    swap,
    sync,
    train,
)


def slot(number: int, model_id: str = "m") -> str:
    return uuid.uuid5(uuid.NAMESPACE_OID, f"{model_id} {number}").hex


async def snapshot(cluster: Cluster, snapshot_id: str, model_id: str = "m") -> w.WrittenSnapshot:
    report = await cluster.orders.ok(snapshot=w.SnapshotOrder(model_id=model_id, snapshot_id=snapshot_id))
    return report.finished.snapshot


def restore(written: w.WrittenSnapshot, model_id: str = "m", **fields: object) -> w.DeployOrder:
    ref = w.SnapshotRef(snapshot_id=written.snapshot_id, manifest_sha256=written.manifest_sha256)
    return deploy(model_id, snapshot=ref, applied_sequence=written.sequence, **fields)  # type: ignore[arg-type]


async def trained(cluster: Cluster, model_id: str = "m") -> int:
    """A model on the device after two steps and with gradients accumulated; returns its sequence number."""
    await cluster.orders.ok(deploy=deploy(model_id))
    present = [d.model_id for d in (await cluster.status()).deployments if d.model_id != model_id]
    await cluster.orders.ok(swap_weights=swap(model_id, *present))
    sequence = await train(cluster.orders, model_id, 1, steps=2)
    await cluster.orders.ok(run_call=call(model_id, forward_backward(), sequence + 1))
    return sequence + 1


async def go_on(cluster: Cluster, model_id: str, after: int) -> list[float]:
    """Steps and syncs from a state, and what the model says then."""
    await cluster.orders.ok(run_call=call(model_id, optim_step(), after + 1))
    await cluster.orders.ok(run_call=call(model_id, sync(), after + 2))
    return await scores(cluster.orders, model_id, after + 3)


async def test_a_snapshot_of_a_model_on_the_device_is_restored_bit_for_bit_by_another_worker(tmp_path: Path) -> None:
    """G02, G21: gradients, optimizer and rollout weights are in it; the state goes on as the undisturbed one does."""
    shared = {"checkpoint_dir": tmp_path / "shared"}
    async with cluster(tmp_path / "a", name="a", **shared) as first:
        sequence = await trained(first)
        written = await snapshot(first, slot(0))
        assert (written.sequence, written.step, written.weights_version) == (sequence, 2, sequence - 1)
        expected = await go_on(first, "m", sequence)
        present = (await first.status()).deployments[0]
        assert present.applied_sequence == sequence + 3, "the model stayed on the device and went on"
    async with cluster(tmp_path / "b", name="b", **shared) as second:
        built = (await second.orders.ok(deploy=restore(written))).finished.deployed
        assert built.applied_sequence == sequence
        await second.orders.ok(swap_weights=swap("m"))
        assert await go_on(second, "m", sequence) == expected


async def test_a_parked_model_is_written_while_another_has_the_device(tmp_path: Path) -> None:
    async with cluster(tmp_path) as worker:
        sequence = await trained(worker)
        await worker.orders.ok(deploy=deploy("other", seed=2))
        await worker.orders.ok(swap_weights=swap("other", "m"))
        slow = deploy("slow", config_json=fake_config({"function": "score", "fault": "slow", "delay_s": 60}, salt=1))
        await worker.orders.ok(deploy=slow)
        await worker.orders.ok(swap_weights=swap("slow", "other"))
        running = await worker.orders.send(run_call=call("slow", score(), 1))
        written = await snapshot(worker, slot(0))
        assert written.sequence == sequence
        assert written.device_s == 0
        assert not any(report.order_id == running and report.HasField("finished") for report in worker.orders.reports)
        await worker.orders.ok(drop=w.DropOrder(model_id="slow"))


async def test_what_is_written_is_the_moment_between_two_calls_whatever_runs_beside_it(tmp_path: Path) -> None:
    async with cluster(tmp_path) as worker:
        sequence = await trained(worker)
        orders = [await worker.orders.send(snapshot=w.SnapshotOrder(model_id="m", snapshot_id=slot(0)))]
        last = await train(worker.orders, "m", sequence + 1, steps=5)
        written = (await worker.orders.finished(orders[0])).finished.snapshot
        assert sequence <= written.sequence <= last
        expected = await scores(worker.orders, "m", last + 1)
        await worker.orders.ok(deploy=restore(written))
        await worker.orders.ok(swap_weights=swap("m"))
        steps = [forward_backward(), optim_step(), sync()]
        for number in range(written.sequence + 1, last + 1):
            await worker.orders.ok(run_call=call("m", steps[(number - sequence - 1) % 3], number, replay=True))
        assert await scores(worker.orders, "m", last + 1) == expected


@pytest.mark.parametrize("to_spare", [True, False], ids=["memory to spare", "none"])
async def test_a_swap_that_wants_the_image_has_it_and_the_snapshot_is_of_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to_spare: bool
) -> None:
    from tests.support.worker_daemon import STATE_BYTES

    monkeypatch.setattr(image_writer, "PIECE_BYTES", 4096)
    moved: list[int] = []
    locks: list[WantedLock] = []
    armed, begun = threading.Event(), threading.Event()
    move_to, step, acquire = image_writer.ImageWriter.move_to, image_writer.ImageWriter.step, WantedLock.acquire

    def noted(self: image_writer.ImageWriter, fd: int) -> None:
        moved.append(fd)
        move_to(self, fd)

    def step_once_wanted(self: image_writer.ImageWriter) -> None:
        limit_s = time.monotonic() + 20
        if armed.is_set():
            begun.set()
        while armed.is_set() and not any(lock.wanted for lock in locks) and time.monotonic() < limit_s:
            time.sleep(0.005)
        armed.clear()
        step(self)

    async def acquire_noted(self: WantedLock) -> bool:
        locks.append(self)
        return bool(await acquire(self))

    monkeypatch.setattr(image_writer.ImageWriter, "move_to", noted)
    monkeypatch.setattr(image_writer.ImageWriter, "step", step_once_wanted)
    monkeypatch.setattr(WantedLock, "acquire", acquire_noted)
    async with cluster(tmp_path, host_state_bytes=(3 if to_spare else 2) * STATE_BYTES) as worker:
        sequence = await trained(worker)
        await worker.orders.ok(deploy=deploy("other", seed=2))
        # The first write brings the image up to date; of the second it is all that is needed.
        await snapshot(worker, slot(1))
        armed.set()
        order_id = await worker.orders.send(snapshot=w.SnapshotOrder(model_id="m", snapshot_id=slot(0)))
        # It has the image; only then comes what changes the state, so that the swap needs the image too.
        assert await asyncio.to_thread(begun.wait, 20)
        await worker.orders.ok(run_call=call("m", optim_step(), sequence + 1))
        await worker.orders.ok(swap_weights=swap("other", "m"))
        written = (await worker.orders.finished(order_id)).finished.snapshot
        assert written.sequence == sequence
        assert bool(moved) is to_spare
        await worker.orders.ok(swap_weights=swap("m", "other"))
        await worker.orders.ok(run_call=call("m", sync(), sequence + 2))
        expected = await scores(worker.orders, "m", sequence + 3)
        await worker.orders.ok(deploy=restore(written))
        await worker.orders.ok(swap_weights=swap("m"))
        assert await go_on(worker, "m", sequence) == expected


@pytest.mark.parametrize("damage", ["truncated", "flipped", "absent", "state", "manifest"])
async def test_a_damaged_snapshot_is_refused_and_the_one_before_is_used(tmp_path: Path, damage: str) -> None:
    """G15: a snapshot counts only with its hashed commit record."""
    async with cluster(tmp_path) as worker:
        sequence = await trained(worker)
        before = await snapshot(worker, slot(0))
        expected = await go_on(worker, "m", sequence)
        newest = await snapshot(worker, slot(1))
        directory = tmp_path / "checkpoints" / "snapshots" / slot(1)
        file = directory / "optimizer.bin"
        match damage:
            case "truncated":
                os.truncate(file, file.stat().st_size - 1)
            case "flipped":
                data = bytearray(file.read_bytes())
                data[len(data) // 2] ^= 1
                file.write_bytes(data)
            case "absent":
                file.unlink()
            case "state":
                state = json.loads((directory / STATE_FILE).read_text())
                (directory / STATE_FILE).write_text(json.dumps(state | {"optimizer_step": 7}))
            case "manifest":
                (directory / "checkpoint.json").write_text("{}")
        assert reason(await worker.orders.do(deploy=restore(newest))) == "CHECKPOINT_CORRUPT"
        await worker.orders.ok(deploy=restore(before))
        await worker.orders.ok(swap_weights=swap("m"))
        assert await go_on(worker, "m", sequence) == expected


async def test_another_number_of_threads_is_refused_with_both_numbers(tmp_path: Path) -> None:
    """The contract of bit-equality: one machine type, fixed thread counts."""
    async with cluster(tmp_path) as worker:
        await trained(worker)
        written = await snapshot(worker, slot(0))
    async with cluster(tmp_path, threads=2) as worker:
        report = await worker.orders.do(deploy=restore(written))
        assert reason(report) == "CONDITIONS_DIFFER"
        assert "number of threads was 1" in report.finished.error.message
        assert "here it is 2" in report.finished.error.message


async def test_the_same_id_is_replaced_and_an_older_manifest_of_it_refused(tmp_path: Path) -> None:
    async with cluster(tmp_path) as worker:
        sequence = await trained(worker)
        old = await snapshot(worker, slot(0))
        await go_on(worker, "m", sequence)
        new = await snapshot(worker, slot(0))
        assert new.manifest_sha256 != old.manifest_sha256
        assert reason(await worker.orders.do(deploy=restore(old))) == "CHECKPOINT_CORRUPT"
        await worker.orders.ok(deploy=restore(new))
        assert len(list((tmp_path / "checkpoints" / "snapshots").glob("*/"))) == 1


async def test_half_written_snapshots_are_swept_at_the_start(tmp_path: Path) -> None:
    """G15: what was begun and not committed does not count, and does not stay."""
    partial = tmp_path / "checkpoints" / "snapshots" / f"{slot(0)}.w0.partial"
    partial.mkdir(parents=True)
    (partial / "optimizer.bin").write_bytes(b"half")
    async with cluster(tmp_path) as worker:
        assert not partial.exists()
        written = w.WrittenSnapshot(snapshot_id=slot(0), manifest_sha256="0" * 64)
        assert reason(await worker.orders.do(deploy=restore(written))) == "CHECKPOINT_NOT_FOUND"


async def test_the_budget_takes_the_oldest_but_never_the_last_of_a_model(tmp_path: Path) -> None:
    """G16: the last one of a model never goes by itself; a full budget is said, and what was there stays."""
    async with cluster(tmp_path, snapshot_bytes=50_000) as worker:
        await trained(worker, "a")
        await snapshot(worker, slot(0, "a"), "a")  # 20 KiB: gradients, optimizer, weights, rollout
        await worker.orders.ok(run_call=call("a", score(), 8))
        newest = await snapshot(worker, slot(1, "a"), "a")
        await trained(worker, "b")
        await snapshot(worker, slot(0, "b"), "b")
        held = {path.name for path in (tmp_path / "checkpoints" / "snapshots").glob("*/")}
        assert held == {slot(1, "a"), slot(0, "b")}
        await trained(worker, "c")
        order = w.SnapshotOrder(model_id="c", snapshot_id=slot(0, "c"))
        refused = await worker.orders.do(snapshot=order)
        assert reason(refused) == "STORAGE_FAILED"
        assert "--snapshot-bytes" in refused.finished.error.message
        await worker.orders.ok(deploy=restore(newest, "a"))
        ids = [slot(1, "a"), slot(5, "nobody")]
        await worker.orders.ok(expire_snapshots=w.ExpireSnapshotsOrder(snapshot_ids=ids))
        assert (await snapshot(worker, slot(0, "c"), "c")).sequence == 7


async def test_after_an_engines_death_the_host_image_is_the_newest_whole_state(tmp_path: Path) -> None:
    """The host tier first: no disk is read for what the daemon still holds."""
    async with cluster(tmp_path) as worker:
        sequence = await trained(worker)
        written = await snapshot(worker, slot(0))
        expected = await go_on(worker, "m", sequence)
        os.kill((await worker.status()).engines[0].pid, signal.SIGKILL)
        await worker.orders.report(lambda r: any(d.state_lost for d in r.deployments))
        lost = (await worker.status()).deployments[0]
        assert (lost.host_image, lost.host_image_sequence) == (True, sequence)
        assert lost.host_image_weights_version == sequence - 1
        (tmp_path / "checkpoints" / "snapshots" / slot(0)).rename(tmp_path / "hidden")
        wrong = deploy("m", from_host_image=True, host_image_sequence=sequence + 1, applied_sequence=sequence)
        assert reason(await worker.orders.do(deploy=wrong)) == "STATE_LOST"
        right = deploy("m", from_host_image=True, host_image_sequence=sequence, applied_sequence=sequence)
        await worker.orders.ok(deploy=right)
        await worker.orders.ok(swap_weights=swap("m"))
        assert await go_on(worker, "m", sequence) == expected
        assert written.sequence == sequence


async def test_a_torn_host_image_is_never_offered(tmp_path: Path) -> None:
    """An engine that dies while it writes the image leaves no whole state there."""
    flag = tmp_path / "once"
    fault = {"function": "write_back", "fault": "crash", "flag_file": str(flag)}
    async with cluster(tmp_path) as worker:
        await worker.orders.ok(deploy=deploy("m", config_json=fake_config(fault)))
        await worker.orders.ok(swap_weights=swap("m"))
        await train(worker.orders, "m", 1)
        flag.touch()
        assert reason(await worker.orders.do(snapshot=w.SnapshotOrder(model_id="m", snapshot_id=slot(0)))) == (
            "ENGINE_DIED"
        )
        lost = (await worker.status()).deployments[0]
        assert (lost.state_lost, lost.host_image) == (True, False)


async def test_a_replayed_call_leaves_the_state_at_the_number_given(tmp_path: Path) -> None:
    """Calls that changed nothing are not replayed: the last one before them carries their number."""
    async with cluster(tmp_path) as worker:
        await worker.orders.ok(deploy=deploy("m", applied_sequence=2))
        await worker.orders.ok(swap_weights=swap("m"))
        replayed = call("m", forward_backward(), 3, replay=True, through_sequence=6)
        await worker.orders.ok(run_call=replayed)
        assert (await worker.status()).deployments[0].applied_sequence == 6
        refused = await worker.orders.do(run_call=call("m", score(), 7, replay=True))
        assert reason(refused) == "INVALID_ARGUMENT"
        mismatch = await worker.orders.do(run_call=call("m", optim_step(), 6, replay=True))
        assert reason(mismatch) == "SEQUENCE_MISMATCH"


async def test_a_model_that_is_dropped_while_it_is_written_takes_nobody_along(tmp_path: Path) -> None:
    async with cluster(tmp_path) as worker:
        await trained(worker)
        order_id = await worker.orders.send(snapshot=w.SnapshotOrder(model_id="m", snapshot_id=slot(0)))
        await worker.orders.ok(drop=w.DropOrder(model_id="m"))
        async with asyncio.timeout(10):
            await worker.orders.finished(order_id)
        await worker.orders.ok(deploy=deploy("m"))
