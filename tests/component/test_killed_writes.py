"""G15: a process that is killed while it writes, at whatever moment, leaves only what counts whole or not at all.

What a kill leaves is what lies on disk at that moment: so the directory is looked at whenever it has changed, between
any two lines that run. Knows no engine: bytes, files and hashes.
"""

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from plexrl_worker.checkpoints import CheckpointFacts, CheckpointStore
from plexrl_worker.engine import port
from plexrl_worker.errors import CheckpointCorrupt, CheckpointNotFound
from plexrl_worker.snapshots import SnapshotStore

COMPONENTS = tuple(port.Component)
COMPONENT_BYTES = 4096
LAYOUT = port.StateLayout(
    components=tuple(port.ComponentLayout(c, n * COMPONENT_BYTES, COMPONENT_BYTES) for n, c in enumerate(COMPONENTS)),
    host_bytes=len(COMPONENTS) * COMPONENT_BYTES,
    parameter_count=1,
)
PARKED = port.ParkedState(tuple(port.ParkedComponent(c, 1, is_zero=False) for c in COMPONENTS), 1, 1)
CONDITIONS = {"threads": "1"}
OLD, NEW = "a" * 32, "b" * 32


@contextmanager
def at_every_change(directory: Path, look: Callable[[Path], None], scratch: Path) -> Iterator[list[int]]:
    """Within the block, shows `look` a copy of the directory whenever it has changed; counts how often."""
    seen: set[tuple[tuple[str, int, int], ...]] = set()
    looks = [0]

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        present = tuple(
            (str(path.relative_to(directory)), path.stat().st_size, path.stat().st_ino)
            for path in sorted(directory.rglob("*"))
        )
        if present not in seen:
            seen.add(present)
            looks[0] += 1
            sys.settrace(None)
            copy = scratch / str(looks[0])
            shutil.copytree(directory, copy)
            look(copy)
            shutil.rmtree(copy)
            sys.settrace(trace)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield looks
    finally:
        sys.settrace(before)


def image(content: int) -> int:
    fd = os.memfd_create("image")
    os.write(fd, b"".join(bytes([content + n]) * COMPONENT_BYTES for n in range(len(COMPONENTS))))
    return fd


def facts(snapshot_id: str, sequence: int) -> CheckpointFacts:
    return CheckpointFacts(snapshot_id, "m", sequence, 1, 1, "A")


def restored(root: Path, snapshot_id: str) -> tuple[int, bytes] | None:
    """Sequence number and bytes of a snapshot as the next life finds it; None when there is none."""
    store, fd = SnapshotStore(root, "w0", 1 << 20), image(99)
    store.remove_partial()
    try:
        found = store.restore(snapshot_id, "", fd, LAYOUT, CONDITIONS)
    except CheckpointNotFound:
        return None
    finally:
        content = os.pread(fd, len(COMPONENTS) * COMPONENT_BYTES, 0)
        os.close(fd)
    return found.facts.sequence, content


def written(content: int) -> bytes:
    return b"".join(bytes([content + n]) * COMPONENT_BYTES for n in range(len(COMPONENTS)))


def write(store: SnapshotStore, facts: CheckpointFacts, content: int) -> None:
    writing = store.begin(facts, image(content), LAYOUT, PARKED, CONDITIONS)
    while not writing.done:
        writing.step()
    writing.commit()


@pytest.mark.parametrize("target", [NEW, OLD], ids=["another place", "over an older one"])
def test_a_snapshot_is_whole_or_not_there_at_every_moment_of_its_writing(tmp_path: Path, target: str) -> None:
    """G15: and the one before it stays, unless it is the one that is written over."""
    root, scratch = tmp_path / "snapshots", tmp_path / "looks"
    store = SnapshotStore(root, "w0", 1 << 20)
    write(store, facts(OLD, 5), 1)
    found: list[tuple[int, bytes] | None] = []

    def look(copy: Path) -> None:
        found.append(restored(copy, target))
        assert found[-1] in (None, (5, written(1)), (9, written(50)))
        if target != OLD:
            assert restored(copy, OLD) == (5, written(1))

    with at_every_change(root, look, scratch) as looks:
        write(store, facts(target, 9), 50)
    assert looks[0] > len(COMPONENTS)
    assert found[0] == (None if target == NEW else (5, written(1)))
    assert restored(root, target) == (9, written(50))


def test_a_checkpoint_counts_with_its_record_alone_at_every_moment(tmp_path: Path) -> None:
    """G15: an engine writes file after file; whatever is there of them, nothing is found before the record is."""
    root, scratch = tmp_path / "checkpoints", tmp_path / "looks"
    store = CheckpointStore(root, "w0")
    names = ("config.json", "model.safetensors", "optimizer.safetensors")
    whole: list[bool] = []

    def look(copy: Path) -> None:
        try:
            checkpoint = CheckpointStore(copy, "w0").verify(NEW)
        except CheckpointNotFound:
            whole.append(False)
        else:
            whole.append(True)
            assert {file.name for file in checkpoint.files} == set(names)

    with at_every_change(root, look, scratch):
        directory = store.begin(NEW)
        for name in names:
            (directory / name).write_bytes(name.encode() * 100)
        store.commit(facts(NEW, 9), {})
    assert whole == sorted(whole)
    assert whole[-1]


@pytest.mark.parametrize("size", [0, 1, 100])
def test_a_record_that_is_cut_off_is_no_record(tmp_path: Path, size: int) -> None:
    """G15."""
    store = CheckpointStore(tmp_path, "w0")
    (store.begin(NEW) / "model.safetensors").write_bytes(b"weights")
    record = store.commit(facts(NEW, 9), {}).directory / "checkpoint.json"
    os.truncate(record, size)
    with pytest.raises(CheckpointCorrupt):
        store.open(NEW)
    assert store.committed() == []
