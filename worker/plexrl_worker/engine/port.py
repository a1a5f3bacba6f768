"""What an engine does, in numpy arrays and plain values: no protobuf, torch or vLLM.

An engine serves the deployments of one architecture and configuration on one device. It runs one function at a time;
the caller orders them. Two implementations pass the same conformance suite: `vllm_torch.VllmTorchEngine` and
`fake.FakeEngine`.

A deployment's state has four components. Each is on the device or not; a copy of what is not lies in the deployment's
host image, shared memory that belongs to the caller. What the caller must remember to use an image again, even in
another engine process, is its `ParkedState`.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from plexrl_worker.engine.errors import EngineError
from plexrl_worker.engine.settings import Base, DeploymentSettings, Precision

Int32Array = NDArray[np.int32]
Float32Array = NDArray[np.float32]
ByteArray = NDArray[np.uint8]


class Component(StrEnum):
    """A part of a deployment's state that moves as one."""

    TRAIN_WEIGHTS = "train_weights"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    ROLLOUT_WEIGHTS = "rollout_weights"


ALL_COMPONENTS: frozenset[Component] = frozenset(Component)
TRAIN_COMPONENTS: frozenset[Component] = ALL_COMPONENTS - {Component.ROLLOUT_WEIGHTS}


class FinishReason(StrEnum):
    """Why a completion ended: a stop token or string; max_tokens or the model's limit; its generate left it."""

    STOP = "stop"
    LENGTH = "length"
    UNFINISHED = "unfinished"


class LossName(StrEnum):
    """Loss functions; `losses` has their formulas."""

    CROSS_ENTROPY = "cross_entropy"
    IMPORTANCE_SAMPLING = "importance_sampling"
    PPO = "ppo"
    GRPO = "grpo"
    CISPO = "cispo"
    LINEAR = "linear"


@dataclass(frozen=True)
class ComponentLayout:
    """Where a component lies in the host image."""

    component: Component
    offset: int
    size_bytes: int


@dataclass(frozen=True)
class StateLayout:
    """A deployment's state: components in host image order, and sizes in bytes."""

    components: tuple[ComponentLayout, ...]
    host_bytes: int
    parameter_count: int

    @property
    def device_bytes(self) -> int:
        """Bytes of all components on the device."""
        return sum(layout.size_bytes for layout in self.components)


@dataclass(frozen=True)
class ParkedComponent:
    """A component's copy in the host image.

    checksum: 64 bits over its bytes, 0 when `is_zero`. is_zero: all zero, so the image's bytes are not used.
    """

    component: Component
    checksum: int
    is_zero: bool = False


@dataclass(frozen=True)
class ParkedState:
    """What must be remembered beside a host image: valid copies, and the scalars of the state."""

    components: tuple[ParkedComponent, ...] = ()
    optimizer_step: int = 0
    rollout_version: int = 0


@dataclass(frozen=True)
class SwapReport:
    """What a swap did. bytes_moved: copied, either way. device_bytes: released (swap out) or allocated (swap in).
    held_bytes: device memory that the engine's process holds afterwards, measured.
    """

    bytes_moved: int
    device_bytes: int
    duration_s: float
    parked: ParkedState
    held_bytes: int = 0


@dataclass(frozen=True)
class DeviceRelease:
    """Device memory given up, and what the engine's process holds afterwards, both measured."""

    released_bytes: int
    held_bytes: int


@dataclass(frozen=True)
class DeploymentState:
    """Where a deployment stands: components on the device, those whose host copy is missing or older, the scalars."""

    resident: frozenset[Component]
    dirty: frozenset[Component]
    optimizer_step: int
    rollout_version: int


@dataclass(frozen=True)
class EngineDescription:
    """What an engine is and can do."""

    architecture: str
    precision: Precision
    device_kind: str
    threads: int
    vocab_size: int
    max_sequence_tokens: int
    kv_cache_bytes: int
    losses: tuple[LossName, ...]
    library_versions: dict[str, str]


@dataclass(frozen=True)
class TokenBatch:
    """Ragged token sequences. token_ids: int32 [N], flat. lengths: int32 [B], each at least 1, adding up to N."""

    token_ids: Int32Array
    lengths: Int32Array


@dataclass(frozen=True)
class SamplingParams:
    """How to sample. Log-probabilities are the raw model's, before temperature and truncation.

    top_k 0 means all. seed: each completion draws from its own stream, `seeds.completion_seed`. leave: the generate
    ends as soon as no more than so many of all its completions are unfinished; those come as far as they are.
    """

    n: int
    max_tokens: int
    seed: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    logprobs: bool = True
    leave: int = 0


@dataclass(frozen=True)
class Generation:
    """Completions of B prompts, n each, ordered by prompt, then by completion.

    token_ids: int32 [N]. lengths: int32 [B * n]. logprobs: float32 [N], empty unless asked for.
    """

    token_ids: Int32Array
    lengths: Int32Array
    logprobs: Float32Array
    finish_reasons: tuple[FinishReason, ...]
    weights_version: int


@dataclass(frozen=True)
class LossParams:
    """Settings of a loss; None means the default. One that the loss does not use must stay None."""

    clip_low: float | None = None
    clip_high: float | None = None
    kl_coef: float | None = None


@dataclass(frozen=True)
class LossBatch:
    """Sequences to train on. Every per-token array is float32 [N], flat like the token ids; entry t belongs to
    predicting token t from the tokens before it. weights[first token of a sequence] must be 0. Arrays that the loss
    does not use must stay None.
    """

    tokens: TokenBatch
    weights: Float32Array
    advantages: Float32Array | None = None
    old_logprobs: Float32Array | None = None
    ref_logprobs: Float32Array | None = None
    logprob_grads: Float32Array | None = None


@dataclass(frozen=True)
class TrainMetrics:
    """Outcome of a forward_backward.

    loss: sum over tokens of weight * term. kl: mean over weighted tokens of the k3 estimate of KL(old || current), 0
    without old_logprobs. entropy: their mean entropy in nats. clip_fraction: share whose ratio was clipped.
    token_count: tokens with weight other than 0. logprobs: float32 [N], 0 where the weight is 0.
    """

    loss: float
    kl: float
    entropy: float
    clip_fraction: float
    token_count: int
    logprobs: Float32Array = field(repr=False)


@dataclass(frozen=True)
class AdamWParams:
    """Settings of one step. max_grad_norm None: no clipping."""

    lr: float
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float | None = None


@dataclass(frozen=True)
class StepResult:
    """Outcome of an optim_step: the gradient's global norm before clipping, and the steps taken so far."""

    grad_norm: float
    step: int


@dataclass(frozen=True)
class SavedFile:
    """A file of a checkpoint."""

    name: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class SavedState:
    """A committed checkpoint: its files, and the hash of the manifest that lists them."""

    files: tuple[SavedFile, ...]
    manifest_sha256: str
    optimizer_step: int
    rollout_version: int

    @property
    def size_bytes(self) -> int:
        """Bytes of all files but the manifest."""
        return sum(file.size_bytes for file in self.files)


class Control(Protocol):
    """How a running function hears and is heard. Both are called between engine steps and micro-batches."""

    def aborted(self) -> bool:
        """Whether the function should end with Aborted."""
        ...

    def yielding(self) -> bool:
        """Whether a generate should stop with Yielded and keep what it has; one that cannot goes on."""
        ...

    def progress(self, done: int, total: int) -> None:
        """Says that `done` of `total` units (tokens; total 0 if unknown) are done."""
        ...


@dataclass(frozen=True, eq=False)
class ConcurrentGenerate:
    """A generate that runs together with others: see Engine.generate for what its fields mean."""

    prompts: TokenBatch
    params: SamplingParams
    control: Control
    execution: str = ""


class Arrivals(Protocol):
    """Where generates that run together come from, and who hears of their ends. Called between engine steps."""

    def take(self) -> Sequence[ConcurrentGenerate]:
        """Those that have come since this was last asked, oldest first. Never waits."""
        ...

    def ended(self, generate: ConcurrentGenerate, outcome: "Generation | EngineError") -> None:
        """One has ended, or given way; the others go on."""
        ...


class Engine(Protocol):
    """An engine of one architecture and configuration.

    Every method raises EngineError kinds only, and leaves the state as it was when it raises, unless it says
    otherwise. All that take a deployment raise UnknownDeployment. For one that is sampled alone, score,
    forward_backward, optim_step, sync and save raise InvalidArgument.

    Deployments of one engine that have the same rollout weights have the same bytes of them in their host images, and
    the same checksum: one can be given another's with swap_in, under a version of its own.
    """

    def describe(self) -> EngineDescription:
        """What this engine is and can do."""
        ...

    def declare(self, deployment_id: str, settings: DeploymentSettings) -> StateLayout:
        """Makes a deployment known, with no state yet: initialize, load or swap_in brings it.

        Declaring it again with equal settings returns the same layout; with others it raises InvalidArgument, as for
        settings that do not go together.
        """
        ...

    def initialize(self, deployment_id: str, base: Base, rollout_version: int, control: Control) -> DeploymentState:
        """Makes the state the base's, all components on the device: step 0, rollout weights equal to the base's.

        With LoRA the state is a first adapter, which changes nothing, and the base must be the engine's.
        Raises InvalidArgument when a directory's weights do not fit the architecture, SlotOccupied.
        """
        ...

    def attach_host(self, deployment_id: str, image: ByteArray) -> None:
        """Gives the deployment its host image: uint8 [layout.host_bytes], writable, shared with the caller.

        A second call replaces the image; the old one is no longer touched.
        """
        ...

    def detach_host(self, deployment_id: str) -> None:
        """Lets go of the host image, and of what was preloaded from it. The deployment must not be on the device.

        Like `preload`, it may be called from another thread while a function for another deployment runs.
        """
        ...

    def swap_out(self, deployment_id: str, components: Collection[Component], control: Control) -> SwapReport:
        """Moves components to the host image: copies what is dirty, releases the device's memory of all.

        Components that are not on the device are left alone. The report's ParkedState describes the whole image.
        """
        ...

    def write_back(self, deployment_id: str, components: Collection[Component], control: Control) -> SwapReport:
        """Copies components that are dirty to the host image; they stay on the device, and are clean then.

        Components that are not on the device are left alone. The report's ParkedState describes the whole image.
        """
        ...

    def swap_in(
        self, deployment_id: str, parked: ParkedState, components: Collection[Component], control: Control
    ) -> SwapReport:
        """Brings components from the host image, each checked against its checksum.

        Raises ParkedStateCorrupt (the components named are then not on the device), SlotOccupied, OutOfMemory.
        """
        ...

    def preload(self, deployment_id: str, parked: ParkedState, control: Control) -> SwapReport:
        """Brings a parked state into spare device memory, each component checked, for `swap_in` to take without a copy.

        May be called from another thread while a function for another deployment runs. The state stays parked. Given up
        by detach_host, drop and release_device. Raises ParkedStateCorrupt, OutOfMemory, Aborted: nothing is kept then.
        """
        ...

    def state(self, deployment_id: str) -> DeploymentState:
        """Where the deployment stands."""
        ...

    def drop(self, deployment_id: str) -> None:
        """Forgets a deployment and frees all it holds. Dropping an unknown one is fine."""
        ...

    def acquire_device(self) -> None:
        """Takes the device: the generator's own memory (KV cache, weight slot) may be used from now on."""
        ...

    def release_device(self) -> DeviceRelease:
        """Gives the device up: frees KV cache, weight slot and what was preloaded.

        Raises SlotOccupied while any deployment has components on the device.
        """
        ...

    def generate(
        self,
        deployment_id: str,
        weights_version: int,
        prompts: TokenBatch,
        params: SamplingParams,
        control: Control,
        execution: str = "",
    ) -> Generation:
        """Samples n completions per prompt from the rollout weights. Draws do not depend on what else is in the batch.

        An execution that has a name can be parked: it raises Yielded, the deployment may leave the device and others
        run, and when it is called again with the same name and arguments it goes on: the same tokens as undisturbed.
        What is parked may be lost, with new rollout weights, say; it begins anew then.

        Raises VersionMismatch, NotResident, InvalidArgument, Aborted, Yielded.
        """
        ...

    def generate_concurrently(self, deployment_id: str, weights_version: int, arrivals: Arrivals) -> None:
        """Runs generates together, as many as come, until there is none: each joins at the next engine step and leaves
        at its own end. What `generate` raises for one ends that one alone, told to `arrivals`, as Aborted and Yielded.

        A request's tokens do not depend on who else is there; in the last bits its log-probabilities do.
        Raises VersionMismatch, NotResident; and whatever an engine step fails with: all that had come have failed then.
        """
        ...

    @property
    def generator_steps(self) -> int:
        """Steps that the generator has made so far: what runs together shares them."""
        ...

    def forget_execution(self, execution: str) -> None:
        """Gives up what a parked execution has sampled; there may be nothing."""
        ...

    def score(self, deployment_id: str, batch: TokenBatch, control: Control) -> Float32Array:
        """Log-probability of each token under the training weights: float32 [N], 0 for each sequence's first token."""
        ...

    def score_rollout(
        self, deployment_id: str, weights_version: int, batch: TokenBatch, control: Control
    ) -> Float32Array:
        """The same under the rollout weights, computed by the generator."""
        ...

    def forward_backward(
        self, deployment_id: str, batch: LossBatch, loss: LossName, params: LossParams, control: Control
    ) -> TrainMetrics:
        """Adds the loss's gradient to the accumulated gradients; all of it or, when it raises, none.

        Raises NonFinite, InvalidArgument, Aborted.
        """
        ...

    def optim_step(self, deployment_id: str, params: AdamWParams) -> StepResult:
        """One AdamW step with the accumulated gradients, which are zero afterwards.

        Raises NonFinite when the gradient is not finite: weights and optimizer stay, the gradients too.
        """
        ...

    def sync(self, deployment_id: str, weights_version: int) -> None:
        """Copies the training weights into the generator, under a version. KV of other weights is never used for it."""
        ...

    def save(self, deployment_id: str, directory: str, control: Control) -> SavedState:
        """Writes the full state into an existing empty directory; the manifest comes last and commits it.

        The directory is also a Hugging Face model directory.
        """
        ...

    def load(
        self, deployment_id: str, directory: str, rollout_version: int | None, control: Control
    ) -> DeploymentState:
        """Replaces the state by a saved one, bit for bit. rollout_version None keeps the saved number.

        One that is sampled alone takes the saved rollout weights, and nothing else.
        Raises CheckpointCorrupt, CheckpointMismatch, SlotOccupied.
        """
        ...

    def close(self) -> None:
        """Ends the engine; nothing may be called afterwards."""
        ...
