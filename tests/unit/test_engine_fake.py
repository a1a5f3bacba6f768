"""The engine's test double passes the suite that the real engine passes."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from plexrl_worker.engine import port
from plexrl_worker.engine.errors import CheckpointMismatch, InvalidArgument, OutOfMemory
from plexrl_worker.engine.fake import FakeEngine
from plexrl_worker.engine.settings import DeploymentSettings, EngineSettings, InitBase
from tests.support.engine_conformance import EngineConformance
from tests.support.engine_subjects import Model, Patient, random_batch, train_a_little

CONFIG = {"architectures": ["FakeForCausalLM"], "vocab_size": 64, "max_position_embeddings": 128}


def start(threads: int = 2, **extra: object) -> FakeEngine:
    return FakeEngine(EngineSettings(json.dumps({**CONFIG, **extra}), threads=threads))


class TestFakeEngine(EngineConformance):
    @pytest.fixture
    def engine(self) -> port.Engine:
        return start()

    def test_parked_state_outlives_its_engine(self, make_model: Callable[..., Model], tmp_path: Path) -> None:
        model = make_model()
        train_a_little(model)
        tokens = random_batch(50)
        expected = model.score(tokens)
        model.swap_out()
        model.engine = start()
        model.engine.declare(model.name, DeploymentSettings(micro_batch_tokens=64))
        model.engine.attach_host(model.name, model.image)
        model.swap_in()
        assert model.score(tokens).tolist() == expected.tolist()
        assert model.engine.state(model.name).optimizer_step == 2

    def test_a_checkpoint_of_another_thread_count_is_refused(
        self, make_model: Callable[..., Model], tmp_path: Path
    ) -> None:
        model = make_model()
        model.save(tmp_path / "saved")
        other = start(threads=1)
        other.declare("model", DeploymentSettings())
        with pytest.raises(CheckpointMismatch, match="threads was 2"):
            other.load("model", str(tmp_path / "saved"), None, Patient())


def test_a_fault_strikes_once_with_a_flag_file(tmp_path: Path) -> None:
    flag = tmp_path / "once"
    flag.touch()
    engine = start(plexrl_fake=[{"function": "generate", "fault": "out_of_memory", "flag_file": str(flag)}])
    engine.declare("model", DeploymentSettings())
    engine.initialize("model", InitBase(1), 0, Patient())
    params = port.SamplingParams(n=1, max_tokens=2, seed=1)
    with pytest.raises(OutOfMemory):
        engine.generate("model", 0, random_batch(1), params, Patient())
    assert engine.generate("model", 0, random_batch(1), params, Patient()).lengths.size == 6


def test_a_configuration_that_is_none_is_refused() -> None:
    with pytest.raises(InvalidArgument):
        FakeEngine(EngineSettings("{}"))
