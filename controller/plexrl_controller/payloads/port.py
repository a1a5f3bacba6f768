"""Where payloads too large for the database lie. Content-addressed within a tenant; knows no calls and no jobs.

Content stays while somebody holds a reference to it: `put` and `retain` take one, `release` gives one back. References
live in memory: a new leader retains what its records name, then sweeps the rest.
"""

from collections.abc import AsyncIterable, AsyncIterator
from typing import Protocol

from plexrl_controller.domain.ids import Tenant
from plexrl_controller.domain.records import Payload

CHUNK_BYTES = 1 << 20
QUOTA_BYTES = 64 << 30
"""Stored bytes of one tenant."""
MAX_PAYLOAD_BYTES = 4 << 30


async def chunks_of(content: bytes | AsyncIterable[bytes]) -> AsyncIterator[bytes]:
    """What `put` accepts, as one kind of thing."""
    if isinstance(content, bytes):
        yield content
        return
    async for chunk in content:
        yield chunk


class PayloadStore(Protocol):
    """The port. Implementations: `directory`, `objects` (S3-compatible), and `memory` as their twin.

    Every method raises Unavailable when the storage fails, and InvalidArgument for a payload whose hash is no SHA-256.
    A tenant reaches its own content only; where the tenant is None, anybody's is meant: for parts of the service
    itself. The size of a payload to read may be -1, when only its hash is known.
    """

    async def put(
        self, tenant: Tenant, content: bytes | AsyncIterable[bytes], *, beyond_quota: bool = False
    ) -> Payload:
        """Stores `content` durably and takes a reference; content that is there already is stored once.

        Raises ResourceExhausted, with the limit, when the payload or the tenant's stored bytes would grow too large
        or the disk is full; nothing is kept then, nor when the wait is cancelled or the iterable raises.
        beyond_quota: for what must be kept, such as a result; it counts all the same.
        """
        ...

    def find(self, tenant: Tenant | None, payload_id: str) -> Payload:
        """Stored content of that hash. Raises NotFound."""
        ...

    def has(self, tenant: Tenant | None, payload_id: str) -> bool:
        """Whether `find` finds it."""
        ...

    def retain(self, tenant: Tenant, payload: Payload) -> None:
        """Takes a reference to stored content. Raises NotFound when the tenant has no such content."""
        ...

    async def release(self, tenant: Tenant, payload: Payload) -> None:
        """Gives a reference back; the last one deletes the content. Raises NotFound when nobody holds any."""
        ...

    async def read(self, tenant: Tenant | None, payload: Payload) -> bytes:
        """The content. Raises NotFound when there is none, DataLoss when it no longer matches hash and size."""
        ...

    def chunks(self, tenant: Tenant | None, payload: Payload) -> AsyncIterator[bytes]:
        """The content in pieces of at most CHUNK_BYTES, errors as `read`.

        The last piece comes only when the whole has matched its hash.
        """
        ...

    def stored_bytes(self, tenant: Tenant) -> int:
        """Bytes that count against the tenant's quota."""
        ...

    @property
    def quota_bytes(self) -> int:
        """The quota of each tenant."""
        ...

    async def sweep(self) -> int:
        """Deletes content that nobody holds a reference to; returns the bytes that this freed."""
        ...
