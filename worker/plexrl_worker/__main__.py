"""`python -m plexrl_worker`: the worker daemon."""

import asyncio
import logging
import sys

import structlog

from plexrl_worker import settings as worker_settings
from plexrl_worker.daemon import serve
from plexrl_worker.errors import SettingsError


def configure_logging() -> None:
    """One JSON object a line on standard error: a stable event name and its ids."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


def main() -> int:
    """Runs the daemon; 2 when a setting cannot be honoured."""
    configure_logging()
    try:
        asyncio.run(serve(worker_settings.read(sys.argv[1:])))
    except SettingsError as error:
        sys.stderr.write(f"plexrl_worker: {error.message}\n")
        return 2
    except PermissionError as error:
        if error.filename is None:
            raise
        # A directory of another user's, most often; the traceback would say no more.
        sys.stderr.write(f"plexrl_worker: {error.filename}: {error.strerror}: see --state-dir and --checkpoint-dir\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
