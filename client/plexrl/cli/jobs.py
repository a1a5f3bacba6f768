"""`plexrl jobs`: jobs and what they used."""

import argparse
from collections.abc import Sequence

from plexrl.cli import options
from plexrl.v1 import job_pb2 as j


def add_parser(subparsers: options.Subparsers) -> None:
    """Adds `jobs` to the subcommands."""
    parser = subparsers.add_parser(
        "jobs", help="list jobs and the device time they used", description="List jobs and the device time they used."
    )
    parser.set_defaults(run=run)
    parser.add_argument("--live", action="store_true", help="only jobs that have not ended")
    parser.add_argument("--limit", type=int, default=50, metavar="N", help="at most this many (default 50)")
    options.add_json_argument(parser)
    options.add_connection_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Returns the exit status."""
    with options.connection(args) as connection:

        def fetch(token: str) -> tuple[Sequence[j.Job], str]:
            request = j.ListJobsRequest(page_size=min(args.limit, 1000), page_token=token, live_only=args.live)
            page = connection.unary(connection.jobs.ListJobs, request)
            return page.jobs, page.next_page_token

        jobs = options.pages(fetch, args.limit)
    if args.json:
        options.show_json(jobs)
        return 0
    columns = (
        "JOB",
        "NAME",
        "STATE",
        "CREATED",
        "CALLS|",
        "BUSY S|",
        "SWAP S|",
        "SWAPS|",
        "HOLD S|",
        "WAIT S|",
        "MESSAGE",
    )
    options.show_table(columns, [_row(job) for job in jobs], "no jobs")
    return 0


def _row(job: j.Job) -> list[str]:
    account = job.account
    return [
        job.job_id,
        job.name,
        options.state_name(j.JobState.Name(job.state), "JOB_STATE_"),
        options.clock_time(job.create_time),
        str(account.calls),
        f"{account.busy_s:.1f}",
        f"{account.swap_s:.1f}",
        str(account.swaps),
        f"{account.hold_s:.1f}",
        f"{account.wait_s:.1f}",
        job.message,
    ]
