"""A test double of the engine: numpy alone, starts at once. Never for real work.

The model is a table of next-token logits, one row per token: float32 [vocab_size, vocab_size]. Losses, AdamW, swaps,
versions and checkpoints are real, so that callers meet the port's behaviour and a job can even learn on it.

The engine's config_json needs `architectures`, `vocab_size` and `max_position_embeddings`; `plexrl_fake` in it orders
faults (see `fake_faults`).
"""

import hashlib
import json
import time
from collections.abc import Collection
from functools import partial
from itertools import accumulate
from pathlib import Path

import numpy as np

from plexrl_worker.engine import checkpoints, fake_files, losses
from plexrl_worker.engine.checks import (
    check_adamw,
    check_deployment,
    check_has_training_weights,
    check_sampling,
    check_trainable,
)
from plexrl_worker.engine.concurrent import alone
from plexrl_worker.engine.errors import (
    Aborted,
    DeviceNotHeld,
    EngineError,
    InvalidArgument,
    NonFinite,
    ParkedStateCorrupt,
    SlotOccupied,
    UnknownDeployment,
    Unsupported,
    VersionMismatch,
    Yielded,
)
from plexrl_worker.engine.fake_faults import Faults
from plexrl_worker.engine.fake_model import (
    FakeDeployment,
    Sampled,
    Sampling,
    base_weights,
    checksum,
    log_softmax,
)
from plexrl_worker.engine.memory import anonymous_bytes
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
    ParkedComponent,
    ParkedState,
    SamplingParams,
    SavedState,
    StateLayout,
    StepResult,
    SwapReport,
    TokenBatch,
    TrainMetrics,
)
from plexrl_worker.engine.settings import Base, DeploymentSettings, EngineSettings, Precision


class FakeEngine:
    """port.Engine on a table of logits. See the module for its faults."""

    def __init__(self, settings: EngineSettings) -> None:
        try:
            config = json.loads(settings.config_json)
            self._vocab_size = int(config["vocab_size"])
            self._max_sequence_tokens = settings.max_sequence_tokens or int(config["max_position_embeddings"])
            self._architecture = str(config["architectures"][0])
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise InvalidArgument(f"config_json is not a model configuration: {error!r}") from error
        if settings.precision is not Precision.FLOAT32:
            raise Unsupported("the fake engine computes in float32 only")
        if settings.lora is not None:
            raise Unsupported("settings.lora: the fake engine has no adapters")
        self._settings = settings
        self._faults = Faults(config.get("plexrl_fake", []))
        self._deployments: dict[str, FakeDeployment] = {}
        self._holds_device = True
        self._parked: dict[str, Sampled] = {}
        self._steps = 0
        self._faults.strike("start", None)

    def describe(self) -> EngineDescription:
        """See port.Engine."""
        return EngineDescription(
            architecture=self._architecture,
            precision=Precision.FLOAT32,
            device_kind="cpu",
            threads=self._settings.threads,
            vocab_size=self._vocab_size,
            max_sequence_tokens=self._max_sequence_tokens,
            kv_cache_bytes=self._settings.kv_cache_bytes,
            losses=tuple(LossName),
            library_versions={"numpy": np.__version__},
        )

    def declare(self, deployment_id: str, settings: DeploymentSettings) -> StateLayout:
        """See port.Engine."""
        known = self._deployments.get(deployment_id)
        if known is None:
            check_deployment(settings, self._settings.lora)
            known = self._deployments[deployment_id] = FakeDeployment(deployment_id, settings, self._vocab_size)
        elif known.settings != settings:
            raise InvalidArgument(f"{deployment_id} is declared with other settings: drop it first")
        return known.layout

    def initialize(self, deployment_id: str, base: Base, rollout_version: int, control: Control) -> DeploymentState:
        """See port.Engine."""
        deployment = self._on_device(deployment_id, "initialize", control)
        self._claim_slot(deployment_id)
        weights = base_weights(base, self._vocab_size)
        deployment.fill(weights.ravel(), None, weights.ravel())
        deployment.ledger.optimizer_step = 0
        deployment.ledger.rollout_version = rollout_version
        return deployment.ledger.state()

    def attach_host(self, deployment_id: str, image: ByteArray) -> None:
        """See port.Engine."""
        deployment = self._deployment(deployment_id)
        if image.shape != (deployment.layout.host_bytes,):
            raise InvalidArgument(f"host image has {image.size} bytes, want {deployment.layout.host_bytes}")
        deployment.image = image
        deployment.ledger.forget_image()

    def detach_host(self, deployment_id: str) -> None:
        """See port.Engine."""
        deployment = self._deployment(deployment_id)
        deployment.preloaded.clear()
        deployment.image = None
        deployment.ledger.forget_image()

    def swap_out(self, deployment_id: str, components: Collection[Component], control: Control) -> SwapReport:
        """See port.Engine."""
        started_s = time.monotonic()
        deployment = self._deployment(deployment_id)
        self._faults.strike("swap_out", control)
        leaving = deployment.ledger.resident(components)
        moved, released = self._park(deployment, leaving), 0
        for component in leaving:
            deployment.ledger.evict(component)
            del deployment.arrays[component]
            released += deployment.ledger.place(component).size_bytes
        parked = deployment.ledger.parked_state()
        return SwapReport(moved, released, time.monotonic() - started_s, parked, anonymous_bytes())

    def write_back(self, deployment_id: str, components: Collection[Component], control: Control) -> SwapReport:
        """See port.Engine."""
        started_s = time.monotonic()
        deployment = self._deployment(deployment_id)
        self._faults.strike("write_back", control)
        moved = self._park(deployment, deployment.ledger.resident(components))
        parked = deployment.ledger.parked_state()
        return SwapReport(moved, 0, time.monotonic() - started_s, parked, anonymous_bytes())

    def swap_in(
        self, deployment_id: str, parked: ParkedState, components: Collection[Component], control: Control
    ) -> SwapReport:
        """See port.Engine."""
        started_s = time.monotonic()
        deployment = self._on_device(deployment_id, "swap_in", control)
        copies = deployment.ledger.parked_of(parked, components)
        if any(copy.component is Component.ROLLOUT_WEIGHTS for copy in copies):
            self._claim_slot(deployment_id)
        moved = allocated = 0
        if any(copy not in deployment.preloaded for copy in copies):
            self._faults.strike("load", control)
        for copy in copies:
            size_bytes = deployment.ledger.place(copy.component).size_bytes
            values = deployment.preloaded.get(copy)
            if values is None:
                try:
                    values = self._unpark(deployment, copy)
                except ParkedStateCorrupt:
                    for other in copies:
                        deployment.arrays.pop(other.component, None)
                        deployment.ledger.evict(other.component)
                    raise
                moved += 0 if copy.is_zero else size_bytes
            deployment.arrays[copy.component] = values
            deployment.ledger.adopt(copy, parked)
            allocated += size_bytes
        deployment.preloaded.clear()
        parked = deployment.ledger.parked_state()
        return SwapReport(moved, allocated, time.monotonic() - started_s, parked, anonymous_bytes())

    def preload(self, deployment_id: str, parked: ParkedState, control: Control) -> SwapReport:
        """See port.Engine."""
        started_s = time.monotonic()
        deployment = self._on_device(deployment_id, "preload", control)
        deployment.preloaded.clear()
        self._faults.strike("load", control)
        copies = deployment.ledger.parked_of(parked, ALL_COMPONENTS)
        deployment.preloaded = {copy: self._unpark(deployment, copy) for copy in copies}
        moved = sum(values.nbytes for copy, values in deployment.preloaded.items() if not copy.is_zero)
        return SwapReport(moved, moved, time.monotonic() - started_s, parked, anonymous_bytes())

    def state(self, deployment_id: str) -> DeploymentState:
        """See port.Engine."""
        return self._deployment(deployment_id).ledger.state()

    def drop(self, deployment_id: str) -> None:
        """See port.Engine."""
        self._deployments.pop(deployment_id, None)
        self._parked = {name: parked for name, parked in self._parked.items() if parked.deployment_id != deployment_id}

    def acquire_device(self) -> None:
        """See port.Engine."""
        self._holds_device = True

    def release_device(self) -> DeviceRelease:
        """See port.Engine."""
        for deployment_id, deployment in self._deployments.items():
            if deployment.arrays:
                raise SlotOccupied(f"{deployment_id} has state on the device: swap it out first")
            deployment.preloaded.clear()
        released = self._settings.kv_cache_bytes if self._holds_device else 0
        self._holds_device = False
        return DeviceRelease(released, anonymous_bytes())

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
        """See port.Engine. A step samples one completion of each."""
        deployment = self._on_device(deployment_id, "generate", None)
        self._rollout(deployment, weights_version, "generate")
        running: list[Sampling] = []
        while True:
            for generate in arrivals.take():
                try:
                    running.append(self._begin(deployment_id, weights_version, generate))
                except EngineError as error:
                    arrivals.ended(generate, error)
            if not running:
                return
            self._steps += 1
            for sampling in list(running):
                outcome: Generation | EngineError | None
                try:
                    outcome = sampling.go_on(partial(deployment.rollout_row, vocab_size=self._vocab_size), self._faults)
                except EngineError as error:
                    outcome = error
                    if isinstance(error, Yielded):
                        self._parked[sampling.generate.execution] = sampling.sampled
                if outcome is not None:
                    running.remove(sampling)
                    arrivals.ended(sampling.generate, outcome)

    @property
    def generator_steps(self) -> int:
        """See port.Engine."""
        return self._steps

    def _begin(self, deployment_id: str, weights_version: int, generate: ConcurrentGenerate) -> Sampling:
        prompts, params = generate.prompts, generate.params
        losses.check_tokens(prompts, self._vocab_size, self._max_sequence_tokens)
        check_sampling(params, prompts, self._max_sequence_tokens)
        if params.stop:
            raise InvalidArgument("stop strings need a tokenizer, which the fake engine does not have")
        self._faults.strike("generate", generate.control)
        sampled = self._parked.pop(generate.execution, None)
        if sampled is None or (sampled.deployment_id, sampled.weights_version) != (deployment_id, weights_version):
            sampled = Sampled(deployment_id, weights_version)
        last_tokens = [int(prompts.token_ids[end - 1]) for end in accumulate(prompts.lengths.tolist())]
        return Sampling(generate, sampled, last_tokens)

    def forget_execution(self, execution: str) -> None:
        """See port.Engine."""
        self._parked.pop(execution, None)

    def score(self, deployment_id: str, batch: TokenBatch, control: Control) -> Float32Array:
        """See port.Engine."""
        deployment = self._with_training_weights(deployment_id, "score", control)
        deployment.ledger.require([Component.TRAIN_WEIGHTS], "score")
        return self._scores(deployment.table(Component.TRAIN_WEIGHTS, self._vocab_size), batch)

    def score_rollout(
        self, deployment_id: str, weights_version: int, batch: TokenBatch, control: Control
    ) -> Float32Array:
        """See port.Engine."""
        deployment = self._on_device(deployment_id, "score_rollout", control)
        return self._scores(self._rollout(deployment, weights_version, "score_rollout"), batch)

    def forward_backward(
        self, deployment_id: str, batch: LossBatch, loss: LossName, params: LossParams, control: Control
    ) -> TrainMetrics:
        """See port.Engine."""
        deployment = self._trainable(deployment_id, "forward_backward", control)
        deployment.ledger.require([Component.TRAIN_WEIGHTS, Component.GRADIENTS], "forward_backward")
        losses.check_tokens(batch.tokens, self._vocab_size, self._max_sequence_tokens)
        losses.check_loss(batch, loss, params)
        positions = np.flatnonzero(batch.weights)
        previous, current = batch.tokens.token_ids[positions - 1], batch.tokens.token_ids[positions]
        log_probabilities = log_softmax(deployment.table(Component.TRAIN_WEIGHTS, self._vocab_size)[previous])
        rows = np.arange(positions.size)
        chosen = log_probabilities[rows, current].astype(np.float32)
        terms = losses.evaluate(loss, params, chosen, losses.select(batch, positions))
        probabilities = np.exp(log_probabilities)
        slopes = -probabilities * terms.gradient[:, None]
        slopes[rows, current] += terms.gradient
        gradient = np.zeros((self._vocab_size, self._vocab_size), np.float32)
        np.add.at(gradient, previous, slopes.astype(np.float32))
        control.progress(int(batch.tokens.lengths.size), int(batch.tokens.lengths.size))
        if control.aborted():
            raise Aborted("forward_backward was aborted")
        deployment.table(Component.GRADIENTS, self._vocab_size)[:] += gradient
        deployment.ledger.write(Component.GRADIENTS)
        logprobs = np.zeros(batch.tokens.token_ids.size, np.float32)
        logprobs[positions] = chosen
        count = max(positions.size, 1)
        entropy = -float(np.sum(probabilities * log_probabilities)) / count
        clip_fraction = terms.clipped / count
        return TrainMetrics(terms.loss, terms.kl_sum / count, entropy, clip_fraction, positions.size, logprobs)

    def optim_step(self, deployment_id: str, params: AdamWParams) -> StepResult:
        """See port.Engine."""
        deployment = self._trainable(deployment_id, "optim_step", None)
        check_adamw(params)
        train = [Component.TRAIN_WEIGHTS, Component.GRADIENTS, Component.OPTIMIZER]
        deployment.ledger.require(train, "optim_step")
        weights, gradient, moments = (deployment.arrays[component] for component in train)
        first, second = moments.reshape(2, -1)
        norm = float(np.linalg.norm(gradient.astype(np.float64)))
        if not np.isfinite(norm):
            raise NonFinite("the gradient is not finite; the step was not taken")
        scale = 1.0 if params.max_grad_norm is None else min(1.0, params.max_grad_norm / (norm + 1e-6))
        step = deployment.ledger.optimizer_step + 1
        scaled = gradient * np.float32(scale)
        first[:] = params.beta1 * first + (1 - params.beta1) * scaled
        second[:] = params.beta2 * second + (1 - params.beta2) * scaled**2
        corrected = np.sqrt(second / (1 - params.beta2**step)) + params.eps
        weights *= np.float32(1 - params.lr * params.weight_decay)
        weights -= (params.lr * (first / (1 - params.beta1**step)) / corrected).astype(np.float32)
        gradient[:] = 0
        deployment.ledger.optimizer_step = step
        for component in train:
            deployment.ledger.write(component, zero=component is Component.GRADIENTS)
        return StepResult(norm, step)

    def sync(self, deployment_id: str, weights_version: int) -> None:
        """See port.Engine."""
        deployment = self._with_training_weights(deployment_id, "sync", None)
        deployment.ledger.require([Component.TRAIN_WEIGHTS], "sync")
        self._claim_slot(deployment_id)
        deployment.arrays[Component.ROLLOUT_WEIGHTS] = deployment.arrays[Component.TRAIN_WEIGHTS].copy()
        deployment.ledger.write(Component.ROLLOUT_WEIGHTS)
        deployment.ledger.rollout_version = weights_version

    def save(self, deployment_id: str, directory: str, control: Control) -> SavedState:
        """See port.Engine."""
        deployment = self._with_training_weights(deployment_id, "save", control)
        deployment.ledger.require([entry.component for entry in deployment.layout.components], "save")
        path = Path(directory)
        (path / checkpoints.CONFIG_FILE).write_text(self._settings.config_json)
        fake_files.write(path, deployment, self._vocab_size)
        step, version = deployment.ledger.optimizer_step, deployment.ledger.rollout_version
        return checkpoints.commit(path, self._conditions(), {"numpy": np.__version__}, step, version, control.progress)

    def load(
        self, deployment_id: str, directory: str, rollout_version: int | None, control: Control
    ) -> DeploymentState:
        """See port.Engine."""
        deployment = self._on_device(deployment_id, "load", control)
        self._claim_slot(deployment_id)
        manifest = checkpoints.verify(Path(directory), control.progress)
        manifest.require(self._conditions())
        weights, rollout, training = fake_files.read(
            manifest, self._vocab_size, trainable=deployment.settings.trainable
        )
        deployment.fill(weights, training, rollout)
        deployment.ledger.optimizer_step = 0 if deployment.settings.rollout_only else manifest.optimizer_step
        deployment.ledger.rollout_version = manifest.rollout_version if rollout_version is None else rollout_version
        return deployment.ledger.state()

    def close(self) -> None:
        """See port.Engine."""
        self._deployments.clear()

    def _conditions(self) -> dict[str, str]:
        return {
            "engine": "fake",
            "config_sha256": hashlib.sha256(self._settings.config_json.encode()).hexdigest(),
            "threads": str(self._settings.threads),
        }

    def _park(self, deployment: FakeDeployment, components: Collection[Component]) -> int:
        """Copies those of `components` that are dirty to the host image; returns the bytes copied."""
        moved = 0
        for component in components:
            if deployment.ledger.is_dirty(component):
                place = deployment.ledger.place(component)
                raw = deployment.arrays[component].view(np.uint8)
                if not deployment.ledger.is_zero(component):
                    deployment.host_image()[place.offset : place.offset + place.size_bytes] = raw
                    moved += place.size_bytes
                deployment.ledger.park(component, checksum(raw))
        return moved

    def _deployment(self, deployment_id: str) -> FakeDeployment:
        try:
            return self._deployments[deployment_id]
        except KeyError:
            raise UnknownDeployment(f"{deployment_id} is not declared in this engine") from None

    def _on_device(self, deployment_id: str, function: str, control: Control | None) -> FakeDeployment:
        deployment = self._deployment(deployment_id)
        if not self._holds_device:
            raise DeviceNotHeld(f"{function}: the engine has released the device")
        if control is not None or function in ("optim_step", "sync"):
            self._faults.strike(function, control)
        return deployment

    def _with_training_weights(self, deployment_id: str, function: str, control: Control | None) -> FakeDeployment:
        deployment = self._on_device(deployment_id, function, control)
        check_has_training_weights(deployment_id, deployment.settings, function)
        return deployment

    def _trainable(self, deployment_id: str, function: str, control: Control | None) -> FakeDeployment:
        deployment = self._on_device(deployment_id, function, control)
        check_trainable(deployment_id, deployment.settings, function)
        return deployment

    def _claim_slot(self, deployment_id: str) -> None:
        for other_id, other in self._deployments.items():
            if other_id != deployment_id and Component.ROLLOUT_WEIGHTS in other.arrays:
                raise SlotOccupied(f"the generator holds the weights of {other_id}: swap them out first")

    def _rollout(self, deployment: FakeDeployment, weights_version: int, function: str) -> Float32Array:
        deployment.ledger.require([Component.ROLLOUT_WEIGHTS], function)
        if deployment.ledger.rollout_version != weights_version:
            held = deployment.ledger.rollout_version
            raise VersionMismatch(f"{function} asks for version {weights_version}, the generator holds {held}")
        return deployment.table(Component.ROLLOUT_WEIGHTS, self._vocab_size)

    def _scores(self, table: Float32Array, batch: TokenBatch) -> Float32Array:
        losses.check_tokens(batch, self._vocab_size, self._max_sequence_tokens)
        scores = np.zeros(batch.token_ids.size, np.float32)
        rest = np.setdiff1d(np.arange(batch.token_ids.size), losses.first_positions(batch))
        scores[rest] = log_softmax(table[batch.token_ids[rest - 1]])[np.arange(rest.size), batch.token_ids[rest]]
        return scores

    def _unpark(self, deployment: FakeDeployment, copy: ParkedComponent) -> Float32Array:
        """A component's values out of the host image. Raises ParkedStateCorrupt."""
        place = deployment.ledger.place(copy.component)
        raw = np.zeros(place.size_bytes, np.uint8)
        if not copy.is_zero:
            raw[:] = deployment.host_image()[place.offset : place.offset + place.size_bytes]
        if checksum(raw) != copy.checksum:
            raise deployment.ledger.corrupt(copy.component)
        return raw.view(np.float32)
