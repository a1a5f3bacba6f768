"""The vLLM generator of one architecture: one set of weights at a time, replaced in place on the live engine.

The step loop is ours, in process; vLLM's schedulers, kernels and KV cache are used as they are. This, `parking`
and `executions` alone touch vLLM, and where they reach for what vLLM does not publish they say so ("private"). Knows no
deployments: a caller names the content of the slot, and its key salts the prefix cache.
"""

import contextlib
import itertools
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from tokenizers import Tokenizer
from vllm import SamplingParams as VllmSamplingParams
from vllm.config.lora import MaxLoRARanks
from vllm.engine.arg_utils import EngineArgs
from vllm.inputs.engine import tokens_input
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.engine.llm_engine import LLMEngine

from plexrl_worker.engine import lora
from plexrl_worker.engine.device import Device, drop_pages
from plexrl_worker.engine.errors import Aborted, EngineError, InvalidArgument, Unsupported, Yielded
from plexrl_worker.engine.executions import Execution, Sampled
from plexrl_worker.engine.parking import Parking
from plexrl_worker.engine.port import (
    Arrivals,
    ConcurrentGenerate,
    Control,
    Float32Array,
    SamplingParams,
    TokenBatch,
)
from plexrl_worker.engine.seeds import completion_seed
from plexrl_worker.engine.settings import EngineSettings, LoraSettings, Precision
from plexrl_worker.engine.weight_slot import AdapterSlot, FullSlot, RolloutContent, WeightSlot

_DTYPES = {Precision.FLOAT32: torch.float32, Precision.BFLOAT16: torch.bfloat16}


class Generator:
    """vLLM on one device. `slot` is the memory of its weights, or with LoRA of its adapter."""

    def __init__(
        self,
        settings: EngineSettings,
        max_sequence_tokens: int,
        shapes: Mapping[str, torch.Size],
        device: Device,
        directory: Path | None = None,
        base_directory: Path | None = None,
    ) -> None:
        self.dtype = _DTYPES[settings.precision]
        self._device = device
        self._directory = tempfile.TemporaryDirectory(prefix="plexrl-engine-", dir=directory)
        self._max_model_tokens = _model_tokens(settings, max_sequence_tokens)
        self._lora = settings.lora
        self._engine = self._start(settings, shapes, base_directory)
        self.parking = Parking(self._engine)
        self._numbers = itertools.count(1)
        self.steps = 0
        model = self._model()
        if ".models.transformers" in type(model).__module__:
            # That backend rewrites transformers' classes in place, and the trainer runs the same classes.
            raise Unsupported(
                "vLLM has no implementation of its own for this architecture, only its Transformers backend"
            )
        self.slot: WeightSlot
        if settings.lora is None:
            self.slot = FullSlot(self._engine, model, shapes, device, self.dtype)
        else:
            self.slot = AdapterSlot(self._engine, settings.lora, shapes, device, self.dtype, Path(self._directory.name))

    def acquire_device(self) -> None:
        """Counterpart of release_device; weights and KV cache have no content yet."""
        if self._device.kind == "cuda":
            self._engine.wake_up()

    def release_device(self) -> None:
        """Frees the slot's and the KV cache's memory; what parked executions have sampled stays."""
        self.parking.give_up_kv()
        if not self._engine.reset_prefix_cache():
            raise EngineError("the generator still has running requests")
        self.slot.release()
        if self._device.kind == "cuda":
            # The weights come anew through the slot; a base under adapters is kept in host memory.
            self._engine.sleep(level=2 if self._lora is None else 1)
            return
        for tensor in self._kv_caches():
            drop_pages(tensor)

    def generate_concurrently(self, arrivals: Arrivals, content: RolloutContent, tokenizer: Tokenizer | None) -> None:
        """Runs generates together until none is left; all of one are admitted before the step that it joins at.

        With an adapter nothing is parked: vLLM knows a request's adapter by a number that does not outlast a swap.
        """
        adapter = self.slot.adapter(content)
        running: dict[str, Execution] = {}
        try:
            while True:
                for generate in arrivals.take():
                    try:
                        execution = self._begin(generate, content, adapter, tokenizer)
                    except EngineError as error:
                        arrivals.ended(generate, error)
                    else:
                        running[execution.name] = execution
                for execution in list(running.values()):
                    if (stopped := self._stopped(execution, may_yield=adapter is None)) is not None:
                        del running[execution.name]
                        arrivals.ended(execution.generate, stopped)
                if not running:
                    return
                self._step(running, tokenizer)
                for execution in list(running.values()):
                    execution.generate.control.progress(len(execution.finished), execution.total)
                    if execution.over:
                        del running[execution.name]
                        arrivals.ended(execution.generate, execution.conclude(self._engine))
        except BaseException:
            self._engine.abort_request([name for each in running.values() for name in each.sampled.request_ids])
            raise

    def _begin(
        self,
        generate: ConcurrentGenerate,
        content: RolloutContent,
        adapter: LoRARequest | None,
        tokenizer: Tokenizer | None,
    ) -> Execution:
        """Gives a generate's requests to the engine, or back to it where they are parked."""
        if generate.params.stop and tokenizer is None:
            raise InvalidArgument("stop strings need a tokenizer, and the model's base has none: use stop_token_ids")
        parked = bool(generate.execution) and adapter is None
        sampled = self.parking.take(generate.execution, content.model, content.version) if parked else None
        if sampled is None:
            sampled = Sampled(content.model, content.version, [], {})
            self._admit(sampled, generate.prompts, generate.params, content, adapter)
        return Execution(generate, sampled)

    def _stopped(self, execution: Execution, *, may_yield: bool) -> EngineError | None:
        """Takes a generate that is to end or to give way out of the engine."""
        control, name = execution.generate.control, execution.generate.execution
        if control.aborted():
            self._engine.abort_request(execution.sampled.request_ids)
            return Aborted("stopped between steps; the model is unchanged")
        if may_yield and name and control.yielding():
            self.parking.park(name, execution.sampled)
            return Yielded("gave way between steps; every token is kept")
        return None

    def _step(self, running: Mapping[str, Execution], tokenizer: Tokenizer | None) -> None:
        """One step of the engine; what ended in it is noted."""
        self.steps += 1
        for output in self._engine.step():
            assert isinstance(output, RequestOutput)
            execution = running.get(output.request_id.rpartition("-")[0])
            if execution is not None:
                execution.note(self._engine, output, tokenizer)

    def score(self, batch: TokenBatch, content: RolloutContent, control: Control) -> Float32Array:
        """Log-probability of each token under the slot's weights: float32 [N], 0 for the first of each sequence."""
        if int(batch.lengths.max()) >= self._max_model_tokens:
            limit = self._max_model_tokens - 1
            raise InvalidArgument(
                f"a sequence has {int(batch.lengths.max())} tokens, the generator scores up to {limit}"
            )
        sampling = VllmSamplingParams(
            max_tokens=1, temperature=0.0, prompt_logprobs=0, flat_logprobs=True, detokenize=False
        )
        sampling.output_kind = RequestOutputKind.FINAL_ONLY
        sequences = _split(batch)
        adapter = self.slot.adapter(content)
        scores: dict[str, list[float]] = {}
        request_ids: list[str] = []
        self.parking.make_room([len(sequence) + 1 for sequence in sequences])
        with self._aborting(request_ids):
            for index, sequence in enumerate(sequences):
                self._add(str(index), sequence, sampling.clone(), content, adapter)
                request_ids.append(str(index))
            for output in self._steps(control, lambda: (len(scores), len(sequences))):
                if output.finished and output.prompt_logprobs is not None:
                    flat = output.prompt_logprobs
                    scores[output.request_id] = [0.0, *(flat.logprobs[start] for start in flat.start_indices[1:])]
        return np.array([score for index in range(len(sequences)) for score in scores[str(index)]], np.float32)

    def close(self) -> None:
        """Ends the engine."""
        self._directory.cleanup()

    def _start(self, settings: EngineSettings, shapes: Iterable[str], base_directory: Path | None) -> LLMEngine:
        if self._device.kind == "cpu":
            _check_head_size(settings.config_json)
        config_file = Path(self._directory.name) / "config.json"
        config_file.write_text(settings.config_json)
        on_cpu = self._device.kind == "cpu"
        arguments = EngineArgs(
            model=self._directory.name if base_directory is None else str(base_directory),
            skip_tokenizer_init=True,
            # Weights come through the slot, and only their memory is wanted here; a base under adapters is read.
            load_format="dummy" if base_directory is None else "safetensors",
            enable_lora=settings.lora is not None,
            max_loras=1,
            max_lora_rank=_offered_rank(settings.lora),
            # Without it vLLM wraps the output layer too, and its CPU kernel fails on the logits of prompts.
            lora_target_modules=None if settings.lora is None else lora.layer_names(shapes),
            generation_config="vllm",
            dtype=settings.precision.value,
            max_model_len=self._max_model_tokens,
            max_num_seqs=settings.max_running_sequences,
            max_num_batched_tokens=max(settings.max_batched_tokens, self._max_model_tokens),
            kv_cache_memory_bytes=settings.kv_cache_bytes,
            block_size=32 if on_cpu else None,
            enforce_eager=on_cpu,
            enable_sleep_mode=not on_cpu,
            enable_prefix_caching=True,
            # A seeded request whose prefill is cut dies on CPU, and cuts would depend on what else is in the batch.
            enable_chunked_prefill=False,
            async_scheduling=False,
            logprobs_mode="raw_logprobs",
            disable_log_stats=True,
            seed=0,
        )
        with _plain_weights() if on_cpu else contextlib.nullcontext():
            return LLMEngine.from_engine_args(arguments)

    def _model(self) -> Any:
        """The module inside the engine, which runs in this process."""
        return self._engine.apply_model(lambda model: model)[0]

    def _kv_caches(self) -> list[torch.Tensor]:
        """KV cache tensors. Private: `model_runner.kv_caches`."""
        caches: list[torch.Tensor] = self._engine.collective_rpc(lambda worker: worker.model_runner.kv_caches)[0]
        return caches

    def _add(
        self,
        request_id: str,
        prompt: list[int],
        sampling: VllmSamplingParams,
        content: RolloutContent,
        adapter: LoRARequest | None,
    ) -> str:
        """Gives one request to the engine; returns what its scheduler knows it by."""
        prompt_input = tokens_input(prompt, cache_salt=content.key)
        return str(self._engine.add_request(request_id, prompt_input, sampling, lora_request=adapter))

    def _admit(
        self,
        sampled: Sampled,
        prompts: TokenBatch,
        params: SamplingParams,
        content: RolloutContent,
        adapter: LoRARequest | None,
    ) -> None:
        """Gives an execution's requests to the engine."""
        number, split = next(self._numbers), _split(prompts)
        self.parking.make_room([len(prompt) + params.max_tokens for prompt in split for _ in range(params.n)])
        with self._aborting(sampled.request_ids):
            for prompt_index, prompt in enumerate(split):
                for completion_index in range(params.n):
                    request_id = f"{number}-{prompt_index * params.n + completion_index}"
                    seed = completion_seed(params.seed, prompt_index, completion_index)
                    scheduled_id = self._add(request_id, prompt, _vllm_params(params, seed), content, adapter)
                    sampled.request_ids.append(request_id)
                    sampled.scheduled_ids.add(scheduled_id)

    @contextlib.contextmanager
    def _aborting(self, request_ids: list[str]) -> Iterator[None]:
        """When the block fails, what is unfinished of its requests is taken out of the engine."""
        try:
            yield
        except BaseException:
            self._engine.abort_request(request_ids)
            raise

    def _steps(self, control: Control, progress: Callable[[], tuple[int, int]]) -> Iterator[RequestOutput]:
        """Runs engine steps until nothing is left, and gives their outputs. Raises Aborted between steps."""
        while self.parking.unfinished():
            if control.aborted():
                raise Aborted("stopped between steps; the model is unchanged")
            self.steps += 1
            for output in self._engine.step():
                assert isinstance(output, RequestOutput)
                yield output
            control.progress(*progress())


def _offered_rank(settings: LoraSettings | None) -> MaxLoRARanks:
    """The least rank of vLLM's that holds the adapters. Raises Unsupported."""
    offered: tuple[MaxLoRARanks, ...] = get_args(MaxLoRARanks)
    wanted = 1 if settings is None else settings.rank
    for rank in offered:
        if rank >= wanted:
            return rank
    raise Unsupported(f"LoRA rank {wanted}: the generator takes ranks up to {max(offered)}")


def _check_head_size(config_json: str) -> None:
    """Refuses what vLLM's CPU attention would take at its start and fail on at the first prompt."""
    config = json.loads(config_json)
    stated = config.get("head_dim")
    head_size = stated or int(config["hidden_size"]) // int(config["num_attention_heads"])
    offered = CPUAttentionBackend.get_supported_head_sizes()
    if head_size not in offered:
        raise Unsupported(
            f"attention heads of size {head_size} are not offered on CPU: want one of {', '.join(map(str, offered))}"
        )


def _model_tokens(settings: EngineSettings, max_sequence_tokens: int) -> int:
    """vLLM's limit: one more than ours where the positions allow, since scoring needs one token of room."""
    positions = int(json.loads(settings.config_json).get("max_position_embeddings", max_sequence_tokens))
    return min(max_sequence_tokens + 1, positions)


@contextlib.contextmanager
def _plain_weights() -> Iterator[None]:
    """Has vLLM on CPU keep linear weights as they are (F.linear), instead of packing them for oneDNN or AMX kernels.

    Packed weights cannot be written or read in place. Measured at 0.3M parameters both generate equally fast. Private.
    """
    import vllm._custom_ops as custom_ops
    import vllm.model_executor.layers.utils as layer_utils

    has_onednn, check = custom_ops._supports_onednn, layer_utils.check_cpu_sgl_kernel
    custom_ops._supports_onednn = False
    layer_utils.check_cpu_sgl_kernel = lambda *_: False
    try:
        yield
    finally:
        custom_ops._supports_onednn = has_onednn
        layer_utils.check_cpu_sgl_kernel = check


def _vllm_params(params: SamplingParams, seed: int) -> VllmSamplingParams:
    return VllmSamplingParams(
        n=1,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        max_tokens=params.max_tokens,
        stop_token_ids=list(params.stop_token_ids),
        ignore_eos=True,
        seed=seed,
        logprobs=0 if params.logprobs else None,
        # One flat list of numbers, and no copy of these settings: half of what a short call costs outside the model.
        flat_logprobs=True,
        skip_clone=True,
        detokenize=False,
        output_kind=RequestOutputKind.CUMULATIVE if params.stop else RequestOutputKind.FINAL_ONLY,
    )


def _split(batch: TokenBatch) -> list[list[int]]:
    ends = np.cumsum(batch.lengths)
    return [batch.token_ids[end - length : end].tolist() for end, length in zip(ends, batch.lengths, strict=True)]
