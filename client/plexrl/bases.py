"""Where a model's first weights come from: a fresh configuration, a catalogue name, or an uploaded directory.

Knows files and uploads; knows nothing of models that exist.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from plexrl import errors
from plexrl.connection import Connection
from plexrl.v1 import model_pb2 as m
from plexrl.v1 import payload_pb2 as p
from plexrl.wire import CHUNK_BYTES

BUNDLE_SUFFIXES = frozenset({".json", ".safetensors", ".txt", ".model", ".jinja"})


@dataclass(frozen=True)
class Init:
    """Random weights from a Hugging Face configuration (`architectures` names exactly one) and a seed."""

    config: Mapping[str, object]
    seed: int = 0


@dataclass(frozen=True)
class Catalogue:
    """A name in the workers' catalogue of model directories."""

    name: str


@dataclass(frozen=True)
class Bundle:
    """A local Hugging Face directory (config.json, *.safetensors, tokenizer files), uploaded once per content."""

    directory: str | os.PathLike[str]


Base = Init | Catalogue | Bundle


def to_wire(base: Base, connection: Connection) -> m.ModelBase:
    """Writes a base for the wire; uploads a bundle's files."""
    match base:
        case Init(config, seed):
            return m.ModelBase(init=m.InitBase(config_json=json.dumps(dict(config), sort_keys=True), seed=seed))
        case Catalogue(name):
            return m.ModelBase(catalogue=name)
        case Bundle(directory):
            files = bundle_files(Path(directory))
            payload_ids = {path.name: _upload(path, connection) for path in files}
            return m.ModelBase(bundle=m.BundleBase(payload_ids=payload_ids))
        case _:
            raise errors.InvalidArgument(
                f"base: {base!r}, want plexrl.Init(config), plexrl.Catalogue(name) or plexrl.Bundle(directory)"
            )


def bundle_files(directory: Path) -> list[Path]:
    """The files of a directory that make a bundle, by name."""
    if not (directory / "config.json").is_file():
        raise errors.InvalidArgument(f"{directory} has no config.json: want a Hugging Face model directory")
    files = sorted(path for path in directory.iterdir() if path.is_file() and path.suffix in BUNDLE_SUFFIXES)
    if not any(path.suffix == ".safetensors" for path in files):
        raise errors.InvalidArgument(f"{directory} has no *.safetensors: only safetensors weights are taken")
    return files


def _upload(path: Path, connection: Connection) -> str:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    size_bytes = path.stat().st_size

    def chunks() -> Iterator[p.PutPayloadRequest]:
        yield p.PutPayloadRequest(size_bytes=size_bytes, sha256=digest)
        with path.open("rb") as source:
            while data := source.read(CHUNK_BYTES):
                yield p.PutPayloadRequest(data=data)

    stored = connection.again(lambda: connection.payloads.PutPayload(chunks(), metadata=connection.metadata))
    return stored.payload_id
