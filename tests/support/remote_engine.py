"""port.Engine over an engine child: the conformance suite drives the real process through it, as a daemon would."""

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Collection, Coroutine
from functools import partial
from typing import Any, TypeVar

import numpy as np

from plexrl import wire
from plexrl.v1 import types_pb2 as t
from plexrl_worker.engine import port
from plexrl_worker.engine.call import EngineCall
from plexrl_worker.engine.client import EngineProcess
from plexrl_worker.engine.errors import EngineError, NotResident, VersionMismatch
from plexrl_worker.engine.settings import Base, DeploymentSettings, EngineSettings

T = TypeVar("T")

_LOSSES = {loss: t.Loss.Value(f"LOSS_{loss.name}") for loss in port.LossName}
_REASONS = {t.FinishReason.Value(f"FINISH_REASON_{reason.name}"): reason for reason in port.FinishReason}


class RemoteEngine:
    """An engine child and the event loop thread that owns it. Host images are memfds that it makes itself."""

    def __init__(self, kind: str, settings: EngineSettings) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._images: dict[int, int] = {}
        self._steps = 0
        try:
            self.process = self._wait(EngineProcess.start(kind, settings))
        except BaseException:
            self._stop()
            raise

    def image(self, size_bytes: int) -> port.ByteArray:
        """Shared memory that attach_host takes."""
        descriptor = os.memfd_create("host-image")
        os.ftruncate(descriptor, size_bytes)
        memory = np.memmap(f"/proc/self/fd/{descriptor}", dtype=np.uint8, mode="r+", shape=(size_bytes,))
        self._images[memory.ctypes.data] = descriptor
        return memory

    def take_images(self, other: "RemoteEngine") -> None:
        """Makes another engine's images this one's, as a daemon does when a child dies."""
        self._images, other._images = other._images, {}

    def describe(self) -> port.EngineDescription:
        return self.process.description

    def declare(self, deployment_id: str, settings: DeploymentSettings) -> port.StateLayout:
        return self._run(lambda: self.process.declare(deployment_id, settings))

    def initialize(
        self, deployment_id: str, base: Base, rollout_version: int, control: port.Control
    ) -> port.DeploymentState:
        return self._run(lambda: self.process.initialize(deployment_id, base, rollout_version), control)

    def attach_host(self, deployment_id: str, image: port.ByteArray) -> None:
        descriptor = self._images[image.ctypes.data]
        self._run(lambda: self.process.attach_host(deployment_id, descriptor, image.size))

    def detach_host(self, deployment_id: str) -> None:
        self._run(lambda: self.process.detach_host(deployment_id))

    def preload(self, deployment_id: str, parked: port.ParkedState, control: port.Control) -> port.SwapReport:
        return self._run(lambda: self.process.preload(deployment_id, parked), control)

    def swap_out(
        self, deployment_id: str, components: Collection[port.Component], control: port.Control
    ) -> port.SwapReport:
        return self._run(lambda: self.process.swap_out(deployment_id, components), control)

    def write_back(
        self, deployment_id: str, components: Collection[port.Component], control: port.Control
    ) -> port.SwapReport:
        return self._run(lambda: self.process.write_back(deployment_id, components), control)

    def swap_in(
        self,
        deployment_id: str,
        parked: port.ParkedState,
        components: Collection[port.Component],
        control: port.Control,
    ) -> port.SwapReport:
        return self._run(lambda: self.process.swap_in(deployment_id, parked, components), control)

    def state(self, deployment_id: str) -> port.DeploymentState:
        return self._run(lambda: self.process.state(deployment_id))

    def drop(self, deployment_id: str) -> None:
        self._run(lambda: self.process.drop(deployment_id))

    def acquire_device(self) -> None:
        self._run(lambda: self.process.acquire_device())

    def release_device(self) -> port.DeviceRelease:
        return self._run(lambda: self.process.release_device())

    def generate(
        self,
        deployment_id: str,
        weights_version: int,
        prompts: port.TokenBatch,
        params: port.SamplingParams,
        control: port.Control,
        execution: str = "",
    ) -> port.Generation:
        spec = _generate_spec(prompts, params)
        call: list[EngineCall[t.GenerateResult]] = []

        def begin() -> EngineCall[t.GenerateResult]:
            call.append(self.process.generate(deployment_id, spec, weights_version, execution))
            return call[0]

        result = self._run(begin, control)
        self._steps = call[0].generator_steps
        return _generation(result)

    def generate_concurrently(self, deployment_id: str, weights_version: int, arrivals: port.Arrivals) -> None:
        self._wait(self._together(deployment_id, weights_version, arrivals))

    async def _together(self, deployment_id: str, weights_version: int, arrivals: port.Arrivals) -> None:
        """As a daemon does: each is sent when it comes, and its end is heard when it comes."""
        ended: asyncio.Queue[tuple[port.ConcurrentGenerate, EngineCall[t.GenerateResult]]] = asyncio.Queue()
        running = 0
        while True:
            for generate in arrivals.take():
                spec = _generate_spec(generate.prompts, generate.params)
                call = self.process.generate(deployment_id, spec, weights_version, generate.execution, concurrent=True)
                call.on_end = partial(ended.put_nowait, (generate, call))
                call.on_progress = partial(self._hear, call, generate.control)
                running += 1
                if generate.control.aborted():
                    call.abort()
            if not running:
                return
            with contextlib.suppress(TimeoutError):
                generate, call = await asyncio.wait_for(ended.get(), 0.01)
                running -= 1
                self._steps = call.generator_steps
                try:
                    arrivals.ended(generate, _generation(call.result()))
                except (VersionMismatch, NotResident):
                    raise
                except EngineError as error:
                    arrivals.ended(generate, error)

    @property
    def generator_steps(self) -> int:
        return self._steps

    def forget_execution(self, execution: str) -> None:
        self._run(lambda: self.process.forget_execution(execution))

    def score(self, deployment_id: str, batch: port.TokenBatch, control: port.Control) -> port.Float32Array:
        spec = t.ScoreSpec(batch=_batch(batch))
        return wire.float32s(self._run(lambda: self.process.score(deployment_id, spec), control).logprobs)

    def score_rollout(
        self, deployment_id: str, weights_version: int, batch: port.TokenBatch, control: port.Control
    ) -> port.Float32Array:
        spec = t.ScoreSpec(batch=_batch(batch))
        result = self._run(lambda: self.process.score_rollout(deployment_id, spec, weights_version), control)
        return wire.float32s(result.logprobs)

    def forward_backward(
        self,
        deployment_id: str,
        batch: port.LossBatch,
        loss: port.LossName,
        params: port.LossParams,
        control: port.Control,
    ) -> port.TrainMetrics:
        spec = t.ForwardBackwardSpec(
            batch=_batch(batch.tokens),
            loss=_LOSSES[loss],
            params=t.LossParams(clip_low=params.clip_low, clip_high=params.clip_high, kl_coef=params.kl_coef),
            weights=wire.tensor(batch.weights, "float32"),
            advantages=_optional(batch.advantages),
            old_logprobs=_optional(batch.old_logprobs),
            ref_logprobs=_optional(batch.ref_logprobs),
            logprob_grads=_optional(batch.logprob_grads),
        )
        result = self._run(lambda: self.process.forward_backward(deployment_id, spec), control)
        return port.TrainMetrics(
            result.loss,
            result.kl,
            result.entropy,
            result.clip_fraction,
            result.token_count,
            wire.float32s(result.logprobs),
        )

    def optim_step(self, deployment_id: str, params: port.AdamWParams) -> port.StepResult:
        adamw = t.AdamWParams(
            lr=params.lr,
            beta1=params.beta1,
            beta2=params.beta2,
            eps=params.eps,
            weight_decay=params.weight_decay,
            max_grad_norm=params.max_grad_norm,
        )
        result = self._run(lambda: self.process.optim_step(deployment_id, t.OptimStepSpec(adamw=adamw)))
        return port.StepResult(result.grad_norm, result.step)

    def sync(self, deployment_id: str, weights_version: int) -> None:
        self._run(lambda: self.process.sync(deployment_id, weights_version))

    def save(self, deployment_id: str, directory: str, control: port.Control) -> port.SavedState:
        return self._run(lambda: self.process.save(deployment_id, directory), control)

    def load(
        self, deployment_id: str, directory: str, rollout_version: int | None, control: port.Control
    ) -> port.DeploymentState:
        return self._run(lambda: self.process.load(deployment_id, directory, rollout_version), control)

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._wait(self.process.close())
        self._stop()
        for descriptor in self._images.values():
            os.close(descriptor)

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)
        self._loop.close()

    def _run(self, begin: Callable[[], EngineCall[T]], control: port.Control | None = None) -> T:
        async def run() -> T:
            call = begin()
            if control is not None:
                if control.aborted():
                    call.abort()
                call.on_progress = lambda done, total: self._hear(call, control, done, total)
            return await call

        return self._wait(run())

    def _hear(self, call: EngineCall[Any], control: port.Control, done: int, total: int) -> None:
        control.progress(done, total)
        if control.aborted():
            call.abort()
        if control.yielding():
            call.give_way()

    def _wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()


def _generate_spec(prompts: port.TokenBatch, params: port.SamplingParams) -> t.GenerateSpec:
    return t.GenerateSpec(
        prompts=_batch(prompts),
        sampling=t.SamplingParams(
            n=params.n,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            max_tokens=params.max_tokens,
            stop_token_ids=params.stop_token_ids,
            stop=params.stop,
            seed=params.seed,
            logprobs=params.logprobs,
            leave=params.leave,
        ),
    )


def _generation(result: t.GenerateResult) -> port.Generation:
    token_ids, lengths = wire.batch_arrays(result.completions, min_length=0)
    return port.Generation(
        token_ids,
        lengths,
        wire.float32s(result.logprobs),
        tuple(_REASONS[reason] for reason in result.finish_reasons),
        result.weights_version,
    )


def _batch(batch: port.TokenBatch) -> t.TokenBatch:
    return t.TokenBatch(token_ids=wire.tensor(batch.token_ids, "int32"), lengths=wire.tensor(batch.lengths, "int32"))


def _optional(values: port.Float32Array | None) -> t.Tensor | None:
    return None if values is None else wire.tensor(values, "float32")
