"""The real engine's parts that need torch but no model: checksums, releasable memory, the weight plan."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import torch

from plexrl_worker.engine import weight_plan
from plexrl_worker.engine.device import PAGE_BYTES, Checksum, CpuDevice
from plexrl_worker.engine.errors import Unsupported
from plexrl_worker.engine.weight_plan import Segment


def checksum(raw: np.ndarray) -> int:
    sum_of = Checksum()
    sum_of.update(torch.from_numpy(raw))
    return sum_of.value()


def example(seed: int, size_bytes: int = 8 * PAGE_BYTES) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size_bytes, dtype=np.uint8)


def test_every_flipped_bit_changes_the_checksum() -> None:
    raw = example(1)
    original = checksum(raw)
    for position in (0, 7, 4095, 4096, 9999, raw.size - 1):
        for bit in range(8):
            raw[position] ^= 1 << bit
            assert checksum(raw) != original
            raw[position] ^= 1 << bit
    assert checksum(raw) == original


def test_the_place_of_words_counts() -> None:
    raw = example(2)
    original = checksum(raw)
    words = raw.view(np.int64)
    for first, second in ((0, 1), (0, 512), (3, 700), (511, 512)):
        words[[first, second]] = words[[second, first]]
        assert checksum(raw) != original
        words[[first, second]] = words[[second, first]]
    assert checksum(np.roll(raw, 8)) != original
    assert checksum(np.zeros(PAGE_BYTES, np.uint8)) == 0


def test_the_checksum_does_not_depend_on_the_chunks_of_a_copy() -> None:
    device, raw = CpuDevice(), example(3, 5 << 20)
    region = device.region(raw.size)
    region.take()
    arrived = device.unpark(raw, region.pieces)
    image = np.zeros_like(raw)
    assert device.park(region.pieces, image) == arrived == checksum(raw)
    np.testing.assert_array_equal(image, raw)


def test_released_memory_leaves_the_resident_set_and_reads_as_zero() -> None:
    device = CpuDevice()
    region = device.region(64 << 20)
    region.take()
    view = region.pieces[0].view(torch.float32)
    before = device.used_bytes()
    view.fill_(1.5)
    assert device.used_bytes() - before > 60 << 20
    region.release()
    assert device.used_bytes() - before < 4 << 20
    assert float(view.sum()) == 0
    view.fill_(2.5)
    assert float(view[123]) == 2.5


def test_many_swaps_leave_no_residue() -> None:
    """G09: 200 swaps keep the memory in use within a bound."""
    device, image = CpuDevice(), np.zeros(4 << 20, np.uint8)
    region = device.region(image.size)
    used: list[int] = []
    for _ in range(200):
        region.take()
        region.pieces[0].fill_(7)
        device.park(region.pieces, image)
        region.release()
        used.append(device.used_bytes())
    assert used[-1] - used[10] < 1 << 20


SHAPES = {"q": torch.Size([4, 3]), "k": torch.Size([2, 3]), "bias": torch.Size([5]), "embed": torch.Size([6, 3])}


def parameters(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """A generator that stacks q and k, and pads the vocabulary from 6 to 8."""
    return {
        "qk": torch.ones(6, 3, dtype=dtype),
        "bias": torch.ones(5, dtype=dtype),
        "embed": torch.ones(8, 3, dtype=dtype),
    }


def load(into: dict[str, torch.Tensor], tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    for name, tensor in tensors:
        match name:
            case "q":
                into["qk"][:4] = tensor
            case "k":
                into["qk"][4:] = tensor
            case "embed":
                into["embed"][:6] = tensor
            case _:
                into[name][:] = tensor


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_plan_is_what_the_loader_does(dtype: torch.dtype) -> None:
    own = parameters(dtype)
    plan = weight_plan.derive(own, SHAPES, lambda tensors: load(own, tensors))
    assert plan == (
        Segment("q", "qk", 0, 12),
        Segment("k", "qk", 12, 6),
        Segment("bias", "bias", 0, 5),
        Segment("embed", "embed", 0, 18),
    )
    assert not own["embed"][6:].any(), "padding is zero"


def test_more_tensors_than_a_digit_holds() -> None:
    shapes = {f"t{index}": torch.Size([1, 2]) for index in range(300)}
    own = {"all": torch.ones(300, 2, dtype=torch.bfloat16)}

    def stack(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            own["all"][int(name[1:])] = tensor[0]

    plan = weight_plan.derive(own, shapes, stack)
    assert [segment.start for segment in plan] == list(range(0, 600, 2))


@pytest.mark.parametrize("trick", ["transposed", "scaled", "left-out", "reversed"])
def test_a_loader_that_does_more_than_copy_is_refused(trick: str) -> None:
    shapes = {"w": torch.Size([4, 4])}
    own = {"w": torch.ones(4, 4)}

    def tricky(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _, tensor in tensors:
            match trick:
                case "transposed":
                    own["w"].copy_(tensor.T)
                case "scaled":
                    own["w"].copy_(tensor * 3)
                case "reversed":
                    own["w"].copy_(tensor.flip(0))

    with pytest.raises(Unsupported):
        weight_plan.derive(own, shapes, tricky)


def test_the_engine_files_are_importable_without_torch() -> None:
    """The daemon imports these; torch and vLLM belong to the child."""
    engine = Path(weight_plan.__file__).parent
    for name in ("port", "errors", "codec", "client", "frames", "child", "ledger", "losses", "fake", "checkpoints"):
        source = (engine / f"{name}.py").read_text()
        assert not [
            line for line in source.splitlines() if line.startswith(("import torch", "from torch", "import vllm"))
        ]
