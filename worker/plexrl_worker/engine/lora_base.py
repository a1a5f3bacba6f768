"""The frozen base under a LoRA engine's adapters: given to trainer and generator once, and proved to mean the same.

Both add adapters to layers that each finds by itself. A probe shows at the engine's start that they agree with an
adapter that is not zero; an architecture where one of them leaves a layer out is refused.
"""

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from plexrl_worker.engine import checkpoints
from plexrl_worker.engine.device import Device
from plexrl_worker.engine.errors import Unsupported
from plexrl_worker.engine.generator import Generator
from plexrl_worker.engine.port import (
    TokenBatch,
)
from plexrl_worker.engine.settings import DeploymentSettings, DirectoryBase, EngineSettings, InitBase, Precision
from plexrl_worker.engine.trainer import Trainer
from plexrl_worker.engine.weight_slot import RolloutContent

_PROBE_TOKENS = 8
_PROBE_TOLERANCE = {Precision.FLOAT32: 1e-3, Precision.BFLOAT16: 0.2}
"""Of a log-probability; without the adapter it differs by more."""
_PROBE_SCALE = 0.3


@contextmanager
def base_directory(
    settings: EngineSettings, trainer: Trainer, weights: Mapping[str, torch.Tensor] | None, directory: Path | None
) -> Iterator[Path | None]:
    """Where the generator reads the base from, None for an engine without adapters; the trainer gets its copy here.

    weights: what a directory base holds, checked.
    """
    if settings.lora is None:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="base-", dir=directory) as made:
        place = Path(made)
        (place / checkpoints.CONFIG_FILE).write_text(settings.config_json)
        match settings.lora.base:
            case DirectoryBase(path):
                trainer.hold_base(weights or {})
                # Only the weights: vLLM reads every *.safetensors that it finds, an optimizer's too.
                for file in checkpoints.weight_files(Path(path)):
                    (place / file.name).symlink_to(file.absolute())
            case InitBase(seed):
                tensors = trainer.initial_weights(seed)
                trainer.hold_base(tensors)
                save_file(tensors, place / checkpoints.WEIGHTS_FILE, metadata={"format": "pt"})
        yield place


def check_adapters(
    settings: EngineSettings, trainer: Trainer, generator: Generator, device: Device, vocab_size: int
) -> None:
    """Raises Unsupported unless trainer and generator mean the same by an adapter."""
    flat = torch.zeros(trainer.element_count, device=device.torch_device)
    tokens = TokenBatch(
        (np.arange(_PROBE_TOKENS, dtype=np.int32) * 7 + 1) % vocab_size, np.array([_PROBE_TOKENS], np.int32)
    )
    reference = DeploymentSettings(trainable=False)
    trainer.bind(flat, None)
    plain = trainer.score(tokens, reference, _Quiet())
    draws = torch.Generator().manual_seed(0)
    for view in trainer.parameters:
        view.of(flat).copy_(torch.randn(view.shape, generator=draws) * _PROBE_SCALE / view.shape[1] ** 0.5)
    expected = trainer.score(tokens, reference, _Quiet())
    generator.slot.fill({view.name: view.of(flat) for view in trainer.parameters})
    found = generator.score(tokens, RolloutContent("probe", 0, "probe"), _Quiet())
    trainer.unbind()
    generator.slot.release()
    error, effect = float(np.abs(found - expected).max()), float(np.abs(plain - expected).max())
    if error > min(_PROBE_TOLERANCE[settings.precision], effect / 2):
        raise Unsupported(
            "LoRA: trainer and generator differ over an adapter by "
            f"{error:.3g} in a log-probability, so the generator does not honour it on every linear layer"
        )


class _Quiet:
    def aborted(self) -> bool:
        return False

    def yielding(self) -> bool:
        return False

    def progress(self, done: int, total: int) -> None:
        pass
