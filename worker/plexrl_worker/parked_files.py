"""The disk tier's files: one parked state per model, fsynced, every component with its SHA-256. All of it blocks.

    NAME-NONCE.state    the components that are not all zero, one after the other
    NAME.json           the manifest: what the state is, where each component lies, its hash; its rename commits

NAME is a hash of the model's id, so that no name from outside becomes a path. Knows bytes and hashes; budgets, and
which state goes where, are for `tiers`.
"""

import hashlib
import json
import os
import secrets
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from plexrl_worker.engine import port
from plexrl_worker.errors import HostStateCorrupt, StorageFailed

_FORMAT = 1
_PIECE_BYTES = 4 << 20
# The disk is made to keep up in steps of this size, so that the last sync is short and a move stops soon when it must.
_SYNC_BYTES = 64 << 20
_MANIFEST_SUFFIX, _DATA_SUFFIX, _UNFINISHED_SUFFIX = ".json", ".state", ".tmp"

Interrupt = Callable[[], bool]


class Interrupted(Exception):
    """A move was stopped for one that matters more; nothing was changed."""


@dataclass(frozen=True)
class StateFacts:
    """What a parked state is. fingerprint: of everything that the deployment was built from. conditions: what must be
    equal where it goes on.
    """

    model_id: str
    fingerprint: str
    applied_sequence: int
    weights_version: int
    conditions: dict[str, str]


@dataclass(frozen=True)
class _Segment:
    """A component's bytes in the file."""

    component: str
    offset: int
    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class DiskCopy:
    """A committed state on disk."""

    facts: StateFacts
    parked: port.ParkedState
    layout: port.StateLayout
    data_file: Path
    segments: tuple[_Segment, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of its data."""
        return sum(segment.size_bytes for segment in self.segments)


class ParkedFiles:
    """A directory of parked states, this daemon's alone."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)

    def write(
        self, facts: StateFacts, parked: port.ParkedState, layout: port.StateLayout, memory_fd: int, stop: Interrupt
    ) -> DiskCopy:
        """Writes a host image, and commits it in the place of the model's earlier copy. Raises StorageFailed,
        Interrupted; the earlier copy then stays.
        """
        name = _name(facts.model_id)
        data_file = self._directory / f"{name}-{secrets.token_hex(4)}{_DATA_SUFFIX}"
        try:
            with data_file.open("xb") as target:
                segments = tuple(_write_segments(target.fileno(), parked, layout, memory_fd, stop))
                os.fsync(target.fileno())
            copy = DiskCopy(facts, parked, layout, data_file, segments)
            self._commit(name, copy)
        except OSError as error:
            data_file.unlink(missing_ok=True)
            raise StorageFailed(f"the parked state of model {facts.model_id} was not written: {error}") from error
        except BaseException:
            data_file.unlink(missing_ok=True)
            raise
        self._remove_data(name, but=data_file)
        return copy

    def restate(self, copy: DiskCopy, facts: StateFacts) -> None:
        """Commits other facts about bytes that stay as they are. Raises StorageFailed."""
        try:
            self._commit(_name(facts.model_id), replace(copy, facts=facts))
        except OSError as error:
            raise StorageFailed(f"the parked state of model {facts.model_id} was not written: {error}") from error

    def read(self, copy: DiskCopy, memory_fd: int, stop: Interrupt) -> None:
        """Fills a host image, comparing every hash. Raises HostStateCorrupt, StorageFailed, Interrupted."""
        buffer = memoryview(bytearray(_PIECE_BYTES))
        try:
            with copy.data_file.open("rb", buffering=0) as source:
                for segment in copy.segments:
                    _read_segment(source.fileno(), segment, _place(copy.layout, segment), memory_fd, buffer, stop)
        except _WrongHash as error:
            raise HostStateCorrupt(
                f"the parked state of model {copy.facts.model_id} on disk is not what was written: {error}; "
                "restore it from a snapshot or checkpoint"
            ) from error
        except FileNotFoundError as error:
            raise HostStateCorrupt(f"the parked state of model {copy.facts.model_id} is gone: {error}") from error
        except OSError as error:
            raise StorageFailed(f"the parked state of model {copy.facts.model_id} was not read: {error}") from error

    def remove(self, model_id: str) -> None:
        """Forgets a model's state; there may be none."""
        name = _name(model_id)
        (self._directory / f"{name}{_MANIFEST_SUFFIX}").unlink(missing_ok=True)
        self._remove_data(name)

    def recover(self) -> list[DiskCopy]:
        """What an earlier life committed; removes what it did not, and what cannot be read."""
        copies = []
        for manifest in sorted(self._directory.glob(f"*{_MANIFEST_SUFFIX}")):
            try:
                copies.append(_parse(manifest))
            except (OSError, ValueError, KeyError, TypeError):
                manifest.unlink()
        kept = {copy.data_file for copy in copies}
        for path in self._directory.iterdir():
            if path.suffix in (_DATA_SUFFIX, _UNFINISHED_SUFFIX) and path not in kept:
                path.unlink()
        return copies

    def _commit(self, name: str, copy: DiskCopy) -> None:
        content = {
            "format": _FORMAT,
            "facts": asdict(copy.facts),
            "parked": asdict(copy.parked),
            "layout": asdict(copy.layout),
            "data_file": copy.data_file.name,
            "segments": [asdict(segment) for segment in copy.segments],
        }
        unfinished = self._directory / f"{name}{_UNFINISHED_SUFFIX}"
        with unfinished.open("w", encoding="ascii") as target:
            json.dump(content, target)
            target.flush()
            os.fsync(target.fileno())
        unfinished.replace(self._directory / f"{name}{_MANIFEST_SUFFIX}")
        descriptor = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _remove_data(self, name: str, but: Path | None = None) -> None:
        for path in self._directory.glob(f"{name}-*{_DATA_SUFFIX}"):
            if path != but:
                path.unlink(missing_ok=True)


class _WrongHash(Exception):
    pass


def _name(model_id: str) -> str:
    return hashlib.sha256(model_id.encode()).hexdigest()[:32]


def _place(layout: port.StateLayout, segment: _Segment) -> int:
    return next(entry.offset for entry in layout.components if entry.component == segment.component)


def _write_segments(
    target_fd: int, parked: port.ParkedState, layout: port.StateLayout, memory_fd: int, stop: Interrupt
) -> Iterator[_Segment]:
    zero = {copy.component for copy in parked.components if copy.is_zero}
    buffer, written = memoryview(bytearray(_PIECE_BYTES)), 0
    for entry in layout.components:
        if entry.component in zero:
            continue
        digest, start = hashlib.sha256(), written
        for piece in _pieces(memory_fd, entry.offset, entry.size_bytes, buffer, stop):
            digest.update(piece)
            _write_all(target_fd, piece, written)
            written += len(piece)
            if written % _SYNC_BYTES < len(piece):
                os.fdatasync(target_fd)
        yield _Segment(entry.component, start, entry.size_bytes, digest.hexdigest())


def _read_segment(
    source_fd: int, segment: _Segment, place: int, memory_fd: int, buffer: memoryview, stop: Interrupt
) -> None:
    digest, done = hashlib.sha256(), 0
    for piece in _pieces(source_fd, segment.offset, segment.size_bytes, buffer, stop):
        digest.update(piece)
        _write_all(memory_fd, piece, place + done)
        done += len(piece)
    if digest.hexdigest() != segment.sha256:
        raise _WrongHash(f"{segment.component} has another SHA-256")


def _pieces(fd: int, offset: int, size_bytes: int, buffer: memoryview, stop: Interrupt) -> Iterator[memoryview]:
    end = offset + size_bytes
    while offset < end:
        if stop():
            raise Interrupted
        count = os.preadv(fd, [buffer[: min(len(buffer), end - offset)]], offset)
        if not count:
            raise _WrongHash(f"{end - offset} bytes are missing")
        yield buffer[:count]
        offset += count


def _write_all(fd: int, piece: memoryview, offset: int) -> None:
    while piece:
        count = os.pwrite(fd, piece, offset)
        piece, offset = piece[count:], offset + count


def _parse(manifest: Path) -> DiskCopy:
    content: dict[str, Any] = json.loads(manifest.read_bytes())
    if content["format"] != _FORMAT:
        raise ValueError(f"format {content['format']}")
    data_file = manifest.parent / Path(content["data_file"]).name
    parked, layout = content["parked"], content["layout"]
    parked["components"] = tuple(
        port.ParkedComponent(**{**entry, "component": port.Component(entry["component"])})
        for entry in parked["components"]
    )
    layout["components"] = tuple(
        port.ComponentLayout(**{**entry, "component": port.Component(entry["component"])})
        for entry in layout["components"]
    )
    segments = tuple(_Segment(**segment) for segment in content["segments"])
    copy = DiskCopy(
        StateFacts(**content["facts"]),
        port.ParkedState(**parked),
        port.StateLayout(**layout),
        data_file,
        segments,
    )
    if manifest.stem != _name(copy.facts.model_id) or data_file.stat().st_size != copy.size_bytes:
        raise ValueError(f"{manifest.name} does not belong to its data")
    return copy
