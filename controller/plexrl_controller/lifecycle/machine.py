"""One table per state machine. `apply` is pure: it returns the changed record, its event and the effects to perform.

Knows records and states only; time is an input. Who performs effects, and when (after the commit), is dispatch's
business.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from functools import cached_property
from typing import Any, Generic, Protocol, TypeVar

from plexrl_controller.domain.errors import StaleTransition
from plexrl_controller.domain.records import Event, changed


class Effect(Enum):
    """What must happen once a transition is durable."""

    DELIVER = "tell the clients that watch the record"
    SEND_ORDER = "send the call's order to its worker"
    SEND_ABORT = "ask the worker to stop the call"
    WAKE_GROUP = "run the scheduling cycle of the worker group"
    FAIL_SUCCESSORS = "fail the later calls of the sequence and the generates that wait for its versions"
    CANCEL_CALLS = "end the record's calls"
    DROP_MODELS = "take the record's models off their workers"
    REASSIGN = "re-queue the worker's calls and mark what was lost with it"


class StatefulRecord(Protocol):
    """A record with a state and a revision."""

    @property
    def revision(self) -> int: ...


R = TypeVar("R", bound=Any)
S = TypeVar("S", bound=IntEnum)
E = TypeVar("E", bound=Enum)


@dataclass(frozen=True, slots=True)
class Transition(Generic[S, E]):
    """One row of a table: an event takes any of `sources` to `target` and owes `effects`."""

    event: E
    sources: frozenset[S]
    target: S
    effects: tuple[Effect, ...] = ()
    note: str = ""


@dataclass(frozen=True, slots=True)
class Applied(Generic[R]):
    """The outcome of a transition: nothing has been performed yet."""

    record: R
    event: Event
    effects: tuple[Effect, ...]


@dataclass(frozen=True)
class Machine(Generic[R, S, E]):
    """A named transition table with its initial and terminal states."""

    name: str
    states: type[S]
    initial: S
    terminal: frozenset[S]
    transitions: Sequence[Transition[S, E]]
    record_id: Callable[[R], str]

    def find(self, state: S, event: E) -> Transition[S, E] | None:
        """The row that `event` selects in `state`, if any."""
        return self._rows.get((event, state))

    @cached_property
    def _rows(self) -> Mapping[tuple[E, S], Transition[S, E]]:
        """The first row of each event and source."""
        rows: dict[tuple[E, S], Transition[S, E]] = {}
        for transition in self.transitions:
            for source in transition.sources:
                rows.setdefault((transition.event, source), transition)
        return rows

    def sources_of(self, event: E) -> frozenset[S]:
        """Every state from which `event` leads somewhere."""
        return frozenset(s for t in self.transitions if t.event is event for s in t.sources)

    def apply(self, record: R, event: E, now: float, **changes: Any) -> Applied[R]:
        """Takes `record` through `event` at time `now`, with `changes` to its other fields.

        Raises StaleTransition when the record's state is not a source of the event.
        """
        row = self.find(record.state, event)
        if row is None:
            raise StaleTransition(
                f"{self.name} {self.record_id(record)} is {record.state.name}: "
                f"{event.name} applies to {', '.join(sorted(s.name for s in self.sources_of(event)))}"
            )
        after: R = changed(record, state=row.target, revision=record.revision + 1, **changes)
        return Applied(after, self._event(after, event._name_, record.state._name_, now), row.effects)

    def created(self, record: R, now: float) -> Event:
        """The event of a record's creation."""
        return self._event(record, "CREATE", None, now)

    def _event(self, record: R, event: str, source: str | None, now: float) -> Event:
        reason = getattr(record, "reason", None)
        return Event(
            self.name,
            self.record_id(record),
            event,
            source,
            record.state._name_,
            now,
            reason._name_ if isinstance(reason, Enum) else "",
            getattr(record, "attempt", 0),
            getattr(record, "leader_term", 0),
        )


def row(event: E, sources: Sequence[S], target: S, *effects: Effect, note: str = "") -> Transition[S, E]:
    """A table row, written the way the tables read."""
    return Transition(event, frozenset(sources), target, effects, note)


def table_by_event(machine: Machine[Any, S, E]) -> Mapping[str, Sequence[Transition[S, E]]]:
    """The table grouped by event name, for diagrams and checks."""
    grouped: dict[str, list[Transition[S, E]]] = {}
    for transition in machine.transitions:
        grouped.setdefault(transition.event.name, []).append(transition)
    return grouped
