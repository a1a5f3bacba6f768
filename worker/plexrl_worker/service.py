"""The worker's gRPC services: translate requests, decide nothing. What they raise becomes a status in `rpc_errors`."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator

import structlog
from grpc import aio

from plexrl.v1 import model_pb2 as m
from plexrl.v1 import worker_pb2 as w
from plexrl.v1 import worker_pb2_grpc
from plexrl_worker import tokenization
from plexrl_worker.checkpoints import CheckpointStore, Chunk
from plexrl_worker.errors import StaleTerm
from plexrl_worker.fences import Fences
from plexrl_worker.host import ModelHost
from plexrl_worker.orders import OrderDesk
from plexrl_worker.outbox import Outbox
from plexrl_worker.weight_serving import WeightServing

_log = structlog.get_logger(__name__)


class WorkerService(worker_pb2_grpc.WorkerServiceServicer):
    """Orders in, reports out, and questions about this worker."""

    def __init__(
        self,
        desk: OrderDesk,
        host: ModelHost,
        fences: Fences,
        outbox: Outbox,
        checkpoints: CheckpointStore,
        describe: Callable[[], w.WorkerStatus],
    ) -> None:
        self._desk = desk
        self._host = host
        self._fences = fences
        self._outbox = outbox
        self._checkpoints = checkpoints
        self._describe = describe

    async def Execute(
        self,
        request_iterator: AsyncIterator[w.ExecuteRequest],
        context: "aio.ServicerContext[w.ExecuteRequest, w.ExecuteResponse]",
    ) -> AsyncIterator[w.ExecuteResponse]:
        """See WorkerService in worker.proto."""
        first = await anext(aiter(request_iterator), None)
        if first is None:
            return
        self._fences.check(first.leader_term, first.worker_incarnation)
        stream = self._outbox.open(first.leader_term)
        _log.info("stream_opened", leader_term=first.leader_term)
        reader = asyncio.create_task(self._read_orders(first, request_iterator))
        reader.add_done_callback(lambda _: stream.close())
        try:
            # Says at once that the stream stands, before there is anything to report.
            yield w.ExecuteResponse()
            while (reports := await stream.next_frame()) is not None:
                yield w.ExecuteResponse(reports=reports)
        finally:
            stream.close()
            reader.cancel()
        refused = reader.exception() if reader.done() and not reader.cancelled() else None
        if isinstance(refused, Exception):
            raise refused
        if self._fences.leader_term > first.leader_term:
            raise StaleTerm(f"a controller of term {self._fences.leader_term} leads now")

    async def _read_orders(self, first: w.ExecuteRequest, frames: AsyncIterator[w.ExecuteRequest]) -> None:
        for order in first.orders:
            self._desk.submit(order)
        async for frame in frames:
            self._fences.check(frame.leader_term, frame.worker_incarnation)
            for order in frame.orders:
                self._desk.submit(order)

    async def RunOrder(
        self, request: w.RunOrderRequest, context: "aio.ServicerContext[w.RunOrderRequest, w.RunOrderResponse]"
    ) -> w.RunOrderResponse:
        """See WorkerService in worker.proto."""
        last = {"finished", "yielded"} if request.order.HasField("run_call") else {"finished"}
        finished: asyncio.Future[w.Report] = asyncio.get_running_loop().create_future()

        def hear(report: w.Report) -> None:
            if report.WhichOneof("event") in last and not finished.done():
                finished.set_result(report)

        self._desk.submit(request.order, hear)
        return w.RunOrderResponse(report=await finished)

    async def GetStatus(
        self, request: w.GetStatusRequest, context: "aio.ServicerContext[w.GetStatusRequest, w.WorkerStatus]"
    ) -> w.WorkerStatus:
        """See WorkerService in worker.proto."""
        return self._describe()

    async def TokenizeText(
        self, request: m.TokenizeRequest, context: "aio.ServicerContext[m.TokenizeRequest, m.TokenizeResponse]"
    ) -> m.TokenizeResponse:
        """See WorkerService in worker.proto."""
        return await asyncio.to_thread(tokenization.tokenize, self._host.tokenizer_file(request.model_id), request)

    async def DetokenizeIds(
        self, request: m.DetokenizeRequest, context: "aio.ServicerContext[m.DetokenizeRequest, m.DetokenizeResponse]"
    ) -> m.DetokenizeResponse:
        """See WorkerService in worker.proto."""
        return await asyncio.to_thread(tokenization.detokenize, self._host.tokenizer_file(request.model_id), request)

    async def ReadCheckpoint(
        self,
        request: m.ExportCheckpointRequest,
        context: "aio.ServicerContext[m.ExportCheckpointRequest, m.FileChunk]",
    ) -> AsyncIterator[m.FileChunk]:
        """See WorkerService in worker.proto."""
        chunks = self._checkpoints.read(request.checkpoint_id, training_state=request.training_state)
        while (chunk := await asyncio.to_thread(_next, chunks)) is not None:
            yield m.FileChunk(name=chunk.name, data=chunk.data, sha256=chunk.sha256)


class WeightService(worker_pb2_grpc.WeightServiceServicer):
    """Rollout weights for other workers."""

    def __init__(self, serving: WeightServing) -> None:
        self._serving = serving

    async def Pull(
        self, request: w.PullRequest, context: "aio.ServicerContext[w.PullRequest, w.PullResponse]"
    ) -> AsyncIterator[w.PullResponse]:
        """See WeightService in worker.proto."""
        async for part in self._serving.read(request.model_id, request.weights_version):
            yield part


def _next(chunks: Iterator[Chunk]) -> Chunk | None:
    return next(chunks, None)
