"""What an engine and its deployments are made with: the settings that a caller chooses. Pure values."""

from dataclasses import dataclass
from enum import StrEnum

# Architectures on which trainer and generator were seen to agree. Others are tried, and refused where they cannot be
# run.
TESTED_ARCHITECTURES: tuple[str, ...] = (
    "GemmaForCausalLM",
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Phi3ForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)

MAX_LORA_RANK = 512
"""The highest that vLLM takes."""


class Precision(StrEnum):
    """Format of the rollout weights and of the trainer's compute; master weights are always float32."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


@dataclass(frozen=True)
class InitBase:
    """Random first weights, as the architecture initialises them, from a seed."""

    seed: int


@dataclass(frozen=True)
class DirectoryBase:
    """First weights from a Hugging Face directory: config.json and *.safetensors."""

    path: str


Base = InitBase | DirectoryBase


@dataclass(frozen=True)
class LoraSettings:
    """Low-rank adapters instead of full-parameter training; a deployment's state is its adapter.

    rank: of every adapter. alpha: an adapter's output is scaled by alpha / rank. base: the frozen weights under them,
    which the engine holds once for all its deployments.
    """

    rank: int
    alpha: float
    base: Base


@dataclass(frozen=True)
class EngineSettings:
    """What makes an engine: two deployments share one exactly when these are equal.

    config_json: a Hugging Face config.json. max_sequence_tokens: longest prompt and completion together, 0 for the
    config's. threads: compute threads, fixed for the life of the engine (results are bit-equal only for equal counts).
    lora: None for full-parameter training.
    """

    config_json: str
    precision: Precision = Precision.FLOAT32
    max_sequence_tokens: int = 0
    kv_cache_bytes: int = 64 << 20
    max_running_sequences: int = 512
    max_batched_tokens: int = 8192
    threads: int = 2
    lora: LoraSettings | None = None


@dataclass(frozen=True)
class DeploymentSettings:
    """How one deployment is run.

    trainable: False for a reference, which has no gradients and no optimizer. micro_batch_tokens: most tokens, padding
    included, in one forward pass of the trainer (a longer single sequence still runs alone). tokenizer_file: a
    tokenizer.json, needed for stop strings only. adapter_seed: of a LoRA deployment's first adapter. rollout_only:
    sampled alone, its state is its rollout weights and the optimizer step always 0; not trainable, not with LoRA.
    """

    trainable: bool = True
    micro_batch_tokens: int = 8192
    activation_checkpointing: bool = False
    tokenizer_file: str | None = None
    adapter_seed: int = 0
    rollout_only: bool = False
