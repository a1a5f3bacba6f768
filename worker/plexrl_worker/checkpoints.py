"""Checkpoints on disk: a directory counts only once its hashed manifest is committed by a rename.

An engine writes and reads the files inside; this module names, hashes, commits, verifies and streams them. All of it
blocks: call it from a thread.
"""

import contextlib
import hashlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from plexrl import wire
from plexrl_worker.engine.checkpoints import GRADIENTS_FILE, MANIFEST_FILE, OPTIMIZER_FILE, ROLLOUT_FILE
from plexrl_worker.errors import CheckpointCorrupt, CheckpointNotFound, InvalidOrder, StorageFailed

# Ours beside the engine's own manifest: what the engine cannot know (model, sequence), and a hash of every file.
COMMIT_FILE = "checkpoint.json"
_MANIFEST_FORMAT = 1
_READ_BYTES = 4 * 1024 * 1024
_ABANDONED_AFTER_S = 24 * 3600.0
# Files that a Hugging Face loader does not need; streamed only when the training state is asked for.
_TRAINING_STATE_FILES = frozenset({OPTIMIZER_FILE, GRADIENTS_FILE, ROLLOUT_FILE, MANIFEST_FILE})


@dataclass(frozen=True)
class CheckpointFile:
    """One file of a checkpoint."""

    name: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class CheckpointFacts:
    """What a checkpoint says about the state inside."""

    checkpoint_id: str
    model_id: str
    sequence: int
    step: int
    weights_version: int
    architecture: str


@dataclass(frozen=True)
class CommittedCheckpoint:
    """A committed checkpoint: its facts, its files, and the hash of the manifest that commits it."""

    facts: CheckpointFacts
    files: tuple[CheckpointFile, ...]
    directory: Path
    manifest_sha256: str
    commit_unix_ns: int

    @property
    def size_bytes(self) -> int:
        """Bytes on disk, the manifest apart."""
        return sum(file.size_bytes for file in self.files)


@dataclass(frozen=True)
class Chunk:
    """A piece of a file; the last piece carries the file's hash."""

    name: str
    data: bytes
    sha256: str


class CheckpointStore:
    """The checkpoint directory, which several workers may share."""

    def __init__(self, root: Path, worker_name: str) -> None:
        self._root = root
        self._partial_suffix = f".{worker_name}.partial"
        root.mkdir(parents=True, exist_ok=True, mode=0o700)

    def remove_partial(self) -> int:
        """Removes what this worker's earlier life had begun and not committed, and what any worker left long ago.

        Returns how many.
        """
        leftovers = [
            partial
            for partial in self._root.glob("*.partial")
            if partial.name.endswith(self._partial_suffix) or _age_s(partial) > _ABANDONED_AFTER_S
        ]
        for leftover in leftovers:
            shutil.rmtree(leftover, ignore_errors=True)
        return len(leftovers)

    def begin(self, checkpoint_id: str) -> Path:
        """An empty private directory for an engine to write into."""
        partial = self._root / f"{checkpoint_name(checkpoint_id)}{self._partial_suffix}"
        try:
            if partial.exists():
                shutil.rmtree(partial)
            partial.mkdir(mode=0o700)
        except OSError as error:
            raise StorageFailed(f"checkpoint {checkpoint_id}: {error}") from error
        return partial

    def abandon(self, checkpoint_id: str) -> None:
        """Removes what was begun; never touches a committed checkpoint."""
        shutil.rmtree(self._root / f"{checkpoint_name(checkpoint_id)}{self._partial_suffix}", ignore_errors=True)

    def commit(
        self, facts: CheckpointFacts, known: Mapping[str, CheckpointFile], *, replace: bool = False
    ) -> CommittedCheckpoint:
        """Syncs the files begun, writes the manifest last, and renames: only then does it count.

        `known`: files, by name, whose hashes were made when they were written; the others are hashed here. With
        `replace` a committed one of the same id makes way; a crash in that moment leaves none.
        """
        name = checkpoint_name(facts.checkpoint_id)
        partial, final = self._root / f"{name}{self._partial_suffix}", self._root / name
        try:
            files = tuple(_sync(path, known.get(path.name)) for path in sorted(partial.iterdir()))
            manifest = {"format": _MANIFEST_FORMAT, "facts": asdict(facts), "files": [asdict(file) for file in files]}
            _write_synced(partial / COMMIT_FILE, json.dumps(manifest, indent=1, sort_keys=True).encode())
            _sync_directory(partial)
            if replace:
                self.delete(facts.checkpoint_id)
            os.rename(partial, final)
            _sync_directory(self._root)
        except OSError as error:
            raise StorageFailed(f"checkpoint {facts.checkpoint_id} was not committed: {error}") from error
        return self.open(facts.checkpoint_id)

    def delete(self, checkpoint_id: str) -> None:
        """Deletes a committed checkpoint; one that is not there is passed over. It stops to count before it shrinks."""
        final = self._root / checkpoint_name(checkpoint_id)
        leaving = final.with_name(f"{final.name}.deleted{self._partial_suffix}")
        try:
            os.rename(final, leaving)
        except FileNotFoundError:
            return
        except OSError as error:
            raise StorageFailed(f"checkpoint {checkpoint_id} cannot be deleted: {error}") from error
        shutil.rmtree(leaving, ignore_errors=True)

    def committed(self) -> list[CommittedCheckpoint]:
        """Every committed checkpoint whose manifest can be read."""
        found = []
        for path in self._root.iterdir():
            if (path / COMMIT_FILE).is_file() and "." not in path.name:
                with contextlib.suppress(CheckpointCorrupt, CheckpointNotFound, InvalidOrder):
                    found.append(self.open(path.name))
        return found

    def find(self, checkpoint_id: str) -> CommittedCheckpoint | None:
        """The committed checkpoint of this id, if there is one."""
        try:
            return self.open(checkpoint_id)
        except CheckpointNotFound:
            return None

    def open(self, checkpoint_id: str) -> CommittedCheckpoint:
        """Reads the manifest. Raises CheckpointNotFound, CheckpointCorrupt."""
        directory = self._root / checkpoint_name(checkpoint_id)
        path = directory / COMMIT_FILE
        try:
            raw = path.read_bytes()
            commit_unix_ns = path.stat().st_mtime_ns
        except FileNotFoundError:
            raise CheckpointNotFound(f"no committed checkpoint {checkpoint_id} in this worker's directory") from None
        except OSError as error:
            raise CheckpointCorrupt(f"checkpoint {checkpoint_id}: {error}") from error
        facts, files = _parse_manifest(raw, checkpoint_id)
        return CommittedCheckpoint(facts, files, directory, hashlib.sha256(raw).hexdigest(), commit_unix_ns)

    def verify(self, checkpoint_id: str) -> CommittedCheckpoint:
        """Reads every byte and compares every hash. Raises CheckpointNotFound, CheckpointCorrupt."""
        checkpoint = self.open(checkpoint_id)
        for file in checkpoint.files:
            for _ in _chunks(checkpoint.directory / file.name, file, _READ_BYTES):
                pass
        return checkpoint

    def read(self, checkpoint_id: str, *, training_state: bool) -> Iterator[Chunk]:
        """The files in order, in pieces of at most 1 MiB. Raises as `verify` does, before a wrong file's last piece."""
        checkpoint = self.open(checkpoint_id)
        for file in checkpoint.files:
            if training_state or file.name not in _TRAINING_STATE_FILES:
                yield from _chunks(checkpoint.directory / file.name, file, wire.CHUNK_BYTES)


def checkpoint_name(checkpoint_id: str) -> str:
    """The directory name of an id from outside: a UUID's hexadecimal digits, so never a path. Raises InvalidOrder."""
    try:
        parsed = uuid.UUID(checkpoint_id)
    except ValueError:
        parsed = None
    if parsed is None or checkpoint_id not in (parsed.hex, str(parsed)):
        raise InvalidOrder(f"checkpoint_id {checkpoint_id[:80]!r}: want a UUID in lower-case hexadecimal")
    return parsed.hex


def _chunks(path: Path, file: CheckpointFile, piece_bytes: int) -> Iterator[Chunk]:
    digest, left = hashlib.sha256(), file.size_bytes
    try:
        with path.open("rb") as source:
            while True:
                data = source.read(piece_bytes)
                digest.update(data)
                left -= len(data)
                if left > 0 and data:
                    yield Chunk(file.name, data, "")
                    continue
                if left != 0 or source.read(1) or digest.hexdigest() != file.sha256:
                    raise CheckpointCorrupt(f"{file.name} is not what its manifest says: its SHA-256 or size differs")
                yield Chunk(file.name, data, file.sha256)
                return
    except OSError as error:
        raise CheckpointCorrupt(f"{file.name} cannot be read: {error}") from error


def _parse_manifest(raw: bytes, checkpoint_id: str) -> tuple[CheckpointFacts, tuple[CheckpointFile, ...]]:
    try:
        manifest: dict[str, Any] = json.loads(raw)
        if manifest["format"] != _MANIFEST_FORMAT:
            raise CheckpointCorrupt(
                f"checkpoint {checkpoint_id} has format {manifest['format']}, this worker reads {_MANIFEST_FORMAT}"
            )
        facts = CheckpointFacts(**manifest["facts"])
        files = tuple(CheckpointFile(**entry) for entry in manifest["files"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointCorrupt(f"checkpoint {checkpoint_id}: its manifest cannot be read: {error}") from error
    if any(Path(file.name).name != file.name or file.name in ("", ".", "..") for file in files):
        raise CheckpointCorrupt(f"checkpoint {checkpoint_id}: its manifest names a file outside its directory")
    return facts, files


def _sync(path: Path, known: CheckpointFile | None) -> CheckpointFile:
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as source:
        if known is not None:
            os.fsync(source.fileno())
            return known
        while data := source.read(_READ_BYTES):
            digest.update(data)
            size += len(data)
        os.fsync(source.fileno())
    return CheckpointFile(path.name, size, digest.hexdigest())


def _age_s(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("wb") as target:
        target.write(data)
        target.flush()
        os.fsync(target.fileno())


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
