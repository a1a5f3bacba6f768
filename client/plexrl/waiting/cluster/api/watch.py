"""Watches: what has changed since a revision, as a stream of events that a transport reads at its own pace.

A watch holds a position in the history of its kind and nothing else, so a thousand of them cost a thousand numbers. One
that reads too slowly finds its place gone and ends with 410, upon which clients list again.
"""

from collections import OrderedDict
from collections.abc import Callable

import msgspec

from plexrl.waiting.cluster.api.errors import (
    ApiError,
    Cause,
    bad_request,
    expired,
    too_large_revision,
)
from plexrl.waiting.cluster.api.requests import Form, Options, Target, parse_revision
from plexrl.waiting.cluster.api.selectors import Test, selector_test
from plexrl.waiting.cluster.api.tables import partial_metadata, table
from plexrl.waiting.cluster.clock import VirtualClock
from plexrl.waiting.cluster.objects import Object, name_of, namespace_of
from plexrl.waiting.cluster.store import Change, ChangeKind, Expired, Store

INITIAL_EVENTS_END = "k8s.io/initial-events-end"
_CACHED_EVENTS = 8_192
_CACHED_BATCHES = 32


class EventEncoder:
    """Events as JSON lines; what many watches send is encoded once, and put together once."""

    def __init__(self) -> None:
        self._lines: OrderedDict[tuple[int, str], bytes] = OrderedDict()
        self._batches: OrderedDict[tuple[Target, int, int], bytes] = OrderedDict()

    def batch(self, target: Target, first: int, last: int, make: Callable[[], bytes]) -> bytes:
        """All events about a target between two positions, for watches that select nothing."""
        key = (target, first, last)
        found = self._batches.get(key)
        if found is None:
            found = self._batches[key] = make()
            if len(self._batches) > _CACHED_BATCHES:
                self._batches.popitem(last=False)
        return found

    def line(self, revision: int, event: str, item: Object) -> bytes:
        key = (revision, event)
        found = self._lines.get(key)
        if found is None:
            found = encode_event(event, item)
            self._lines[key] = found
            if len(self._lines) > _CACHED_EVENTS:
                self._lines.popitem(last=False)
        return found


def encode_event(event: str, item: Object) -> bytes:
    return msgspec.json.encode({"type": event, "object": item}) + b"\n"


class Watch:
    """One client's watch. `read` gives encoded events; `ended` says that none will come any more."""

    def __init__(
        self, store: Store, clock: VirtualClock, encoder: EventEncoder, target: Target, options: Options, form: Form
    ) -> None:
        self.target = target
        self.timeout_s = options.timeout_s
        self.bookmarks = options.bookmarks
        self.ended = False
        self._store = store
        self._clock = clock
        self._encoder = encoder
        self._form = form
        self._selects = bool(options.label_selector or options.field_selector)
        self._include = options.include_object
        self._first_row = True
        self._history = store.history(target.kind)
        self._test = self._visible(selector_test(options.label_selector, options.field_selector, target.kind))
        self._initial: list[Object] = []
        self._end_of_initial = b""
        self._start(options)

    @property
    def lag(self) -> int:
        """How many changes of the kind lie ahead."""
        return self._history.end - self._position

    def read_objects(self, limit: int) -> list[tuple[str, Object]]:
        """As `read`, with the objects themselves, for a client in this process."""
        if self._initial:
            items, self._initial = self._initial, []
            return [("ADDED", item) for item in items]
        changes = self._history.read(self._position, limit)
        self._position += len(changes)
        return [(event, change.item) for change in changes if (event := self._event(change))]

    def read(self, limit: int) -> bytes:
        """The next events as JSON lines, from up to `limit` changes; b"" if none of them concerns this watch."""
        if self._initial:
            items, self._initial = self._initial[:limit], self._initial[limit:]
            return b"".join(self._encode(int(item["metadata"]["resourceVersion"]), "ADDED", item) for item in items)
        if self._end_of_initial:
            line, self._end_of_initial = self._end_of_initial, b""
            return line
        if self.ended:
            return b""
        try:
            changes = self._history.read(self._position, limit)
        except Expired as error:
            self.ended = True
            status = expired(f"too old resource version: {error}").to_json()
            return encode_event("ERROR", {**status, "reason": "Expired"})
        first = self._position
        self._position += len(changes)
        if not changes:
            return b""
        if self._selects or self._form is not Form.FULL:
            return self._lines(changes)
        return self._encoder.batch(self.target, first, self._position, lambda: self._lines(changes))

    def bookmark(self) -> bytes:
        """An event that says how far this watch has read."""
        revision = self._store.revision if self.lag == 0 else self._history.read(self._position, 1)[0].revision - 1
        return self._bookmark(revision, {})

    def _start(self, options: Options) -> None:
        revision = options.resource_version
        initial = revision in ("", "0")
        if options.initial_events is not None:
            if options.resource_version_match != "NotOlderThan":
                raise _invalid_options("resourceVersionMatch", "sendInitialEvents needs NotOlderThan here")
            initial = options.initial_events
        elif options.resource_version_match:
            raise _invalid_options(
                "resourceVersionMatch", "is forbidden for watch unless sendInitialEvents is provided"
            )
        asked = parse_revision(revision) if revision else 0
        if asked > self._store.revision:
            raise too_large_revision(asked, self._store.revision)
        if initial:
            self._position = self._history.end
            for item in self._store.items(self.target.kind, self.target.namespace):
                if self._test(item):
                    self._initial.append(item)
            if options.initial_events and options.bookmarks:
                self._end_of_initial = self._bookmark(self._store.revision, {INITIAL_EVENTS_END: "true"})
            return
        try:
            # Neither a revision nor initial events: from now on.
            self._position = self._history.position_after(asked) if asked else self._history.end
        except Expired as error:
            raise expired(f"too old resource version: {error}") from error

    def _visible(self, test: Test | None) -> Callable[[Object], bool]:
        namespace, name = self.target.namespace, self.target.name

        def visible(item: Object) -> bool:
            return (
                (not namespace or namespace_of(item) == namespace)
                and (not name or name_of(item) == name)
                and (test is None or test(item))
            )

        return visible

    def _lines(self, changes: list[Change]) -> bytes:
        return b"".join(
            self._encode(change.revision, event, change.item) for change in changes if (event := self._event(change))
        )

    def _event(self, change: Change) -> str:
        """What a change is for this watch, "" for nothing: to it, objects come and go as they match its selector."""
        seen = change.previous is not None and self._test(change.previous)
        sees = change.kind is not ChangeKind.DELETED and self._test(change.item)
        if not seen and not sees:
            return ""
        return "DELETED" if not sees else "MODIFIED" if seen else "ADDED"

    def _encode(self, revision: int, event: str, item: Object) -> bytes:
        match self._form:
            case Form.FULL:
                return self._encoder.line(revision, event, item)
            case Form.METADATA:
                return encode_event(event, partial_metadata(item))
            case Form.TABLE:
                version = {"resourceVersion": item["metadata"]["resourceVersion"]}
                shown = table(self.target.kind, [item], self._clock, self._include, version)
                # Columns are told once.
                if not self._first_row:
                    shown["columnDefinitions"] = None
                self._first_row = False
                return encode_event(event, shown)

    def _bookmark(self, revision: int, annotations: dict[str, str]) -> bytes:
        metadata: Object = {"resourceVersion": str(revision), "creationTimestamp": None}
        if annotations:
            metadata["annotations"] = annotations
        kind = self.target.kind
        item: Object = {"kind": kind.kind, "apiVersion": kind.api_version, "metadata": metadata}
        if self._form is Form.METADATA:
            item |= {"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1"}
        elif self._form is Form.TABLE:
            row = {"cells": [], "object": partial_metadata(item)}
            item = {
                "kind": "Table",
                "apiVersion": "meta.k8s.io/v1",
                "metadata": {"resourceVersion": str(revision)},
                "columnDefinitions": None,
                "rows": [row] if annotations else [],
            }
        return encode_event("BOOKMARK", item)


def _invalid_options(field: str, why: str) -> ApiError:
    cause = Cause("FieldValueForbidden", f"Forbidden: {why}", field)
    message = f'ListOptions.meta.k8s.io "" is invalid: {field}: {cause.message}'
    details = {"group": "meta.k8s.io", "kind": "ListOptions", "causes": [cause.to_json()]}
    return ApiError(422, "Invalid", message, details) if field else bad_request(message)
