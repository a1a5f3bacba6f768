"""Writes what a host image holds to files, a piece at a time: between two pieces the image can be had back.

The bytes go from the image's pages to the disk, past the page cache where the file system can: a snapshot of hundreds
of gigabytes must not push out what others read, nor cost a copy that nobody reads. All of it blocks: call it from a
thread.
"""

import contextlib
import errno
import fcntl
import hashlib
import mmap
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from plexrl_worker.checkpoints import CheckpointFile
from plexrl_worker.engine import port

PIECE_BYTES = 64 * 1024 * 1024
_BLOCK_BYTES = 4096
"""What direct writes are aligned to; components begin on such a boundary of the image."""


class ImageWriter:
    """The files of one image, COMPONENT.bin each. Owns descriptors of its own: the model may be dropped meanwhile."""

    def __init__(self, image_fd: int, extents: Sequence[port.ComponentLayout], directory: Path) -> None:
        """`image_fd` becomes the writer's, also where this fails."""
        self._fd = image_fd
        self._directory = directory
        self._left = list(reversed(extents))
        self._at = 0
        self._digest = hashlib.sha256()
        self._file: _File | None = None
        self.files: list[CheckpointFile] = []
        """Those that are written, with their hashes."""

    @property
    def done(self) -> bool:
        """Whether everything is written."""
        return not self._left

    def step(self) -> None:
        """Writes the next piece. Raises OSError."""
        extent = self._left[-1]
        if self._file is None:
            self._file = _File(self._directory / f"{extent.component}.bin")
        size_bytes = min(PIECE_BYTES, extent.size_bytes - self._at)
        with _mapped(self._fd, extent.offset + self._at, size_bytes) as piece:
            self._digest.update(piece)
            self._file.write(piece)
        self._at += size_bytes
        if self._at == extent.size_bytes:
            self._file.close()
            self.files.append(CheckpointFile(f"{extent.component}.bin", extent.size_bytes, self._digest.hexdigest()))
            self._file, self._at, self._digest = None, 0, hashlib.sha256()
            self._left.pop()

    def move_to(self, fd: int) -> None:
        """Copies what is left into another image of the same layout, and goes on there; `fd` is the writer's then."""
        begun = self._at
        try:
            for extent in reversed(self._left):
                offset, end = extent.offset + begun, extent.offset + extent.size_bytes
                begun = 0
                os.lseek(fd, offset, os.SEEK_SET)
                while offset < end:
                    offset += os.sendfile(fd, self._fd, offset, end - offset)
        except BaseException:
            os.close(fd)
            raise
        os.close(self._fd)
        self._fd = fd

    def close(self) -> None:
        """Gives up its descriptors; again is fine."""
        file, self._file = self._file, None
        if file is not None:
            file.close()
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class _File:
    """A new file, written in order."""

    def __init__(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        try:
            self._fd, self._direct = os.open(path, flags | os.O_DIRECT, 0o600), True
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._fd, self._direct = os.open(path, flags, 0o600), False

    def write(self, piece: memoryview) -> None:
        """Appends a piece; all but the last of a file are whole blocks."""
        whole = len(piece) - len(piece) % _BLOCK_BYTES
        written = 0
        while written < len(piece):
            if self._direct and written == whole:
                self._no_more_direct()
            try:
                written += os.write(self._fd, piece[written : whole if self._direct else None])
            except OSError as error:
                # Some file systems ask for larger blocks, and say so only here.
                if not self._direct or error.errno != errno.EINVAL:
                    raise
                self._no_more_direct()
        if not self._direct:
            # So that no other file's fsync waits behind everything at once.
            os.fdatasync(self._fd)

    def _no_more_direct(self) -> None:
        fcntl.fcntl(self._fd, fcntl.F_SETFL, fcntl.fcntl(self._fd, fcntl.F_GETFL) & ~os.O_DIRECT)
        self._direct = False

    def close(self) -> None:
        os.close(self._fd)


@contextlib.contextmanager
def _mapped(fd: int, offset: int, size_bytes: int) -> Iterator[memoryview]:
    """A part of an image, read-only."""
    before = offset % mmap.ALLOCATIONGRANULARITY
    with (
        mmap.mmap(fd, before + size_bytes, prot=mmap.PROT_READ, offset=offset - before) as pages,
        memoryview(pages) as view,
        view[before:] as part,
    ):
        yield part
