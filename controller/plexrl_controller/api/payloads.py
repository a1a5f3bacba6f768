"""PayloadService: uploads and downloads in chunks."""

from collections.abc import AsyncIterator
from typing import Any

from plexrl.v1 import model_pb2, payload_pb2, payload_pb2_grpc
from plexrl_controller.api.auth import identity
from plexrl_controller.dispatch.core import Core
from plexrl_controller.domain.errors import DataLoss, InvalidArgument, NotFound, ResourceExhausted
from plexrl_controller.domain.ids import ModelId, Tenant
from plexrl_controller.domain.records import Payload
from plexrl_controller.domain.states import Role
from plexrl_controller.payloads.port import MAX_PAYLOAD_BYTES


class PayloadService(payload_pb2_grpc.PayloadServiceServicer):
    """The wire's PayloadService over the payload store."""

    def __init__(self, core: Core) -> None:
        self._core = core

    async def PutPayload(
        self, request_iterator: AsyncIterator[payload_pb2.PutPayloadRequest], context: Any
    ) -> payload_pb2.PutPayloadResponse:
        """Stores an upload under its SHA-256; what is stored already and whole is not waited for."""
        first = await anext(aiter(request_iterator), None)
        if first is None or not first.sha256:
            raise InvalidArgument("the first message must carry size_bytes and sha256")
        if first.size_bytes > MAX_PAYLOAD_BYTES:
            raise ResourceExhausted(f"size_bytes: {first.size_bytes}, the limit is {MAX_PAYLOAD_BYTES}")
        tenant = identity().own_tenant
        if await self._held(tenant, Payload(first.sha256, first.size_bytes)):
            return payload_pb2.PutPayloadResponse(payload_id=first.sha256)

        async def chunks() -> AsyncIterator[bytes]:
            size_bytes = len(first.data)
            yield first.data
            async for request in request_iterator:
                size_bytes += len(request.data)
                if size_bytes > first.size_bytes:
                    raise InvalidArgument(f"more bytes came than size_bytes = {first.size_bytes}")
                yield request.data
            if size_bytes != first.size_bytes:
                raise InvalidArgument(f"{size_bytes} bytes came, want size_bytes = {first.size_bytes}")

        payload = await self._core.payloads.put(tenant, chunks())
        if payload.sha256 != first.sha256:
            await self._core.payloads.release(tenant, payload)
            raise InvalidArgument(f"bytes with hash {payload.sha256} came, want sha256 = {first.sha256}")
        await self._core.uploads.uploaded(tenant, payload, self._core.clock.now())
        return payload_pb2.PutPayloadResponse(payload_id=payload.sha256)

    async def _held(self, tenant: Tenant, payload: Payload) -> bool:
        """Whether the tenant has the content already, unharmed; it is kept for an upload's time then.

        It is read through: content that is damaged must be replaced by what the client has, not be taken for it.
        """
        payloads = self._core.payloads
        if not payloads.has(tenant, payload.sha256):
            return False
        payloads.retain(tenant, payload)
        try:
            async for _ in payloads.chunks(tenant, payload):
                pass
        except DataLoss:
            await payloads.release(tenant, payload)
            return False
        except BaseException:
            await payloads.release(tenant, payload)
            raise
        await self._core.uploads.uploaded(tenant, payload, self._core.clock.now())
        return True

    async def GetPayload(
        self, request: payload_pb2.GetPayloadRequest, context: Any
    ) -> AsyncIterator[payload_pb2.GetPayloadResponse]:
        """Reads a payload back."""
        who = identity()
        if len(request.payload_id) != 64 or not set(request.payload_id) <= set("0123456789abcdef"):
            raise InvalidArgument("payload_id: want 64 hexadecimal digits")
        tenant = self._tenant_of_model(request) if who.role is Role.WORKER else who.own_tenant
        async for data in self._core.payloads.chunks(tenant, Payload(request.payload_id, -1)):
            yield payload_pb2.GetPayloadResponse(data=data)

    def _tenant_of_model(self, request: payload_pb2.GetPayloadRequest) -> Tenant:
        """A worker reads the files of the models that it has, and no others."""
        model = self._core.ledger.model(ModelId(request.model_id))
        if request.payload_id not in model_pb2.ModelBase.FromString(model.base).bundle.payload_ids.values():
            raise NotFound(f"model {model.model_id} has no payload {request.payload_id}")
        return model.tenant
