"""Low-rank adapters (Hu et al. 2021, eq. 3): y = base(x) + alpha / rank * B (A x), A and B trained, the base frozen.

Every linear layer of the body gets one. Names and files are PEFT's, so that an adapter opens there and in vLLM. Knows
modules and names; memory is the trainer's, engines are vLLM's.
"""

import json
import math
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from plexrl_worker.engine.errors import Unsupported
from plexrl_worker.engine.settings import LoraSettings

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_DOWN, _UP = "lora_A.weight", "lora_B.weight"


class LoraLinear(nn.Module):
    """A frozen linear layer with an adapter: x [..., in] → [..., out]. Parameters are on the meta device."""

    def __init__(self, base: nn.Linear, settings: LoraSettings) -> None:
        super().__init__()
        self.base = base
        self.lora_A = nn.Linear(base.in_features, settings.rank, bias=False, device="meta")
        self.lora_B = nn.Linear(settings.rank, base.out_features, bias=False, device="meta")
        self._scale = settings.alpha / settings.rank

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """See the module."""
        adapted: torch.Tensor = self.lora_B(self.lora_A(inputs))
        output: torch.Tensor = self.base(inputs)
        return output + self._scale * adapted


def inject(model: nn.Module, settings: LoraSettings) -> None:
    """Puts an adapter beside every linear layer of the body. Raises Unsupported when there is none."""
    body = getattr(model, str(model.base_model_prefix))
    found = [
        (parent, name, layer)
        for parent in body.modules()
        for name, layer in parent.named_children()
        if isinstance(layer, nn.Linear)
    ]
    if not found:
        raise Unsupported(f"{type(model).__name__} has no linear layers for adapters")
    for parent, name, layer in found:
        setattr(parent, name, LoraLinear(layer, settings))


def is_adapter(parameter_name: str) -> bool:
    """Whether a parameter belongs to an adapter, by its name in the model."""
    return parameter_name.endswith((_DOWN, _UP))


def layer_names(parameter_names: Iterable[str]) -> list[str]:
    """The kinds of layers that have adapters, e.g. q_proj."""
    return sorted({name.split(".")[-3] for name in parameter_names})


def base_name(parameter_name: str) -> str:
    """A base parameter's name without the wrapper around its layer."""
    return parameter_name.replace(".base.", ".")


def first_weights(name: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    """First weights as PEFT draws them: A Kaiming-uniform, B zero, so that the first adapter changes nothing."""
    if name.endswith(_UP):
        return torch.zeros(shape)
    bound = 1.0 / math.sqrt(shape[1])
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


def write(directory: Path, tensors: dict[str, torch.Tensor], settings: LoraSettings) -> None:
    """Writes an adapter, by the model's names, as PEFT's two files."""
    named = {f"{_PREFIX}{name}": tensor.contiguous() for name, tensor in tensors.items()}
    save_file(named, directory / WEIGHTS_FILE, metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": settings.rank,
        "lora_alpha": settings.alpha,
        "target_modules": layer_names(tensors),
        "bias": "none",
    }
    (directory / CONFIG_FILE).write_text(json.dumps(config, indent=2))


def model_names(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A PEFT file's tensors by the model's names."""
    return {name.removeprefix(_PREFIX): tensor for name, tensor in tensors.items()}
