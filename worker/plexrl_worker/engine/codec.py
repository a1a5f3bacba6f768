"""Conversions between the frames of `plexrl.v1.engine` and the port's values. No sockets, no engine."""

from collections.abc import Collection, Iterable

from plexrl import wire
from plexrl.v1 import engine_pb2 as e
from plexrl.v1 import model_pb2 as m
from plexrl.v1 import types_pb2 as t
from plexrl_worker.engine import port
from plexrl_worker.engine.errors import InvalidArgument
from plexrl_worker.engine.settings import (
    Base,
    DeploymentSettings,
    DirectoryBase,
    EngineSettings,
    InitBase,
    LoraSettings,
    Precision,
)

_COMPONENTS = {
    port.Component.TRAIN_WEIGHTS: e.ENGINE_COMPONENT_TRAIN_WEIGHTS,
    port.Component.GRADIENTS: e.ENGINE_COMPONENT_GRADIENTS,
    port.Component.OPTIMIZER: e.ENGINE_COMPONENT_OPTIMIZER,
    port.Component.ROLLOUT_WEIGHTS: e.ENGINE_COMPONENT_ROLLOUT_WEIGHTS,
}
_LOSSES = {
    port.LossName.CROSS_ENTROPY: t.LOSS_CROSS_ENTROPY,
    port.LossName.IMPORTANCE_SAMPLING: t.LOSS_IMPORTANCE_SAMPLING,
    port.LossName.PPO: t.LOSS_PPO,
    port.LossName.GRPO: t.LOSS_GRPO,
    port.LossName.CISPO: t.LOSS_CISPO,
    port.LossName.LINEAR: t.LOSS_LINEAR,
}
_PRECISIONS = {
    Precision.FLOAT32: m.PRECISION_FLOAT32,
    Precision.BFLOAT16: m.PRECISION_BFLOAT16,
}
_FINISH_REASONS = {
    port.FinishReason.STOP: t.FINISH_REASON_STOP,
    port.FinishReason.LENGTH: t.FINISH_REASON_LENGTH,
    port.FinishReason.UNFINISHED: t.FINISH_REASON_UNFINISHED,
}
_COMPONENT_OF = {wire_value: value for value, wire_value in _COMPONENTS.items()}
_LOSS_OF = {wire_value: value for value, wire_value in _LOSSES.items()}
_PRECISION_OF = {wire_value: value for value, wire_value in _PRECISIONS.items()} | {
    m.PRECISION_UNSPECIFIED: Precision.FLOAT32
}


def components(values: Iterable[e.EngineComponent.ValueType]) -> frozenset[port.Component]:
    """Components of their wire values; InvalidArgument for one that is not known."""
    try:
        return frozenset(_COMPONENT_OF[value] for value in values)
    except KeyError as error:
        raise InvalidArgument(f"component {error} is not known") from error


def component_values(values: Collection[port.Component]) -> list[e.EngineComponent.ValueType]:
    """The wire values of components, in a fixed order."""
    return [_COMPONENTS[value] for value in port.Component if value in values]


def settings(message: e.EngineStartRequest) -> EngineSettings:
    """EngineSettings of their message."""
    return EngineSettings(
        config_json=message.config_json,
        precision=_PRECISION_OF[message.precision],
        max_sequence_tokens=message.max_sequence_tokens,
        kv_cache_bytes=message.kv_cache_bytes,
        max_running_sequences=message.max_running_sequences,
        max_batched_tokens=message.max_batched_tokens,
        threads=message.threads,
        lora=_lora(message.lora) if message.HasField("lora") else None,
    )


def _lora(message: e.EngineLora) -> LoraSettings:
    match message.WhichOneof("base"):
        case "seed":
            return LoraSettings(message.rank, message.alpha, InitBase(message.seed))
        case "directory":
            return LoraSettings(message.rank, message.alpha, DirectoryBase(message.directory))
        case _:
            raise InvalidArgument("lora: base is not set")


def _lora_message(value: LoraSettings) -> e.EngineLora:
    match value.base:
        case InitBase(seed):
            return e.EngineLora(rank=value.rank, alpha=value.alpha, seed=seed)
        case DirectoryBase(path):
            return e.EngineLora(rank=value.rank, alpha=value.alpha, directory=path)


def start_request(value: EngineSettings) -> e.EngineStartRequest:
    """The message of EngineSettings."""
    return e.EngineStartRequest(
        config_json=value.config_json,
        precision=_PRECISIONS[value.precision],
        max_sequence_tokens=value.max_sequence_tokens,
        kv_cache_bytes=value.kv_cache_bytes,
        max_running_sequences=value.max_running_sequences,
        max_batched_tokens=value.max_batched_tokens,
        threads=value.threads,
        lora=None if value.lora is None else _lora_message(value.lora),
    )


def precision(value: m.Precision.ValueType) -> Precision:
    """The port's precision of a model's setting; unset is float32."""
    return _PRECISION_OF[value]


def deployment_settings(message: e.DeclareRequest) -> DeploymentSettings:
    """DeploymentSettings of their message."""
    return DeploymentSettings(
        trainable=message.trainable,
        micro_batch_tokens=message.micro_batch_tokens,
        activation_checkpointing=message.activation_checkpointing,
        tokenizer_file=message.tokenizer_file or None,
        adapter_seed=message.adapter_seed,
        rollout_only=message.rollout_only,
    )


def declare_request(value: DeploymentSettings) -> e.DeclareRequest:
    """The message of DeploymentSettings."""
    return e.DeclareRequest(
        trainable=value.trainable,
        micro_batch_tokens=value.micro_batch_tokens,
        activation_checkpointing=value.activation_checkpointing,
        tokenizer_file=value.tokenizer_file or "",
        adapter_seed=value.adapter_seed,
        rollout_only=value.rollout_only,
    )


def base(message: e.InitializeRequest) -> Base:
    """The base that an InitializeRequest names."""
    match message.WhichOneof("base"):
        case "seed":
            return InitBase(message.seed)
        case "directory":
            return DirectoryBase(message.directory)
        case _:
            raise InvalidArgument("initialize: base is not set")


def initialize_request(value: Base, rollout_version: int) -> e.InitializeRequest:
    """The message that names a base."""
    match value:
        case InitBase(seed):
            return e.InitializeRequest(seed=seed, weights_version=rollout_version)
        case DirectoryBase(path):
            return e.InitializeRequest(directory=path, weights_version=rollout_version)


def description(message: e.EngineDescriptionResponse) -> port.EngineDescription:
    """EngineDescription of its message."""
    return port.EngineDescription(
        architecture=message.architecture,
        precision=_PRECISION_OF[message.precision],
        device_kind=message.device_kind,
        threads=message.threads,
        vocab_size=message.vocab_size,
        max_sequence_tokens=message.max_sequence_tokens,
        kv_cache_bytes=message.kv_cache_bytes,
        losses=tuple(_LOSS_OF[loss] for loss in message.losses),
        library_versions=dict(message.library_versions),
    )


def description_response(value: port.EngineDescription) -> e.EngineDescriptionResponse:
    """The message of EngineDescription."""
    return e.EngineDescriptionResponse(
        architecture=value.architecture,
        precision=_PRECISIONS[value.precision],
        device_kind=value.device_kind,
        threads=value.threads,
        vocab_size=value.vocab_size,
        max_sequence_tokens=value.max_sequence_tokens,
        kv_cache_bytes=value.kv_cache_bytes,
        losses=[_LOSSES[loss] for loss in value.losses],
        library_versions=value.library_versions,
    )


def layout(message: e.StateLayoutResponse) -> port.StateLayout:
    """StateLayout of its message."""
    return port.StateLayout(
        components=tuple(
            port.ComponentLayout(_COMPONENT_OF[extent.component], extent.offset, extent.size_bytes)
            for extent in message.components
        ),
        host_bytes=message.host_bytes,
        parameter_count=message.parameter_count,
    )


def layout_response(value: port.StateLayout) -> e.StateLayoutResponse:
    """The message of StateLayout."""
    return e.StateLayoutResponse(
        components=[
            e.ComponentExtent(component=_COMPONENTS[c.component], offset=c.offset, size_bytes=c.size_bytes)
            for c in value.components
        ],
        host_bytes=value.host_bytes,
        parameter_count=value.parameter_count,
    )


def parked(message: e.ParkedDeploymentState) -> port.ParkedState:
    """ParkedState of its message."""
    return port.ParkedState(
        components=tuple(
            port.ParkedComponent(_COMPONENT_OF[c.component], c.checksum, c.is_zero) for c in message.components
        ),
        optimizer_step=message.optimizer_step,
        rollout_version=message.weights_version,
    )


def parked_message(value: port.ParkedState) -> e.ParkedDeploymentState:
    """The message of ParkedState."""
    return e.ParkedDeploymentState(
        components=[
            e.ParkedComponentState(component=_COMPONENTS[c.component], checksum=c.checksum, is_zero=c.is_zero)
            for c in value.components
        ],
        optimizer_step=value.optimizer_step,
        weights_version=value.rollout_version,
    )


def swap_report(message: e.SwapReportResponse) -> port.SwapReport:
    """SwapReport of its message."""
    return port.SwapReport(
        message.bytes_moved, message.device_bytes, message.duration_s, parked(message.parked), message.held_bytes
    )


def swap_response(value: port.SwapReport) -> e.SwapReportResponse:
    """The message of SwapReport."""
    return e.SwapReportResponse(
        bytes_moved=value.bytes_moved,
        device_bytes=value.device_bytes,
        duration_s=value.duration_s,
        parked=parked_message(value.parked),
        held_bytes=value.held_bytes,
    )


def deployment_state(message: e.DeploymentStateResponse) -> port.DeploymentState:
    """DeploymentState of its message."""
    return port.DeploymentState(
        components(message.resident), components(message.dirty), message.optimizer_step, message.weights_version
    )


def state_response(value: port.DeploymentState) -> e.DeploymentStateResponse:
    """The message of DeploymentState."""
    return e.DeploymentStateResponse(
        resident=component_values(value.resident),
        dirty=component_values(value.dirty),
        optimizer_step=value.optimizer_step,
        weights_version=value.rollout_version,
    )


def token_batch(message: t.TokenBatch, *, name: str = "batch") -> port.TokenBatch:
    """TokenBatch of its message; InvalidArgument when it is not what its schema says."""
    try:
        return port.TokenBatch(*wire.batch_arrays(message, name=name))
    except wire.WireError as error:
        raise InvalidArgument(str(error)) from error


def sampling(message: t.SamplingParams) -> port.SamplingParams:
    """SamplingParams of their message; an unset top_p means 1."""
    return port.SamplingParams(
        n=message.n,
        max_tokens=message.max_tokens,
        seed=message.seed,
        temperature=message.temperature,
        top_p=message.top_p or 1.0,
        top_k=message.top_k,
        stop_token_ids=tuple(message.stop_token_ids),
        stop=tuple(message.stop),
        logprobs=message.logprobs,
        leave=message.leave,
    )


def generation_result(value: port.Generation) -> t.GenerateResult:
    """The message of Generation."""
    result = t.GenerateResult(
        finish_reasons=[_FINISH_REASONS[reason] for reason in value.finish_reasons],
        weights_version=value.weights_version,
    )
    wire.put_tensor(result.completions.token_ids, value.token_ids, "int32")
    wire.put_tensor(result.completions.lengths, value.lengths, "int32")
    wire.put_tensor(result.logprobs, value.logprobs, "float32")
    return result


def loss_arguments(
    message: t.ForwardBackwardSpec,
) -> tuple[port.LossBatch, port.LossName, port.LossParams]:
    """What a ForwardBackwardSpec asks for; InvalidArgument when it is not what its schema says."""

    def optional_array(field: str) -> port.Float32Array | None:
        return wire.float32s(getattr(message, field), name=field) if message.HasField(field) else None  # type: ignore[arg-type]

    if message.loss not in _LOSS_OF:
        raise InvalidArgument(f"loss: {t.Loss.Name(message.loss)} is not a loss")
    tokens = token_batch(message.batch)
    try:
        batch = port.LossBatch(
            tokens=tokens,
            weights=wire.float32s(message.weights, name="weights"),
            advantages=optional_array("advantages"),
            old_logprobs=optional_array("old_logprobs"),
            ref_logprobs=optional_array("ref_logprobs"),
            logprob_grads=optional_array("logprob_grads"),
        )
    except wire.WireError as error:
        raise InvalidArgument(str(error)) from error
    params = message.params
    return (
        batch,
        _LOSS_OF[message.loss],
        port.LossParams(
            clip_low=params.clip_low if params.HasField("clip_low") else None,
            clip_high=params.clip_high if params.HasField("clip_high") else None,
            kl_coef=params.kl_coef if params.HasField("kl_coef") else None,
        ),
    )


def metrics_result(value: port.TrainMetrics) -> t.ForwardBackwardResult:
    """The message of TrainMetrics."""
    return t.ForwardBackwardResult(
        loss=value.loss,
        kl=value.kl,
        entropy=value.entropy,
        clip_fraction=value.clip_fraction,
        token_count=value.token_count,
        logprobs=wire.tensor(value.logprobs, "float32"),
    )


def adamw(message: t.AdamWParams) -> port.AdamWParams:
    """AdamWParams of their message; what is unset takes the port's default."""
    given = {
        name: getattr(message, name)
        for name in ("beta1", "beta2", "eps", "weight_decay", "max_grad_norm")
        if message.HasField(name)
    }
    return port.AdamWParams(lr=message.lr, **given)


def saved(message: e.SavedStateResponse) -> port.SavedState:
    """SavedState of its message."""
    return port.SavedState(
        files=tuple(port.SavedFile(file.name, file.size_bytes, file.sha256) for file in message.files),
        manifest_sha256=message.manifest_sha256,
        optimizer_step=message.optimizer_step,
        rollout_version=message.weights_version,
    )


def saved_response(value: port.SavedState) -> e.SavedStateResponse:
    """The message of SavedState."""
    return e.SavedStateResponse(
        files=[
            e.SavedFileEntry(name=file.name, size_bytes=file.size_bytes, sha256=file.sha256) for file in value.files
        ],
        manifest_sha256=value.manifest_sha256,
        optimizer_step=value.optimizer_step,
        weights_version=value.rollout_version,
    )


def scores_result(value: port.Float32Array) -> t.ScoreResult:
    """The message of log-probabilities."""
    return t.ScoreResult(logprobs=wire.tensor(value, "float32"))
