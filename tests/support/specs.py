"""Small valid calls of every kind."""

from plexrl import wire
from plexrl.v1 import types_pb2


def generate(**sampling: object) -> types_pb2.CallSpec:
    """Two prompts, one completion each."""
    params = types_pb2.SamplingParams(n=1, temperature=1.0, max_tokens=4, logprobs=True)
    for name, value in sampling.items():
        setattr(params, name, value)
    return types_pb2.CallSpec(generate=types_pb2.GenerateSpec(prompts=wire.token_batch([[1, 2], [3]]), sampling=params))


def generate_at(**version: object) -> types_pb2.CallSpec:
    """The same, at a version."""
    spec = generate()
    spec.generate.version.CopyFrom(types_pb2.VersionSelector(**version))  # type: ignore[arg-type]
    return spec


def forward_backward(tokens: int = 3) -> types_pb2.CallSpec:
    """Cross-entropy over one sequence."""
    return types_pb2.CallSpec(
        forward_backward=types_pb2.ForwardBackwardSpec(
            batch=wire.token_batch([[1] * tokens]),
            loss=types_pb2.LOSS_CROSS_ENTROPY,
            weights=wire.tensor([0.0] + [1.0 / tokens] * (tokens - 1), "float32"),
        )
    )


def score() -> types_pb2.CallSpec:
    """Score two sequences."""
    return types_pb2.CallSpec(score=types_pb2.ScoreSpec(batch=wire.token_batch([[1, 2], [3]])))


def optim_step(lr: float = 1e-3) -> types_pb2.CallSpec:
    """One AdamW step."""
    return types_pb2.CallSpec(optim_step=types_pb2.OptimStepSpec(adamw=types_pb2.AdamWParams(lr=lr)))


def sync() -> types_pb2.CallSpec:
    """Publish the weights."""
    return types_pb2.CallSpec(sync_weights=types_pb2.SyncWeightsSpec(in_flight=types_pb2.IN_FLIGHT_DRAIN))


def save(label: str = "a") -> types_pb2.CallSpec:
    """Write a checkpoint."""
    return types_pb2.CallSpec(save_checkpoint=types_pb2.SaveCheckpointSpec(label=label))


def load(checkpoint_id: str = "") -> types_pb2.CallSpec:
    """Read a checkpoint, or the base."""
    source = {"checkpoint_id": checkpoint_id} if checkpoint_id else {"base": True}
    return types_pb2.CallSpec(load_checkpoint=types_pb2.LoadCheckpointSpec(**source))


def pull(source_id: str, weights_version: int = 0) -> types_pb2.CallSpec:
    """Take another model's rollout weights."""
    source = types_pb2.RolloutSource(model_id=source_id, weights_version=weights_version)
    return types_pb2.CallSpec(load_checkpoint=types_pb2.LoadCheckpointSpec(rollout=source))
