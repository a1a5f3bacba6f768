"""Checkpoints through a daemon with the fake engine: written whole or not at all, read as written or refused."""

from pathlib import Path

import pytest
from grpc import StatusCode, aio

from plexrl.v1 import model_pb2 as m
from tests.support.worker_daemon import (
    METADATA,
    Cluster,
    call,
    cluster,
    deploy,
    fake_config,
    forward_backward,
    generate,
    load,
    new_checkpoint_id,
    optim_step,
    reason,
    save,
    scores,
    swap,
    train,
)


async def saved(c: Cluster, sequence: int, checkpoint_id: str) -> None:
    await c.orders.ok(run_call=call("m1", save(), sequence, new_checkpoint_id=checkpoint_id))


async def with_checkpoint(c: Cluster) -> tuple[str, int, list[float]]:
    """A trained model with gradients under way, saved: the checkpoint, its sequence, and what one more step scores."""
    await c.orders.ok(deploy=deploy("m1"))
    await c.orders.ok(swap_weights=swap("m1"))
    last = await train(c.orders, "m1", first=1, steps=2)
    await c.orders.ok(run_call=call("m1", forward_backward(), last + 1))
    checkpoint_id = new_checkpoint_id()
    await saved(c, last + 2, checkpoint_id)
    await c.orders.ok(run_call=call("m1", optim_step(), last + 3))
    return checkpoint_id, last + 2, await scores(c.orders, "m1", last + 4)


async def files(c: Cluster, checkpoint_id: str, *, training_state: bool = False) -> dict[str, bytes]:
    request = m.ExportCheckpointRequest(checkpoint_id=checkpoint_id, training_state=training_state)
    received: dict[str, bytes] = {}
    async for chunk in c.stub.ReadCheckpoint(request, metadata=METADATA):
        received[chunk.name] = received.get(chunk.name, b"") + chunk.data
    return received


async def test_a_saved_state_continues_bit_equal_wherever_it_is_loaded(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        checkpoint_id, sequence, expected = await with_checkpoint(c)
        # In place, as a call of the model's sequence.
        at = sequence + 2
        report = await c.orders.ok(run_call=call("m1", load(checkpoint_id), at + 1))
        assert report.finished.result.load_checkpoint.step == 2
        assert report.deployments[0].weights_version == at + 1
        await c.orders.ok(run_call=call("m1", optim_step(), at + 2))
        assert await scores(c.orders, "m1", at + 3) == expected
        await c.orders.ok(run_call=call("m1", generate(), weights_version=at + 1))
        await c.orders.ok(drop={"model_id": "m1"})
    # On another worker that shares the directory, as a deploy.
    async with cluster(tmp_path, state_dir=tmp_path / "other", name="w1") as c:
        restored = deploy("m1", checkpoint_id=checkpoint_id, applied_sequence=sequence, weights_version=6)
        report = await c.orders.ok(deploy=restored)
        assert (report.deployments[0].applied_sequence, report.deployments[0].weights_version) == (sequence, 6)
        await c.orders.ok(swap_weights=swap("m1"))
        await c.orders.ok(run_call=call("m1", optim_step(), sequence + 1))
        assert await scores(c.orders, "m1", sequence + 2) == expected


async def test_the_base_can_be_loaded_again(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        await c.orders.ok(deploy=deploy("m1"))
        await c.orders.ok(swap_weights=swap("m1"))
        fresh = await scores(c.orders, "m1", 1)
        last = await train(c.orders, "m1", first=2)
        await c.orders.ok(run_call=call("m1", load(), last + 1))
        assert await scores(c.orders, "m1", last + 2) == fresh


async def test_an_export_is_what_was_written(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        checkpoint_id, _, _ = await with_checkpoint(c)
        exported = await files(c, checkpoint_id)
        assert set(exported) == {"config.json", "model.safetensors"}
        whole = await files(c, checkpoint_id, training_state=True)
        assert {"optimizer.safetensors", "gradients.safetensors"} <= set(whole)
        directory = tmp_path / "checkpoints" / checkpoint_id
        assert all((directory / name).read_bytes() == data for name, data in whole.items())


async def test_the_record_has_size_and_hash_and_a_second_save_of_the_call_is_the_same(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        checkpoint_id, sequence, _ = await with_checkpoint(c)
        again = call("m1", save(), sequence + 3, new_checkpoint_id=checkpoint_id)
        report = await c.orders.do(run_call=again)
        assert reason(report) == "INVALID_ARGUMENT"
        await c.orders.ok(run_call=call("m1", save("x"), sequence + 3, new_checkpoint_id=new_checkpoint_id()))
        record = c.orders.reports[-1].finished.result.save_checkpoint.checkpoint
        assert (record.label, record.sequence, record.model_id) == ("x", sequence + 3, "m1")
        assert record.size_bytes > 0
        assert len(record.manifest_sha256) == 64


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
async def test_a_damaged_checkpoint_is_refused_and_the_state_stays(tmp_path: Path, damage: str) -> None:
    """G15."""
    async with cluster(tmp_path) as c:
        checkpoint_id, sequence, expected = await with_checkpoint(c)
        victim = tmp_path / "checkpoints" / checkpoint_id / "model.safetensors"
        data = bytearray(victim.read_bytes())
        data[-1] ^= 1
        match damage:
            case "flip":
                victim.write_bytes(data)
            case "truncate":
                victim.write_bytes(data[:-1])
            case _:
                victim.unlink()
        report = await c.orders.do(run_call=call("m1", load(checkpoint_id), sequence + 3))
        assert reason(report) == "CHECKPOINT_CORRUPT"
        assert await scores(c.orders, "m1", sequence + 3) == expected
        with pytest.raises(aio.AioRpcError) as caught:
            await files(c, checkpoint_id)
        assert caught.value.code() is StatusCode.DATA_LOSS


@pytest.mark.parametrize("checkpoint_id", ["../../etc/passwd", "", "AB" * 16, "0" * 31, "not-a-uuid"])
async def test_ids_from_outside_never_become_paths(tmp_path: Path, checkpoint_id: str) -> None:
    async with cluster(tmp_path) as c:
        await c.orders.ok(deploy=deploy("m1"))
        await c.orders.ok(swap_weights=swap("m1"))
        report = await c.orders.do(run_call=call("m1", save(), 1, new_checkpoint_id=checkpoint_id))
        assert reason(report) == "INVALID_ARGUMENT"
        with pytest.raises(aio.AioRpcError) as caught:
            await files(c, checkpoint_id)
        assert caught.value.code() is StatusCode.INVALID_ARGUMENT


async def test_what_was_never_committed_is_not_found_and_is_swept_by_the_next_life(tmp_path: Path) -> None:
    """G15."""
    left = tmp_path / "checkpoints" / f"{new_checkpoint_id()}.w0.partial"
    left.mkdir(parents=True)
    foreign = tmp_path / "checkpoints" / f"{new_checkpoint_id()}.w9.partial"
    foreign.mkdir()
    async with cluster(tmp_path) as c:
        assert (left.exists(), foreign.exists()) == (False, True)
        await c.orders.ok(deploy=deploy("m1"))
        unknown = deploy("m2", checkpoint_id=left.name.partition(".")[0])
        assert reason(await c.orders.do(deploy=unknown)) == "CHECKPOINT_NOT_FOUND"


async def test_a_save_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        await c.orders.ok(deploy=deploy("m1", config_json=fake_config({"function": "save", "fault": "out_of_memory"})))
        await c.orders.ok(swap_weights=swap("m1"))
        report = await c.orders.do(run_call=call("m1", save(), 1, new_checkpoint_id=new_checkpoint_id()))
        assert reason(report) == "OUT_OF_MEMORY"
        assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["snapshots"]
