"""First weights, in host memory: read from a Hugging Face directory, or drawn from a seed. Knows no deployments."""

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from plexrl_worker.engine import checkpoints, model_config
from plexrl_worker.engine.errors import InvalidArgument
from plexrl_worker.engine.settings import Base, DirectoryBase, InitBase
from plexrl_worker.engine.trainer import ParameterView, Trainer


def base_weights(base: Base, trainer: Trainer, config_json: str) -> dict[str, torch.Tensor]:
    """A base's tensors, by the architecture's names. Raises InvalidArgument."""
    match base:
        case InitBase(seed):
            return trainer.initial_weights(seed)
        case DirectoryBase(path):
            return read_directory(path, trainer.parameters, config_json)


def read_directory(path: str, wanted: Sequence[ParameterView], config_json: str) -> dict[str, torch.Tensor]:
    """A directory's tensors. Raises InvalidArgument unless all that are wanted are among them and the architecture is
    that of the configuration.
    """
    directory = Path(path)
    try:
        stated = (directory / checkpoints.CONFIG_FILE).read_text()
        model_config.require_same(stated, config_json)
        tensors: dict[str, torch.Tensor] = {}
        for file in checkpoints.weight_files(directory):
            tensors |= load_file(file)
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise InvalidArgument(f"{directory}: cannot read its weights: {error}") from error
    for view in wanted:
        if view.name not in tensors:
            raise InvalidArgument(f"{directory}: has no tensor {view.name}, which the architecture needs")
        if tensors[view.name].shape != view.shape:
            shape = list(tensors[view.name].shape)
            raise InvalidArgument(f"{directory}: {view.name} has shape {shape}, want {list(view.shape)}")
    return tensors
