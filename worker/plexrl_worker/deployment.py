"""What the daemon remembers of one model on this worker, beside where its bytes are."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from plexrl.v1 import model_pb2 as m
from plexrl.v1 import worker_pb2 as w
from plexrl_worker.bases import LocalBase
from plexrl_worker.engine import codec, port
from plexrl_worker.engine.client import EngineProcess
from plexrl_worker.engine.settings import Base, DeploymentSettings, EngineSettings, LoraSettings
from plexrl_worker.errors import Unsupported
from plexrl_worker.parked_files import StateFacts
from plexrl_worker.settings import WorkerSettings
from plexrl_worker.wanted_lock import WantedLock

_DEFAULT_MICRO_BATCH_TOKENS = 8192
# Keys of a config.json that change neither the architecture nor its numbers.
_COSMETIC_CONFIG_KEYS = frozenset({"_name_or_path", "transformers_version"})


@dataclass(frozen=True)
class HostState:
    """The whole state of a moment, as a host image holds it, and where the model's sequence stood then."""

    parked: port.ParkedState
    applied_sequence: int
    weights_version: int


@dataclass
class Deployment:
    """A model on this worker.

    parked: what must be remembered to use its host image; None while there is no usable one. While the model is on the
    device, of components that are clean alone.
    conditions: what must be equal where a snapshot of it is restored.
    host_state: what the image holds, which may be older than what is on the device; None while it is being written.
    image_lock: held while the image is written, or read for a snapshot.
    attached: the engine child that knows it; another, or none, must be told again.
    """

    order: w.DeployOrder
    base: LocalBase
    engine_key: str
    engine_settings: EngineSettings
    settings: DeploymentSettings
    applied_sequence: int
    weights_version: int
    layout: port.StateLayout | None = None
    parked: port.ParkedState | None = None
    attached: EngineProcess | None = None
    state_lost: bool = False
    conditions: Mapping[str, str] = field(default_factory=dict)
    host_state: HostState | None = None
    image_lock: WantedLock = field(default_factory=WantedLock)

    @property
    def model_id(self) -> str:
        """The model."""
        return self.order.model_id

    @property
    def job_id(self) -> str:
        """Its job."""
        return self.order.job_id

    @property
    def components(self) -> frozenset[port.Component]:
        """The components that its state has."""
        assert self.layout is not None
        return frozenset(extent.component for extent in self.layout.components)

    def facts(self) -> StateFacts:
        """What its state of this moment is, for whoever finds it on disk."""
        return StateFacts(
            self.model_id, fingerprint(self.order), self.applied_sequence, self.weights_version, dict(self.conditions)
        )

    def description(self) -> w.DeployedModel:
        """What was built, as a report says it."""
        assert self.layout is not None
        return w.DeployedModel(
            parameter_count=self.layout.parameter_count,
            state_bytes=self.layout.device_bytes,
            has_tokenizer=self.base.tokenizer_file is not None,
            applied_sequence=self.applied_sequence,
        )


def fingerprint(order: w.DeployOrder) -> str:
    """SHA-256 over what a model is built from, and for whom: equal for a model that is deployed again."""
    same = w.DeployOrder(
        model_id=order.model_id, job_id=order.job_id, base=order.base, role=order.role, settings=order.settings
    )
    return hashlib.sha256(same.SerializeToString(deterministic=True)).hexdigest()


def check_settings(settings: m.ModelSettings) -> None:
    """Raises Unsupported for what the wire reserves and this worker does not offer."""
    if settings.precision not in m.Precision.values():
        raise Unsupported(f"settings.precision: {settings.precision} is none that this worker knows")
    if settings.HasField("lora") and settings.lora.rank < 1:
        raise Unsupported("settings.lora.rank: 0; want at least 1")
    if settings.world_size > 1:
        raise Unsupported(f"settings.world_size: {settings.world_size}; gangs are not offered: use 1")
    if settings.keep_versions > 1:
        raise Unsupported(f"settings.keep_versions: {settings.keep_versions}; only the latest version is kept: use 1")


def make_deployment(order: w.DeployOrder, base: LocalBase, settings: WorkerSettings) -> Deployment:
    """A deployment as ordered, with no state yet."""
    model = order.settings
    engine_settings = EngineSettings(
        config_json=base.config_json,
        precision=codec.precision(model.precision),
        max_sequence_tokens=model.max_sequence_tokens,
        kv_cache_bytes=settings.kv_cache_bytes,
        threads=settings.threads,
        lora=_lora(model.lora, base.weights) if model.HasField("lora") else None,
    )
    return Deployment(
        order=order,
        base=base,
        engine_key=engine_key(engine_settings),
        engine_settings=engine_settings,
        settings=DeploymentSettings(
            trainable=order.role not in (m.MODEL_ROLE_REFERENCE, m.MODEL_ROLE_ROLLOUT),
            micro_batch_tokens=model.micro_batch_tokens or _DEFAULT_MICRO_BATCH_TOKENS,
            activation_checkpointing=model.activation_checkpointing,
            tokenizer_file=str(base.tokenizer_file) if base.tokenizer_file else None,
            adapter_seed=model.lora.seed,
            rollout_only=order.role == m.MODEL_ROLE_ROLLOUT,
        ),
        applied_sequence=order.applied_sequence,
        weights_version=order.weights_version,
    )


def _lora(settings: m.LoraSettings, base: Base) -> LoraSettings:
    return LoraSettings(settings.rank, settings.alpha or float(settings.rank), base)


def engine_key(settings: EngineSettings) -> str:
    """SHA-256 over the canonical config and the engine's settings: deployments with equal keys share a child."""
    content = asdict(settings) | {"config_json": _canonical(settings.config_json)}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def configuration_sha256(config_json: str) -> str:
    """SHA-256 of what a config.json says about the architecture and its numbers."""
    return hashlib.sha256(json.dumps(_canonical(config_json), sort_keys=True).encode()).hexdigest()


def _canonical(config_json: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(config_json)
    return {key: value for key, value in config.items() if key not in _COSMETIC_CONFIG_KEYS}
