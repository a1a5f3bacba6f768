"""Hugging Face configurations: which models the real engine takes, and when two describe the same model."""

import hashlib
import json
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from plexrl_worker.engine.errors import InvalidArgument, Unsupported

# Keys of a config.json that say nothing about what a model computes.
_COSMETIC_CONFIG_KEYS = frozenset({"_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache"})


def read(config_json: str) -> PretrainedConfig:
    """The configuration of one dense causal language model, dropout off. Raises InvalidArgument, Unsupported."""
    try:
        values: dict[str, Any] = json.loads(config_json)
        model_type, architectures = str(values["model_type"]), values["architectures"]
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidArgument(f"config_json needs model_type and architectures: {error!r}") from error
    if not isinstance(architectures, list) or len(architectures) != 1:
        raise InvalidArgument(f"config_json must name exactly one architecture, not {architectures}")
    rest = {key: value for key, value in values.items() if key != "model_type"}
    try:
        config = AutoConfig.for_model(model_type, **rest)
    except ValueError as error:
        raise Unsupported(f"model_type {model_type} is not known to this transformers") from error
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise Unsupported(f"{architectures[0]} is not a causal language model")
    for key, value in config.to_dict().items():
        if key.endswith(("dropout", "_pdrop")) and value:
            setattr(config, key, 0.0)
    return config


def require_same(directory_json: str, engine_json: str) -> None:
    """Raises InvalidArgument unless two config.json describe the same computation."""
    theirs, ours = json.loads(directory_json), json.loads(engine_json)
    different = [key for key in sorted({*theirs, *ours} - _COSMETIC_CONFIG_KEYS) if theirs.get(key) != ours.get(key)]
    if different:
        raise InvalidArgument(f"config.json differs from the engine's in {', '.join(different)}")


def sha256(config_json: str) -> str:
    """Names what a configuration computes, in hexadecimal: equal for equal models."""
    stated = json.loads(config_json)
    computed = {key: value for key, value in stated.items() if key not in _COSMETIC_CONFIG_KEYS}
    return hashlib.sha256(json.dumps(computed, sort_keys=True).encode()).hexdigest()
