"""The engine child as a process: death, hangs, aborts, shared memory. With the fake engine and faults to order."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from plexrl import wire
from plexrl.v1 import types_pb2 as t
from plexrl_worker.engine import port
from plexrl_worker.engine.client import EngineProcess
from plexrl_worker.engine.errors import Aborted, EngineDied, EngineError, EngineHung, InvalidArgument, OutOfMemory
from plexrl_worker.engine.settings import DeploymentSettings, EngineSettings, InitBase

SPEC = t.GenerateSpec(prompts=wire.token_batch([[1, 2], [3]]), sampling=t.SamplingParams(n=2, max_tokens=3, seed=1))
SETTINGS = DeploymentSettings()


def settings(*faults: dict[str, object]) -> EngineSettings:
    config = {"architectures": ["Fake"], "vocab_size": 32, "max_position_embeddings": 64, "plexrl_fake": faults}
    return EngineSettings(json.dumps(config))


async def start(*faults: dict[str, object], hang_limit_s: float = 30.0) -> EngineProcess:
    """A child with one initialized model."""
    engine = await EngineProcess.start("fake", settings(*faults), hang_limit_s=hang_limit_s)
    await engine.declare("model", SETTINGS)
    await engine.initialize("model", InitBase(1))
    return engine


async def test_a_killed_child_fails_what_is_in_flight_and_what_comes_later() -> None:
    engine = await start({"function": "generate", "fault": "slow", "delay_s": 60})
    running, queued = engine.generate("model", SPEC, 0), engine.state("model")
    await asyncio.sleep(0.1)
    os.kill(engine.pid, signal.SIGKILL)
    for call in (running, queued):
        with pytest.raises(EngineDied, match="SIGKILL") as died:
            await call
        assert died.value.signal == signal.SIGKILL
    assert (await engine.wait_exit()).reason == "ENGINE_DIED"
    with pytest.raises(EngineDied):
        await engine.state("model")
    assert not engine.busy


async def test_a_child_whose_frames_cannot_be_read_is_ended_and_nobody_waits_for_ever() -> None:
    engine = await start()
    engine._received += b"\xff\xff\xff\xff"
    with pytest.raises(EngineDied) as died:
        await engine.state("model")
    assert not isinstance(died.value, EngineHung)
    await engine.wait_exit()


async def test_a_listener_that_raises_costs_no_response() -> None:
    engine = await start({"function": "generate", "fault": "slow", "delay_s": 0.3})
    call = engine.generate("model", SPEC, 0)

    def bad(done: int, total: int) -> None:
        raise LookupError("a listener's own fault")

    call.on_progress = bad
    assert (await call).weights_version == 0
    await engine.close()


async def test_a_crash_in_the_middle_of_a_function_is_told() -> None:
    engine = await start({"function": "forward_backward", "fault": "crash"})
    tokens = wire.token_batch([[1, 2, 3]])
    spec = t.ForwardBackwardSpec(batch=tokens, loss=t.LOSS_CROSS_ENTROPY, weights=wire.tensor([0, 1, 1], "float32"))
    with pytest.raises(EngineDied, match="SIGKILL"):
        await engine.forward_backward("model", spec)
    await engine.wait_exit()


async def test_an_exit_code_is_told() -> None:
    engine = await start({"function": "sync", "fault": "exit"})
    with pytest.raises(EngineDied) as died:
        await engine.sync("model", 1)
    assert died.value.exit_code == 3


async def test_a_hang_is_told_from_slow_work() -> None:
    """Slow work shows progress and may outlast the limit; a hang does not."""
    engine = await start({"function": "generate", "fault": "slow", "delay_s": 4.0}, hang_limit_s=2.0)
    result = await engine.generate("model", SPEC, 0)
    assert len(result.finish_reasons) == 4
    await engine.close()
    engine = await start({"function": "generate", "fault": "hang"}, hang_limit_s=1.0)
    with pytest.raises(EngineHung, match="no progress for 1 s"):
        await engine.generate("model", SPEC, 0)
    assert isinstance(await engine.wait_exit(), EngineHung)


async def test_an_idle_child_is_not_a_hang() -> None:
    engine = await start(hang_limit_s=2.0)
    await asyncio.sleep(3.0)
    assert (await engine.state("model")).rollout_version == 0
    await engine.close()


async def test_abort_ends_a_running_function_and_passes_over_a_queued_one() -> None:
    engine = await start({"function": "generate", "fault": "slow", "delay_s": 60})
    running, queued = engine.generate("model", SPEC, 0), engine.generate("model", SPEC, 0)
    await asyncio.sleep(0.1)
    queued.abort()
    running.abort()
    for call in (running, queued):
        with pytest.raises(Aborted):
            await call
    assert (await engine.state("model")).optimizer_step == 0
    await engine.close()


async def test_errors_come_back_as_what_they_were() -> None:
    engine = await start({"function": "swap_out", "fault": "out_of_memory"}, {"function": "generate", "fault": "fail"})
    with pytest.raises(OutOfMemory, match="told to run out"):
        await engine.swap_out("model", port.ALL_COMPONENTS)
    with pytest.raises(EngineError, match="RuntimeError: generate was told to fail") as failed:
        await engine.generate("model", SPEC, 0)
    assert failed.value.reason == "ENGINE_ERROR"
    await engine.close()


async def test_parking_needs_a_host_image() -> None:
    engine = await start()
    with pytest.raises(InvalidArgument, match="no host image"):
        await engine.swap_out("model", port.ALL_COMPONENTS)
    await engine.close()


async def test_a_configuration_that_cannot_start_leaves_no_process() -> None:
    before = _children()
    with pytest.raises(InvalidArgument, match="config_json"):
        await EngineProcess.start("fake", EngineSettings("{}"))
    assert _children() == before


async def test_progress_is_heard() -> None:
    engine = await start({"function": "generate", "fault": "slow", "delay_s": 0.3})
    call = engine.generate("model", SPEC, 0)
    heard: list[tuple[int, int]] = []
    call.on_progress = lambda done, total: heard.append((done, total))
    await call
    assert len(heard) >= 2
    await engine.close()


async def test_a_parked_model_moves_to_the_next_child_through_shared_memory() -> None:
    first = await start()
    layout = await first.declare("model", SETTINGS)
    memory = os.memfd_create("image")
    os.ftruncate(memory, layout.host_bytes)
    await first.attach_host("model", memory, layout.host_bytes)
    expected = await first.generate("model", SPEC, 0)
    parked = (await first.swap_out("model", port.ALL_COMPONENTS)).parked
    await first.kill()
    second = await EngineProcess.start("fake", settings())
    await second.declare("model", SETTINGS)
    await second.attach_host("model", memory, layout.host_bytes)
    await second.swap_in("model", parked, port.ALL_COMPONENTS)
    assert await second.generate("model", SPEC, 0) == expected
    assert np.fromfile(f"/proc/self/fd/{memory}", np.uint8).any()
    await second.close()
    os.close(memory)


async def test_large_frames_pass() -> None:
    engine = await start()
    sequences = [[1 + i % 30 for i in range(64)]] * 20_000
    result = await engine.score("model", t.ScoreSpec(batch=wire.token_batch(sequences)))
    assert wire.float32s(result.logprobs).size == 64 * 20_000
    await engine.close()


async def test_closing_lets_the_child_exit_by_itself() -> None:
    engine = await start()
    ended = await engine.close()
    assert (ended.exit_code, ended.signal) == (0, None)


async def test_too_many_calls_in_flight_are_refused() -> None:
    engine = await start({"function": "generate", "fault": "slow", "delay_s": 30})
    calls = [engine.generate("model", SPEC, 0) for _ in range(140)]
    with pytest.raises(EngineError, match="128 functions are in flight"):
        await calls[-1]
    await engine.kill()


def test_the_child_dies_with_its_parent(tmp_path: Path) -> None:
    """Kill -9 of the daemon leaves no engine behind, busy or not."""
    script = f"""
import asyncio
from plexrl_worker.engine.client import EngineProcess
from plexrl_worker.engine.settings import EngineSettings
async def main():
    engine = await EngineProcess.start("fake", EngineSettings({settings().config_json!r}))
    print(engine.pid, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert _alive(child)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline_s = time.monotonic() + 10
    while _alive(child) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    assert not _alive(child)


def _alive(pid: int) -> bool:
    """Running: a zombie that nobody has reaped yet is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _children() -> set[str]:
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())
