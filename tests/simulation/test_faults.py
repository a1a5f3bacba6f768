"""The controller in a world that fails, much faster than time (G01, G03, G04, G06, G11, G14, G19, G20, G23).

A sample of `make simulate-faults`. The second half breaks the code, or the double's part of the contract, in one place
at a time: a checker that cannot see that would prove nothing.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from plexrl.v1 import types_pb2, worker_pb2
from plexrl_controller.api.auth import Identity
from plexrl_controller.dispatch import cycle, reports, views, workers
from plexrl_controller.dispatch.core import Core
from plexrl_controller.dispatch.ledger import Ledger
from plexrl_controller.dispatch.readiness import ready_calls
from plexrl_controller.domain.records import Call
from plexrl_controller.domain.states import CallState
from plexrl_controller.store.memory import MemoryStore
from plexrl_controller.store.port import Changes
from tests.simulation.faults.__main__ import describe, shortest
from tests.simulation.faults.device import Device
from tests.simulation.faults.worker import WorkerProcess
from tests.simulation.faults.world import Plan, run

pytestmark = pytest.mark.timeout(180)

SEEDS = range(120)
CHUNK = 10
MOST_SEEDS = 60
"""A defect must show within so many."""


@pytest.mark.parametrize("first", SEEDS[::CHUNK])
def test_nothing_is_lost_doubled_reordered_or_hung(first: int) -> None:
    for seed in range(first, first + CHUNK):
        verdict = run(Plan(seed))
        assert not verdict.violations, describe(shortest(verdict))


def test_the_same_seed_is_the_same_run() -> None:
    for seed in (3, 16, 39):
        first, again = run(Plan(seed)), run(Plan(seed))
        assert first.calls > 10
        assert first.fingerprint == again.fingerprint


# The checker can fail.


def caught(wanted: str, seeds: range = range(MOST_SEEDS)) -> str:
    """The first violation that any of the seeds shows."""
    for seed in seeds:
        violations = run(Plan(seed)).violations
        if any(wanted in violation for violation in violations):
            return violations[0]
    raise AssertionError(f"{len(seeds)} seeds, and nothing like {wanted!r}")


def test_it_sees_a_result_of_an_older_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the attempt in the fence, what an execution that was given up says counts."""
    real: Callable[..., None] = reports.ReportRecorder._event

    def event(self: Any, batch: Any, worker_id: Any, report: worker_pb2.Report, result: Any) -> None:
        call = self._core.ledger.calls.get(report.call.call_id)
        if call is not None and call.state is not CallState.PENDING:
            report.call.attempt = call.attempt
        real(self, batch, worker_id, report, result)

    keep_outcomes(monkeypatch)
    monkeypatch.setattr(reports.ReportRecorder, "_event", event)
    # One seed in eighty or so brings such an execution and the call's next one together.
    caught("has the result of", range(100, 500))


def keep_outcomes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that says again how every earlier attempt of a call ended: allowed, and harmless under the fences."""
    real: Callable[..., None] = WorkerProcess._accept

    def accept(self: WorkerProcess, order: worker_pb2.Order) -> None:
        earlier = self.finished.get(order.run_call.call.call_id)
        real(self, order)
        if earlier is not None and earlier.outcome is not None:
            self._put(self._report(earlier.order, finished=earlier.outcome))

    monkeypatch.setattr(WorkerProcess, "_accept", accept)


def test_keeping_outcomes_alone_is_harmless(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_outcomes(monkeypatch)
    for seed in range(20):
        assert not run(Plan(seed)).violations


def test_it_sees_a_request_that_runs_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """G01: without the memory of request ids a resend is another call."""
    real = Ledger.__init__

    def forgetful(self: Ledger) -> None:
        real(self)
        self.call_by_request = Nothing()

    monkeypatch.setattr(Ledger, "__init__", forgetful)
    monkeypatch.setattr(MemoryStore, "_check_unique", lambda self, writes: (set(), set()))
    caught("two calls")


class Nothing(dict[Any, Any]):
    """Remembers nothing."""

    def __setitem__(self, key: Any, value: Any) -> None:
        pass


def test_it_sees_a_call_that_is_applied_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that neither knows its attempts nor checks the sequence applies what is sent again, again."""

    def accept(self: WorkerProcess, order: worker_pb2.Order) -> None:
        self.finished.pop(order.run_call.call.call_id, None)
        real(self, order)

    real: Callable[..., None] = WorkerProcess._accept
    refusal: Callable[..., Any] = Device.refusal

    def lenient(self: Device, order: worker_pb2.RunCallOrder) -> Any:
        held = self.models.get(order.model_id)
        if held is not None and order.sequence:
            held.applied = order.after_sequence
        return refusal(self, order)

    monkeypatch.setattr(WorkerProcess, "_accept", accept)
    monkeypatch.setattr(Device, "refusal", lenient)
    caught("ran on another state")


def test_it_sees_a_change_that_is_dispatched_before_it_is_durable(monkeypatch: pytest.MonkeyPatch) -> None:
    """G14: only what changes nothing may leave before its commit. The next leader knows nothing of what was applied."""
    monkeypatch.setattr(cycle.GroupCycle, "_may_leave_now", lambda self, calls, orders: len(orders) == len(calls))
    caught("hangs", range(330, 390))


def test_it_sees_what_is_told_before_it_is_durable(monkeypatch: pytest.MonkeyPatch) -> None:
    """G14, G20: a controller that answers first and writes later loses what it accepted when it dies."""
    real = Core.post

    def post(self: Core, batch: Any) -> "asyncio.Future[None]":
        real(self, batch).add_done_callback(lambda done: done.exception())
        self.undurable.clear()
        early: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        early.set_result(None)
        return early

    monkeypatch.setattr(Core, "post", post)
    caught("nobody knows it any more")


def test_it_sees_two_leaders_that_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """G20: without the term in the store's fence, a controller that was replaced goes on."""
    real = MemoryStore.commit

    async def commit(self: MemoryStore, term: int, changes: Changes) -> None:
        await real(self, self._term, changes)

    monkeypatch.setattr(MemoryStore, "commit", commit)
    # Rare: a leader must be replaced in the middle of a commit and go on. One seed in a hundred shows it.
    caught("", range(90, 90 + MOST_SEEDS))


def test_it_sees_orders_that_are_not_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """G03: what was on a stream that broke must be sent again, or its call hangs."""

    async def nothing(core: Core, worker_id: Any) -> None:
        pass

    monkeypatch.setattr(workers, "_send_again", nothing)
    caught("hangs")


def test_it_sees_a_call_that_yielded_and_is_never_continued(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which also shows that calls yield here."""
    real = ready_calls

    def without_yielded(ledger: Ledger, model: Any, now: float) -> Any:
        return tuple(
            ready
            for ready in real(ledger, model, now)
            if (call := ledger.calls.get(ready.call_id)) is None or call.state is not CallState.YIELDED
        )

    monkeypatch.setattr(views, "ready_calls", without_yielded)
    caught("hangs")


def test_it_sees_weights_of_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """G06: a sync that does not wait for earlier generates, on a worker that does not look at the version."""
    refusal: Callable[..., Any] = Device.refusal

    def lenient(self: Device, order: worker_pb2.RunCallOrder) -> Any:
        held = self.models.get(order.model_id)
        if held is not None and order.spec.HasField("generate"):
            order.weights_version = held.version
        return refusal(self, order)

    def never_draining(ledger: Any, sync: Call, index: Any) -> list[Any]:
        return []

    monkeypatch.setattr(Device, "refusal", lenient)
    monkeypatch.setattr("plexrl_controller.dispatch.readiness._draining", never_draining)
    caught("resolved to version")


def test_it_sees_a_version_that_is_replaced_before_it_was_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plexrl_controller.dispatch.readiness.older_pulls", lambda *_: [])
    caught("found its version replaced")


def test_it_sees_weights_that_were_taken_at_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its check a worker gives what it has."""
    real: Callable[..., worker_pb2.OrderFinished | None] = Device.not_pulled

    def lenient(self: Device, run: worker_pb2.RunCallOrder) -> worker_pb2.OrderFinished | None:
        refusal = real(self, run)
        peer = self.peer_at(run.weight_source.address)
        return None if peer is not None and run.weight_source.model_id in peer.models else refusal

    monkeypatch.setattr(Device, "not_pulled", lenient)
    monkeypatch.setattr("plexrl_controller.dispatch.readiness.may_be_ordered", lambda *_: True)
    caught("other weights than version")


def test_it_sees_another_tenants_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """G23."""
    monkeypatch.setattr(Identity, "may_see", lambda self, tenant: True)
    caught("another tenant's")


def test_it_sees_a_state_that_a_failed_call_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of a call or nothing: an engine that refuses a batch after having applied it."""
    real: Callable[..., types_pb2.CallResult] = Device.execute

    def execute(self: Device, order: worker_pb2.RunCallOrder, incarnation: int) -> types_pb2.CallResult:
        if order.spec.HasField("forward_backward") and self.rng.random() < 0.1:
            held = self.models[order.model_id]
            held.state = held.state.after("forward_backward", order.spec)
        return real(self, order, incarnation)

    monkeypatch.setattr(Device, "execute", execute)
    caught("ran on another state")
