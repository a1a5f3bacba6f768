"""`plexrl calls`: calls, newest first."""

import argparse
from collections.abc import Sequence

from plexrl.cli import options
from plexrl.v1 import call_pb2 as c
from plexrl.v1 import types_pb2 as t


def add_parser(subparsers: options.Subparsers) -> None:
    """Adds `calls` to the subcommands."""
    parser = subparsers.add_parser("calls", help="list calls, newest first", description="List calls, newest first.")
    parser.set_defaults(run=run)
    parser.add_argument("--job", default="", metavar="ID", help="only calls of this job")
    parser.add_argument("--live", action="store_true", help="only calls that have not ended")
    parser.add_argument("--limit", type=int, default=50, metavar="N", help="at most this many (default 50)")
    options.add_json_argument(parser)
    options.add_connection_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Returns the exit status."""
    with options.connection(args) as connection:

        def fetch(token: str) -> tuple[Sequence[c.Call], str]:
            size = min(args.limit, 1000)
            request = c.ListCallsRequest(job_id=args.job, page_size=size, page_token=token, live_only=args.live)
            page = connection.unary(connection.calls.ListCalls, request)
            return page.calls, page.next_page_token

        calls = options.pages(fetch, args.limit)
    if args.json:
        options.show_json(calls)
        return 0
    columns = (
        "CALL",
        "JOB",
        "FUNCTION",
        "SEQUENCE|",
        "STATE",
        "REASON",
        "TRY|",
        "PROGRESS|",
        "SUBMITTED",
        "SECONDS|",
    )
    options.show_table(columns, [_row(call) for call in calls], "no calls")
    return 0


def _row(call: c.Call) -> list[str]:
    seconds = (call.end_time.ToNanoseconds() - call.create_time.ToNanoseconds()) / 1e9
    progress = f"{call.progress_done}/{call.progress_total or '?'}" if call.progress_done else ""
    reason = options.state_name(t.CallReason.Name(call.reason), "CALL_REASON_") if call.reason else ""
    return [
        call.call_id,
        call.job_id,
        options.state_name(t.CallKind.Name(call.kind), "CALL_KIND_"),
        str(call.sequence or ""),
        options.state_name(t.CallState.Name(call.state), "CALL_STATE_"),
        reason,
        str(call.attempt),
        progress,
        options.clock_time(call.create_time),
        f"{seconds:.2f}" if call.HasField("end_time") else "",
    ]
