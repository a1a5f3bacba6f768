"""Automatic snapshots on disk: a model's host image as files, committed like a checkpoint by its hashed manifest.

    COMPONENT.bin    a component's bytes as they lie in the host image; one that is all zero has no file
    state.json       where each belongs, its checksum, the scalars, and the conditions of a bit-equal restore

Whoever chooses the ids gives each model a few of its own and uses them in turn: writing an id again replaces what was
there, so that the directory does not grow. All of it blocks: call it from a thread.
"""

import contextlib
import hashlib
import json
import os
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from plexrl_worker.checkpoints import CheckpointFacts, CheckpointFile, CheckpointStore, CommittedCheckpoint
from plexrl_worker.deployment import HostState
from plexrl_worker.engine import port
from plexrl_worker.errors import CheckpointCorrupt, ConditionsDiffer, StorageFailed
from plexrl_worker.image_writer import ImageWriter

STATE_FILE = "state.json"
_STATE_FORMAT = 1
_CHUNK_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True)
class RestoredSnapshot:
    """What a snapshot put into a host image."""

    facts: CheckpointFacts
    state: HostState


class SnapshotStore:
    """The snapshot directory, which the workers of a cluster share.

    budget_bytes bounds what it holds. When a new snapshot would exceed it, the oldest snapshots go that are not the
    last of their model; those never go by themselves.
    """

    def __init__(self, root: Path, worker_name: str, budget_bytes: int) -> None:
        self._store = CheckpointStore(root, worker_name)
        self._root = root
        self._budget_bytes = budget_bytes

    def remove_partial(self) -> int:
        """Removes what this worker's earlier life had begun and not committed; returns how many."""
        return self._store.remove_partial()

    def store_id(self) -> str:
        """The directory's identity, made at first use: workers that see the same one share it."""
        path = self._root / "store-id"
        try:
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(uuid.uuid4().hex)
        except FileExistsError:
            pass
        return path.read_text().strip()

    def begin(
        self,
        facts: CheckpointFacts,
        image_fd: int,
        layout: port.StateLayout,
        parked: port.ParkedState,
        conditions: Mapping[str, str],
    ) -> "SnapshotWriting":
        """Begins to write what an image holds. `image_fd` becomes the writing's, also where this fails.

        Raises StorageFailed, and leaves then what was there.
        """
        try:
            copies = {copy.component: copy for copy in parked.components}
            extents = [e for e in layout.components if not copies[e.component].is_zero]
            self._make_room(facts, sum(extent.size_bytes for extent in extents))
            state = {
                "format": _STATE_FORMAT,
                "optimizer_step": parked.optimizer_step,
                "rollout_version": parked.rollout_version,
                "conditions": dict(conditions),
                "components": [asdict(e) | asdict(copies[e.component]) for e in layout.components],
            }
            directory = self._store.begin(facts.checkpoint_id)
        except BaseException:
            os.close(image_fd)
            raise
        return SnapshotWriting(self._store, facts, state, ImageWriter(image_fd, extents, directory), directory)

    def restore(
        self,
        snapshot_id: str,
        manifest_sha256: str,
        image_fd: int,
        layout: port.StateLayout,
        conditions: Mapping[str, str],
    ) -> RestoredSnapshot:
        """Reads a snapshot into an image, every byte against its hash. `manifest_sha256` empty: any.

        Raises CheckpointNotFound, CheckpointCorrupt, ConditionsDiffer.
        """
        committed = self._store.open(snapshot_id)
        if manifest_sha256 and committed.manifest_sha256 != manifest_sha256:
            raise CheckpointCorrupt(f"snapshot {snapshot_id} is not the one that was committed: its manifest differs")
        files = {file.name: file for file in committed.files}
        state = _read_state(committed, files)
        _require(conditions, state["conditions"], snapshot_id)
        parked = _parked_state(state, layout, snapshot_id)
        for extent, copy in zip(layout.components, parked.components, strict=True):
            if not copy.is_zero:
                name = f"{extent.component}.bin"
                if name not in files:
                    raise CheckpointCorrupt(f"snapshot {snapshot_id}: its manifest does not name {name}")
                _copy_in(committed.directory / name, files[name], image_fd, extent)
        facts = committed.facts
        return RestoredSnapshot(facts, HostState(parked, facts.sequence, facts.weights_version))

    def expire(self, snapshot_id: str) -> None:
        """Deletes a snapshot; one that is not there is passed over."""
        self._store.delete(snapshot_id)

    def _make_room(self, facts: CheckpointFacts, needed_bytes: int) -> None:
        if needed_bytes > self._budget_bytes:
            raise StorageFailed(
                f"a snapshot of model {facts.model_id} needs {needed_bytes} bytes, --snapshot-bytes is "
                f"{self._budget_bytes}: raise it"
            )
        others = [c for c in self._store.committed() if c.facts.checkpoint_id != facts.checkpoint_id]
        used_bytes = sum(other.size_bytes for other in others)
        newest = {c.facts.model_id: c for c in sorted(others, key=lambda c: (c.facts.sequence, c.commit_unix_ns))}
        expendable = [c for c in others if c is not newest[c.facts.model_id]]
        for other in sorted(expendable, key=lambda c: c.commit_unix_ns):
            if used_bytes + needed_bytes <= self._budget_bytes:
                return
            self._store.delete(other.facts.checkpoint_id)
            used_bytes -= other.size_bytes
        if used_bytes + needed_bytes > self._budget_bytes:
            raise StorageFailed(
                f"a snapshot of model {facts.model_id} needs {needed_bytes} bytes beside {used_bytes} of other models' "
                f"last ones, --snapshot-bytes is {self._budget_bytes}: raise it, or delete snapshots of jobs that ended"
            )


class SnapshotWriting:
    """One snapshot on its way: `step` until `done`, then `commit`; or `abandon`. Made by `SnapshotStore.begin`.

    Whoever may write the image must wait until it is done, or until `move_to` has returned.
    """

    def __init__(
        self,
        store: CheckpointStore,
        facts: CheckpointFacts,
        state: Mapping[str, Any],
        writer: ImageWriter,
        directory: Path,
    ) -> None:
        self._store = store
        self._facts = facts
        self._state = state
        self._writer = writer
        self._directory = directory

    @property
    def done(self) -> bool:
        """Whether the image is not needed any more."""
        return self._writer.done

    def step(self) -> None:
        """Writes the next piece, of at most 64 MiB. Raises StorageFailed."""
        with self._storage():
            self._writer.step()

    def move_to(self, image_fd: int) -> None:
        """Copies what is left into another image; `image_fd` becomes the writing's. Raises StorageFailed."""
        with self._storage():
            self._writer.move_to(image_fd)

    def commit(self) -> CommittedCheckpoint:
        """Makes it count. Raises StorageFailed, and leaves then what was there."""
        with self._storage():
            (self._directory / STATE_FILE).write_text(json.dumps(self._state, indent=1, sort_keys=True))
            files = {file.name: file for file in self._writer.files}
            committed = self._store.commit(self._facts, files, replace=True)
        self._writer.close()
        return committed

    def abandon(self) -> None:
        """Removes what was written."""
        self._writer.close()
        self._store.abandon(self._facts.checkpoint_id)

    @contextlib.contextmanager
    def _storage(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            facts = self._facts
            raise StorageFailed(f"snapshot {facts.checkpoint_id} of model {facts.model_id}: {error}") from error


def _copy_in(path: Path, file: CheckpointFile, image_fd: int, extent: port.ComponentLayout) -> None:
    digest, buffer = hashlib.sha256(), memoryview(bytearray(_CHUNK_BYTES))
    done = 0
    try:
        with path.open("rb", buffering=0) as source:
            while count := source.readinto(buffer):
                if done + count > extent.size_bytes:
                    break
                digest.update(buffer[:count])
                written = 0
                while written < count:
                    written += os.pwrite(image_fd, buffer[written:count], extent.offset + done + written)
                done += count
    except OSError as error:
        raise CheckpointCorrupt(f"{path} cannot be read: {error}") from error
    if done != extent.size_bytes or file.size_bytes != extent.size_bytes or digest.hexdigest() != file.sha256:
        raise CheckpointCorrupt(f"{path} is not what its manifest says: its SHA-256 or size differs")


def _read_state(committed: CommittedCheckpoint, files: Mapping[str, CheckpointFile]) -> dict[str, Any]:
    path = committed.directory / STATE_FILE
    try:
        raw = path.read_bytes()
        state: dict[str, Any] = json.loads(raw)
        if hashlib.sha256(raw).hexdigest() != files[STATE_FILE].sha256 or state["format"] != _STATE_FORMAT:
            raise CheckpointCorrupt(f"{path} is not what its manifest says, or of another format")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointCorrupt(f"{path} cannot be read: {error!r}") from error
    return state


def _require(here: Mapping[str, str], then: Mapping[str, str], snapshot_id: str) -> None:
    for name in sorted({*here, *then}):
        if here.get(name) != then.get(name):
            raise ConditionsDiffer(
                f"the {name} was {then.get(name)} when snapshot {snapshot_id} was written, here it is "
                f"{here.get(name)}: replay would not be bit-equal; restore it on a worker like the one that wrote it"
            )


def _parked_state(state: Mapping[str, Any], layout: port.StateLayout, snapshot_id: str) -> port.ParkedState:
    try:
        entries = [(port.Component(entry["component"]), entry) for entry in state["components"]]
        extents = [port.ComponentLayout(component, e["offset"], e["size_bytes"]) for component, e in entries]
        copies = [port.ParkedComponent(component, int(e["checksum"]), bool(e["is_zero"])) for component, e in entries]
        parked = port.ParkedState(tuple(copies), int(state["optimizer_step"]), int(state["rollout_version"]))
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointCorrupt(f"snapshot {snapshot_id}: {STATE_FILE} cannot be read: {error!r}") from error
    if tuple(extents) != layout.components:
        raise ConditionsDiffer(f"snapshot {snapshot_id} has another layout than this engine gives the model's state")
    return parked
