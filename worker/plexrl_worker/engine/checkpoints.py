"""Checkpoints on disk: a Hugging Face directory, the rest of the training state beside it, and a manifest that
commits it.

    config.json, model.safetensors, tokenizer files    what transformers' from_pretrained reads; float32 master weights
    optimizer.safetensors                              exp_avg.NAME and exp_avg_sq.NAME
    gradients.safetensors                              only if any is not zero
    rollout.safetensors                                only if they differ from the master weights
    manifest.json                                      hashes, scalars and conditions; written last, by rename

Without a manifest a directory is no checkpoint. The engines write and read the tensors; this module commits and
verifies.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plexrl_worker.engine.errors import CheckpointCorrupt, CheckpointMismatch
from plexrl_worker.engine.port import SavedFile, SavedState

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
GRADIENTS_FILE = "gradients.safetensors"
ROLLOUT_FILE = "rollout.safetensors"
MANIFEST_FILE = "manifest.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)

_FORMAT = 1
_HASH_BYTES = 4 << 20

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Manifest:
    """A verified checkpoint. conditions: what must be equal where it is loaded, for a bit-equal continuation."""

    directory: Path
    files: frozenset[str]
    conditions: Mapping[str, str]
    optimizer_step: int
    rollout_version: int

    def require(self, conditions: Mapping[str, str]) -> None:
        """Raises CheckpointMismatch unless it was written under exactly these conditions."""
        for name in sorted({*conditions, *self.conditions}):
            saved, here = self.conditions.get(name), conditions.get(name)
            if saved != here:
                raise CheckpointMismatch(f"{name} was {saved} when the checkpoint was written, here it is {here}")


def copy_tokenizer(tokenizer_file: str | None, directory: Path) -> None:
    """Copies a tokenizer and the files that belong to it."""
    if tokenizer_file is None:
        return
    for name in TOKENIZER_FILES:
        source = Path(tokenizer_file).parent / name
        if source.is_file():
            shutil.copyfile(source, directory / name)


def commit(
    directory: Path,
    conditions: Mapping[str, str],
    library_versions: Mapping[str, str],
    optimizer_step: int,
    rollout_version: int,
    progress: Progress,
) -> SavedState:
    """Makes the files of a directory durable and commits them with a manifest."""
    paths = sorted(path for path in directory.iterdir() if path.name != MANIFEST_FILE)
    sizes = [path.stat().st_size for path in paths]
    files: list[SavedFile] = []
    for path, size_bytes in zip(paths, sizes, strict=True):
        progress(sum(file.size_bytes for file in files), sum(sizes))
        _sync(path)
        files.append(SavedFile(path.name, size_bytes, _sha256(path)))
    manifest = {
        "format": _FORMAT,
        "files": {file.name: {"size_bytes": file.size_bytes, "sha256": file.sha256} for file in files},
        "conditions": dict(conditions),
        "library_versions": dict(library_versions),
        "optimizer_step": optimizer_step,
        "rollout_version": rollout_version,
    }
    data = json.dumps(manifest, indent=1, sort_keys=True).encode()
    unfinished = directory / f".{MANIFEST_FILE}"
    unfinished.write_bytes(data)
    _sync(unfinished)
    unfinished.rename(directory / MANIFEST_FILE)
    _sync(directory)
    return SavedState(tuple(files), hashlib.sha256(data).hexdigest(), optimizer_step, rollout_version)


def verify(directory: Path, progress: Progress) -> Manifest:
    """Reads a manifest and compares every file with it. Raises CheckpointCorrupt."""
    try:
        manifest = json.loads((directory / MANIFEST_FILE).read_bytes())
        if manifest["format"] != _FORMAT:
            raise CheckpointCorrupt(f"{directory}: manifest format {manifest['format']} is not known")
        files: dict[str, dict[str, Any]] = manifest["files"]
        total = sum(entry["size_bytes"] for entry in files.values())
        done = 0
        for name, entry in files.items():
            path = directory / name
            if path.parent != directory:
                raise CheckpointCorrupt(f"{directory}: the manifest names {name!r}, which is not a plain file name")
            if path.stat().st_size != entry["size_bytes"] or _sha256(path) != entry["sha256"]:
                raise CheckpointCorrupt(f"{path} is not as it was written")
            done += entry["size_bytes"]
            progress(done, total)
        return Manifest(
            directory=directory,
            files=frozenset(files),
            conditions=manifest["conditions"],
            optimizer_step=manifest["optimizer_step"],
            rollout_version=manifest["rollout_version"],
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointCorrupt(f"{directory} is not a whole checkpoint: {error!r}") from error


def weight_files(directory: Path) -> list[Path]:
    """The *.safetensors files that hold a Hugging Face directory's weights: one, or those of an index."""
    index = directory / f"{WEIGHTS_FILE}.index.json"
    if index.is_file():
        names: Iterable[str] = set(json.loads(index.read_bytes())["weight_map"].values())
        return [directory / Path(name).name for name in sorted(names)]
    return [directory / WEIGHTS_FILE]


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_HASH_BYTES):
            digest.update(block)
    return digest.hexdigest()
