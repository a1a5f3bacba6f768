"""Scheduling views, built from the ledger."""

from dataclasses import replace

from plexrl_controller.dispatch.capabilities import capabilities_of
from plexrl_controller.dispatch.facts import GroupState, JobFacts
from plexrl_controller.dispatch.learning import corrected_hint
from plexrl_controller.dispatch.ledger import Ledger
from plexrl_controller.dispatch.readiness import ready_calls
from plexrl_controller.dispatch.replays import replays_in_flight
from plexrl_controller.domain.ids import GroupId, JobId, WorkerId
from plexrl_controller.domain.records import Worker
from plexrl_controller.domain.states import CallKind, CallState, WorkerState
from plexrl_controller.lifecycle import models as model_lifecycle
from plexrl_controller.scheduling.views import (
    ClusterView,
    GroupView,
    Hardware,
    JobView,
    MemberView,
    ModelView,
    PlacedGroupView,
)

SERVING_STATES = (WorkerState.READY, WorkerState.CORDONED, WorkerState.DRAINING)
DEFAULT_ROUND_TRIP_S = 0.05


def group_view(ledger: Ledger, worker_id: WorkerId, now: float) -> GroupView:
    """The worker's group at this moment."""
    worker, group = ledger.workers[worker_id], ledger.groups[worker_id]
    in_flight: dict[JobId, int] = {}
    left_s: dict[JobId, float] = {}
    yields = False
    for call in ledger.in_flight(worker_id):
        known_s = group.estimates.expected_s(call.job_id, call.kind)
        expected_s = known_s or 0.0
        if ledger.session_of(call) is not None:
            # What a call takes is its share of the device, and what it has had is one too.
            ran_s = group.shares.had_s(call.call_id, now)
            expected_s = max(0.0, expected_s - ledger.ran_s.get(call.call_id, 0.0) - ran_s)
        elif call.job_id not in in_flight:
            # Calls run one after the other: the first has run since the chunk began.
            expected_s = max(0.0, expected_s - ledger.ran_s.get(call.call_id, 0.0) - (now - group.chunk_start))
        in_flight[call.job_id] = in_flight.get(call.job_id, 0) + 1
        if known_s is not None:
            left_s[call.job_id] = left_s.get(call.job_id, 0.0) + expected_s
        yields = yields or (call.kind is CallKind.GENERATE and call.state is not CallState.CANCELLING)
    models: dict[JobId, list[ModelView]] = {}
    for model_id in ledger.models_of_worker[worker_id]:
        model = ledger.models[model_id]
        if replays := replays_in_flight(ledger, model):
            in_flight[model.job_id] = in_flight.get(model.job_id, 0) + replays
        models.setdefault(model.job_id, []).append(
            ModelView(
                model_id=model_id,
                state_bytes=model.state_bytes,
                on_device=model_id in group.on_device,
                last_used=group.used_at.get(model_id, 0.0),
                moving=model_id == group.prefetched and model_id not in group.on_device,
                ready=ready_calls(ledger, model, now),
                load_s=_round_trip_s(group.estimates.round_trip_s(model.job_id)) / 2,
            )
        )
    jobs = []
    estimates = group.estimates
    for job_id, views in models.items():
        record = ledger.jobs.get(job_id)
        weight = record.weight if record is not None else 1.0
        group.accounts.join(job_id, weight=weight)
        facts, last = ledger.facts.get(job_id, JobFacts(lease_end=0.0)), group.last_calls.get(job_id)
        jobs.append(
            JobView(
                job_id=job_id,
                models=tuple(views),
                in_flight=in_flight.get(job_id, 0),
                in_flight_left_s=left_s.get(job_id),
                idle_until=corrected_hint(facts, estimates.hint_factor(job_id)),
                mid_phase=facts.mid_iteration and last is not None and last.kind is CallKind.GENERATE,
                mid_iteration=facts.mid_iteration,
                last_finish=last.finish if last is not None else 0.0,
                round_trip_s=_round_trip_s(estimates.round_trip_s(job_id)),
                expected_stall_s=estimates.expected_stall_s(job_id, last.kind) if last is not None else None,
                attained_s=group.accounts.attained_s(job_id),
                over_quota=ledger.tenant_accounts.over_quota(job_id, now),
                last_served=group.served_at.get(job_id, 0.0),
                weight=weight,
            )
        )
    capabilities = capabilities_of(worker)
    return GroupView(
        worker_id=worker_id,
        available=group.connected and worker.state in SERVING_STATES and not group.stopping,
        device_state_bytes=capabilities.device_state_bytes,
        jobs=tuple(jobs),
        serving=group.serving,
        slice_start=group.slice_start,
        can_yield=capabilities.yields and yields,
        chunk_start=group.chunk_start,
        background_moves=capabilities.prefetch,
    )


def _round_trip_s(measured_s: float | None) -> float:
    return measured_s if measured_s is not None else DEFAULT_ROUND_TRIP_S


def cluster_view(ledger: Ledger, now: float, *, with_disk: bool = False) -> ClusterView:
    """Every worker that is registered and not lost, each a group of one rank.

    with_disk: parked states may lie on disk as well as in host memory.
    """
    living = [worker for worker in ledger.workers.values() if worker.state is not WorkerState.LOST]
    return ClusterView(
        tuple(_placed_group_view(ledger, worker, with_disk) for worker in living),
        now=now,
        tenants=ledger.tenant_accounts.tenants(now),
    )


def _placed_group_view(ledger: Ledger, worker: Worker, with_disk: bool) -> PlacedGroupView:
    capabilities = capabilities_of(worker)
    group = ledger.groups[worker.worker_id]
    members: dict[JobId, MemberView] = {}
    for model_id in ledger.models_of_worker[worker.worker_id]:
        model = ledger.models[model_id]
        if model.state not in model_lifecycle.TERMINAL:
            before = members.get(model.job_id) or _member(ledger, group, model.job_id)
            members[model.job_id] = replace(
                before, state_bytes=before.state_bytes + model.state_bytes, model_ids=before.model_ids | {model_id}
            )
    return PlacedGroupView(
        group_id=GroupId(worker.worker_id),
        worker_ids=(worker.worker_id,),
        hardware=Hardware(
            device_state_bytes=capabilities.device_state_bytes,
            host_state_bytes=max(capabilities.host_state_bytes, capabilities.disk_state_bytes if with_disk else 0),
            labels=worker.labels,
            architectures=frozenset(capabilities.architectures),
            catalogue=frozenset(capabilities.catalogue),
            max_lora_rank=capabilities.max_lora_rank,
        ),
        ready=worker.state is WorkerState.READY and group.connected and not group.stopping,
        members=tuple(members.values()),
    )


def _member(ledger: Ledger, group: GroupState, job_id: JobId) -> MemberView:
    job = ledger.jobs.get(job_id)
    demand = group.estimates.demand(job_id)
    if job is None:
        return MemberView(job_id, 0, demand=demand)
    earlier = ledger.demands.get((job.tenant, job.name))
    return MemberView(job_id, 0, demand=demand or earlier, slowdown_target=job.slowdown_target)
