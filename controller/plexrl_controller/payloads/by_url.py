"""The payload store that a URL names."""

import os
from pathlib import Path
from urllib.parse import unquote, urlsplit

from plexrl_controller.domain.errors import Unavailable
from plexrl_controller.payloads.directory import DirectoryPayloadStore
from plexrl_controller.payloads.objects import ObjectPayloadStore, require_objects, s3_store
from plexrl_controller.payloads.port import PayloadStore


def check_payload_url(url: str, s3_endpoint: str | None) -> None:
    """Raises ValueError, with what is wanted, for a URL that `open_payloads` does not take."""
    scheme = urlsplit(url).scheme
    if scheme == "s3":
        s3_store(url, s3_endpoint)
    elif scheme == "file":
        _directory(url)
    else:
        raise ValueError(f"{url}: want file:///directory or s3://bucket/prefix")


async def require_payloads(url: str, s3_endpoint: str | None) -> None:
    """Asks the storage whether it is there, and changes nothing in it: its leader may be at work.

    Raises ValueError for another URL, Unavailable when it does not answer or cannot be written.
    """
    if urlsplit(url).scheme == "s3":
        await require_objects(s3_store(url, s3_endpoint))
        return
    directory = _directory(url)
    nearest = next(path for path in (directory, *directory.parents) if path.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        raise Unavailable(f"{url}: {nearest} is no directory that this user can write: see its owner and mode")


async def open_payloads(url: str, s3_endpoint: str | None, tenant_quota_bytes: int) -> PayloadStore:
    """Opens it. Raises ValueError for another URL, Unavailable when the storage does not answer."""
    check_payload_url(url, s3_endpoint)
    if urlsplit(url).scheme == "s3":
        return await ObjectPayloadStore.open(s3_store(url, s3_endpoint), quota_bytes=tenant_quota_bytes)
    return await DirectoryPayloadStore.open(_directory(url), quota_bytes=tenant_quota_bytes)


def _directory(url: str) -> Path:
    parts = urlsplit(url)
    path = Path(unquote(parts.path))
    if parts.netloc or parts.query or parts.fragment or not path.is_absolute() or path == Path("/"):
        raise ValueError(f"{url}: want file:///absolute/directory, without a host")
    return path
