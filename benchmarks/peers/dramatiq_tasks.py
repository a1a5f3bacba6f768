"""The actor of the Dramatiq worker; broker and results are at BENCH_REDIS_URL."""

import os

import dramatiq
import redis
from dramatiq.brokers.redis import RedisBroker
from dramatiq.results import Results
from dramatiq.results.backends import RedisBackend

_SOCKET = os.environ["BENCH_REDIS_URL"].removeprefix("unix://")
broker = RedisBroker(client=redis.Redis(unix_socket_path=_SOCKET))  # type: ignore[no-untyped-call]
results = RedisBackend(client=redis.Redis(unix_socket_path=_SOCKET))
broker.add_middleware(Results(backend=results))  # type: ignore[no-untyped-call]
dramatiq.set_broker(broker)


@dramatiq.actor(store_results=True)
def echo(payload: str) -> str:
    """Returns its argument."""
    return payload
