"""The torch trainer: forward, backward and AdamW of one architecture over state that lies in flat device memory.

There is one module, whose parameters and gradients are views; `bind` points them at a deployment's memory. It knows
neither vLLM nor residency nor versions: what it is given is on the device.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from plexrl_worker.engine import lora, losses
from plexrl_worker.engine.errors import Aborted, NonFinite, OutOfMemory, Unsupported
from plexrl_worker.engine.port import (
    AdamWParams,
    Control,
    Float32Array,
    LossBatch,
    LossName,
    LossParams,
    TokenBatch,
    TrainMetrics,
)
from plexrl_worker.engine.settings import DeploymentSettings, LoraSettings, Precision

# Views start on cache lines.
_ALIGNMENT_ELEMENTS = 16
# Logits of one piece of the output layer: 32 Mi float32 elements, 128 MiB.
_LOGITS_ELEMENTS = 32 << 20
_PROBE_TOKENS = 5


@dataclass(frozen=True)
class ParameterView:
    """A parameter's place in flat float32 memory, in elements."""

    name: str
    shape: torch.Size
    start: int

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """The parameter's view of flat memory."""
        return flat[self.start : self.start + self.shape.numel()].view(self.shape)


@dataclass(frozen=True)
class MicroBatch:
    """Sequences of one forward pass, padded on the right, and the flat positions of the tokens to predict.

    token_ids: int64 [b, L]. rows, columns: int64 [P], where in the pass the hidden state is that predicts each
    position.
    """

    token_ids: torch.Tensor
    rows: torch.Tensor
    columns: torch.Tensor
    positions: NDArray[np.int64]


class Trainer:
    """Computes on bound memory. Flat tensors are float32 [element_count] on the device.

    `parameters` are those that are trained: all of them, or with LoRA the adapters'. `base_parameters` are the rest, by
    the architecture's names; `hold_base` brings them, and until then nothing runs.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        precision: Precision,
        device: torch.device,
        adapters: LoraSettings | None = None,
    ) -> None:
        self._config = config
        self._precision = precision
        self._device = device
        self._adapters = adapters
        self._model = _meta_model(config)
        if adapters is not None:
            lora.inject(self._model, adapters)
        named = [(name, parameter.shape) for name, parameter in self._model.named_parameters()]
        trained = [(name, shape) for name, shape in named if adapters is None or lora.is_adapter(name)]
        frozen = [(name, shape) for name, shape in named if adapters is not None and not lora.is_adapter(name)]
        self.parameters = tuple(_lay_out(trained))
        self.base_parameters = tuple(_lay_out((lora.base_name(name), shape) for name, shape in frozen))
        self._frozen_names = [name for name, _ in frozen]
        self._base: torch.Tensor | None = None
        _make_bindable(self._model, device)
        for module in self._model.modules():
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.to(device)
        self.parameter_count = sum(view.shape.numel() for view in self.parameters)
        last = self.parameters[-1]
        self.element_count = _aligned(last.start + last.shape.numel())
        if adapters is None:
            self._check_head()

    def hold_base(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Takes copies of the base parameters, in the compute format, for the trainer's life (LoRA)."""
        last = self.base_parameters[-1]
        dtype = torch.bfloat16 if self._precision is Precision.BFLOAT16 else torch.float32
        self._base = torch.zeros(last.start + last.shape.numel(), dtype=dtype, device=self._device)
        for view in self.base_parameters:
            view.of(self._base).copy_(tensors[view.name])
        self._bind_base()
        self._check_head()

    def base_to(self, device: torch.device) -> None:
        """Moves the base parameters off the device, to release it, or back."""
        if self._base is not None and self._base.device != device:
            self._base = self._base.to(device)
            self._bind_base()

    def initial_weights(self, seed: int) -> dict[str, torch.Tensor]:
        """All of the architecture's parameters, by name, as it initialises them."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(self._config, dtype=torch.float32)
        return {name: parameter.detach() for name, parameter in model.named_parameters()}

    def random_weights(self, seed: int, flat: torch.Tensor) -> None:
        """Fills flat memory with first weights: the architecture's, or an adapter's."""
        flat.zero_()
        if self._adapters is None:
            self.copy_weights(self.initial_weights(seed), flat)
            return
        draws = torch.Generator().manual_seed(seed)
        for view in self.parameters:
            view.of(flat).copy_(lora.first_weights(view.name, view.shape, draws))

    def copy_weights(self, tensors: Mapping[str, torch.Tensor], flat: torch.Tensor) -> None:
        """Copies tensors, by the architecture's names, into flat memory."""
        with torch.no_grad():
            for view in self.parameters:
                view.of(flat).copy_(tensors[view.name])

    def bind(self, weights: torch.Tensor, gradients: torch.Tensor | None) -> None:
        """Points the module at a deployment's weights and, to train, its gradients."""
        own = dict(self._model.named_parameters())
        for view in self.parameters:
            parameter = own[view.name]
            parameter.grad = None
            parameter.data = view.of(weights)
            parameter.requires_grad_(gradients is not None)
            if gradients is not None:
                parameter.grad = view.of(gradients)

    def unbind(self) -> None:
        """Lets go of the bound memory, so that it can be released."""
        own = dict(self._model.named_parameters())
        for view in self.parameters:
            own[view.name].grad = None
            own[view.name].data = torch.empty(0, device=self._device)

    def _bind_base(self) -> None:
        assert self._base is not None
        own = dict(self._model.named_parameters())
        for name, view in zip(self._frozen_names, self.base_parameters, strict=True):
            own[name].data = view.of(self._base)

    def score(self, batch: TokenBatch, settings: DeploymentSettings, control: Control) -> Float32Array:
        """Log-probability of each token: float32 [N], 0 for the first of each sequence."""
        logprobs = np.zeros(batch.token_ids.size, np.float32)
        wanted = np.ones(batch.token_ids.size, np.bool_)
        wanted[losses.first_positions(batch)] = False
        with torch.no_grad(), self._computing(recompute=False):
            for micro_batch in self._micro_batches(batch, wanted, settings, control):
                hidden = self._hidden(micro_batch)
                for rows, positions in self._head_pieces(hidden, micro_batch.positions):
                    chosen, _ = self._log_probabilities(rows, batch, positions)
                    logprobs[positions] = chosen.cpu().numpy()
        return logprobs

    def forward_backward(
        self,
        batch: LossBatch,
        loss: LossName,
        params: LossParams,
        gradients: torch.Tensor,
        gradients_are_zero: bool,
        settings: DeploymentSettings,
        control: Control,
    ) -> TrainMetrics:
        """Adds the gradient of a checked loss to the bound gradients; restores them when it raises."""
        before = None if gradients_are_zero else gradients.clone()
        try:
            with self._computing(recompute=settings.activation_checkpointing):
                metrics = self._accumulate(batch, loss, params, settings, control)
            if not bool(torch.isfinite(torch.linalg.vector_norm(gradients))):
                raise NonFinite("the gradient is not finite; nothing was accumulated")
            return metrics
        except BaseException:
            gradients.copy_(before) if before is not None else gradients.zero_()
            raise

    def optim_step(
        self,
        params: AdamWParams,
        step: int,
        weights: torch.Tensor,
        gradients: torch.Tensor,
        moments: tuple[torch.Tensor, torch.Tensor],
    ) -> float:
        """One AdamW step on flat memory, `step` taken before; clears the gradients. The norm before clipping.

        Raises NonFinite before anything is changed.
        """
        norm = torch.linalg.vector_norm(gradients)
        if not bool(torch.isfinite(norm)):
            raise NonFinite("the gradient is not finite; the step was not taken")
        if params.max_grad_norm is not None:
            gradients.mul_(torch.clamp(params.max_grad_norm / (norm + 1e-6), max=1.0))
        flat = nn.Parameter(weights)
        flat.grad = gradients
        optimizer = torch.optim.AdamW(
            [flat],
            lr=params.lr,
            betas=(params.beta1, params.beta2),
            eps=params.eps,
            weight_decay=params.weight_decay,
            fused=True,
        )
        step_count = torch.tensor(float(step), dtype=torch.float32, device=weights.device)
        optimizer.state[flat] = {"step": step_count, "exp_avg": moments[0], "exp_avg_sq": moments[1]}
        optimizer.step()
        gradients.zero_()
        return float(norm)

    def _accumulate(
        self, batch: LossBatch, loss: LossName, params: LossParams, settings: DeploymentSettings, control: Control
    ) -> TrainMetrics:
        total_loss = kl_sum = entropy_sum = 0.0
        clipped = 0
        logprobs = np.zeros(batch.tokens.token_ids.size, np.float32)
        wanted = batch.weights != 0
        for micro_batch in self._micro_batches(batch.tokens, wanted, settings, control):
            hidden = self._hidden(micro_batch)
            # The output layer runs piece by piece, so that the logits of a micro-batch never exist at once; what its
            # backward passes leave in `leaf` then goes through the rest of the model in one backward pass.
            leaf = hidden.detach().requires_grad_()
            for rows, positions in self._head_pieces(leaf, micro_batch.positions):
                chosen, entropy = self._log_probabilities(rows, batch.tokens, positions)
                values = chosen.detach().cpu().numpy()
                terms = losses.evaluate(loss, params, values, losses.select(batch, positions))
                chosen.backward(torch.from_numpy(terms.gradient).to(chosen.device))
                logprobs[positions] = values
                total_loss += terms.loss
                kl_sum += terms.kl_sum
                clipped += terms.clipped
                entropy_sum += float(entropy)
            if leaf.grad is not None:
                hidden.backward(leaf.grad)
        token_count = int(np.count_nonzero(wanted))
        count = max(token_count, 1)
        return TrainMetrics(total_loss, kl_sum / count, entropy_sum / count, clipped / count, token_count, logprobs)

    def _micro_batches(
        self, batch: TokenBatch, wanted: NDArray[np.bool_], settings: DeploymentSettings, control: Control
    ) -> Iterator[MicroBatch]:
        """Sequences of like length together, at most settings.micro_batch_tokens with padding. Raises Aborted."""
        starts, lengths = losses.first_positions(batch), batch.lengths.astype(np.int64)
        order = np.argsort(-lengths, kind="stable")
        done = 0
        while done < order.size:
            if control.aborted():
                raise Aborted("stopped between micro-batches; nothing was changed")
            longest = int(lengths[order[done]])
            count = max(1, settings.micro_batch_tokens // longest)
            chosen = order[done : done + count]
            token_ids = np.zeros((chosen.size, longest), np.int64)
            rows, columns, positions = [], [], []
            for row, sequence in enumerate(chosen):
                start, length = int(starts[sequence]), int(lengths[sequence])
                token_ids[row, :length] = batch.token_ids[start : start + length]
                offsets = np.flatnonzero(wanted[start : start + length])
                rows.append(np.full(offsets.size, row, np.int64))
                columns.append(offsets - 1)
                positions.append(offsets + start)
            done += chosen.size
            micro_batch = MicroBatch(
                torch.from_numpy(token_ids).to(self._device),
                torch.from_numpy(np.concatenate(rows)).to(self._device),
                torch.from_numpy(np.concatenate(columns)).to(self._device),
                np.concatenate(positions),
            )
            if micro_batch.positions.size:
                yield micro_batch
            control.progress(done, order.size)

    def _hidden(self, micro_batch: MicroBatch) -> torch.Tensor:
        """Hidden states that predict the micro-batch's positions: [P, hidden_size].

        Padding is on the right and attention is causal, so real tokens never see it and no mask is needed.
        """
        body = getattr(self._model, self._model.base_model_prefix)
        states: torch.Tensor = body(input_ids=micro_batch.token_ids, use_cache=False).last_hidden_state
        return states[micro_batch.rows, micro_batch.columns]

    def _head_pieces(
        self, hidden: torch.Tensor, positions: NDArray[np.int64]
    ) -> Iterator[tuple[torch.Tensor, NDArray[np.int64]]]:
        size = max(1, _LOGITS_ELEMENTS // int(self._config.vocab_size))
        for start in range(0, positions.size, size):
            yield hidden[start : start + size], positions[start : start + size]

    def _log_probabilities(
        self, hidden: torch.Tensor, batch: TokenBatch, positions: NDArray[np.int64]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(log-probability of the token at each position [P], summed entropy), float32."""
        logits = self._model.get_output_embeddings()(hidden).float()
        targets = torch.from_numpy(batch.token_ids[positions].astype(np.int64)).to(self._device)
        log_probabilities = torch.log_softmax(logits, dim=-1)
        chosen = log_probabilities.gather(1, targets[:, None]).squeeze(1)
        with torch.no_grad():
            entropy = -(log_probabilities.exp() * log_probabilities).sum()
        return chosen, entropy

    @contextlib.contextmanager
    def _computing(self, *, recompute: bool) -> Iterator[None]:
        """Compute format, determinism and activation checkpointing for one function."""
        deterministic = torch.are_deterministic_algorithms_enabled()
        fill = torch.utils.deterministic.fill_uninitialized_memory
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False
        if recompute:
            self._model.gradient_checkpointing_enable({"use_reentrant": False})
            self._model.train()
        try:
            with torch.autocast(self._device.type, torch.bfloat16, enabled=self._precision is Precision.BFLOAT16):
                yield
        except (torch.OutOfMemoryError, MemoryError) as error:
            raise OutOfMemory(f"the trainer ran out of memory: lower micro_batch_tokens ({error})") from error
        except RuntimeError as error:
            if "can't allocate memory" in str(error):
                raise OutOfMemory(f"the trainer ran out of memory: lower micro_batch_tokens ({error})") from error
            raise
        finally:
            if recompute:
                self._model.gradient_checkpointing_disable()
                self._model.eval()
            torch.use_deterministic_algorithms(deterministic)
            torch.utils.deterministic.fill_uninitialized_memory = fill

    def _check_head(self) -> None:
        """Refuses architectures that do more to the hidden states than the output layer does: the trainer runs the body
        and the output layer apart."""
        flat = torch.zeros(self.element_count, dtype=torch.float32, device=self._device)
        self.random_weights(0, flat)
        self.bind(flat, None)
        token_ids = torch.arange(_PROBE_TOKENS, device=self._device)[None] % int(self._config.vocab_size)
        with torch.no_grad():
            body = getattr(self._model, self._model.base_model_prefix, None)
            head = self._model.get_output_embeddings()
            if body is None or head is None:
                raise Unsupported(f"{type(self._model).__name__} has no separate body and output layer")
            whole = self._model(input_ids=token_ids, use_cache=False).logits
            apart = head(body(input_ids=token_ids, use_cache=False).last_hidden_state)
        self.unbind()
        if not torch.allclose(whole, apart, rtol=1e-5, atol=1e-6):
            raise Unsupported(f"{type(self._model).__name__} changes logits after its output layer: not offered yet")


def _meta_model(config: PretrainedConfig) -> Any:
    """The architecture's module with real buffers and parameters on the meta device, which take no memory."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        # One that is on meta already is being tied: it must stay the same object.
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=False)
        register(module, name, parameter)

    nn.Module.register_parameter = register_on_meta
    try:
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    finally:
        nn.Module.register_parameter = register


def _make_bindable(model: nn.Module, device: torch.device) -> None:
    """Puts empty parameters in the place of those on meta, which cannot point at memory; tied ones stay tied."""
    replacements: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                empty = nn.Parameter(torch.empty(0, device=device), requires_grad=False)
                module._parameters[name] = replacements.setdefault(id(parameter), empty)


def _lay_out(named: Iterable[tuple[str, torch.Size]]) -> Iterator[ParameterView]:
    start = 0
    for name, shape in named:
        yield ParameterView(name, shape, start)
        start += _aligned(shape.numel())


def _aligned(elements: int) -> int:
    return -(-elements // _ALIGNMENT_ELEMENTS) * _ALIGNMENT_ELEMENTS
