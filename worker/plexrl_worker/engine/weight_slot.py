"""The generator's weights: the memory of one model's worth, filled and moved in place on the live engine.

`FullSlot` is all of vLLM's parameters. `AdapterSlot` is one LoRA adapter over parameters that stay. Both speak in the
trainer's tensor names; neither knows versions or deployments.
"""

import itertools
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from vllm.config import set_current_vllm_config
from vllm.lora.request import LoRARequest
from vllm.v1.engine.llm_engine import LLMEngine

from plexrl_worker.engine import lora, weight_plan
from plexrl_worker.engine.device import Device, Region, padded
from plexrl_worker.engine.errors import Unsupported
from plexrl_worker.engine.settings import LoraSettings

_ALIGNMENT_BYTES = 64


@dataclass(frozen=True)
class RolloutContent:
    """What is in the slot: a model's weights of a version. `key` is new whenever the slot was written."""

    model: str
    version: int
    key: str


class WeightSlot(Protocol):
    """Memory of the rollout weights of the one deployment that owns it."""

    size_bytes: int

    @property
    def pieces(self) -> Sequence[torch.Tensor]:
        """The memory: flat uint8 tensors, in a fixed order. Only while the device is held."""
        ...

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The content by the trainer's names: flat views, a tied tensor once."""
        ...

    def fill(self, sources: Mapping[str, torch.Tensor]) -> None:
        """Copies tensors, by the trainer's names, into the slot, in the generator's format."""
        ...

    def release(self) -> None:
        """Gives the memory back where that is possible while the device is held; the content is lost."""
        ...

    def adapter(self, content: RolloutContent) -> LoRARequest | None:
        """What a request must carry to run on the slot's content."""
        ...


class FullSlot:
    """All parameters of vLLM's model."""

    def __init__(
        self, engine: LLMEngine, model: Any, shapes: Mapping[str, torch.Size], device: Device, dtype: torch.dtype
    ) -> None:
        self._dtype = dtype
        self._parameters = {name: parameter.data for name, parameter in model.named_parameters()}
        for name, parameter in self._parameters.items():
            if parameter.numel() == 0 or not parameter.is_contiguous() or parameter.dtype != dtype:
                raise Unsupported(f"the generator keeps {name} in a packed form, which cannot be updated in place")
        with set_current_vllm_config(engine.vllm_config):
            self._segments = weight_plan.derive(self._parameters, shapes, model.load_weights)
        self._region: Region | None = None
        if device.kind == "cpu":
            self._relocate(model, device)
        self.size_bytes = sum(piece.numel() for piece in self.pieces)

    @property
    def pieces(self) -> Sequence[torch.Tensor]:
        """See WeightSlot."""
        if self._region is not None:
            return self._region.pieces
        return [parameter.view(-1).view(torch.uint8) for parameter in self._parameters.values()]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See WeightSlot."""
        seen: set[str] = set()
        for segment in self._segments:
            if segment.tensor not in seen:
                seen.add(segment.tensor)
                yield segment.tensor, self._view(segment)

    def fill(self, sources: Mapping[str, torch.Tensor]) -> None:
        """See WeightSlot."""
        for segment in self._segments:
            self._view(segment).copy_(sources[segment.tensor].reshape(-1))

    def release(self) -> None:
        """See WeightSlot."""
        if self._region is not None:
            self._region.release()

    def adapter(self, content: RolloutContent) -> LoRARequest | None:
        """See WeightSlot."""
        return None

    def _relocate(self, model: Any, device: Device) -> None:
        """Moves the parameters into one region, so that they move and are released as one."""
        places, offset = {}, 0
        for name, parameter in self._parameters.items():
            places[name] = offset
            size_bytes = parameter.numel() * parameter.element_size()
            offset += -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        self._region = device.region(padded(offset))
        self._region.take()
        memory = self._region.pieces[0]
        for name, parameter in model.named_parameters():
            old = self._parameters[name]
            size_bytes = old.numel() * old.element_size()
            parameter.data = memory[places[name] : places[name] + size_bytes].view(self._dtype).view(old.shape)
            self._parameters[name] = parameter.data

    def _view(self, segment: weight_plan.Segment) -> torch.Tensor:
        return self._parameters[segment.parameter].view(-1)[segment.start : segment.start + segment.count]


class AdapterSlot:
    """One adapter. vLLM takes adapters from PEFT's files: they are written when content is used for the first time."""

    def __init__(
        self,
        engine: LLMEngine,
        settings: LoraSettings,
        shapes: Mapping[str, torch.Size],
        device: Device,
        dtype: torch.dtype,
        directory: Path,
    ) -> None:
        self._engine = engine
        self._settings = settings
        self._shapes = dict(shapes)
        self._dtype = dtype
        self._directory = directory
        self._region = device.region(padded(sum(shape.numel() for shape in shapes.values()) * dtype.itemsize))
        self._loaded: tuple[str, LoRARequest] | None = None
        self._numbers = itertools.count(1)
        self.size_bytes = self._region.size_bytes

    @property
    def pieces(self) -> Sequence[torch.Tensor]:
        """See WeightSlot."""
        self._region.take()
        return self._region.pieces

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See WeightSlot."""
        flat, start = self.pieces[0].view(self._dtype), 0
        for name, shape in self._shapes.items():
            yield name, flat[start : start + shape.numel()]
            start += shape.numel()

    def fill(self, sources: Mapping[str, torch.Tensor]) -> None:
        """See WeightSlot."""
        for name, view in self.tensors():
            view.copy_(sources[name].reshape(-1))

    def release(self) -> None:
        """See WeightSlot."""
        self._region.release()

    def adapter(self, content: RolloutContent) -> LoRARequest | None:
        """See WeightSlot. vLLM keeps one adapter: the one before is taken out. Raises Unsupported."""
        if self._loaded is not None and self._loaded[0] == content.key:
            return self._loaded[1]
        if self._loaded is not None:
            self._engine.remove_lora(self._loaded[1].lora_int_id)
            self._loaded = None
        number = next(self._numbers)
        directory = self._directory / f"adapter-{number}"
        directory.mkdir()
        try:
            tensors = {name: view.view(self._shapes[name]) for name, view in self.tensors()}
            lora.write(directory, tensors, self._settings)
            # A name is never used for other content: vLLM keys cached blocks by it.
            request = LoRARequest(f"{content.model}@{content.version}", number, str(directory))
            if not self._engine.add_lora(request):
                raise Unsupported("the generator did not take the adapter")
        # What vLLM raises for an adapter that it cannot use.
        except (ValueError, RuntimeError, KeyError) as error:
            raise Unsupported(f"the generator cannot use the adapter: {type(error).__name__}: {error}") from error
        finally:
            shutil.rmtree(directory, ignore_errors=True)
        self._loaded = content.key, request
        return request
