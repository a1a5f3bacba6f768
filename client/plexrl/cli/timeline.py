"""`plexrl timeline`: device time as a Chrome trace. The demo writes its trace with the same function.

Format: the Trace Event Format's JSON object form, complete events ("X") with microseconds.
"""

import argparse
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

from plexrl.cli import options
from plexrl.connection import Connection
from plexrl.v1 import admin_pb2 as a
from plexrl.v1 import call_pb2 as c
from plexrl.v1 import job_pb2 as j
from plexrl.v1 import types_pb2 as t

DEVICE_TRACK = 0
# Colour names of the trace viewer.
_COLOURS = {
    t.INTERVAL_KIND_BUSY: "thread_state_running",
    t.INTERVAL_KIND_SWAP_IN: "thread_state_iowait",
    t.INTERVAL_KIND_SWAP_OUT: "thread_state_iowait",
    t.INTERVAL_KIND_HOLD: "thread_state_sleeping",
}


def add_parser(subparsers: options.Subparsers) -> None:
    """Adds `timeline` to the subcommands."""
    parser = subparsers.add_parser(
        "timeline",
        help="write device time as a Chrome trace, which opens in Perfetto (ui.perfetto.dev)",
        description="Write device time as a Chrome trace, which opens in Perfetto (ui.perfetto.dev).",
    )
    parser.set_defaults(run=run)
    parser.add_argument("-o", "--output", required=True, type=Path, metavar="FILE", help="e.g. trace.json")
    parser.add_argument("--job", default="", metavar="ID", help="only this job's device time")
    parser.add_argument(
        "--format",
        choices=("chrome", "trace"),
        default="chrome",
        help="trace: JSON lines for `plexrl simulate --from-trace`",
    )
    options.add_connection_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Returns the exit status."""
    with options.connection(args) as connection:
        intervals = read_intervals(connection, args.job)
        job_names, worker_names = read_names(connection)
        submitted = read_submissions(connection, args.job) if args.format == "trace" else {}
    if args.format == "trace":
        write_recording(args.output, intervals, worker_names, submitted)
        print(f"wrote {len(intervals)} intervals to {args.output}: plexrl simulate --from-trace {args.output}")
        return 0
    write_trace(args.output, intervals, job_names, worker_names)
    print(f"wrote {len(intervals)} intervals to {args.output}: open it in https://ui.perfetto.dev")
    return 0


def read_intervals(connection: Connection, job_id: str = "") -> list[t.DeviceInterval]:
    """All device time, or one job's, by start."""
    batches = connection.collect(connection.admin.ListIntervals, a.ListIntervalsRequest(job_id=job_id))
    return [interval for batch in batches for interval in batch.intervals]


def read_submissions(connection: Connection, job_id: str = "") -> dict[str, int]:
    """When each call was accepted, in nanoseconds of Unix time, by call id."""

    def fetch(token: str) -> tuple[list[c.Call], str]:
        request = c.ListCallsRequest(job_id=job_id, page_size=1000, page_token=token)
        page = connection.unary(connection.calls.ListCalls, request)
        return list(page.calls), page.next_page_token

    return {call.call_id: call.create_time.ToNanoseconds() for call in options.pages(fetch, limit=10_000_000)}


def read_names(connection: Connection) -> tuple[dict[str, str], dict[str, str]]:
    """Job names by job id, and worker names by worker id."""

    def fetch(token: str) -> tuple[list[j.Job], str]:
        page = connection.unary(connection.jobs.ListJobs, j.ListJobsRequest(page_size=1000, page_token=token))
        return list(page.jobs), page.next_page_token

    jobs = {job.job_id: job.name for job in options.pages(fetch, limit=100_000)}
    workers = connection.unary(connection.admin.ListWorkers, a.ListWorkersRequest()).workers
    return jobs, {worker.worker_id: worker.name for worker in workers}


def write_recording(
    path: Path,
    intervals: Iterable[t.DeviceInterval],
    worker_names: Mapping[str, str],
    submitted_unix_ns: Mapping[str, int] = MappingProxyType({}),
) -> None:
    """Writes device time as JSON lines, seconds from the first interval: what `plexrl simulate --from-trace` reads.

    submitted_unix_ns: when calls were accepted, by call id, as far as it is known.
    """
    intervals = sorted(intervals, key=lambda interval: interval.start_unix_ns)
    origin_ns = intervals[0].start_unix_ns if intervals else 0
    lines = [json.dumps({"format": "plexrl-trace", "version": 1})]
    for interval in intervals:
        busy = interval.kind == t.INTERVAL_KIND_BUSY
        line: dict[str, object] = {
            "kind": options.state_name(t.IntervalKind.Name(interval.kind), "INTERVAL_KIND_").lower(),
            "worker": worker_names.get(interval.worker_id, interval.worker_id),
            "job": interval.job_id,
            "function": options.state_name(t.CallKind.Name(interval.call_kind), "CALL_KIND_").lower() if busy else "",
            "start_s": (interval.start_unix_ns - origin_ns) / 1e9,
            "end_s": (max(interval.start_unix_ns, interval.end_unix_ns) - origin_ns) / 1e9,
        }
        if busy and (submitted_ns := submitted_unix_ns.get(interval.call_id)) is not None:
            line["submitted_s"] = (submitted_ns - origin_ns) / 1e9
        lines.append(json.dumps(line))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_trace(
    path: Path,
    intervals: Iterable[t.DeviceInterval],
    job_names: Mapping[str, str],
    worker_names: Mapping[str, str],
) -> None:
    """Writes a trace with a process per worker, in it a device track and a track per job."""
    events = trace_events(intervals, job_names, worker_names)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"displayTimeUnit": "ms", "traceEvents": events}), encoding="utf-8")


def trace_events(
    intervals: Iterable[t.DeviceInterval], job_names: Mapping[str, str], worker_names: Mapping[str, str]
) -> list[dict[str, object]]:
    """The trace's events; times count from the first interval."""
    intervals = sorted(intervals, key=lambda interval: interval.start_unix_ns)
    if not intervals:
        return []
    origin_ns = intervals[0].start_unix_ns
    processes: dict[str, int] = {}
    tracks: dict[str, int] = {}
    names: dict[tuple[int, int], dict[str, object]] = {}
    events: list[dict[str, object]] = []
    for interval in intervals:
        process = processes.setdefault(interval.worker_id, len(processes) + 1)
        track = tracks.setdefault(interval.job_id, len(tracks) + 1)
        job_name = job_names.get(interval.job_id, interval.job_id)
        worker_name = worker_names.get(interval.worker_id, interval.worker_id)
        names.setdefault((process, -1), _name("process_name", process, DEVICE_TRACK, f"worker {worker_name}"))
        names.setdefault((process, DEVICE_TRACK), _name("thread_name", process, DEVICE_TRACK, "device"))
        names.setdefault((process, track), _name("thread_name", process, track, f"job {job_name}"))
        for tid, label in ((DEVICE_TRACK, job_name), (track, _label(interval))):
            events.append(_event(interval, process, tid, label, origin_ns))
    return [*names.values(), *events]


def _name(kind: str, process: int, track: int, name: str) -> dict[str, object]:
    return {"ph": "M", "name": kind, "pid": process, "tid": track, "args": {"name": name}}


def _label(interval: t.DeviceInterval) -> str:
    if interval.kind == t.INTERVAL_KIND_BUSY:
        return options.state_name(t.CallKind.Name(interval.call_kind), "CALL_KIND_")
    return options.state_name(t.IntervalKind.Name(interval.kind), "INTERVAL_KIND_")


def _event(interval: t.DeviceInterval, process: int, track: int, label: str, origin_ns: int) -> dict[str, object]:
    return {
        "ph": "X",
        "name": label,
        "cat": options.state_name(t.IntervalKind.Name(interval.kind), "INTERVAL_KIND_"),
        "pid": process,
        "tid": track,
        "ts": (interval.start_unix_ns - origin_ns) / 1000,
        "dur": max(0, interval.end_unix_ns - interval.start_unix_ns) / 1000,
        "cname": _COLOURS.get(interval.kind, "generic_work"),
        "args": {
            "function": _label(interval),
            "call_id": interval.call_id,
            "model_id": interval.model_id,
            "moved_bytes": interval.moved_bytes,
        },
    }
