"""The real engine: the trainer and the vLLM generator of one architecture over the state of its deployments.

Owns residency and versions; leaves computing to `trainer` and `generator`, memory to `device`, files to `checkpoints`.
"""

from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path

import torch
import transformers
import vllm
from safetensors.torch import load_file, save_file
from transformers import PretrainedConfig

from plexrl_worker.engine import checkpoints, lora, losses, model_config
from plexrl_worker.engine.bases import base_weights, read_directory
from plexrl_worker.engine.checks import (
    check_adamw,
    check_deployment,
    check_has_training_weights,
    check_sampling,
    check_trainable,
)
from plexrl_worker.engine.concurrent import Checked, alone
from plexrl_worker.engine.deployment import Deployment
from plexrl_worker.engine.device import CpuDevice, CudaDevice, Device
from plexrl_worker.engine.errors import (
    CheckpointMismatch,
    DeviceNotHeld,
    EngineError,
    InvalidArgument,
    OutOfMemory,
    SlotOccupied,
    UnknownDeployment,
    Unsupported,
    VersionMismatch,
)
from plexrl_worker.engine.generator import Generator
from plexrl_worker.engine.lora_base import base_directory, check_adapters
from plexrl_worker.engine.moves import StateMover
from plexrl_worker.engine.port import (
    ALL_COMPONENTS,
    AdamWParams,
    Arrivals,
    ByteArray,
    Component,
    ConcurrentGenerate,
    Control,
    DeploymentState,
    DeviceRelease,
    EngineDescription,
    Float32Array,
    Generation,
    LossBatch,
    LossName,
    LossParams,
    ParkedState,
    SamplingParams,
    SavedState,
    StateLayout,
    StepResult,
    SwapReport,
    TokenBatch,
    TrainMetrics,
)
from plexrl_worker.engine.settings import Base, DeploymentSettings, DirectoryBase, EngineSettings, InitBase
from plexrl_worker.engine.trainer import Trainer


def start(settings: EngineSettings, directory: Path | None = None) -> "VllmTorchEngine":
    """Starts the engine; `directory` is its own, to write to.

    Raises Unsupported or InvalidArgument with the reason when the architecture cannot be run.
    """
    torch.set_num_threads(settings.threads)
    transformers.utils.logging.set_verbosity_error()
    try:
        config = model_config.read(settings.config_json)
        return VllmTorchEngine(settings, config, directory)
    except EngineError:
        raise
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise OutOfMemory(f"the engine does not fit on the device: {error}") from error
    # What vLLM and transformers raise for a model they cannot run has no common type narrower than these.
    except (ValueError, KeyError, TypeError, AttributeError, AssertionError, RuntimeError, ImportError) as error:
        raise Unsupported(f"this model cannot be run: {type(error).__name__}: {error}") from error


class VllmTorchEngine:
    """port.Engine on vLLM and torch."""

    def __init__(self, settings: EngineSettings, config: PretrainedConfig, directory: Path | None = None) -> None:
        self._settings = settings
        self._config = config
        self._device: Device = CudaDevice() if torch.cuda.is_available() else CpuDevice()
        limit = int(config.max_position_embeddings)
        self._max_sequence_tokens = settings.max_sequence_tokens or limit
        if self._max_sequence_tokens > limit:
            raise InvalidArgument(
                f"max_sequence_tokens is {self._max_sequence_tokens}, the model has {limit} positions"
            )
        self._trainer = Trainer(config, settings.precision, self._device.torch_device, settings.lora)
        shapes = {view.name: view.shape for view in self._trainer.parameters}
        weights = None
        if settings.lora is not None and isinstance(settings.lora.base, DirectoryBase):
            weights = read_directory(settings.lora.base.path, self._trainer.base_parameters, settings.config_json)
        with base_directory(settings, self._trainer, weights, directory) as base:
            self._generator = Generator(settings, self._max_sequence_tokens, shapes, self._device, directory, base)
        if settings.lora is not None:
            check_adapters(settings, self._trainer, self._generator, self._device, int(config.vocab_size))
        self._threads = torch.get_num_threads()
        if self._threads != settings.threads:
            raise EngineError(f"torch runs {self._threads} threads, {settings.threads} were asked for")
        self._mover = StateMover(self._device, self._generator, self._trainer)
        self._deployments: dict[str, Deployment] = {}
        self._holds_device = True

    def describe(self) -> EngineDescription:
        """See port.Engine."""
        return EngineDescription(
            architecture=self._config.architectures[0],
            precision=self._settings.precision,
            device_kind=self._device.kind,
            threads=self._threads,
            vocab_size=int(self._config.vocab_size),
            max_sequence_tokens=self._max_sequence_tokens,
            kv_cache_bytes=self._settings.kv_cache_bytes,
            losses=tuple(LossName),
            library_versions=_library_versions(),
        )

    def declare(self, deployment_id: str, settings: DeploymentSettings) -> StateLayout:
        """See port.Engine."""
        known = self._deployments.get(deployment_id)
        if known is None:
            check_deployment(settings, self._settings.lora)
            slot_bytes = self._generator.slot.size_bytes
            known = Deployment(deployment_id, settings, self._trainer, slot_bytes, self._device)
            self._deployments[deployment_id] = known
        elif known.settings != settings:
            raise InvalidArgument(f"{deployment_id} is declared with other settings: drop it first")
        return known.layout

    def initialize(self, deployment_id: str, base: Base, rollout_version: int, control: Control) -> DeploymentState:
        """See port.Engine."""
        deployment = self._on_device(deployment_id, "initialize")
        self._mover.claim_slot(deployment_id)
        if self._settings.lora is not None and base != self._settings.lora.base:
            raise InvalidArgument(f"{deployment_id} is an adapter over another base than the engine's")
        if deployment.settings.rollout_only:
            self._mover.take(deployment)
            self._mover.fill_slot(deployment, base_weights(base, self._trainer, self._settings.config_json))
            # The base was in host memory for this moment alone.
            self._device.trim()
        else:
            self._fill_all(deployment, base)
        deployment.ledger.optimizer_step = 0
        deployment.ledger.rollout_version = rollout_version
        return deployment.ledger.state()

    def _fill_all(self, deployment: Deployment, base: Base) -> None:
        """Fills what a deployment that has training weights has."""
        tensors = None
        if isinstance(base, DirectoryBase) and self._settings.lora is None:
            tensors = read_directory(base.path, self._trainer.parameters, self._settings.config_json)
        self._mover.take(deployment)
        flat = deployment.flat(Component.TRAIN_WEIGHTS)
        if tensors is not None:
            self._trainer.copy_weights(tensors, flat)
        elif isinstance(base, InitBase) and self._settings.lora is None:
            self._trainer.random_weights(base.seed, flat)
        else:
            self._trainer.random_weights(deployment.settings.adapter_seed, flat)
        self._mover.fill_slot(deployment, self._named(flat))
        deployment.ledger.write(Component.TRAIN_WEIGHTS)
        if deployment.settings.trainable:
            for component in (Component.GRADIENTS, Component.OPTIMIZER):
                deployment.regions[component].pieces[0].zero_()
                deployment.ledger.write(component, zero=True)

    def attach_host(self, deployment_id: str, image: ByteArray) -> None:
        """See port.Engine."""
        deployment = self._deployment(deployment_id)
        if image.shape != (deployment.layout.host_bytes,):
            raise InvalidArgument(f"host image has {image.size} bytes, want {deployment.layout.host_bytes}")
        self._mover.detach(deployment)
        self._device.pin(image)
        deployment.image = image

    def detach_host(self, deployment_id: str) -> None:
        """See port.Engine."""
        deployment = self._deployment(deployment_id)
        self._mover.discard_preloaded(deployment)
        self._mover.detach(deployment)

    def swap_out(self, deployment_id: str, components: Collection[Component], control: Control) -> SwapReport:
        """See port.Engine."""
        return self._mover.swap_out(self._deployment(deployment_id), components, control)

    def write_back(self, deployment_id: str, components: Collection[Component], control: Control) -> SwapReport:
        """See port.Engine."""
        return self._mover.write_back(self._deployment(deployment_id), components, control)

    def swap_in(
        self, deployment_id: str, parked: ParkedState, components: Collection[Component], control: Control
    ) -> SwapReport:
        """See port.Engine."""
        return self._mover.swap_in(self._on_device(deployment_id, "swap_in"), parked, components, control)

    def preload(self, deployment_id: str, parked: ParkedState, control: Control) -> SwapReport:
        """See port.Engine."""
        return self._mover.preload(self._on_device(deployment_id, "preload"), parked, control)

    def state(self, deployment_id: str) -> DeploymentState:
        """See port.Engine."""
        return self._deployment(deployment_id).ledger.state()

    def drop(self, deployment_id: str) -> None:
        """See port.Engine."""
        deployment = self._deployments.pop(deployment_id, None)
        if deployment is None:
            return
        self._generator.parking.forget_model(deployment_id)
        self._mover.drop(deployment)

    def acquire_device(self) -> None:
        """See port.Engine."""
        if not self._holds_device:
            self._trainer.base_to(self._device.torch_device)
            self._generator.acquire_device()
            self._holds_device = True

    def release_device(self) -> DeviceRelease:
        """See port.Engine."""
        for deployment_id, deployment in list(self._deployments.items()):
            if deployment.ledger.resident():
                raise SlotOccupied(f"{deployment_id} has state on the device: swap it out first")
        used_bytes = self._device.used_bytes()
        if self._holds_device:
            for deployment in list(self._deployments.values()):
                self._mover.discard_preloaded(deployment)
            self._generator.release_device()
            if self._device.kind == "cuda":
                self._trainer.base_to(torch.device("cpu"))
            self._device.trim()
            self._holds_device = False
        return DeviceRelease(max(0, used_bytes - self._device.used_bytes()), self._device.held_bytes())

    def generate(
        self,
        deployment_id: str,
        weights_version: int,
        prompts: TokenBatch,
        params: SamplingParams,
        control: Control,
        execution: str = "",
    ) -> Generation:
        """See port.Engine."""
        generate = ConcurrentGenerate(prompts, params, control, execution)
        return alone(partial(self.generate_concurrently, deployment_id, weights_version), generate)

    def generate_concurrently(self, deployment_id: str, weights_version: int, arrivals: Arrivals) -> None:
        """See port.Engine."""
        deployment = self._rollout(deployment_id, weights_version, "generate")
        checked = Checked(arrivals, self._check_generate)
        self._generator.generate_concurrently(checked, deployment.rollout_content(), deployment.tokenizer)

    def _check_generate(self, generate: ConcurrentGenerate) -> None:
        losses.check_tokens(generate.prompts, int(self._config.vocab_size), self._max_sequence_tokens)
        check_sampling(generate.params, generate.prompts, self._max_sequence_tokens)

    @property
    def generator_steps(self) -> int:
        """See port.Engine."""
        return self._generator.steps

    def forget_execution(self, execution: str) -> None:
        """See port.Engine."""
        self._generator.parking.forget(execution)

    def score(self, deployment_id: str, batch: TokenBatch, control: Control) -> Float32Array:
        """See port.Engine."""
        deployment = self._with_training_weights(deployment_id, "score")
        deployment.ledger.require([Component.TRAIN_WEIGHTS], "score")
        losses.check_tokens(batch, int(self._config.vocab_size), self._max_sequence_tokens)
        self._trainer.bind(deployment.flat(Component.TRAIN_WEIGHTS), None)
        return self._trainer.score(batch, deployment.settings, control)

    def score_rollout(
        self, deployment_id: str, weights_version: int, batch: TokenBatch, control: Control
    ) -> Float32Array:
        """See port.Engine."""
        deployment = self._rollout(deployment_id, weights_version, "score_rollout")
        losses.check_tokens(batch, int(self._config.vocab_size), self._max_sequence_tokens)
        return self._generator.score(batch, deployment.rollout_content(), control)

    def forward_backward(
        self, deployment_id: str, batch: LossBatch, loss: LossName, params: LossParams, control: Control
    ) -> TrainMetrics:
        """See port.Engine."""
        deployment = self._trainable(deployment_id, "forward_backward")
        ledger = deployment.ledger
        ledger.require([Component.TRAIN_WEIGHTS, Component.GRADIENTS], "forward_backward")
        losses.check_tokens(batch.tokens, int(self._config.vocab_size), self._max_sequence_tokens)
        losses.check_loss(batch, loss, params)
        gradients = deployment.flat(Component.GRADIENTS)
        self._trainer.bind(deployment.flat(Component.TRAIN_WEIGHTS), gradients)
        metrics = self._trainer.forward_backward(
            batch, loss, params, gradients, ledger.is_zero(Component.GRADIENTS), deployment.settings, control
        )
        ledger.write(Component.GRADIENTS)
        return metrics

    def optim_step(self, deployment_id: str, params: AdamWParams) -> StepResult:
        """See port.Engine."""
        deployment = self._trainable(deployment_id, "optim_step")
        ledger = deployment.ledger
        check_adamw(params)
        ledger.require([Component.TRAIN_WEIGHTS, Component.GRADIENTS, Component.OPTIMIZER], "optim_step")
        grad_norm = self._trainer.optim_step(
            params,
            ledger.optimizer_step,
            deployment.flat(Component.TRAIN_WEIGHTS),
            deployment.flat(Component.GRADIENTS),
            deployment.moments(),
        )
        ledger.optimizer_step += 1
        ledger.write(Component.TRAIN_WEIGHTS)
        ledger.write(Component.OPTIMIZER)
        ledger.write(Component.GRADIENTS, zero=True)
        return StepResult(grad_norm, ledger.optimizer_step)

    def sync(self, deployment_id: str, weights_version: int) -> None:
        """See port.Engine."""
        deployment = self._with_training_weights(deployment_id, "sync")
        deployment.ledger.require([Component.TRAIN_WEIGHTS], "sync")
        self._mover.claim_slot(deployment_id)
        self._mover.fill_slot(deployment, self._named(deployment.flat(Component.TRAIN_WEIGHTS)))
        deployment.ledger.rollout_version = weights_version

    def save(self, deployment_id: str, directory: str, control: Control) -> SavedState:
        """See port.Engine."""
        deployment = self._with_training_weights(deployment_id, "save")
        ledger, path = deployment.ledger, Path(directory)
        ledger.require(ledger.existing(ALL_COMPONENTS), "save")
        weights = self._named(deployment.flat(Component.TRAIN_WEIGHTS))
        (path / checkpoints.CONFIG_FILE).write_text(self._settings.config_json)
        checkpoints.copy_tokenizer(deployment.settings.tokenizer_file, path)
        if self._settings.lora is None:
            _save(weights, path / checkpoints.WEIGHTS_FILE)
        else:
            lora.write(path, weights, self._settings.lora)
        rollout = dict(self._generator.slot.tensors())
        if any(not torch.equal(rollout[name], weights[name].view(-1).to(rollout[name])) for name in weights):
            _save({name: rollout[name].view(weights[name].shape) for name in weights}, path / checkpoints.ROLLOUT_FILE)
        if deployment.settings.trainable:
            first, second = (self._named(flat) for flat in deployment.moments())
            moments = {f"exp_avg.{name}": tensor for name, tensor in first.items()}
            moments |= {f"exp_avg_sq.{name}": tensor for name, tensor in second.items()}
            _save(moments, path / checkpoints.OPTIMIZER_FILE)
            if not ledger.is_zero(Component.GRADIENTS):
                _save(self._named(deployment.flat(Component.GRADIENTS)), path / checkpoints.GRADIENTS_FILE)
        return checkpoints.commit(
            path,
            self._conditions(),
            _library_versions(),
            ledger.optimizer_step,
            ledger.rollout_version,
            control.progress,
        )

    def load(
        self, deployment_id: str, directory: str, rollout_version: int | None, control: Control
    ) -> DeploymentState:
        """See port.Engine."""
        deployment = self._on_device(deployment_id, "load")
        self._mover.claim_slot(deployment_id)
        manifest = checkpoints.verify(Path(directory), control.progress)
        manifest.require(self._conditions())
        trainable, alone = deployment.settings.trainable, deployment.settings.rollout_only
        if trainable and checkpoints.OPTIMIZER_FILE not in manifest.files:
            raise CheckpointMismatch(f"{directory}: has no optimizer state, it was written by a reference")
        self._mover.take(deployment)
        ledger = deployment.ledger
        if self._settings.lora is None:
            rollout = load_file(manifest.directory / checkpoints.WEIGHTS_FILE)
        else:
            rollout = lora.model_names(load_file(manifest.directory / lora.WEIGHTS_FILE))
        if not alone:
            self._trainer.copy_weights(rollout, deployment.flat(Component.TRAIN_WEIGHTS))
            ledger.write(Component.TRAIN_WEIGHTS)
            rollout = self._named(deployment.flat(Component.TRAIN_WEIGHTS))
        if trainable:
            self._load_training(deployment, manifest)
        if checkpoints.ROLLOUT_FILE in manifest.files:
            rollout = load_file(manifest.directory / checkpoints.ROLLOUT_FILE)
        self._mover.fill_slot(deployment, rollout)
        ledger.optimizer_step = 0 if alone else manifest.optimizer_step
        ledger.rollout_version = manifest.rollout_version if rollout_version is None else rollout_version
        return ledger.state()

    def close(self) -> None:
        """See port.Engine."""
        for deployment_id in list(self._deployments):
            self.drop(deployment_id)
        self._generator.close()

    def _load_training(self, deployment: Deployment, manifest: checkpoints.Manifest) -> None:
        moments = load_file(manifest.directory / checkpoints.OPTIMIZER_FILE)
        for prefix, flat in zip(("exp_avg.", "exp_avg_sq."), deployment.moments(), strict=True):
            tensors = {name.removeprefix(prefix): moments[name] for name in moments if name.startswith(prefix)}
            self._trainer.copy_weights(tensors, flat)
        deployment.ledger.write(Component.OPTIMIZER, zero=manifest.optimizer_step == 0)
        gradients = deployment.flat(Component.GRADIENTS)
        if checkpoints.GRADIENTS_FILE in manifest.files:
            self._trainer.copy_weights(load_file(manifest.directory / checkpoints.GRADIENTS_FILE), gradients)
            deployment.ledger.write(Component.GRADIENTS)
        else:
            gradients.zero_()
            deployment.ledger.write(Component.GRADIENTS, zero=True)

    def _named(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        return {view.name: view.of(flat) for view in self._trainer.parameters}

    def _conditions(self) -> dict[str, str]:
        lora_settings = self._settings.lora
        return {
            "engine": "vllm_torch",
            "config_sha256": model_config.sha256(self._settings.config_json),
            "precision": self._settings.precision.value,
            "device_kind": self._device.kind,
            "threads": str(self._threads),
            **({} if lora_settings is None else {"lora": f"rank {lora_settings.rank}, alpha {lora_settings.alpha:g}"}),
        }

    def _deployment(self, deployment_id: str) -> Deployment:
        try:
            return self._deployments[deployment_id]
        except KeyError:
            raise UnknownDeployment(f"{deployment_id} is not declared in this engine") from None

    def _on_device(self, deployment_id: str, function: str) -> Deployment:
        deployment = self._deployment(deployment_id)
        if not self._holds_device:
            raise DeviceNotHeld(f"{function}: the engine has released the device")
        return deployment

    def _with_training_weights(self, deployment_id: str, function: str) -> Deployment:
        deployment = self._on_device(deployment_id, function)
        check_has_training_weights(deployment_id, deployment.settings, function)
        return deployment

    def _trainable(self, deployment_id: str, function: str) -> Deployment:
        deployment = self._on_device(deployment_id, function)
        check_trainable(deployment_id, deployment.settings, function)
        return deployment

    def _rollout(self, deployment_id: str, weights_version: int, function: str) -> Deployment:
        deployment = self._on_device(deployment_id, function)
        deployment.ledger.require([Component.ROLLOUT_WEIGHTS], function)
        held = deployment.ledger.rollout_version
        if held != weights_version:
            raise VersionMismatch(f"{function} asks for version {weights_version}, the generator holds {held}")
        return deployment


def _save(tensors: Mapping[str, torch.Tensor], file: Path) -> None:
    save_file(dict(tensors), file, metadata={"format": "pt"})


def _library_versions() -> dict[str, str]:
    return {"torch": torch.__version__, "vllm": vllm.__version__, "transformers": transformers.__version__}
