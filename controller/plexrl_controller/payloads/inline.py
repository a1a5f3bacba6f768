"""The rule of size: small payloads travel in their record, larger ones go to the payload store."""

from hashlib import sha256

from plexrl_controller.domain.errors import DataLoss
from plexrl_controller.domain.ids import Tenant
from plexrl_controller.domain.records import Payload
from plexrl_controller.payloads.port import PayloadStore

INLINE_LIMIT_BYTES = 64 * 1024


def inline_payload(content: bytes) -> Payload:
    """A payload that carries its bytes."""
    return Payload(sha256(content).hexdigest(), len(content), content)


async def keep(store: PayloadStore, tenant: Tenant, content: bytes, *, beyond_quota: bool = False) -> Payload:
    """Makes a payload of `content`, durable before it returns unless its record will carry it. Errors as `put`."""
    if len(content) <= INLINE_LIMIT_BYTES:
        return inline_payload(content)
    return await store.put(tenant, content, beyond_quota=beyond_quota)


async def fetch(store: PayloadStore, tenant: Tenant | None, payload: Payload) -> bytes:
    """The payload's bytes, wherever they are. Errors as `read`."""
    if payload.inline is None:
        return await store.read(tenant, payload)
    if len(payload.inline) != payload.size_bytes or sha256(payload.inline).hexdigest() != payload.sha256:
        raise DataLoss(f"payload {payload.sha256} no longer matches its hash", reason="PAYLOAD_CORRUPT")
    return payload.inline


def retain(store: PayloadStore, tenant: Tenant, payload: Payload | None) -> None:
    """Takes a reference where there is something to refer to. Errors as `PayloadStore.retain`."""
    if payload is not None and payload.inline is None:
        store.retain(tenant, payload)


async def release(store: PayloadStore, tenant: Tenant, payload: Payload | None) -> None:
    """Gives the reference of a payload back, where there is one. Errors as `PayloadStore.release`."""
    if payload is not None and payload.inline is None:
        await store.release(tenant, payload)
