"""Where a model's first weights come from, on this machine: written configs, catalogue directories, fetched bundles.

Names from outside never become paths: a catalogue name is looked up, a bundle's file names are checked one by one.
"""

import asyncio
import hashlib
import json
import re
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plexrl.v1 import model_pb2 as m
from plexrl_worker.engine.settings import Base, DirectoryBase, InitBase
from plexrl_worker.errors import InvalidOrder, PayloadUnavailable, StorageFailed

_MAX_CONFIG_BYTES = 1024 * 1024
_MAX_BUNDLE_FILES = 512
_WEIGHTS_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,120}\.safetensors")
_PAYLOAD_ID = re.compile(r"[0-9a-f]{64}")
TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_FILES = frozenset(
    {
        TOKENIZER_FILE,
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.json",
        "merges.txt",
        "chat_template.jinja",
    }
)
_OTHER_BUNDLE_FILES = frozenset({"config.json", "generation_config.json", "model.safetensors.index.json"})

# Reads a payload of a model's, given as (model id, payload id), from the controller, piece by piece.
PayloadReader = Callable[[str, str], AsyncIterator[bytes]]


@dataclass(frozen=True)
class LocalBase:
    """A base on this machine. `directory` holds config.json and, where there is one, the tokenizer."""

    directory: Path
    config_json: str
    architecture: str
    weights: Base
    private: bool

    @property
    def tokenizer_file(self) -> Path | None:
        """The tokenizer, if the base came with one."""
        path = self.directory / TOKENIZER_FILE
        return path if path.is_file() else None

    def discard(self) -> None:
        """Removes what was written for this base; a catalogue directory stays."""
        if self.private:
            shutil.rmtree(self.directory, ignore_errors=True)


class BaseLibrary:
    """Makes bases local. Its private directories belong to one life of the daemon."""

    def __init__(
        self, root: Path, catalogue: Mapping[str, Path], read_payload: PayloadReader, max_bundle_bytes: int
    ) -> None:
        self._root = root
        self._catalogue = catalogue
        self._read_payload = read_payload
        self._max_bundle_bytes = max_bundle_bytes
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir(parents=True, mode=0o700)

    async def resolve(self, model_id: str, base: m.ModelBase) -> LocalBase:
        """Makes a base local. Raises InvalidOrder, PayloadUnavailable, StorageFailed."""
        match base.WhichOneof("source"):
            case "init":
                return await asyncio.to_thread(self._write_config, base.init)
            case "catalogue":
                return await asyncio.to_thread(self._look_up, base.catalogue)
            case "bundle":
                return await self._fetch(model_id, base.bundle.payload_ids)
            case _:
                raise InvalidOrder("base.source: not set, want init, catalogue or bundle")

    def _write_config(self, init: m.InitBase) -> LocalBase:
        config = parse_config(init.config_json, "base.init.config_json")
        directory = self._private_directory()
        (directory / "config.json").write_text(init.config_json, encoding="utf-8")
        return LocalBase(directory, init.config_json, config["architectures"][0], InitBase(init.seed), private=True)

    def _look_up(self, name: str) -> LocalBase:
        directory = self._catalogue.get(name)
        if directory is None:
            known = ", ".join(sorted(self._catalogue)) or "none"
            raise InvalidOrder(f"base.catalogue {name[:80]!r} is not in this worker's catalogue, which has: {known}")
        return _of_directory(directory, private=False)

    async def _fetch(self, model_id: str, payload_ids: Mapping[str, str]) -> LocalBase:
        if "config.json" not in payload_ids:
            raise InvalidOrder("base.bundle: config.json is missing")
        if len(payload_ids) > _MAX_BUNDLE_FILES:
            raise InvalidOrder(f"base.bundle: {len(payload_ids)} files, the limit is {_MAX_BUNDLE_FILES}")
        for name, payload_id in payload_ids.items():
            if name not in TOKENIZER_FILES | _OTHER_BUNDLE_FILES and not _WEIGHTS_NAME.fullmatch(name):
                raise InvalidOrder(
                    f"base.bundle: {name[:80]!r}: want config.json, *.safetensors or a tokenizer's files"
                )
            if not _PAYLOAD_ID.fullmatch(payload_id):
                raise InvalidOrder(f"base.bundle: {name}: the payload id is not a SHA-256 in hexadecimal")
        directory = await asyncio.to_thread(self._private_directory)
        try:
            left_bytes = self._max_bundle_bytes
            for name, payload_id in payload_ids.items():
                left_bytes -= await self._fetch_file(model_id, directory / name, payload_id, left_bytes)
            return await asyncio.to_thread(_of_directory, directory, private=True)
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            raise

    async def _fetch_file(self, model_id: str, path: Path, payload_id: str, limit_bytes: int) -> int:
        digest, size = hashlib.sha256(), 0
        try:
            with path.open("wb") as target:
                async for data in self._read_payload(model_id, payload_id):
                    size += len(data)
                    if size > limit_bytes:
                        raise InvalidOrder(
                            f"base.bundle: its files exceed {self._max_bundle_bytes} bytes, this worker's host budget"
                        )
                    digest.update(data)
                    await asyncio.to_thread(target.write, data)
        except OSError as error:
            raise StorageFailed(f"base.bundle: {path.name}: {error}") from error
        if digest.hexdigest() != payload_id:
            raise PayloadUnavailable(f"base.bundle: {path.name} arrived with another SHA-256 than its payload id")
        return size

    def _private_directory(self) -> Path:
        try:
            return Path(tempfile.mkdtemp(dir=self._root))
        except OSError as error:
            raise StorageFailed(f"{self._root}: {error}") from error


def parse_config(text: str, name: str) -> dict[str, Any]:
    """A Hugging Face config.json with exactly one architecture and no code of its own. Raises InvalidOrder."""
    if len(text) > _MAX_CONFIG_BYTES:
        raise InvalidOrder(f"{name}: {len(text)} characters, the limit is {_MAX_CONFIG_BYTES}")
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidOrder(f"{name}: is not JSON: {error}") from error
    architectures = config.get("architectures") if isinstance(config, dict) else None
    if not isinstance(architectures, list) or len(architectures) != 1 or not isinstance(architectures[0], str):
        raise InvalidOrder(f"{name}: `architectures` must name exactly one architecture")
    if "auto_map" in config:
        raise InvalidOrder(f"{name}: `auto_map` names code to load, which is never done")
    return dict(config)


def _of_directory(directory: Path, *, private: bool) -> LocalBase:
    path = directory / "config.json"
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidOrder(f"{path.name} cannot be read: {error}") from error
    architecture = parse_config(text, path.name)["architectures"][0]
    return LocalBase(directory, text, architecture, DirectoryBase(str(directory)), private=private)
