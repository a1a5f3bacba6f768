"""Models: creating and placing, deleting, resuming their sequences."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, replace

from plexrl.v1 import model_pb2, types_pb2
from plexrl_controller.dispatch import limits
from plexrl_controller.dispatch.cascade import fail
from plexrl_controller.dispatch.core import Core, log
from plexrl_controller.dispatch.jobs import Key, done_before, remember
from plexrl_controller.dispatch.learning import known_demand
from plexrl_controller.dispatch.views import cluster_view
from plexrl_controller.domain.errors import (
    AlreadyExists,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from plexrl_controller.domain.ids import ModelId, WorkerId
from plexrl_controller.domain.records import Job, Model, Worker
from plexrl_controller.domain.states import CallReason, CallState, JobState, ModelState
from plexrl_controller.lifecycle import models as model_lifecycle
from plexrl_controller.lifecycle.models import ModelEvent
from plexrl_controller.scheduling.place import Blocker, GroupRequest, Placed, PlacementRequest, Refused, place
from plexrl_controller.scheduling.views import ClusterView, Demand, Requirements


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A validated request for a model."""

    name: str
    base: model_pb2.ModelBase
    role: int
    settings: model_pb2.ModelSettings
    affinity: types_pb2.Affinity


async def create_model(core: Core, key: Key, job: Job, spec: ModelSpec) -> Model:
    """Creates a model and places it; its worker builds it in the background."""
    if (model_id := done_before(core, key)) is not None:
        await core.commit(core.batch())
        model = core.ledger.models.get(ModelId(model_id)) or await core.store.get_model(ModelId(model_id))
        if model is None:
            raise NotFound(f"model {model_id} of this request id is gone")
        return model
    if job.state not in (JobState.ACTIVE, JobState.PAUSED):
        raise FailedPrecondition(f"job {job.name} is {job.state.name}: it takes no models", reason="JOB_NOT_ACTIVE")
    mine = [core.ledger.models[m] for m in core.ledger.models_of_job[job.job_id]]
    live = [m for m in mine if m.state not in model_lifecycle.TERMINAL]
    if any(m.name == spec.name for m in live):
        raise AlreadyExists(f"job {job.name} has a model named {spec.name!r}", reason="MODEL_NAME_TAKEN")
    if len(live) >= limits.MAX_MODELS_PER_JOB:
        raise ResourceExhausted(f"job {job.name} has {len(live)} models, which is the limit; delete some")
    worker_id = choose_worker(core, spec.base, spec.affinity, spec.settings, job=job)
    batch = core.batch()
    model = Model(
        model_id=ModelId(core.new_id()),
        job_id=job.job_id,
        tenant=job.tenant,
        name=spec.name,
        state=ModelState.CREATING,
        create_time=batch.now,
        role=spec.role,
        base=spec.base.SerializeToString(deterministic=True),
        settings=spec.settings.SerializeToString(deterministic=True),
        affinity=spec.affinity.SerializeToString(deterministic=True),
        worker_id=worker_id,
        worker_incarnation=core.ledger.workers[worker_id].incarnation,
    )
    core.uploads.hold_base(model)
    batch.insert(model)
    remember(batch, key, model.model_id)
    durable = core.post(batch)
    core.wake(worker_id)
    await asyncio.shield(durable)
    return model


def choose_worker(
    core: Core,
    base: model_pb2.ModelBase,
    affinity: types_pb2.Affinity,
    settings: model_pb2.ModelSettings,
    state_bytes: int = 0,
    may_take: Callable[[Worker], bool] = lambda _: True,
    *,
    job: Job | None = None,
) -> WorkerId:
    """Places a model on a worker that `may_take` it: for a `job` that its tenant's quota allows, or wherever it was.

    Raises ResourceExhausted when the tenant's device seconds are used up, Unavailable when a worker may come,
    FailedPrecondition when none can ever do.
    """
    request = PlacementRequest(
        groups=(GroupRequest(state_bytes=state_bytes),),
        requirements=Requirements(
            architecture=architecture_of(base),
            catalogue=base.catalogue or None,
            lora_rank=settings.lora.rank,
            labels=dict(affinity.require),
            colocate=frozenset(ModelId(m) for m in affinity.colocate_model_ids),
            avoid=frozenset(ModelId(m) for m in affinity.avoid_model_ids),
        ),
    )
    known = None
    if job is not None:
        request = replace(request, job_id=job.job_id, tenant=job.tenant, slowdown_target=job.slowdown_target)
        known = known_demand(core.ledger, job)
    outcome = _place(core, request, may_take, known)
    if isinstance(outcome, Refused):
        # Placement knows ids; people know names.
        for worker in core.ledger.workers.values():
            outcome = replace(outcome, reason=outcome.reason.replace(worker.worker_id, worker.name))
    match outcome:
        case Placed() as placed:
            return placed.worker_id
        case Refused(reason=reason, blocker=Blocker.QUOTA):
            raise ResourceExhausted(f"the model is not placed: {reason}", reason="QUOTA_EXHAUSTED")
        case Refused(reason=reason, temporary=True):
            raise Unavailable(f"the model cannot be placed now: {reason}", reason="NO_WORKER_READY", retry_after_s=1.0)
        case Refused(reason=reason):
            raise FailedPrecondition(f"the model cannot be placed: {reason}", reason="NO_FEASIBLE_WORKER")


def _place(
    core: Core, request: PlacementRequest, may_take: Callable[[Worker], bool], known: Demand | None
) -> Placed | Refused:
    """Where everybody's slowdown target is kept, if the job is known; else where there is memory; else on disk."""
    outcome: Placed | Refused | None = None
    if known is not None:
        warm = replace(request, groups=tuple(replace(group, demand=known) for group in request.groups))
        outcome = place(_taking(core, may_take), warm, core.policy)
        if isinstance(outcome, Refused):
            log.info("placed_beyond_targets", job=request.job_id, detail=outcome.reason)
    if not isinstance(outcome, Placed):
        outcome = place(_taking(core, may_take), request, core.policy)
    if isinstance(outcome, Refused):
        # Nowhere in host memory: then where the least recently used states may lie on disk.
        outcome = place(_taking(core, may_take, with_disk=True), request, core.policy)
    return outcome


def _taking(core: Core, may_take: Callable[[Worker], bool], *, with_disk: bool = False) -> ClusterView:
    view = cluster_view(core.ledger, core.clock.now(), with_disk=with_disk)
    taking = [group for group in view.groups if may_take(core.ledger.workers[group.worker_ids[0]])]
    return replace(view, groups=taking)


def architecture_of(base: model_pb2.ModelBase) -> str | None:
    """The architecture that an init base names; None where only the worker can tell. Raises InvalidArgument."""
    if base.WhichOneof("source") != "init":
        return None
    try:
        config = json.loads(base.init.config_json)
        names = config["architectures"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InvalidArgument(
            "base.init.config_json: want a Hugging Face config.json with `architectures`, for example "
            f'{{"architectures": ["Qwen3ForCausalLM"], ...}}: {type(error).__name__}: {error}'
        ) from error
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise InvalidArgument(f"base.init.config_json: architectures is {names!r}, want a list of exactly one name")
    return names[0]


async def delete_model(core: Core, model: Model) -> Model:
    """Takes a model off its worker; deleting again changes nothing."""
    if model.state not in (*model_lifecycle.TERMINAL, ModelState.DELETING):
        batch = core.batch()
        batch.transition(model, ModelEvent.DELETE)
        await core.commit(batch)
    return core.ledger.models.get(model.model_id, model)


async def resume_sequence(core: Core, key: Key, model: Model) -> int:
    """Frees a blocked sequence and closes gaps; returns the next number.

    The same request again returns the same number and frees nothing: what is blocked by then, its client may not know.
    """
    if (resumed := done_before(core, key)) is not None:
        await core.commit(core.batch())
        return int(resumed.rpartition("@")[2])
    if model.state is ModelState.STATE_LOST:
        raise FailedPrecondition(f"model {model.name}: {model.message}", reason="STATE_LOST")
    index = core.ledger.calls_of_model[model.model_id]
    gap = next((n for n in range(model.due_sequence, model.last_sequence + 1) if n not in index.sequenced), None)
    blocked_from = min((n for n in (model.failed_sequence, gap) if n), default=None)
    if blocked_from is None:
        batch = core.batch()
        remember(batch, key, f"{model.model_id}@{model.last_sequence + 1}")
        await core.commit(batch)
        return model.last_sequence + 1
    behind = [core.ledger.calls[c] for s, c in sorted(index.sequenced.items()) if s >= blocked_from]
    if len(behind) < len(index.sequenced) or any(call.state is not CallState.PENDING for call in behind):
        raise FailedPrecondition(
            f"model {model.name} still runs calls of the sequence; wait for them, then resume", retry_after_s=0.2
        )
    # What waits for a version which will not be made now.
    waiting = core.ledger.waiting_for_version(model.model_id, blocked_from)
    batch = core.batch()
    for call in (*behind, *waiting):
        message = f"sequence {blocked_from} was given up by ResumeSequence"
        fail(batch, call, CallReason.PREDECESSOR_FAILED, message)
    batch.update(model, failed_sequence=0, due_sequence=model.last_sequence + 1)
    remember(batch, key, f"{model.model_id}@{model.last_sequence + 1}")
    await core.commit(batch)
    return model.last_sequence + 1
