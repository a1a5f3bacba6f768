"""Options that the commands share: how to reach the controller, and tables or JSON.

Knows argparse and the connection; knows nothing of what the commands show.
"""

import argparse
import datetime
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias, TypeVar

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp
from rich.console import Console
from rich.table import Table

from plexrl.cluster import connect
from plexrl.connection import Connection

PageT = TypeVar("PageT")
Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

# Commands answer or say why not soon; a person waits.
RETRY_FOR_S = 10.0
# More than any table has.
TABLE_WIDTH = 10_000


def add_connection_arguments(parser: argparse.ArgumentParser) -> None:
    """--endpoint, --token-file, --tls-ca."""
    group = parser.add_argument_group("connection")
    group.add_argument("--endpoint", metavar="HOST:PORT", help="the controller (default: PLEXRL_ENDPOINT, .plexrl/)")
    group.add_argument(
        "--token-file", metavar="FILE", help="file with the token (default: PLEXRL_TOKEN, PLEXRL_TOKEN_FILE, .plexrl/)"
    )
    group.add_argument(
        "--tls-ca",
        metavar="FILE",
        help="CA file, or `system` for the system's roots; needed beyond loopback (default: PLEXRL_TLS_CA)",
    )


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    """--json."""
    parser.add_argument("--json", action="store_true", help="print JSON, one document, instead of a table")


@contextmanager
def connection(args: argparse.Namespace) -> Iterator[Connection]:
    """A connection as the arguments say, closed afterwards."""
    with connect(args.endpoint, token_file=args.token_file, tls=args.tls_ca, retry_for_s=RETRY_FOR_S) as cluster:
        yield cluster.connection


def pages(fetch: Callable[[str], tuple[Sequence[PageT], str]], limit: int) -> list[PageT]:
    """Reads pages until there are `limit` entries or no more; `fetch(page_token)` gives entries and the next token."""
    entries: list[PageT] = []
    token = ""
    while True:
        page, token = fetch(token)
        entries.extend(page)
        if not token or len(entries) >= limit:
            return entries[:limit]


def show_json(messages: Sequence[Message]) -> None:
    """Prints messages as a JSON array with the wire's field names."""
    print(json.dumps([MessageToDict(message, preserving_proto_field_name=True) for message in messages], indent=2))


def show_table(columns: Sequence[str], rows: Sequence[Sequence[str]], empty: str) -> None:
    """Prints a table; columns that end in "|" hold numbers. `empty` is said when there are no rows.

    As wide as it is: a terminal wraps it, and nothing of an id or a number is lost where it is piped.
    """
    console = Console(width=TABLE_WIDTH)
    if not rows:
        console.print(empty)
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in columns:
        table.add_column(column.rstrip("|"), justify="right" if column.endswith("|") else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def state_name(enum_name: str, prefix: str) -> str:
    """WORKER_STATE_READY with prefix WORKER_STATE_ → ready."""
    return enum_name.removeprefix(prefix).lower()


def clock_time(timestamp: Timestamp) -> str:
    """Local time as YYYY-MM-DD HH:MM:SS; empty if unset."""
    if not timestamp.ToNanoseconds():
        return ""
    return timestamp.ToDatetime(tzinfo=_local()).strftime("%Y-%m-%d %H:%M:%S")


def _local() -> datetime.tzinfo:
    zone = datetime.datetime.now().astimezone().tzinfo
    assert zone is not None
    return zone


def file_size(size_bytes: int) -> str:
    """1536 → 1.5 KiB."""
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
