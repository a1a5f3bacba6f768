"""Writes the files of an exported checkpoint, each checked against its hash, all of them or none.

Knows file chunks and directories; knows nothing of who sends them.
"""

import hashlib
import os
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

from plexrl import errors
from plexrl.v1 import model_pb2 as m

_SAFE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,254}")


def write_export(chunks: Iterable[m.FileChunk], directory: Path) -> Path:
    """Writes the files into `directory`, which must not exist or be empty.

    Raises DataLoss when a hash does not match or a file stops short; then `directory` is as it was.
    """
    if directory.exists() and any(directory.iterdir()):
        raise errors.InvalidArgument(f"{directory} is not empty: choose a directory that does not exist yet")
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=f".{directory.name}-") as scratch:
        files = Path(scratch) / "files"
        files.mkdir()
        _write_files(chunks, files)
        os.replace(files, directory)
    return directory


def _write_files(chunks: Iterable[m.FileChunk], directory: Path) -> None:
    done: set[str] = set()
    name: str | None = None
    file: BinaryIO | None = None
    digest = hashlib.sha256()
    try:
        for chunk in chunks:
            if file is None:
                name = _checked_name(chunk.name, done)
                digest = hashlib.sha256()
                file = (directory / name).open("xb")
            elif chunk.name != name:
                raise errors.DataLoss(f"{name} stopped short: {chunk.name} began before its hash came")
            file.write(chunk.data)
            digest.update(chunk.data)
            if chunk.sha256:
                file.close()
                file = None
                if digest.hexdigest() != chunk.sha256:
                    raise errors.DataLoss(f"{name}: its bytes do not match their SHA-256; export again")
                done.add(str(name))
    finally:
        if file is not None:
            file.close()
    if file is not None:
        raise errors.DataLoss(f"{name} stopped short: the stream ended before its hash came")
    if not done:
        raise errors.DataLoss("the export has no files")


def _checked_name(name: str, done: set[str]) -> str:
    if not _SAFE_NAME.fullmatch(name) or name in done:
        raise errors.DataLoss(f"refusing to write a file named {name!r}")
    return name
