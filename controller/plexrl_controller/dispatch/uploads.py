"""Who keeps an uploaded payload: its uploader for an hour, then the models whose base it belongs to.

Holds are in memory. What nobody holds when a controller starts gets the same hour again: an upload of just before a
restart is still there for the CreateModel that follows it.
"""

from collections import deque

import structlog

from plexrl.v1 import model_pb2
from plexrl_controller.dispatch.ledger import Ledger
from plexrl_controller.domain.errors import FailedPrecondition, NotFound, Unavailable
from plexrl_controller.domain.ids import ModelId, Tenant
from plexrl_controller.domain.records import Model, Payload
from plexrl_controller.lifecycle import models as model_lifecycle
from plexrl_controller.payloads.port import PayloadStore

UPLOAD_HOLD_S = 3600.0
_log = structlog.get_logger(__name__)


class Uploads:
    """References of uploads and of models' bases; one instance per controller."""

    def __init__(self, payloads: PayloadStore) -> None:
        self._payloads = payloads
        self._until: dict[tuple[Tenant, str], float] = {}
        self._bases: dict[ModelId, list[tuple[Tenant, Payload]]] = {}
        self._due: deque[tuple[Tenant, Payload]] = deque()
        self._sweep_at: float | None = None

    def start(self, ledger: Ledger, now: float) -> list[Payload]:
        """Takes the references of the loaded models; returns what is missing. The rest is swept an hour later."""
        missing: list[Payload] = []
        for model in ledger.models.values():
            held = self._bases.setdefault(model.model_id, [])
            for payload in _files(model):
                try:
                    self._payloads.retain(model.tenant, payload)
                    held.append((model.tenant, payload))
                except NotFound:
                    missing.append(payload)
        self._sweep_at = now + UPLOAD_HOLD_S
        return missing

    async def uploaded(self, tenant: Tenant, payload: Payload, now: float) -> None:
        """Keeps, for its hour, the reference that came with an upload; the same content again begins a new hour."""
        again = (tenant, payload.sha256) in self._until
        self._until[tenant, payload.sha256] = now + UPLOAD_HOLD_S
        if again:
            await self._payloads.release(tenant, payload)

    def hold_base(self, model: Model) -> None:
        """Takes the references of a model's base, all or none. Raises FailedPrecondition when a file is not there."""
        held: list[tuple[Tenant, Payload]] = []
        files = list(_files(model))
        for payload in files:
            if not self._payloads.has(model.tenant, payload.sha256):
                raise FailedPrecondition(
                    f"base.bundle: payload {payload.sha256} is not stored; an upload that no model uses is kept for "
                    f"{UPLOAD_HOLD_S / 60:g} minutes: upload it again",
                    reason="PAYLOAD_NOT_FOUND",
                )
        for payload in files:
            self._payloads.retain(model.tenant, payload)
            held.append((model.tenant, payload))
        self._bases[model.model_id] = held

    async def reap(self, ledger: Ledger, now: float) -> None:
        """Gives up what is past its hour, and the bases of models that are gone."""
        late = [key for key, until in self._until.items() if until < now]
        for tenant, digest in late:
            del self._until[tenant, digest]
        gone = [
            model_id
            for model_id in self._bases
            if (model := ledger.models.get(model_id)) is None or model.state in model_lifecycle.TERMINAL
        ]
        self._due.extend((tenant, Payload(digest, -1)) for tenant, digest in late)
        for model_id in gone:
            self._due.extend(self._bases.pop(model_id))
        while self._due:
            tenant, payload = self._due.popleft()
            try:
                await self._payloads.release(tenant, payload)
            except Unavailable as error:
                # Nobody needs it any more; the next start finds what is left of it. The others wait for the next pass:
                # each try may take long, and leases wait for this one.
                _log.warning("payload_not_deleted", payload=payload.sha256, detail=error.message)
                return
        if self._sweep_at is not None and self._sweep_at < now:
            self._sweep_at = None
            try:
                await self._payloads.sweep()
            except Unavailable as error:
                _log.warning("payloads_not_swept", detail=error.message)


def _files(model: Model) -> set[Payload]:
    ids = model_pb2.ModelBase.FromString(model.base).bundle.payload_ids.values()
    return {Payload(payload_id, -1) for payload_id in ids}
