"""Device memory: regions that can be released and taken again, and checked copies between them and host images.

On CPU the "device" is anonymous mapped memory, whose pages go back to the kernel on release, so that the resident set
falls. On CUDA it is torch's allocator, with host images pinned and copies on a side stream. Knows bytes, not models.
"""

import contextlib
import ctypes
import mmap
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np
import torch

from plexrl_worker.engine.errors import EngineError, OutOfMemory
from plexrl_worker.engine.memory import anonymous_bytes
from plexrl_worker.engine.port import ByteArray

PAGE_BYTES = 4096
_ROW_WORDS = PAGE_BYTES // 8
_CPU_CHUNK_BYTES = 8 << 20
_CUDA_CHUNK_BYTES = 256 << 20
_ROW_FACTOR = 0x5851_F42D_4C95_7F2E  # Even: see Checksum.
_MASK = 2**64 - 1
_libc = ctypes.CDLL(None, use_errno=True)


class Checksum:
    """64 bits over a component's bytes, sensitive to their place; cheap enough for every move.

    The bytes are 64-bit words in rows of 512. With row sums R_r and column sums C_c, all modulo 2**64, it is
    F * sum_r (2 r + 1) R_r + sum_c (2 c + 1) C_c with an even F. A change of one word by d changes it by d times an odd
    number, so any flipped bits within one word are always seen.
    """

    def __init__(self) -> None:
        self._rows = 0
        self._row_sums: list[torch.Tensor] = []
        self._column_sums: torch.Tensor | None = None

    def update(self, raw: torch.Tensor) -> None:
        """Adds bytes: uint8, a multiple of PAGE_BYTES unless they are the last."""
        tail = -raw.numel() % PAGE_BYTES
        if tail:
            raw = torch.cat([raw, raw.new_zeros(tail)])
        words = raw.view(torch.int64).view(-1, _ROW_WORDS)
        self._row_sums.append(words.sum(1))
        columns = words.sum(0)
        self._column_sums = columns if self._column_sums is None else self._column_sums + columns

    def value(self) -> int:
        """The checksum of all bytes added."""
        if self._column_sums is None:
            return 0
        rows = torch.cat(self._row_sums)
        row_part = int((_odd_numbers(rows) * rows).sum())
        column_part = int((_odd_numbers(self._column_sums) * self._column_sums).sum())
        return (_ROW_FACTOR * row_part + column_part) & _MASK


class Region(Protocol):
    """A component's device memory."""

    size_bytes: int

    @property
    def pieces(self) -> Sequence[torch.Tensor]:
        """The memory: flat uint8 tensors whose sizes add up to size_bytes. Only while it is held."""
        ...

    def take(self) -> None:
        """Makes the memory usable, zero-filled unless it was held already. Raises OutOfMemory."""
        ...

    def release(self) -> None:
        """Gives the memory back; views of it must not be used any more."""
        ...


class Device(Protocol):
    """Where an engine's state lives."""

    kind: str
    torch_device: torch.device

    def region(self, size_bytes: int) -> Region:
        """A region of its own, not yet taken. size_bytes is a multiple of PAGE_BYTES."""
        ...

    def pin(self, image: ByteArray) -> None:
        """Prepares a host image for fast copies."""
        ...

    def unpin(self, image: ByteArray) -> None:
        """Undoes `pin`."""
        ...

    def used_bytes(self) -> int:
        """Device memory in use, measured: what a move frees or takes shows here."""
        ...

    def held_bytes(self) -> int:
        """Device memory that this process alone holds, free lists of its allocator included: growth is a leak."""
        ...

    def moving(self) -> AbstractContextManager[object]:
        """Around moves that run beside computing: what they allocate and copy waits for no computation."""
        ...

    def trim(self) -> None:
        """Returns what the allocator keeps of freed memory."""
        ...

    def park(self, pieces: Sequence[torch.Tensor], image: ByteArray) -> int:
        """Copies device memory to an image; the checksum of what was on the device."""
        ...

    def unpark(self, image: ByteArray, pieces: Sequence[torch.Tensor]) -> int:
        """Copies an image to device memory; the checksum of what is on the device now."""
        ...


class CpuRegion:
    """Anonymous mapped memory with a stable address: views stay valid, and read as zero after release."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._memory = mmap.mmap(-1, max(size_bytes, PAGE_BYTES), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._pieces = (torch.frombuffer(self._memory, dtype=torch.uint8, count=size_bytes),)

    @property
    def pieces(self) -> Sequence[torch.Tensor]:
        """See Region."""
        return self._pieces

    def take(self) -> None:
        """See Region; the kernel gives zero pages at first touch."""

    def release(self) -> None:
        """See Region."""
        self._memory.madvise(mmap.MADV_DONTNEED)


class CpuDevice:
    """Host memory in the role of a device."""

    kind = "cpu"
    torch_device = torch.device("cpu")

    def region(self, size_bytes: int) -> Region:
        """See Device."""
        try:
            return CpuRegion(size_bytes)
        except OSError as error:
            raise OutOfMemory(f"cannot map {size_bytes} bytes: {error}") from error

    def pin(self, image: ByteArray) -> None:
        """Nothing to do."""

    def unpin(self, image: ByteArray) -> None:
        """Nothing to do."""

    def used_bytes(self) -> int:
        """See Device."""
        return anonymous_bytes()

    def held_bytes(self) -> int:
        """See Device."""
        return anonymous_bytes()

    def moving(self) -> AbstractContextManager[object]:
        """Nothing to do: copies on CPU run in the thread that makes them."""
        return contextlib.nullcontext()

    def trim(self) -> None:
        """See Device; activations of a trainer leave gigabytes in malloc's free lists."""
        _libc.malloc_trim(0)

    def park(self, pieces: Sequence[torch.Tensor], image: ByteArray) -> int:
        """See Device."""
        return self._copy(pieces, _slices(image, pieces))

    def unpark(self, image: ByteArray, pieces: Sequence[torch.Tensor]) -> int:
        """See Device."""
        return self._copy(_slices(image, pieces), pieces)

    def _copy(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> int:
        """One plain memmove per piece, which streams past the caches, then the sum of what arrived.

        Both in this thread: teams of threads that wait for each other cost more where the cores are taken.
        """
        checksum = Checksum()
        for source, target in zip(sources, targets, strict=True):
            ctypes.memmove(target.data_ptr(), source.data_ptr(), source.numel())
            for chunk in target.split(_CPU_CHUNK_BYTES):
                checksum.update(chunk)
        return checksum.value()


class CudaRegion:
    """Memory of torch's allocator. Releasing returns it to the driver, so another process can have it."""

    def __init__(self, size_bytes: int, device: torch.device) -> None:
        self.size_bytes = size_bytes
        self._device = device
        self._memory: torch.Tensor | None = None

    @property
    def pieces(self) -> Sequence[torch.Tensor]:
        """See Region."""
        if self._memory is None:
            raise EngineError("device memory is used after its release")
        return (self._memory,)

    def take(self) -> None:
        """See Region."""
        if self._memory is None:
            try:
                self._memory = torch.zeros(self.size_bytes, dtype=torch.uint8, device=self._device)
            except torch.OutOfMemoryError as error:
                raise OutOfMemory(f"no {self.size_bytes} bytes are free on {self._device}: {error}") from error

    def release(self) -> None:
        """See Region. The memory may belong to the side stream: what computes on it must be done."""
        if self._memory is not None:
            torch.cuda.current_stream(self._device).synchronize()
        self._memory = None


class CudaDevice:
    """A CUDA device."""

    kind = "cuda"

    def __init__(self, index: int = 0) -> None:
        self.torch_device = torch.device("cuda", index)
        self._stream = torch.cuda.Stream(self.torch_device)

    def region(self, size_bytes: int) -> Region:
        """See Device."""
        return CudaRegion(size_bytes, self.torch_device)

    def pin(self, image: ByteArray) -> None:
        """Registers the mapping with CUDA, so that copies are asynchronous and at full speed."""
        _check_cuda("cudaHostRegister", torch.cuda.cudart().cudaHostRegister(image.ctypes.data, image.nbytes, 0))

    def unpin(self, image: ByteArray) -> None:
        """See Device."""
        _check_cuda("cudaHostUnregister", torch.cuda.cudart().cudaHostUnregister(image.ctypes.data))

    def used_bytes(self) -> int:
        """Device memory in use, other processes' included."""
        free_bytes, total_bytes = torch.cuda.mem_get_info(self.torch_device)
        return int(total_bytes - free_bytes)

    def held_bytes(self) -> int:
        """See Device. Sleeping weights and KV cache count, so that they do not look like a change."""
        return int(torch.cuda.memory_reserved(self.torch_device))

    def moving(self) -> AbstractContextManager[object]:
        """See Device."""
        context: AbstractContextManager[object] = torch.cuda.stream(self._stream)
        return context

    def trim(self) -> None:
        """See Device."""
        torch.cuda.empty_cache()

    def park(self, pieces: Sequence[torch.Tensor], image: ByteArray) -> int:
        """See Device."""
        return self._copy(pieces, _slices(image, pieces), on_device=pieces)

    def unpark(self, image: ByteArray, pieces: Sequence[torch.Tensor]) -> int:
        """See Device."""
        return self._copy(_slices(image, pieces), pieces, on_device=pieces)

    def _copy(
        self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], on_device: Sequence[torch.Tensor]
    ) -> int:
        """Copies on the side stream; the sum is taken of the device's side, where memory is fast."""
        checksum = Checksum()
        self._stream.wait_stream(torch.cuda.current_stream(self.torch_device))
        with torch.cuda.stream(self._stream):
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source, non_blocking=True)
            for piece in on_device:
                for chunk in piece.split(_CUDA_CHUNK_BYTES):
                    checksum.update(chunk)
            value = checksum.value()
        self._stream.synchronize()
        return value


def drop_pages(tensor: torch.Tensor) -> None:
    """Gives the whole pages inside a CPU tensor's storage back to the kernel; they read as zero afterwards."""
    storage = tensor.untyped_storage()
    start = -(-storage.data_ptr() // PAGE_BYTES) * PAGE_BYTES
    end = (storage.data_ptr() + storage.nbytes()) // PAGE_BYTES * PAGE_BYTES
    if end <= start:
        return
    status = _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED)
    if status != 0:
        raise EngineError(f"madvise failed with errno {ctypes.get_errno()}")


def padded(size_bytes: int) -> int:
    """The next multiple of the page size."""
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


def _slices(image: ByteArray, pieces: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    sizes = [piece.numel() for piece in pieces]
    if sum(sizes) != image.size:
        raise EngineError(f"a component has {sum(sizes)} bytes, its place in the host image {image.size}")
    return list(torch.from_numpy(image).split(sizes))


def _odd_numbers(like: torch.Tensor) -> torch.Tensor:
    return torch.arange(1, 2 * like.numel(), 2, dtype=torch.int64, device=like.device)


def _check_cuda(function: str, status: object) -> None:
    if int(np.asarray(int(status))) != 0:  # type: ignore[call-overload]
        raise EngineError(f"{function} failed with status {status}")
