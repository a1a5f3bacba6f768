"""What a host image holds reaches its files as it was, whoever wants the image meanwhile."""

import errno
import hashlib
import os
import random
from pathlib import Path

import pytest

from plexrl_worker import image_writer
from plexrl_worker.engine import port

COMPONENTS = tuple(port.Component)


@pytest.mark.parametrize("size_bytes", [1, 4096, 4097, 70_000])
@pytest.mark.parametrize("moved_after", [0, 1, 3])
@pytest.mark.parametrize("direct", [True, False])
def test_an_image_that_is_had_back_while_it_is_written_is_written_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size_bytes: int, moved_after: int, direct: bool
) -> None:
    """Whatever its size, and where the file system takes no direct writes."""
    extents = [port.ComponentLayout(c, 70_000 // 4096 * 8192 * n, size_bytes) for n, c in enumerate(COMPONENTS)]
    total_bytes = extents[-1].offset + size_bytes
    content = random.Random(size_bytes).randbytes(total_bytes)
    source, copy = os.memfd_create("source"), os.memfd_create("copy")
    os.write(source, content)
    os.truncate(copy, total_bytes)
    monkeypatch.setattr(image_writer, "PIECE_BYTES", 16384)
    if not direct:
        monkeypatch.setattr(os, "O_DIRECT", 0)
    writer, steps = image_writer.ImageWriter(os.dup(source), extents, tmp_path), 0
    while not writer.done:
        if steps == moved_after:
            writer.move_to(os.dup(copy))
            os.pwrite(source, bytes(total_bytes), 0)
        writer.step()
        steps += 1
    writer.close()
    for extent, file in zip(extents, writer.files, strict=True):
        wanted = content[extent.offset : extent.offset + size_bytes]
        assert (tmp_path / file.name).read_bytes() == wanted
        assert (file.size_bytes, file.sha256) == (size_bytes, hashlib.sha256(wanted).hexdigest())
    for fd in (source, copy):
        os.close(fd)


def test_a_copy_that_fails_keeps_nothing_open_and_the_image_can_still_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    extents = [port.ComponentLayout(c, 4096 * n, 4096) for n, c in enumerate(COMPONENTS)]
    source, copy = os.memfd_create("source"), os.memfd_create("copy")
    os.truncate(source, 4096 * len(COMPONENTS))

    def fail(*arguments: object) -> int:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    before = os.listdir("/proc/self/fd")
    writer = image_writer.ImageWriter(os.dup(source), extents, tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(os, "sendfile", fail)
        moved_to = os.dup(copy)
        with pytest.raises(OSError, match="memory"):
            writer.move_to(moved_to)
    while not writer.done:
        writer.step()
    writer.close()
    writer.close()
    assert os.listdir("/proc/self/fd") == before
    for fd in (source, copy):
        os.close(fd)
