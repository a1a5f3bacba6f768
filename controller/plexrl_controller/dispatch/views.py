"""Scheduling views, built from the ledger."""

from dataclasses import replace

from plexrl.v1 import registry_pb2
from plexrl_controller.dispatch.ledger import JobFacts, Ledger
from plexrl_controller.dispatch.readiness import ready_calls
from plexrl_controller.dispatch.replays import replays_in_flight
from plexrl_controller.domain.ids import GroupId, JobId, WorkerId
from plexrl_controller.domain.records import Worker
from plexrl_controller.domain.states import WorkerState
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
    for call_id in ledger.calls_on_worker[worker_id]:
        job_id = ledger.calls[call_id].job_id
        in_flight[job_id] = in_flight.get(job_id, 0) + 1
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
                ready=ready_calls(ledger, model, now),
            )
        )
    jobs = []
    for job_id, views in models.items():
        facts = ledger.facts.get(job_id, JobFacts(lease_end=0.0))
        jobs.append(
            JobView(
                job_id=job_id,
                models=tuple(views),
                in_flight=in_flight.get(job_id, 0),
                idle_until=facts.idle_until,
                mid_iteration=facts.mid_iteration,
                last_finish=facts.last_finish,
                round_trip_s=ledger.round_trip_s.get(job_id, DEFAULT_ROUND_TRIP_S),
            )
        )
    capabilities = registry_pb2.WorkerCapabilities.FromString(worker.capabilities)
    return GroupView(
        worker_id=worker_id,
        available=group.connected and worker.state in SERVING_STATES and not group.stopping,
        device_state_bytes=capabilities.device_state_bytes,
        jobs=tuple(jobs),
        serving=group.serving,
        slice_start=group.slice_start,
    )


def cluster_view(ledger: Ledger) -> ClusterView:
    """Every worker that is registered and not lost, each a group of one rank."""
    return ClusterView(
        tuple(_placed_group_view(ledger, w) for w in ledger.workers.values() if w.state is not WorkerState.LOST)
    )


def _placed_group_view(ledger: Ledger, worker: Worker) -> PlacedGroupView:
    capabilities = registry_pb2.WorkerCapabilities.FromString(worker.capabilities)
    group = ledger.groups[worker.worker_id]
    members: dict[JobId, MemberView] = {}
    for model_id in ledger.models_of_worker[worker.worker_id]:
        model = ledger.models[model_id]
        if model.state not in model_lifecycle.TERMINAL:
            before = members.get(model.job_id, MemberView(model.job_id, 0))
            members[model.job_id] = replace(
                before, state_bytes=before.state_bytes + model.state_bytes, model_ids=before.model_ids | {model_id}
            )
    return PlacedGroupView(
        group_id=GroupId(worker.worker_id),
        worker_ids=(worker.worker_id,),
        hardware=Hardware(
            device_state_bytes=capabilities.device_state_bytes,
            host_state_bytes=capabilities.host_state_bytes,
            labels=worker.labels,
            architectures=frozenset(capabilities.architectures),
            catalogue=frozenset(capabilities.catalogue),
            max_lora_rank=capabilities.max_lora_rank,
        ),
        ready=worker.state is WorkerState.READY and group.connected and not group.stopping,
        members=tuple(members.values()),
    )
