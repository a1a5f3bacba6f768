"""Records to the wire's messages, and the parts of requests that many rpcs share."""

import hashlib
import re
from collections.abc import Mapping
from typing import Any

from google.protobuf import duration_pb2, timestamp_pb2

from plexrl.v1 import admin_pb2, call_pb2, job_pb2, model_pb2, registry_pb2, session_pb2, types_pb2
from plexrl_controller.dispatch import limits
from plexrl_controller.dispatch.core import Core
from plexrl_controller.dispatch.readiness import blocked
from plexrl_controller.dispatch.replays import progress
from plexrl_controller.dispatch.sessions import grant_of
from plexrl_controller.domain.errors import InvalidArgument
from plexrl_controller.domain.ids import RequestId
from plexrl_controller.domain.records import Call, Checkpoint, Interval, Job, Model, Session, Worker
from plexrl_controller.domain.states import CallReason, CallState
from plexrl_controller.store.port import Account

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


def timestamp(at: float | None) -> timestamp_pb2.Timestamp | None:
    """Seconds of Unix time as a message."""
    if at is None:
        return None
    message = timestamp_pb2.Timestamp()
    message.FromNanoseconds(int(at * 1e9))
    return message


def duration(seconds: float) -> duration_pb2.Duration:
    """Seconds as a message."""
    message = duration_pb2.Duration()
    message.FromNanoseconds(int(seconds * 1e9))
    return message


def nanoseconds(message: Any, field: str) -> int:
    """A duration, or a time since 1970, in nanoseconds; 0 when unset. Raises InvalidArgument outside 64 bits."""
    if not message.HasField(field):
        return 0
    try:
        value = int(getattr(message, field).ToNanoseconds())
    except ValueError as error:
        raise InvalidArgument(f"{field}: {error}") from error
    if not 0 <= value < 2**63:
        raise InvalidArgument(f"{field}: {value} ns, want at least 0 and less than 2^63")
    return value


def seconds(message: Any, field: str, default: float, bounds: tuple[float, float]) -> float:
    """A duration field in seconds; `default` when unset. Raises InvalidArgument outside `bounds`."""
    if not message.HasField(field):
        return default
    value = nanoseconds(message, field) / 1e9
    if not bounds[0] <= value <= bounds[1]:
        raise InvalidArgument(f"{field}: {value:g} s, want {bounds[0]:g} to {bounds[1]:g} s")
    return value


def name_of(value: str, field: str) -> str:
    """A name from outside. Raises InvalidArgument."""
    if not _NAME.fullmatch(value):
        raise InvalidArgument(f"{field}: {value[:80]!r}, want 1-64 characters of A-Z a-z 0-9 . _ -")
    return value


def request_id_of(value: str) -> RequestId:
    """An idempotency key from outside. Raises InvalidArgument."""
    if not 1 <= len(value) <= 64 or not value.isprintable():
        raise InvalidArgument("request_id: want 1-64 printable characters; a random UUID is a good choice")
    return RequestId(value)


def labels_of(value: Mapping[str, str], field: str) -> dict[str, str]:
    """Labels from outside. Raises InvalidArgument."""
    if len(value) > limits.MAX_LABELS:
        raise InvalidArgument(f"{field}: {len(value)} entries, the limit is {limits.MAX_LABELS}")
    for key, text in value.items():
        name_of(key, f"{field} key")
        if len(text) > 256 or not text.isprintable():
            raise InvalidArgument(f"{field}[{key}]: want at most 256 printable characters")
    return dict(value)


def content_hash(request: Any) -> str:
    """SHA-256 over a request's content without its request_id."""
    bare = type(request)()
    bare.CopyFrom(request)
    bare.ClearField("request_id")
    return hashlib.sha256(bare.SerializeToString(deterministic=True)).hexdigest()


def job_message(core: Core, job: Job, stored: Account | None = None) -> job_pb2.Job:
    """A job with its account: the leader's own, or, of a job that it no longer knows, the `stored` one."""
    account, facts = stored or core.ledger.account(job.job_id), core.ledger.facts.get(job.job_id)
    return job_pb2.Job(
        job_id=job.job_id,
        tenant=job.tenant,
        name=job.name,
        state=job_pb2.JobState.ValueType(job.state),
        labels=dict(job.labels),
        weight=job.weight,
        slowdown_target=job.slowdown_target,
        lease=duration(job.lease_s),
        create_time=timestamp(job.create_time),
        end_time=timestamp(job.end_time),
        account=job_pb2.JobAccount(
            busy_s=account.busy_s,
            swap_s=account.swap_s,
            hold_s=account.hold_s,
            swaps=account.swaps,
            calls=account.calls + (facts.calls_succeeded if facts is not None else 0),
            wait_s=facts.wait_s if facts is not None else 0.0,
        ),
        message=job.message,
    )


def model_message(core: Core, model: Model) -> model_pb2.Model:
    """A model with its residency."""
    return model_pb2.Model(
        model_id=model.model_id,
        job_id=model.job_id,
        name=model.name,
        state=model_pb2.ModelState.ValueType(model.state),
        message=": ".join(filter(None, (model.message, progress(core.ledger, model)))),
        role=model_pb2.ModelRole.ValueType(model.role),
        settings=model_pb2.ModelSettings.FromString(model.settings),
        affinity=types_pb2.Affinity.FromString(model.affinity),
        worker_id=model.worker_id or "",
        weights_version=model.weights_version,
        applied_sequence=model.applied_sequence,
        residency=core.ledger.residency.get(model.model_id, ()),
        parameter_count=model.parameter_count,
        state_bytes=model.state_bytes,
        has_tokenizer=model.has_tokenizer,
        create_time=timestamp(model.create_time),
        next_sequence=model.last_sequence + 1,
        snapshots=[
            model_pb2.Snapshot(
                snapshot_id=snapshot.snapshot_id,
                sequence=snapshot.sequence,
                step=snapshot.step,
                size_bytes=snapshot.size_bytes,
                create_time=timestamp(snapshot.create_time),
            )
            for snapshot in sorted(
                core.ledger.snapshots_of_model.get(model.model_id, {}).values(), key=lambda s: s.sequence, reverse=True
            )
            if snapshot.committed
        ],
        recoveries=model.recoveries,
    )


def fill_call(message: call_pb2.Call, core: Core, call: Call) -> None:
    """Writes a call without its result into an empty message; a pending one says what it waits for."""
    message.call_id = call.call_id
    message.request_id = call.request_id
    message.job_id = call.job_id
    message.model_id = call.model_id
    message.kind = types_pb2.CallKind.ValueType(call.kind)
    message.sequence = call.sequence
    message.state = types_pb2.CallState.ValueType(call.state)
    reason = call.reason
    if call.state is CallState.PENDING:
        why = blocked(core.ledger, call)
        reason = why.reason if why is not None else CallReason.GROUP_BUSY
    message.reason = types_pb2.CallReason.ValueType(reason)
    if call.error is not None:
        message.error.MergeFromString(call.error)
    message.attempt = call.attempt
    message.weights_version = call.weights_version
    message.worker_id = call.worker_id or ""
    if call.session_id is not None:
        message.session_id = call.session_id
    message.progress_done, message.progress_total = core.ledger.progress.get(call.call_id, (0, 0))
    _fill_time(message.create_time, call.create_time)
    if call.start_time is not None:
        _fill_time(message.start_time, call.start_time)
    if call.end_time is not None:
        _fill_time(message.end_time, call.end_time)


def _fill_time(message: timestamp_pb2.Timestamp, at: float) -> None:
    message.seconds = seconds = int(at)
    message.nanos = int((at - seconds) * 1e9)


def session_message(core: Core, session: Session) -> session_pb2.Session:
    """A session as it stands now."""
    facts = core.ledger.session_facts.get(session.session_id)
    grant = grant_of(core.ledger, session) if facts is not None else 0
    return session_pb2.Session(
        session_id=session.session_id,
        job_id=session.job_id,
        model_id=session.model_id,
        state=session_pb2.SessionState.ValueType(session.state),
        grant=session_pb2.SessionGrant.ValueType(grant),
        max_concurrent=session.max_concurrent,
        grace=duration(session.grace_s),
        idle_limit=duration(session.idle_limit_s),
        running=len(facts.in_flight) if facts is not None else 0,
        create_time=timestamp(session.create_time),
        end_time=timestamp(session.end_time),
    )


def call_message(core: Core, call: Call) -> call_pb2.Call:
    """A call without its result."""
    message = call_pb2.Call()
    fill_call(message, core, call)
    return message


def fill_small_call(message: call_pb2.Call, core: Core, call: Call) -> bool:
    """Writes a call with its result where it has one; False when the result must be read from the payload store."""
    if call.result is not None and call.result.inline is None:
        return False
    fill_call(message, core, call)
    if call.result is not None and call.result.inline is not None:
        message.result.MergeFromString(call.result.inline)
    return True


async def full_call_message(core: Core, call: Call) -> call_pb2.Call:
    """A call with its result where it has one."""
    message = call_message(core, call)
    if call.result is not None:
        message.result.MergeFromString(await core.fetch(call.tenant, call.result))
    return message


def checkpoint_message(checkpoint: Checkpoint) -> types_pb2.Checkpoint:
    """A committed checkpoint."""
    return types_pb2.Checkpoint(
        checkpoint_id=checkpoint.checkpoint_id,
        model_id=checkpoint.model_id,
        label=checkpoint.label,
        sequence=checkpoint.sequence,
        step=checkpoint.step,
        size_bytes=checkpoint.size_bytes,
        manifest_sha256=checkpoint.manifest_sha256,
        create_time=timestamp(checkpoint.create_time),
    )


def worker_message(core: Core, worker: Worker) -> admin_pb2.Worker:
    """A worker with what it holds."""
    group = core.ledger.groups[worker.worker_id]
    models = [core.ledger.models[m] for m in core.ledger.models_of_worker[worker.worker_id]]
    return admin_pb2.Worker(
        worker_id=worker.worker_id,
        name=worker.name,
        state=admin_pb2.WorkerState.ValueType(worker.state),
        address=worker.address,
        labels=dict(worker.labels),
        capabilities=registry_pb2.WorkerCapabilities.FromString(worker.capabilities),
        worker_incarnation=worker.incarnation,
        last_sync_time=timestamp(group.last_sync),
        deployments=[
            registry_pb2.DeploymentStatus(
                model_id=model.model_id,
                residency=core.ledger.residency.get(model.model_id, ()),
                weights_version=model.weights_version,
                applied_sequence=model.applied_sequence,
            )
            for model in models
        ],
        serving_job_id=group.serving or "",
        message="" if group.connected else group.trouble,
    )


def interval_message(interval: Interval) -> types_pb2.DeviceInterval:
    """A stretch of device time."""
    return types_pb2.DeviceInterval(
        kind=types_pb2.IntervalKind.ValueType(interval.kind),
        worker_id=interval.worker_id,
        job_id=interval.job_id,
        model_id=interval.model_id,
        call_id=interval.call_id or "",
        call_kind=types_pb2.CallKind.ValueType(interval.call_kind or 0),
        start_unix_ns=interval.start_unix_ns,
        end_unix_ns=interval.end_unix_ns,
        moved_bytes=interval.moved_bytes,
    )
