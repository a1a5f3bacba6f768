"""The payload store's twin in memory, for tests and simulation."""

from collections.abc import AsyncIterable, AsyncIterator, Sequence
from hashlib import sha256
from typing import Any

from plexrl_controller.domain.ids import Tenant
from plexrl_controller.domain.records import Payload
from plexrl_controller.payloads.held import HeldPayloads
from plexrl_controller.payloads.ledger import Key, Ledger, owner_of
from plexrl_controller.payloads.port import CHUNK_BYTES, chunks_of


class MemoryPayloadStore(HeldPayloads):
    """Implements `PayloadStore`."""

    def __init__(self, *, quota_bytes: int = 1 << 40, max_payload_bytes: int = 1 << 32) -> None:
        super().__init__(Ledger(quota_bytes, max_payload_bytes))
        self._content: dict[Key, bytes] = {}

    def restarted(self) -> "MemoryPayloadStore":
        """The same content, of which nobody holds anything: what a new process finds."""
        found = MemoryPayloadStore()
        for key, content in self._content.items():
            found._ledger.found(key, len(content))
            found._content[key] = content
        return found

    def damage(self, tenant: Tenant, payload_id: str) -> None:
        """Flips a bit of stored content, as a disk may."""
        key = owner_of(tenant), payload_id
        content = self._content[key]
        self._content[key] = bytes([content[0] ^ 1]) + content[1:]

    async def put(
        self, tenant: Tenant, content: bytes | AsyncIterable[bytes], *, beyond_quota: bool = False
    ) -> Payload:
        owner, received = owner_of(tenant), bytearray()
        try:
            async for chunk in chunks_of(content):
                self._ledger.reserve(owner, len(chunk), len(received) + len(chunk), beyond_quota=beyond_quota)
                received += chunk
        except BaseException:
            self._ledger.cancel(owner, len(received))
            raise
        payload = Payload(sha256(received).hexdigest(), len(received))
        self._content[owner, payload.sha256] = bytes(received)
        self._ledger.settle((owner, payload.sha256), len(received))
        return payload

    async def _pieces(self, key: Key, digest: Any) -> AsyncIterator[bytes]:
        content = self._content[key]
        for start in range(0, len(content), CHUNK_BYTES):
            chunk = content[start : start + CHUNK_BYTES]
            digest.update(chunk)
            yield chunk

    async def _delete(self, keys: Sequence[Key]) -> None:
        for key in keys:
            del self._content[key]
