"""The transition tables as state machines: what can happen happens, nothing else does, and everything can end."""

from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plexrl_controller.domain.errors import StaleTransition
from plexrl_controller.domain.ids import CallId, JobId, ModelId, RequestId, SessionId, Tenant, WorkerId
from plexrl_controller.domain.records import Call, Job, Model, Session, Worker
from plexrl_controller.domain.states import CallKind, CallState, JobState, ModelState, SessionState, WorkerState
from plexrl_controller.lifecycle import diagrams
from plexrl_controller.lifecycle.machine import Machine

T = Tenant("t")
RECORDS: dict[str, Any] = {
    "call": Call(
        CallId("c"), RequestId("r"), "h", JobId("j"), ModelId("m"), T, CallKind.GENERATE, CallState.PENDING, 0, 0, None,
        0.0, 1.0,
    ),
    "model": Model(ModelId("m"), JobId("j"), T, "policy", ModelState.CREATING, 0.0, 1, b"", b"", b""),
    "job": Job(JobId("j"), T, "job", JobState.ACTIVE, 0.0, 60.0),
    "session": Session(SessionId("s"), JobId("j"), ModelId("m"), T, SessionState.OPEN, 4, 5.0, 60.0, 0.0),
    "worker": Worker(WorkerId("w"), "w", WorkerState.JOINING, "a:1", 1, 1, b""),
}  # fmt: skip
machines = pytest.mark.parametrize("machine", diagrams.MACHINES, ids=lambda m: m.name)


def events_of(machine: Machine[Any, Any, Any]) -> list[Enum]:
    return list({t.event: None for t in machine.transitions})


@machines
@given(data=st.data())
def test_any_history_keeps_the_table(machine: Machine[Any, Any, Any], data: st.DataObject) -> None:
    """Whatever is asked in whatever order: allowed events move and count, others are refused and change nothing."""
    record = RECORDS[machine.name]
    for event in data.draw(st.lists(st.sampled_from(events_of(machine)), max_size=20)):
        row = machine.find(record.state, event)
        if row is None:
            with pytest.raises(StaleTransition, match=record.state.name):
                machine.apply(record, event, now=5.0)
            continue
        applied = machine.apply(record, event, now=5.0)
        assert applied.record.state is row.target
        assert applied.record.revision == record.revision + 1
        assert (applied.event.source, applied.event.target) == (record.state.name, row.target.name)
        assert applied.effects == row.effects
        record = applied.record


@machines
def test_terminal_states_have_no_way_out_and_every_other_state_has_one(machine: Machine[Any, Any, Any]) -> None:
    for state in machine.states:
        leaving = [t for t in machine.transitions if state in t.sources]
        assert bool(leaving) != (state in machine.terminal), state


@machines
def test_every_state_can_be_reached_and_can_reach_an_end(machine: Machine[Any, Any, Any]) -> None:
    """G03: no state is a trap."""
    states = {state for t in machine.transitions for state in (*t.sources, t.target)}
    assert {state.name for state in states} == set(machine.states.__members__)
    edges = {(s, t.target) for t in machine.transitions for s in t.sources}

    def closure(start: set[Any], forward: bool) -> set[Any]:
        found = set(start)
        while more := {(b if forward else a) for a, b in edges if (a if forward else b) in found} - found:
            found |= more
        return found

    assert closure({machine.initial}, forward=True) == states
    if machine.terminal:
        assert closure(set(machine.terminal), forward=False) == states


@machines
def test_one_event_in_one_state_has_one_meaning(machine: Machine[Any, Any, Any]) -> None:
    pairs = [(t.event, s) for t in machine.transitions for s in t.sources]
    assert len(pairs) == len(set(pairs))


def test_the_document_is_what_the_tables_say() -> None:
    path = Path(__file__).parents[2] / "docs" / "lifecycle.md"
    assert path.read_text() == diagrams.render(), (
        "run: python -m plexrl_controller.lifecycle.diagrams > docs/lifecycle.md"
    )
