"""What a call's arguments and a model's settings may be. What cannot be honoured is refused here, with its reason."""

import math
from collections.abc import Iterable

import numpy as np

from plexrl import wire
from plexrl.v1 import model_pb2, types_pb2
from plexrl_controller.api.messages import name_of
from plexrl_controller.dispatch import limits
from plexrl_controller.domain.errors import InvalidArgument, Unsupported
from plexrl_controller.domain.states import CallKind

_SETTINGS_OF_LOSS = {
    types_pb2.LOSS_CROSS_ENTROPY: (frozenset[str](), frozenset[str]()),
    types_pb2.LOSS_IMPORTANCE_SAMPLING: (frozenset({"advantages", "old_logprobs"}), frozenset[str]()),
    types_pb2.LOSS_PPO: (frozenset({"advantages", "old_logprobs"}), frozenset({"clip_low", "clip_high"})),
    types_pb2.LOSS_GRPO: (
        frozenset({"advantages", "old_logprobs", "ref_logprobs"}),
        frozenset({"clip_low", "clip_high", "kl_coef"}),
    ),
    types_pb2.LOSS_CISPO: (frozenset({"advantages", "old_logprobs"}), frozenset({"clip_low", "clip_high"})),
    types_pb2.LOSS_LINEAR: (frozenset({"logprob_grads"}), frozenset[str]()),
}
"""Per loss: the arrays and the settings that it uses."""
_KINDS = {kind.name.lower(): kind for kind in CallKind}
_FEW = 256
_ARRAYS = ("advantages", "old_logprobs", "ref_logprobs", "logprob_grads")


def check_spec(spec: types_pb2.CallSpec) -> CallKind:
    """Checks a call's arguments and returns its kind. Raises InvalidArgument, Unsupported, WireError."""
    kind = _KINDS.get(spec.WhichOneof("function") or "") or CallKind(wire.kind_of(spec))
    match kind:
        case CallKind.GENERATE:
            _check_generate(spec.generate)
        case CallKind.SCORE:
            _check_batch(spec.score.batch, "score.batch")
        case CallKind.FORWARD_BACKWARD:
            _check_forward_backward(spec.forward_backward)
        case CallKind.OPTIM_STEP:
            _check_adamw(spec.optim_step.adamw)
        case CallKind.SYNC_WEIGHTS:
            if spec.sync_weights.in_flight == types_pb2.IN_FLIGHT_KEEP:
                raise Unsupported("sync_weights.in_flight: keep is not offered yet; use drain or abort")
            if spec.sync_weights.in_flight not in types_pb2.InFlight.values():
                raise InvalidArgument(f"sync_weights.in_flight: {spec.sync_weights.in_flight} is no known value")
        case CallKind.SAVE_CHECKPOINT:
            name_of(spec.save_checkpoint.label, "save_checkpoint.label")
        case CallKind.LOAD_CHECKPOINT:
            _check_load(spec.load_checkpoint)
    return kind


def _check_generate(spec: types_pb2.GenerateSpec) -> None:
    _, lengths = _check_batch(spec.prompts, "generate.prompts")
    sampling = spec.sampling
    _in_range("sampling.n", sampling.n, 1, limits.MAX_COMPLETIONS)
    if lengths.size * sampling.n > limits.MAX_BATCH_SEQUENCES:
        raise InvalidArgument(
            f"generate: {lengths.size} prompts x n={sampling.n} are more than "
            f"{limits.MAX_BATCH_SEQUENCES} completions; split it"
        )
    if sampling.leave and sampling.leave >= lengths.size * sampling.n:
        raise InvalidArgument(
            f"sampling.leave: {sampling.leave} of {lengths.size * sampling.n} completions; want fewer than there are"
        )
    _in_range("sampling.max_tokens", sampling.max_tokens, 1, limits.MAX_BATCH_TOKENS)
    _finite("sampling.temperature", sampling.temperature, low=0.0, high=100.0)
    _finite("sampling.top_p", sampling.top_p, low=0.0, high=1.0)
    _in_range("sampling.stop", len(sampling.stop), 0, limits.MAX_STOP_STRINGS)
    _in_range("sampling.stop_token_ids", len(sampling.stop_token_ids), 0, limits.MAX_STOP_STRINGS * 16)
    if any(not text for text in sampling.stop):
        raise InvalidArgument("sampling.stop: an empty string would end every completion at once")


def _check_forward_backward(spec: types_pb2.ForwardBackwardSpec) -> None:
    token_ids, lengths = _check_batch(spec.batch, "forward_backward.batch")
    if spec.loss not in _SETTINGS_OF_LOSS:
        known = ", ".join(types_pb2.Loss.Name(loss) for loss in _SETTINGS_OF_LOSS)
        raise InvalidArgument(f"forward_backward.loss: {spec.loss} is not one of {known}")
    arrays, settings = _SETTINGS_OF_LOSS[spec.loss]
    loss_name = types_pb2.Loss.Name(spec.loss)
    weights = _per_token(spec.weights, "weights", token_ids.size)
    firsts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    if np.any(weights[firsts] != 0.0):
        raise InvalidArgument(
            "forward_backward.weights: the first token of a sequence is predicted by nothing: weight 0"
        )
    optional = {"ref_logprobs"} if not spec.params.kl_coef else set()
    for field in _ARRAYS:
        if spec.HasField(field):  # type: ignore[arg-type]
            if field not in arrays:
                raise InvalidArgument(f"forward_backward.{field}: {loss_name} does not use it; leave it out")
            _per_token(getattr(spec, field), field, token_ids.size)
        elif field in arrays and field not in optional:
            raise InvalidArgument(f"forward_backward.{field}: {loss_name} needs it")
    for setting in ("clip_low", "clip_high", "kl_coef"):
        if not spec.params.HasField(setting):
            continue
        if setting not in settings:
            raise InvalidArgument(f"forward_backward.params.{setting}: {loss_name} does not use it; leave it out")
        high = 1.0 if setting == "clip_low" else 1e6
        _finite(f"params.{setting}", getattr(spec.params, setting), low=0.0, high=high)


def _check_adamw(adamw: types_pb2.AdamWParams) -> None:
    if not adamw.lr > 0.0 or not math.isfinite(adamw.lr):
        raise InvalidArgument(f"optim_step.adamw.lr: {adamw.lr:g}, want a finite number > 0")
    for field, low, high in (("beta1", 0.0, 1.0), ("beta2", 0.0, 1.0), ("weight_decay", 0.0, 1e6)):
        if adamw.HasField(field):  # type: ignore[arg-type]
            value = getattr(adamw, field)
            _finite(f"optim_step.adamw.{field}", value, low=low, high=high)
            if field != "weight_decay" and value == 1.0:
                raise InvalidArgument(f"optim_step.adamw.{field}: 1 never forgets; want a number in [0, 1)")
    for field in ("eps", "max_grad_norm"):
        if adamw.HasField(field):  # type: ignore[arg-type]
            value = getattr(adamw, field)
            if not value > 0.0 or not math.isfinite(value):
                raise InvalidArgument(f"optim_step.adamw.{field}: {value:g}, want a finite number > 0")


def _check_load(spec: types_pb2.LoadCheckpointSpec) -> None:
    source = spec.WhichOneof("source")
    if source is None or (source == "base" and not spec.base):
        raise InvalidArgument("load_checkpoint.source: want checkpoint_id, base = true, or rollout")


def check_settings(settings: model_pb2.ModelSettings) -> None:
    """Checks how a model wants to be run. Raises InvalidArgument, Unsupported."""
    if settings.HasField("lora"):
        _in_range("settings.lora.rank", settings.lora.rank, 1, limits.MAX_LORA_RANK)
        _finite("settings.lora.alpha", settings.lora.alpha, low=0.0, high=1e6)
    if settings.world_size > 1:
        raise Unsupported(f"settings.world_size: {settings.world_size}: gangs are not offered yet; leave it out")
    if settings.keep_versions > 1:
        raise Unsupported(f"settings.keep_versions: {settings.keep_versions}: only the latest version is kept for now")
    if settings.precision not in model_pb2.Precision.values():
        raise InvalidArgument(f"settings.precision: {settings.precision} is no known value")
    _in_range("settings.max_sequence_tokens", settings.max_sequence_tokens, 0, 1 << 20)
    _in_range("settings.micro_batch_tokens", settings.micro_batch_tokens, 0, 1 << 24)


def _check_batch(batch: types_pb2.TokenBatch, name: str) -> tuple[wire.Int32Array, wire.Int32Array]:
    token_ids, lengths = wire.batch_arrays(batch, name=name)
    if lengths.size == 0:
        raise InvalidArgument(f"{name}: it is empty; send at least one sequence")
    if lengths.size > limits.MAX_BATCH_SEQUENCES:
        raise InvalidArgument(f"{name}: {lengths.size} sequences, the limit is {limits.MAX_BATCH_SEQUENCES}; split it")
    if token_ids.size > limits.MAX_BATCH_TOKENS:
        raise InvalidArgument(f"{name}: {token_ids.size} tokens, the limit is {limits.MAX_BATCH_TOKENS}; split it")
    # Few are looked at sooner one by one than as an array.
    least = min(token_ids.tolist()) if token_ids.size <= _FEW else int(token_ids.min())
    if least < 0:
        raise InvalidArgument(f"{name}.token_ids: {least} is negative")
    return token_ids, lengths


def _per_token(tensor: types_pb2.Tensor, name: str, size: int) -> wire.Float32Array:
    values = wire.float32s(tensor, name=f"forward_backward.{name}")
    if values.size != size:
        raise InvalidArgument(
            f"forward_backward.{name}: {values.size} entries for {size} tokens; one per token is needed"
        )
    if not np.isfinite(values).all():
        bad = int(np.flatnonzero(~np.isfinite(values))[0])
        raise InvalidArgument(f"forward_backward.{name}: entry {bad} is {values[bad]}; all must be finite")
    return values


def _in_range(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise InvalidArgument(f"{name}: {value}, want {low} to {high}")


def _finite(name: str, value: float, *, low: float, high: float) -> None:
    if not math.isfinite(value) or not low <= value <= high:
        raise InvalidArgument(f"{name}: {value:g}, want a finite number from {low:g} to {high:g}")


def check_payload_names(names: Iterable[str]) -> None:
    """Checks the file names of an uploaded bundle. Raises InvalidArgument."""
    names = list(names)
    for name in names:
        name_of(name, "base.bundle file name")
        if not name.endswith((".json", ".safetensors", ".txt", ".model", ".jinja")):
            raise InvalidArgument(
                f"base.bundle: {name!r} is neither weights (.safetensors) nor configuration or tokenizer"
            )
    if "config.json" not in names or not any(name.endswith(".safetensors") for name in names):
        raise InvalidArgument("base.bundle: want config.json and at least one *.safetensors")
