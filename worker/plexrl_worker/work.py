"""One accepted order on its way through the lanes. Knows neither lanes nor engines."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from plexrl.v1 import worker_pb2 as w
from plexrl_worker.attempts import Attempt
from plexrl_worker.errors import WorkerError
from plexrl_worker.execution import Execution
from plexrl_worker.journal import Journal

Sink = Callable[[w.Report], None]


@dataclass
class Work:
    """An accepted order: what it needs before it may run, and where its reports go."""

    order: w.Order
    sink: Sink
    journal: Journal = field(default_factory=Journal)
    attempt: Attempt | None = None
    execution: Execution | None = None
    # Why it was stopped, if it was.
    stopped: WorkerError | None = None
    after: tuple[asyncio.Future[None], ...] = ()

    @cached_property
    def done(self) -> asyncio.Future[None]:
        """Resolves when it needs nothing of its lane any more."""
        return asyncio.get_running_loop().create_future()


def generates(work: Work) -> bool:
    """Whether it is a generate call, which can yield and run beside others."""
    return work.order.HasField("run_call") and work.order.run_call.spec.HasField("generate")
