"""Whoever waits is told what for, with the numbers of the rule that decides."""

from dataclasses import replace

from plexrl_controller.domain.ids import CallId, JobId, ModelId, WorkerId
from plexrl_controller.domain.states import CallKind
from plexrl_controller.scheduling.explain import WaitReason, why_waiting
from plexrl_controller.scheduling.policy import Order, Policy
from plexrl_controller.scheduling.views import GroupView, JobView, ModelView, ReadyCall

NOW = 1000.0
POLICY = Policy(order=Order.LAS, quantum_s=10.0, starvation_bound_s=600.0)


def job(name: str, since: float | None, **facts: object) -> JobView:
    model_id = ModelId(f"m-{name}")
    ready = (ReadyCall(CallId(f"c-{name}"), model_id, CallKind.GENERATE, since),) if since is not None else ()
    return replace(JobView(JobId(name), (ModelView(model_id, 100, False, ready=ready),)), **facts)  # type: ignore[arg-type]


def why(view: GroupView, policy: Policy = POLICY) -> WaitReason:
    return why_waiting(view, JobId("me"), NOW, policy)


def group(*jobs: JobView, serving: str | None = None, slice_start: float = NOW - 4.0) -> GroupView:
    return GroupView(WorkerId("w"), True, 100, jobs, JobId(serving) if serving else None, slice_start)


ME = job("me", NOW - 30.0, attained_s=50.0)
PLACE = "this one for 30.0 s; it comes before all others in 570 s"


def test_each_cause_has_its_sentence() -> None:
    busy = why(group(ME, job("other", None, in_flight=2), serving="other"))
    assert busy == WaitReason(JobId("other"), f"runs 2 call(s), 4.0 s into a slice of 10.0 s; 1 job(s) wait, {PLACE}")
    resident = why(group(ME, job("other", NOW), serving="other"))
    assert resident == WaitReason(JobId("other"), f"is 4.0 s into a slice of 10.0 s; 1 job(s) wait, {PLACE}")
    stalled = job("other", None, last_finish=NOW - 1.0, round_trip_s=4.0)
    held = why(group(ME, stalled, serving="other"))
    assert held.text.startswith("stalls, and the group is held for it for 1.00 s more (ski_rental)")
    poorer = why(group(ME, job("other", NOW, attained_s=20.0)))
    text = f"goes first by las: it has had 20.0 s by weight, this job 50.0 s; 2 job(s) wait, {PLACE}"
    assert poorer == WaitReason(JobId("other"), text)
    older = why(group(ME, job("other", NOW - 60.0)), replace(POLICY, order=Order.FIFO))
    assert older.text.startswith("goes first by fifo: it has waited 60.0 s")
    starving = why(group(ME, job("other", NOW - 700.0, attained_s=99.0)))
    assert starving.text.startswith("goes first by starvation, having waited 700.0 s")
    within = why(group(replace(ME, over_quota=True), job("other", NOW, attained_s=99.0)))
    assert within.text.startswith("goes first by quota")
    assert why(group(ME)).text == "it is served next; 1 job(s) wait, this one for 30.0 s"
    assert why(replace(group(ME), available=False)).text == "the group is not available"
    assert why(replace(group(ME), world_size=8, lost_ranks=2)).text == "2 of the gang's 8 ranks are missing"
