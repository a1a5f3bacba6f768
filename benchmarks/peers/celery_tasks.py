"""The task of the Celery worker; broker and results are at BENCH_REDIS_URL."""

import os

from celery import Celery

URL = os.environ["BENCH_REDIS_URL"]
app = Celery(
    "bench", broker=URL.replace("unix://", "redis+socket://"), backend=URL.replace("unix://", "redis+socket://")
)
app.conf.update(task_acks_late=True, worker_prefetch_multiplier=64, broker_connection_retry_on_startup=True)


@app.task  # type: ignore[untyped-decorator]
def echo(payload: str) -> str:
    """Returns its argument."""
    return payload
