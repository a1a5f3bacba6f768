"""What a client in virtual time asks for: calls, drawn at random. Knows not what becomes of them."""

import random
from collections.abc import Callable, Sequence

from plexrl import wire
from plexrl.v1 import types_pb2
from tests.simulation.faults.truth import ModelTruth

_WEIGHTS = {
    "forward_backward": 30,
    "optim_step": 22,
    "sync_weights": 14,
    "generate": 26,
    "score": 12,
    "save_checkpoint": 8,
    "load_checkpoint": 3,
}
_LARGE_TOKENS = 9000
"""Above 64 KiB its bytes go to the payload store first."""


def draw_functions(rng: random.Random) -> list[str]:
    """The functions of one round."""
    return rng.choices(list(_WEIGHTS), list(_WEIGHTS.values()), k=rng.randint(1, 7))


def draw_spec(
    rng: random.Random,
    function: str,
    *,
    version: int,
    saved: Sequence[str],
    policy_id: str,
    new_label: Callable[[], str],
) -> types_pb2.CallSpec:
    """A call of a function, or a pull.

    version: the newest that is known to be made. saved: checkpoints that can be loaded. policy_id: whose weights a pull
    takes.
    """
    spec = types_pb2.CallSpec()
    match function:
        case "generate":
            sampling = types_pb2.SamplingParams(n=1, temperature=1.0, max_tokens=4, seed=rng.getrandbits(30))
            spec.generate.CopyFrom(types_pb2.GenerateSpec(prompts=wire.token_batch([[1, 2]]), sampling=sampling))
            if rng.random() < 0.2:
                spec.generate.version.at_least = version
            elif rng.random() < 0.1:
                spec.generate.version.exact = version
        case "score":
            spec.score.batch.CopyFrom(wire.token_batch([[1, 2, 3]]))
        case "forward_backward":
            length = _LARGE_TOKENS if rng.random() < 0.1 else 3
            spec.forward_backward.CopyFrom(
                types_pb2.ForwardBackwardSpec(
                    batch=wire.token_batch([[1] * length]),
                    loss=types_pb2.LOSS_CROSS_ENTROPY,
                    weights=wire.tensor([0.0] + [rng.random()] * (length - 1), "float32"),
                )
            )
        case "optim_step":
            spec.optim_step.adamw.lr = rng.random() + 1e-3
        case "sync_weights":
            in_flight = [types_pb2.IN_FLIGHT_DRAIN, types_pb2.IN_FLIGHT_ABORT]
            spec.sync_weights.in_flight = rng.choices(in_flight, [4, 1])[0]
        case "save_checkpoint":
            spec.save_checkpoint.label = new_label()
        case "pull":
            spec.load_checkpoint.rollout.model_id = policy_id
        case "load_checkpoint":
            if saved and rng.random() < 0.8:
                spec.load_checkpoint.checkpoint_id = rng.choice(saved)
            else:
                spec.load_checkpoint.base = True
        case _:
            raise AssertionError(function)
    return spec


def saved_checkpoints(model: ModelTruth) -> list[str]:
    """Checkpoints of a model that its client knows of."""
    saved = [
        types_pb2.CallResult.FromString(request.outcome.result).save_checkpoint.checkpoint.checkpoint_id
        for request in model.requests
        if request.function == "save_checkpoint" and request.outcome is not None and request.outcome.succeeded
    ]
    return [checkpoint_id for checkpoint_id in saved if checkpoint_id]
