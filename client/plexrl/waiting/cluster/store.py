"""Objects by key with one revision counter, and the recent changes of each kind, which watches read.

Plays etcd's part. Knows revisions and keys; knows nothing of what objects mean, of requests or of time. Objects are
never changed in place: whoever reads one may keep it.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from plexrl.waiting.cluster.objects import Object, name_of, namespace_of, uid_of, with_metadata
from plexrl.waiting.cluster.resources import RESOURCE_TYPES, ResourceType

Key: TypeAlias = tuple[str, str]
"""Namespace ("" for none) and name."""

HISTORY_LIMIT = 50_000


class ChangeKind(Enum):
    """What happened to an object, by the name that watches use."""

    ADDED = "ADDED"
    MODIFIED = "MODIFIED"
    DELETED = "DELETED"


@dataclass(frozen=True, slots=True)
class Change:
    """One write. `item` is the object after it (for a deletion: as it was last, with the deletion's revision)."""

    revision: int
    kind: ChangeKind
    item: Object
    previous: Object | None


class Expired(LookupError):
    """The changes asked for are no longer kept."""


class History:
    """The last changes of one kind. A reader keeps a position, so readers cost nothing and slow ones are found out."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._ring: list[Change] = []
        self._revisions: list[int] = []
        self._end = 0
        self.floor_revision = 0
        """The newest revision that was dropped: whoever has seen less has missed something."""

    @property
    def end(self) -> int:
        """The position after the newest change."""
        return self._end

    @property
    def start(self) -> int:
        """The position of the oldest change that is kept."""
        return self._end - len(self._ring)

    def append(self, change: Change) -> None:
        self._ring.append(change)
        self._revisions.append(change.revision)
        self._end += 1
        # Dropped in blocks: one at a time would move the whole list at every change.
        if len(self._ring) >= self._limit + max(1, self._limit // 4):
            cut = len(self._ring) - self._limit
            self.floor_revision = self._revisions[cut - 1]
            del self._ring[:cut]
            del self._revisions[:cut]

    def position_after(self, revision: int) -> int:
        """Where to read on for whoever has seen everything up to a revision. Raises Expired if that is gone."""
        if revision < self.floor_revision:
            raise Expired(f"revision {revision} is older than {self.floor_revision}")
        return self.start + bisect_right(self._revisions, revision)

    def read(self, position: int, limit: int) -> list[Change]:
        """Up to `limit` changes from a position on. Raises Expired if the first of them is gone."""
        if position < self.start:
            raise Expired(f"position {position} is older than {self.start}")
        first = position - self.start
        return self._ring[first : first + limit]

    def changes_since(self, revision: int) -> Iterator[Change]:
        """Changes after a revision, newest first. Raises Expired if some are gone."""
        first = self.position_after(revision) - self.start
        for index in range(len(self._ring) - 1, first - 1, -1):
            yield self._ring[index]


Listener: TypeAlias = Callable[[ResourceType, Change], None]


class Store:
    """All objects of a cluster."""

    def __init__(self, history_limit: int = HISTORY_LIMIT) -> None:
        self.revision = 1
        self._items: dict[ResourceType, dict[Key, Object]] = {kind: {} for kind in RESOURCE_TYPES}
        self._histories = {kind: History(history_limit) for kind in RESOURCE_TYPES}
        self._owned: dict[str, dict[tuple[ResourceType, Key], Object]] = {}
        self._listeners: list[Listener] = []

    def listen(self, listener: Listener) -> None:
        """Calls `listener` after every change, in order, until the store is gone."""
        self._listeners.append(listener)

    def history(self, kind: ResourceType) -> History:
        return self._histories[kind]

    def get(self, kind: ResourceType, key: Key) -> Object | None:
        return self._items[kind].get(key)

    def count(self, kind: ResourceType) -> int:
        return len(self._items[kind])

    def items(self, kind: ResourceType, namespace: str = "") -> list[Object]:
        """Objects by key; of one namespace, or of all for ""."""
        kept = self._items[kind]
        if namespace:
            return [kept[key] for key in sorted(key for key in kept if key[0] == namespace)]
        return [kept[key] for key in sorted(kept)]

    def items_at(self, kind: ResourceType, revision: int, namespace: str = "") -> list[Object]:
        """Objects as they were at an earlier revision. Raises Expired if that is too long ago."""
        if revision == self.revision:
            return self.items(kind, namespace)
        kept = dict(self._items[kind])
        for change in self._histories[kind].changes_since(revision):
            key = (namespace_of(change.item), name_of(change.item))
            if change.previous is None:
                kept.pop(key, None)
            else:
                kept[key] = change.previous
        return [kept[key] for key in sorted(kept) if not namespace or key[0] == namespace]

    def owned_by(self, uid: str) -> list[tuple[ResourceType, Object]]:
        """Objects with an owner reference to this uid, in the order in which they came."""
        return [(kind, item) for (kind, _), item in self._owned.get(uid, {}).items()]

    def create(self, kind: ResourceType, item: Object) -> Object:
        """Stores a new object; returns it with its revision. Raises KeyError if the key is taken."""
        key = (namespace_of(item), name_of(item))
        if key in self._items[kind]:
            raise KeyError(key)
        return self._write(kind, ChangeKind.ADDED, key, item, None)

    def replace(self, kind: ResourceType, item: Object) -> Object:
        """Stores a new version; returns it with its revision. Raises KeyError if there is no such object."""
        key = (namespace_of(item), name_of(item))
        return self._write(kind, ChangeKind.MODIFIED, key, item, self._items[kind][key])

    def remove(self, kind: ResourceType, key: Key) -> Object:
        """Takes an object away; returns its last state. Raises KeyError if there is none."""
        previous = self._items[kind][key]
        return self._write(kind, ChangeKind.DELETED, key, previous, previous)

    def _write(self, kind: ResourceType, change: ChangeKind, key: Key, item: Object, previous: Object | None) -> Object:
        self.revision += 1
        item = with_metadata(item, resourceVersion=str(self.revision))
        if change is ChangeKind.DELETED:
            del self._items[kind][key]
        else:
            self._items[kind][key] = item
        self._index_owners(kind, key, previous, None if change is ChangeKind.DELETED else item)
        record = Change(self.revision, change, item, previous)
        self._histories[kind].append(record)
        for listener in self._listeners:
            listener(kind, record)
        return item

    def _index_owners(self, kind: ResourceType, key: Key, before: Object | None, after: Object | None) -> None:
        kept = _owner_uids(after)
        for uid in _owner_uids(before):
            if uid not in kept:
                del self._owned[uid][(kind, key)]
                if not self._owned[uid]:
                    del self._owned[uid]
        for uid in kept:
            self._owned.setdefault(uid, {})[(kind, key)] = after or {}


def _owner_uids(item: Object | None) -> list[str]:
    """Each owner once, in order."""
    if item is None:
        return []
    return list(dict.fromkeys(reference["uid"] for reference in item["metadata"].get("ownerReferences") or ()))


def same_object(left: Object, right: Object) -> bool:
    """Whether two versions are one object: a name can be used again, a uid never is."""
    return uid_of(left) == uid_of(right)
