"""The worker's channels to the controller and to other workers: TLS where it is set, the worker token on every rpc."""

import re
from collections.abc import AsyncIterator

import grpc
from grpc import aio

from plexrl import wire
from plexrl.v1 import payload_pb2 as p
from plexrl.v1 import payload_pb2_grpc
from plexrl_worker.errors import InvalidOrder, PayloadUnavailable
from plexrl_worker.settings import LOOPBACK_HOSTS, TlsFiles, WorkerSettings

AUTHORIZATION = "authorization"
# gRPC would take much else for a target: sockets in the file system, other resolvers.
_PEER_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]{2,64}\]|[A-Za-z0-9._-]{1,253}):[0-9]{1,5}")


def bearer(token: str) -> str:
    """The value of the authorization metadata."""
    return f"Bearer {token}"


def metadata(settings: WorkerSettings) -> tuple[tuple[str, str]]:
    """The metadata of every rpc to the controller or another worker."""
    return ((AUTHORIZATION, bearer(settings.token)),)


def check_peer(settings: WorkerSettings, address: str) -> None:
    """Raises InvalidOrder for what is no other worker's address, or one that the token must not go to."""
    found = _PEER_ADDRESS.fullmatch(address)
    if found is None:
        raise InvalidOrder(f"weight_source.address {address[:300]!r}: want HOST:PORT")
    if settings.tls is None and found[1] not in LOOPBACK_HOSTS:
        raise InvalidOrder(
            f"weight_source.address {address} is beyond loopback, where the token needs TLS: start this worker with "
            "--tls-cert, --tls-key and --tls-ca"
        )


def open_channel(settings: WorkerSettings, address: str = "") -> aio.Channel:
    """A channel to the controller, or to another worker at `address`."""
    target = address or settings.controller
    # Channels with equal options share a connection unless told otherwise; each use here has its own on purpose.
    options = (*wire.CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1))
    if settings.tls is None:
        return aio.insecure_channel(target, options=options)
    credentials = grpc.ssl_channel_credentials(
        root_certificates=settings.tls.authority.read_bytes(),
        private_key=settings.tls.key.read_bytes(),
        certificate_chain=settings.tls.certificate.read_bytes(),
    )
    return aio.secure_channel(target, credentials, options=options)


def server_credentials(tls: TlsFiles) -> grpc.ServerCredentials:
    """Mutual TLS for this worker's own server."""
    pair = (tls.key.read_bytes(), tls.certificate.read_bytes())
    return grpc.ssl_server_credentials([pair], tls.authority.read_bytes(), require_client_auth=True)


class PayloadSource:
    """Reads payloads from the controller, over a channel of its own so that bulk delays no heartbeat."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings

    async def read(self, model_id: str, payload_id: str) -> AsyncIterator[bytes]:
        """The bytes of a file of the model's bundle, piece by piece. Raises PayloadUnavailable."""
        async with open_channel(self._settings) as channel:
            stub = payload_pb2_grpc.PayloadServiceStub(channel)
            try:
                request = p.GetPayloadRequest(payload_id=payload_id, model_id=model_id)
                async for piece in stub.GetPayload(request, metadata=metadata(self._settings)):
                    yield piece.data
            except aio.AioRpcError as error:
                raise PayloadUnavailable(
                    f"payload {payload_id}: the controller answers {error.code().name}: {error.details()}"
                ) from error
