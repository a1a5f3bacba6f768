"""Reports on their way to the controller: to the newest stream, or kept, within a bound, until there is one."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Iterable

import structlog

from plexrl.v1 import worker_pb2 as w

_log = structlog.get_logger(__name__)

MAX_KEPT_REPORTS = 4096
MAX_KEPT_BYTES = 512 * 1024 * 1024
_MAX_FRAME_REPORTS = 256
_MAX_FRAME_BYTES = 32 * 1024 * 1024


class ReportStream:
    """One Execute stream's end of the outbox."""

    def __init__(self, outbox: "Outbox", leader_term: int) -> None:
        self.leader_term = leader_term
        self._outbox = outbox

    @property
    def replaced(self) -> bool:
        """Whether a newer stream took over."""
        return self._outbox.stream is not self

    async def next_frame(self) -> list[w.Report] | None:
        """Waits for reports and takes all that fit a frame; None once a newer stream took over."""
        return await self._outbox.take(self)

    def close(self) -> None:
        """Ends the stream; what it did not take is kept for the next."""
        self._outbox.detach(self)


class Outbox:
    """Every report passes here. What no stream has taken in time, and is over the bounds, is dropped, oldest first, the
    newest never: the controller sends orders again whose end it has not seen, and is answered from memory.
    """

    def __init__(self, max_kept_reports: int = MAX_KEPT_REPORTS, max_kept_bytes: int = MAX_KEPT_BYTES) -> None:
        self.stream: ReportStream | None = None
        self._reports: deque[tuple[w.Report, int]] = deque()
        """Each with its bytes."""
        self._kept_bytes = 0
        self._max_kept_reports = max_kept_reports
        self._max_kept_bytes = max_kept_bytes
        self._changed = asyncio.Event()
        self._taken = asyncio.Event()

    def put(self, report: w.Report) -> None:
        """Adds a report. Progress that nobody is there to hear is not kept."""
        if self.stream is None and report.WhichOneof("event") == "progress":
            return
        size_bytes = report.ByteSize()
        self._reports.append((report, size_bytes))
        self._kept_bytes += size_bytes
        while len(self._reports) > 1 and self._over_bounds():
            dropped = self._pop()
            _log.warning(
                "report_dropped", order_id=dropped.order_id, kept=len(self._reports), kept_bytes=self._kept_bytes
            )
        self._changed.set()

    def open(self, leader_term: int) -> ReportStream:
        """A new stream, which replaces the one before."""
        self.stream = ReportStream(self, leader_term)
        self._changed.set()
        return self.stream

    def detach(self, stream: ReportStream) -> None:
        """A stream ended; a newer one stays."""
        if self.stream is stream:
            self.stream = None
            self._changed.set()

    async def drained(self, limit_s: float) -> bool:
        """Waits until a stream has taken every report; False when that takes longer than `limit_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while self._reports:
                    self._taken.clear()
                    await self._taken.wait()
        return not self._reports

    def clear(self) -> None:
        """Forgets what was kept: it belongs to a life that is over."""
        self._reports.clear()
        self._kept_bytes = 0

    async def take(self, stream: ReportStream) -> list[w.Report] | None:
        """See ReportStream.next_frame."""
        while self.stream is stream and not self._reports:
            self._changed.clear()
            await self._changed.wait()
        if self.stream is not stream:
            # Wakes the stream that took over, should it wait on the same event.
            self._changed.set()
            return None
        frame = list(self._frame())
        self._taken.set()
        return frame

    def _frame(self) -> Iterable[w.Report]:
        frame_bytes = count = 0
        while self._reports and count < _MAX_FRAME_REPORTS:
            frame_bytes += self._reports[0][1]
            if count and frame_bytes > _MAX_FRAME_BYTES:
                return
            count += 1
            yield self._pop()

    def _over_bounds(self) -> bool:
        return len(self._reports) > self._max_kept_reports or self._kept_bytes > self._max_kept_bytes

    def _pop(self) -> w.Report:
        report, size_bytes = self._reports.popleft()
        self._kept_bytes -= size_bytes
        return report
