"""`python -m plexrl_controller`: serve, or migrate the database."""

import argparse
import asyncio
import logging
import sys
from collections.abc import Sequence

import structlog
from sqlalchemy.exc import DBAPIError

from plexrl_controller.domain.errors import ControllerError
from plexrl_controller.settings import add_serve_arguments, database_url_argument, serve_settings


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a subcommand and returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="plexrl-controller",
        description="The PlexRL controller. Every flag can also be set as PLEXRL_CONTROLLER_<FLAG>.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    add_serve_arguments(commands.add_parser("serve", help="take leadership and serve"))
    database_url_argument(commands.add_parser("migrate", help="bring the database to this version's schema"))
    args = parser.parse_args(argv)
    # Only here: what else uses this package needs no Alembic.
    from plexrl_migrations import SchemaMismatch, require_head, upgrade

    try:
        if args.command == "migrate":
            asyncio.run(upgrade(args.database_url))
            return 0
        settings = serve_settings(args)
        _log_json(settings.log_level)
        from plexrl_controller.server import serve

        # Another version's schema must not be led, not even for the moment until a statement fails.
        asyncio.run(require_head(settings.database_url))
        return asyncio.run(serve(settings))
    except DBAPIError as error:
        print(f"plexrl-controller: the database does not answer: {error.orig}", file=sys.stderr)
        return 1
    except (ControllerError, SchemaMismatch, ValueError, OSError) as error:
        print(f"plexrl-controller: {error}", file=sys.stderr)
        return 1


def _log_json(level: str) -> None:
    """One JSON object a line on stderr: event, time, level and bound ids."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


if __name__ == "__main__":
    sys.exit(main())
