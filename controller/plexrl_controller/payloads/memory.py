"""The payload store's twin in memory, for tests and simulation."""

from collections.abc import AsyncIterable, AsyncIterator
from hashlib import sha256

from plexrl_controller.domain.errors import DataLoss
from plexrl_controller.domain.ids import Tenant
from plexrl_controller.domain.records import Payload
from plexrl_controller.payloads.ledger import Key, Ledger, checked_sha256
from plexrl_controller.payloads.port import CHUNK_BYTES, chunks_of


class MemoryPayloadStore:
    """Implements `PayloadStore`."""

    def __init__(self, *, quota_bytes: int = 1 << 40, max_payload_bytes: int = 1 << 32) -> None:
        self._ledger = Ledger(quota_bytes, max_payload_bytes)
        self._content: dict[Key, bytes] = {}

    def restarted(self) -> "MemoryPayloadStore":
        """The same content, of which nobody holds anything: what a new process finds."""
        found = MemoryPayloadStore()
        for key, content in self._content.items():
            found._ledger.found(key, len(content))
            found._content[key] = content
        return found

    async def put(self, tenant: Tenant, content: bytes | AsyncIterable[bytes]) -> Payload:
        received = bytearray()
        try:
            async for chunk in chunks_of(content):
                self._ledger.reserve(tenant, len(chunk), len(received) + len(chunk))
                received += chunk
        except BaseException:
            self._ledger.cancel(tenant, len(received))
            raise
        payload = Payload(sha256(received).hexdigest(), len(received))
        self._content[tenant, payload.sha256] = bytes(received)
        self._ledger.settle((tenant, payload.sha256), len(received))
        return payload

    def find(self, tenant: Tenant | None, payload_id: str) -> Payload:
        return self._ledger.find(tenant, checked_sha256(payload_id))

    def has(self, tenant: Tenant | None, payload_id: str) -> bool:
        return self._ledger.holds(tenant, checked_sha256(payload_id))

    def retain(self, tenant: Tenant, payload: Payload) -> None:
        self._ledger.retain((tenant, checked_sha256(payload.sha256)))

    async def release(self, tenant: Tenant, payload: Payload) -> None:
        key = tenant, checked_sha256(payload.sha256)
        if self._ledger.release(key):
            del self._content[key]

    async def read(self, tenant: Tenant | None, payload: Payload) -> bytes:
        content = self._content[self._ledger.key(tenant, checked_sha256(payload.sha256))]
        if payload.size_bytes not in (len(content), -1) or sha256(content).hexdigest() != payload.sha256:
            raise DataLoss(f"payload {payload.sha256} no longer matches its hash", reason="PAYLOAD_CORRUPT")
        return content

    async def chunks(self, tenant: Tenant | None, payload: Payload) -> AsyncIterator[bytes]:
        content = await self.read(tenant, payload)
        for start in range(0, len(content), CHUNK_BYTES):
            yield content[start : start + CHUNK_BYTES]

    def stored_bytes(self, tenant: Tenant) -> int:
        return self._ledger.used_bytes(tenant)

    async def sweep(self) -> int:
        unreferenced = self._ledger.unreferenced()
        freed_bytes = sum(self._ledger.size(key) for key in unreferenced)
        for key in unreferenced:
            self._ledger.forget(key)
            del self._content[key]
        return freed_bytes
