"""What every payload store does with its ledger: who holds what, whose it is, and content checked as it is read.

A store adds `put`, where its bytes come from, and how they are deleted.
"""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from hashlib import sha256
from typing import Any

from plexrl_controller.domain.errors import DataLoss
from plexrl_controller.domain.ids import Tenant
from plexrl_controller.domain.records import Payload
from plexrl_controller.payloads.ledger import Key, Ledger, checked_sha256, owner_of


class HeldPayloads(ABC):
    """The part of `PayloadStore` that is the same wherever the bytes lie."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    @abstractmethod
    def _pieces(self, key: Key, digest: Any) -> AsyncIterator[bytes]:
        """Stored content in pieces of at most CHUNK_BYTES, as it is, each added to the digest beside the event loop.

        Raises DataLoss, Unavailable.
        """

    @abstractmethod
    async def _delete(self, keys: Sequence[Key]) -> None:
        """Deletes content that the ledger has forgotten. Raises Unavailable."""

    def find(self, tenant: Tenant | None, payload_id: str) -> Payload:
        return self._ledger.find(_owner_or_any(tenant), checked_sha256(payload_id))

    def has(self, tenant: Tenant | None, payload_id: str) -> bool:
        return self._ledger.holds(_owner_or_any(tenant), checked_sha256(payload_id))

    def retain(self, tenant: Tenant, payload: Payload) -> None:
        self._ledger.retain((owner_of(tenant), checked_sha256(payload.sha256)))

    async def release(self, tenant: Tenant, payload: Payload) -> None:
        key = owner_of(tenant), checked_sha256(payload.sha256)
        if self._ledger.release(key):
            await self._delete([key])

    async def read(self, tenant: Tenant | None, payload: Payload) -> bytes:
        return b"".join([chunk async for chunk in self.chunks(tenant, payload)])

    async def chunks(self, tenant: Tenant | None, payload: Payload) -> AsyncIterator[bytes]:
        key = self._ledger.key(_owner_or_any(tenant), checked_sha256(payload.sha256))
        digest, size_bytes, held_back = sha256(), 0, b""
        async for piece in self._pieces(key, digest):
            size_bytes += len(piece)
            if held_back:
                yield held_back
            held_back = piece
        if payload.size_bytes not in (size_bytes, -1) or digest.hexdigest() != payload.sha256:
            raise DataLoss(f"payload {payload.sha256} no longer matches its hash", reason="PAYLOAD_CORRUPT")
        if held_back:
            yield held_back

    def stored_bytes(self, tenant: Tenant) -> int:
        return self._ledger.used_bytes(owner_of(tenant))

    @property
    def quota_bytes(self) -> int:
        return self._ledger.quota_bytes

    async def sweep(self) -> int:
        unreferenced = list(self._ledger.unreferenced())
        freed_bytes = sum(self._ledger.size(key) for key in unreferenced)
        for key in unreferenced:
            self._ledger.forget(key)
        await self._delete(unreferenced)
        return freed_bytes


def _owner_or_any(tenant: Tenant | None) -> str | None:
    return None if tenant is None else owner_of(tenant)
