"""Records with every field set to something that is not its default, so that a lost column shows."""

from dataclasses import replace
from typing import Any

from plexrl_controller.domain.ids import (
    CallId,
    CheckpointId,
    JobId,
    ModelId,
    RequestId,
    SessionId,
    SnapshotId,
    Tenant,
    TokenId,
    WorkerId,
)
from plexrl_controller.domain.records import (
    Call,
    Checkpoint,
    Event,
    Interval,
    Job,
    Model,
    Payload,
    Request,
    Session,
    Snapshot,
    Token,
    Worker,
)
from plexrl_controller.domain.states import (
    CallKind,
    CallReason,
    CallState,
    IntervalKind,
    JobState,
    ModelState,
    Role,
    SessionState,
    WorkerState,
)

TENANT = Tenant("acme")
T0 = 1_790_000_000.25


def make_job(number: int = 1, **changes: Any) -> Job:
    job = Job(
        job_id=JobId(f"job-{number}"),
        tenant=TENANT,
        name=f"run {number} ü",
        state=JobState.ACTIVE,
        create_time=T0 + number,
        lease_s=90.5,
        weight=2.5,
        slowdown_target=1.4,
        labels={"team": "math", "quote": '"{},\\'},
        end_time=None,
        message="fine",
        client_state=b"\x00\xffstate",
        revision=1,
    )
    return replace(job, **changes)


def make_model(number: int = 1, job: int = 1, **changes: Any) -> Model:
    model = Model(
        model_id=ModelId(f"model-{number}"),
        job_id=JobId(f"job-{job}"),
        tenant=TENANT,
        name=f"policy-{number}",
        state=ModelState.PLACED,
        create_time=T0 + number,
        role=2,
        base=b"\x00base",
        settings=b"settings",
        affinity=b"affinity",
        worker_id=WorkerId("worker-1"),
        worker_incarnation=3,
        weights_version=4,
        applied_sequence=5,
        due_sequence=6,
        last_sequence=7,
        failed_sequence=8,
        step=9,
        log_start=3,
        recoveries=2,
        parameter_count=312_000,
        state_bytes=2**40,
        has_tokenizer=True,
        message="placed",
    )
    return replace(model, **changes)


def make_call(number: int = 1, job: int = 1, model: int = 1, **changes: Any) -> Call:
    call = Call(
        call_id=CallId(f"call-{number}"),
        request_id=RequestId(f"request-{number}"),
        request_hash=f"hash-{number}",
        job_id=JobId(f"job-{job}"),
        model_id=ModelId(f"model-{model}"),
        tenant=TENANT,
        kind=CallKind.FORWARD_BACKWARD,
        state=CallState.PENDING,
        sequence=number,
        weights_version=2,
        spec=Payload("ab" * 32, 5, b"\x00spec"),
        create_time=T0 + number,
        deadline=T0 + 600,
        reason=CallReason.GROUP_BUSY,
        error=b"status",
        result=Payload("cd" * 32, 2**33),
        attempt=2,
        lost_attempts=1,
        leader_term=3,
        worker_id=WorkerId("worker-1"),
        worker_incarnation=4,
        checkpoint_id=CheckpointId("checkpoint-9"),
        start_time=T0 + 1.5,
        end_time=T0 + 2.5,
        acknowledged=False,
        outcome_sha256="12" * 32,
        session_id=SessionId("session-1"),
        source_model_id=ModelId("model-2"),
        revision=1,
    )
    return replace(call, **changes)


def make_session(number: int = 1, model: int = 1, **changes: Any) -> Session:
    session = Session(
        session_id=SessionId(f"session-{number}"),
        job_id=JobId("job-1"),
        model_id=ModelId(f"model-{model}"),
        tenant=TENANT,
        state=SessionState.OPEN,
        max_concurrent=24,
        grace_s=2.5,
        idle_limit_s=90.25,
        create_time=T0 + number,
        end_time=None,
        revision=1,
    )
    return replace(session, **changes)


def make_worker(number: int = 1, **changes: Any) -> Worker:
    worker = Worker(
        worker_id=WorkerId(f"worker-{number}"),
        name=f"gpu-{number}",
        state=WorkerState.READY,
        address="127.0.0.1:7000",
        incarnation=2,
        life_nonce=2**64 - 1,
        capabilities=b"capabilities",
        labels={"zone": "a"},
        version="0.1.0",
    )
    return replace(worker, **changes)


def make_checkpoint(number: int = 1, model: int = 1, **changes: Any) -> Checkpoint:
    checkpoint = Checkpoint(
        checkpoint_id=CheckpointId(f"checkpoint-{number}"),
        model_id=ModelId(f"model-{model}"),
        job_id=JobId("job-1"),
        tenant=TENANT,
        label="best so far",
        sequence=11,
        step=5,
        weights_version=10,
        size_bytes=2**35,
        manifest_sha256="ef" * 32,
        create_time=T0 + number,
    )
    return replace(checkpoint, **changes)


def make_snapshot(number: int = 1, model: int = 1, **changes: Any) -> Snapshot:
    snapshot = Snapshot(
        snapshot_id=SnapshotId(f"snapshot-{number}"),
        model_id=ModelId(f"model-{model}"),
        job_id=JobId("job-1"),
        tenant=TENANT,
        slot=number,
        committed=True,
        sequence=11,
        step=5,
        weights_version=10,
        size_bytes=2**35,
        manifest_sha256="ef" * 32,
        create_time=T0 + number,
    )
    return replace(snapshot, **changes)


def make_token(number: int = 1, **changes: Any) -> Token:
    token = Token(
        token_id=TokenId(f"token-{number}"),
        token_sha256=f"{number:064x}",
        label="laptop",
        role=Role.TENANT,
        tenant=TENANT,
    )
    return replace(token, **changes)


def make_request(number: int = 1, scope: str = "acme") -> Request:
    return Request(scope, RequestId(f"request-{number}"), f"hash-{number}", f"job-{number}", T0 + number)


def make_interval(
    start_s: float, seconds: float = 1.0, kind: IntervalKind = IntervalKind.BUSY, job: int = 1, **changes: Any
) -> Interval:
    start_unix_ns = int(start_s * 1e9)
    interval = Interval(
        kind=kind,
        worker_id=WorkerId("worker-1"),
        job_id=JobId(f"job-{job}"),
        model_id=ModelId("model-1"),
        call_id=CallId("call-1"),
        call_kind=CallKind.GENERATE,
        start_unix_ns=start_unix_ns,
        end_unix_ns=start_unix_ns + int(seconds * 1e9),
        moved_bytes=2**34,
    )
    return replace(interval, **changes)


def make_event(record_id: str, event: str = "DISPATCH", at: float = T0) -> Event:
    return Event("call", record_id, event, "PENDING", "DISPATCHED", at, reason="GROUP_BUSY", attempt=2, leader_term=3)
