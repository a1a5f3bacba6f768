"""A method of a Ray actor."""

from contextlib import asynccontextmanager
from typing import Any

from benchmarks.peers.peer import CallIterator, Peer

PROMISE = "nothing is stored: a call is lost with its caller, its actor or the machine"


STARTS = 3


def _start(ray: Any) -> None:
    """Ray gives its node 30 s to come up, which a busy machine may not manage before its files are cached."""
    for left in reversed(range(STARTS)):
        try:
            ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
            return
        except Exception:
            ray.shutdown()
            if not left:
                raise


@asynccontextmanager
async def _open() -> CallIterator:
    import ray

    _start(ray)
    try:

        @ray.remote
        class Echo:
            def call(self, payload: bytes) -> bytes:
                return payload

        actor, payload = Echo.remote(), bytes(100)  # type: ignore[attr-defined]

        async def call() -> None:
            await actor.call.remote(payload)

        yield call
    finally:
        ray.shutdown()


def peer() -> Peer:
    """The peer."""
    return Peer("Ray actor call", PROMISE, _open)
