"""`plexrl explain CALL`: what a call waits for, or how it ended."""

import argparse

from rich.console import Console

from plexrl.cli import options
from plexrl.v1 import call_pb2 as c
from plexrl.v1 import types_pb2 as t


def add_parser(subparsers: options.Subparsers) -> None:
    """Adds `explain` to the subcommands."""
    parser = subparsers.add_parser(
        "explain",
        help="say what a call waits for, or how it ended",
        description="Say what a call waits for, or how it ended.",
    )
    parser.set_defaults(run=run)
    parser.add_argument("call", metavar="CALL", help="a call's id, as `plexrl calls` and error messages show it")
    options.add_json_argument(parser)
    options.add_connection_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Returns the exit status."""
    with options.connection(args) as connection:
        explained = connection.unary(connection.calls.ExplainCall, c.ExplainCallRequest(call_id=args.call))
    if args.json:
        options.show_json([explained])
        return 0
    console = Console(highlight=False)
    kind = options.state_name(t.CallKind.Name(explained.call.kind), "CALL_KIND_")
    state = options.state_name(t.CallState.Name(explained.call.state), "CALL_STATE_")
    console.print(f"{kind} {explained.call.call_id} is {state}: {explained.explanation}", soft_wrap=True)
    if explained.blocking_call_ids:
        console.print(f"It waits for: {', '.join(explained.blocking_call_ids)}", soft_wrap=True)
    return 0
