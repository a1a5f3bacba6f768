"""What a worker can do, which it says once and which views ask for at every event."""

from functools import lru_cache

from plexrl.v1 import registry_pb2
from plexrl_controller.domain.records import Worker


def capabilities_of(worker: Worker) -> registry_pb2.WorkerCapabilities:
    """What a worker said when it registered; only to be read."""
    return _parsed(worker.capabilities)


@lru_cache(1024)
def _parsed(serialized: bytes) -> registry_pb2.WorkerCapabilities:
    return registry_pb2.WorkerCapabilities.FromString(serialized)
