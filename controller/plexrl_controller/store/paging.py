"""Cursors of newest-first listings: the creation time and id of the last item shown, opaque to clients."""

from base64 import urlsafe_b64decode, urlsafe_b64encode
from binascii import Error as Base64Error
from collections.abc import Callable, Iterable
from math import isfinite
from typing import TypeVar

from plexrl_controller.domain.errors import InvalidArgument
from plexrl_controller.domain.records import Call, Job
from plexrl_controller.store.port import Listing, Page

MAX_PAGE_SIZE = 1000
_MAX_CURSOR_CHARACTERS = 256

R = TypeVar("R", Job, Call)
Position = tuple[float, str]
"""Creation time and id."""


def encode_cursor(position: Position) -> str:
    """The `next` of a page whose last item stands at `position`."""
    return urlsafe_b64encode(f"{position[0]!r}/{position[1]}".encode()).decode()


def decode_page(page: Page) -> Position | None:
    """Where the page starts; None at the newest. Raises InvalidArgument for a bad size or a foreign cursor."""
    if not 1 <= page.size <= MAX_PAGE_SIZE:
        raise InvalidArgument(
            f"page size {page.size} is outside 1..{MAX_PAGE_SIZE}",
            reason="PAGE_SIZE",
            metadata={"limit": str(MAX_PAGE_SIZE)},
        )
    if page.after is None:
        return None
    try:
        if len(page.after) > _MAX_CURSOR_CHARACTERS:
            raise ValueError(page.after)
        time, separator, item_id = urlsafe_b64decode(page.after.encode("ascii")).decode().partition("/")
        position = float(time), item_id
        if not separator or not isfinite(position[0]) or "\x00" in item_id:
            raise ValueError(page.after)
    except (ValueError, Base64Error) as error:
        raise InvalidArgument(
            "page token is not one that a listing returned; start again without it", reason="PAGE_TOKEN"
        ) from error
    return position


def newest_first(records: Iterable[R], page: Page, wanted: Callable[[R], bool]) -> Listing[R]:
    """A page of records in memory. Raises InvalidArgument for a bad page."""
    start = decode_page(page)
    found = sorted((r for r in records if wanted(r)), key=_position, reverse=True)
    rest = [r for r in found if start is None or _position(r) < start]
    items = tuple(rest[: page.size])
    return Listing(items, encode_cursor(_position(items[-1])) if len(rest) > page.size else None)


def _position(record: Job | Call) -> Position:
    return record.create_time, record.job_id if isinstance(record, Job) else record.call_id
