"""What one commit writes, reduced to one row write per record. Pure; shared by every store and by the writer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any

from plexrl_controller.domain.errors import ControllerError
from plexrl_controller.domain.records import Call, Checkpoint, Job, Model, Record, Session, Snapshot, Token, Worker
from plexrl_controller.store.port import Changes

FIXED_FIELDS: dict[type[Any], frozenset[str]] = {
    Job: frozenset({"job_id", "tenant", "name", "create_time"}),
    Model: frozenset({"model_id", "job_id", "tenant", "name", "create_time", "role", "base", "settings", "affinity"}),
    Call: frozenset(
        {
            "call_id",
            "request_id",
            "request_hash",
            "job_id",
            "model_id",
            "tenant",
            "kind",
            "sequence",
            "weights_version",
            "create_time",
            "deadline",
            "session_id",
            "source_model_id",
        }
    ),
    Session: frozenset(field.name for field in fields(Session)) - {"state", "end_time", "revision"},
    Worker: frozenset({"worker_id"}),
    Checkpoint: frozenset(field.name for field in fields(Checkpoint)) - {"label", "revision"},
    Snapshot: frozenset({"snapshot_id", "model_id", "job_id", "tenant", "slot"}),
    Token: frozenset({"token_id", "token_sha256", "role", "tenant"}),
}
"""Fields that an update never writes. A call's `spec` may only be dropped."""

Key = tuple[type[Any], str]

_ID_OF: dict[type[Any], Callable[[Any], str]] = {
    Job: attrgetter("job_id"),
    Model: attrgetter("model_id"),
    Call: attrgetter("call_id"),
    Session: attrgetter("session_id"),
    Worker: attrgetter("worker_id"),
    Checkpoint: attrgetter("checkpoint_id"),
    Snapshot: attrgetter("snapshot_id"),
    Token: attrgetter("token_id"),
}
_FIXED_OF = {kind: attrgetter(*sorted(names)) for kind, names in FIXED_FIELDS.items()}


@dataclass(frozen=True, slots=True)
class Update:
    """The last of a record's updates in a commit, and the revision that must be stored before it."""

    record: Record
    base_revision: int


@dataclass(frozen=True, slots=True)
class RowWrites:
    """One write per record: inserts carry the newest version of a new record."""

    inserts: tuple[Record, ...]
    updates: tuple[Update, ...]


def record_id(record: Record) -> str:
    """The record's identifier, whatever its type."""
    return _ID_OF[type(record)](record)


def record_key(record: Record) -> Key:
    """Type and identifier."""
    kind = type(record)
    return kind, _ID_OF[kind](record)


def merge(changes: Sequence[Changes], commit_id: str) -> Changes:
    """Several commits as one, in order."""
    return Changes(
        inserts=tuple(record for change in changes for record in change.inserts),
        updates=tuple(record for change in changes for record in change.updates),
        events=tuple(event for change in changes for event in change.events),
        intervals=tuple(interval for change in changes for interval in change.intervals),
        requests=tuple(request for change in changes for request in change.requests),
        commit_id=commit_id,
    )


def coalesce(changes: Changes) -> RowWrites:
    """Reduces the versions of each record to the newest one.

    Raises ControllerError when a record is inserted twice, revisions have a gap or a fixed field changes.
    """
    inserted: dict[Key, Record] = {}
    for record in changes.inserts:
        key = record_key(record)
        if key in inserted:
            raise _inconsistent(record, "is inserted twice")
        inserted[key] = record
    updated: dict[Key, Update] = {}
    for record in changes.updates:
        key = record_key(record)
        new, before = inserted.get(key), updated.get(key)
        if new is not None:
            _check_successor(new, record)
            inserted[key] = record
        elif before is not None:
            _check_successor(before.record, record)
            updated[key] = Update(record, before.base_revision)
        else:
            updated[key] = Update(record, record.revision - 1)
    return RowWrites(tuple(inserted.values()), tuple(updated.values()))


def changed_fixed_fields(earlier: Record, later: Record) -> Sequence[str]:
    """Names of fixed fields in which two versions of a record differ."""
    fixed = _FIXED_OF[type(later)]
    changed: list[str] = []
    if fixed(earlier) != fixed(later):
        names = sorted(FIXED_FIELDS[type(later)])
        changed = [name for name in names if getattr(earlier, name) != getattr(later, name)]
    if isinstance(earlier, Call) and isinstance(later, Call) and later.spec is not None and later.spec != earlier.spec:
        changed.append("spec")
    return changed


def _check_successor(earlier: Record, later: Record) -> None:
    if later.revision != earlier.revision + 1:
        raise _inconsistent(later, f"goes from revision {earlier.revision} to {later.revision}")
    if changed := changed_fixed_fields(earlier, later):
        raise _inconsistent(later, f"changes {', '.join(changed)}")


def _inconsistent(record: Record, problem: str) -> ControllerError:
    return ControllerError(
        f"{type(record).__name__.lower()} {record_id(record)} {problem} within a commit", reason="INCONSISTENT_CHANGES"
    )
