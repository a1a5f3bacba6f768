"""`plexrl demo`: two RLVR jobs learn on one worker; what sharing saved, in a table and a picture.

The flags are known to the base install; what runs the demo is imported when it runs.
"""

import argparse
from pathlib import Path

from plexrl.cli import options


def add_parser(subparsers: options.Subparsers) -> None:
    """Adds `demo` to the subcommands."""
    parser = subparsers.add_parser(
        "demo",
        help="watch two RLVR jobs learn on one worker, and see what sharing saved",
        description="Starts a cluster of one worker, runs two RLVR jobs alone and then together, and reports what "
        "sharing the worker saved: a table, a picture, a Perfetto trace and report.json.",
    )
    parser.add_argument("--out", type=Path, default=Path("out/demo"), metavar="DIR", help="default: out/demo")
    parser.add_argument("--smollm2", action="store_true", help="a pretrained LLM, SmolLM2-135M; about 25 minutes")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Returns the exit status: 0 when every expectation of the demo is met."""
    if args.smollm2:
        from plexrl.demo import smollm2

        return smollm2.run(args.out)
    from plexrl.demo import demo

    return demo.run(args.out)
