"""From Hugging Face tensors to the generator's parameters: which piece of which parameter a tensor fills.

vLLM fuses and pads (qkv, gate and up, vocabulary). The plan is found by asking vLLM's own loader: tensors filled with
their number show where each goes, then tensors of random values prove it element by element. An architecture whose
loader does more than copy is refused. After that weights move by plain copies, in place, on a live engine.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from plexrl_worker.engine.errors import Unsupported

# Tensor numbers are written in digits that every dtype holds exactly (bfloat16: integers up to 256).
_DIGIT_BASE = 128

Load = Callable[[Iterable[tuple[str, torch.Tensor]]], object]


@dataclass(frozen=True)
class Segment:
    """A tensor's elements, in order, are elements [start, start + count) of a parameter."""

    tensor: str
    parameter: str
    start: int
    count: int


def derive(parameters: Mapping[str, torch.Tensor], shapes: Mapping[str, torch.Size], load: Load) -> tuple[Segment, ...]:
    """Finds and proves the plan; the parameters' values are lost, what no tensor fills is zero afterwards.

    parameters: the generator's, contiguous. shapes: Hugging Face tensor name to shape. load: the generator's loader.
    Raises Unsupported when the loader does more than copy.
    """
    names = list(shapes)
    numbers = {name: _tensor_numbers(parameters[name]) for name in parameters}
    digits = 1
    while _DIGIT_BASE**digits < len(names) + 1:
        digits += 1
    dtype = next(iter(parameters.values())).dtype
    for digit in range(digits):
        for parameter in parameters.values():
            parameter.zero_()
        load(_numbered(shapes, digit, dtype))
        for name, parameter in parameters.items():
            numbers[name] += _rows(parameter)[:, 0].to(torch.int64).cpu() * _DIGIT_BASE**digit
    segments = tuple(_segments(names, shapes, parameters, numbers))
    _prove(segments, parameters, shapes, load)
    return segments


def _tensor_numbers(parameter: torch.Tensor) -> torch.Tensor:
    return torch.zeros(_rows(parameter).shape[0], dtype=torch.int64)


def _rows(parameter: torch.Tensor) -> torch.Tensor:
    """Fused tensors are stacked along the first axis; a vector's elements are its rows."""
    return parameter.reshape(parameter.shape[0], -1)


def _numbered(shapes: Mapping[str, torch.Size], digit: int, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    for index, (name, shape) in enumerate(shapes.items()):
        yield name, torch.full(shape, float((index + 1) // _DIGIT_BASE**digit % _DIGIT_BASE), dtype=dtype)


def _segments(
    names: list[str],
    shapes: Mapping[str, torch.Size],
    parameters: Mapping[str, torch.Tensor],
    numbers: Mapping[str, torch.Tensor],
) -> Iterator[Segment]:
    for parameter_name, row_numbers in numbers.items():
        row_elements = parameters[parameter_name].numel() // row_numbers.numel()
        values, counts = torch.unique_consecutive(row_numbers, return_counts=True)
        start = 0
        for number, rows in zip(values.tolist(), counts.tolist(), strict=True):
            if not 0 <= number <= len(names):
                raise Unsupported(f"the generator's loader changes the values of {parameter_name}")
            if number:
                name = names[number - 1]
                if shapes[name].numel() != rows * row_elements:
                    raise Unsupported(f"the generator keeps {name} in more than one piece of {parameter_name}")
                yield Segment(name, parameter_name, start * row_elements, rows * row_elements)
            start += rows


def _prove(
    segments: tuple[Segment, ...],
    parameters: Mapping[str, torch.Tensor],
    shapes: Mapping[str, torch.Size],
    load: Load,
) -> None:
    for parameter in parameters.values():
        parameter.zero_()
    dtype = next(iter(parameters.values())).dtype
    load((name, _random(index, shape).to(dtype)) for index, (name, shape) in enumerate(shapes.items()))
    by_tensor: dict[str, list[Segment]] = {}
    for segment in segments:
        by_tensor.setdefault(segment.tensor, []).append(segment)
    for index, (name, shape) in enumerate(shapes.items()):
        if name not in by_tensor:
            raise Unsupported(f"the generator does not load the tensor {name}")
        for segment in by_tensor[name]:
            parameter = parameters[segment.parameter]
            loaded = parameter.view(-1)[segment.start : segment.start + segment.count]
            if not torch.equal(loaded, _random(index, shape).to(parameter).view(-1)):
                raise Unsupported(f"the generator's loader reorders or changes {name}")


def _random(index: int, shape: torch.Size) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(index))
