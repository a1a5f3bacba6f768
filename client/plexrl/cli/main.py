"""Entry point of the `plexrl` command: finds the command, runs it, and turns errors into exit statuses.

Knows the list of commands; knows nothing of what they do.
"""

import argparse
import importlib.metadata
import os
import sys
from collections.abc import Sequence

from plexrl import errors
from plexrl.cli import calls, cordon, demo, explain, jobs, simulate, timeline, tokens, up, waiting, workers

# Exit statuses: 0 done, 1 an error that a message explains, 2 wrong usage (argparse), 130 interrupted.
FAILED = 1
INTERRUPTED = 130

COMMANDS = (up, demo, jobs, workers, cordon, calls, explain, timeline, simulate, waiting, tokens)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="plexrl",
        description="LLM execution as a cluster service: many RLVR jobs share the same GPUs.",
        epilog="`plexrl COMMAND --help` tells more. Commands find the controller by --endpoint, else PLEXRL_ENDPOINT, "
        "else the files that `plexrl up` leaves in the current directory.",
    )
    parser.add_argument("--version", action="version", version=f"plexrl {importlib.metadata.version('plexrl')}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add_parser(subparsers)
    args = parser.parse_args(argv)
    try:
        status = int(args.run(args))
        sys.stdout.flush()
    except errors.PlexRLError as error:
        print(f"plexrl: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("plexrl: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader (a pager, head) has seen enough; without this Python complains at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except OSError as error:
        # A file that the command line named; anything else is a defect and wants its traceback.
        if error.filename is None:
            raise
        print(f"plexrl: {os.fsdecode(error.filename)}: {error.strerror}", file=sys.stderr)
        return FAILED
    return status


if __name__ == "__main__":
    sys.exit(main())
