"""The schema: one table per record type, and the logs beside them. `migrations` creates what stands here.

States are stored by name, so that psql reads well; times are seconds of Unix time. `live` and `cancelling` are derived
from the state: they alone stand in indexes, because an update that changes no indexed column stays on its page. Calls
have not even `live`: a call that only succeeds changes no index entry from its insert on. Nor have they foreign keys,
which cost as much per row as the row: a commit checks once that the models of its new calls are there.
"""

from collections.abc import Iterable
from enum import IntEnum
from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Computed,
    Double,
    ForeignKey,
    Identity,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Numeric,
    SmallInteger,
    Table,
    Text,
    UniqueConstraint,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB

from plexrl_controller.domain.states import CallKind, CallState, IntervalKind, Role
from plexrl_controller.lifecycle import jobs as job_life
from plexrl_controller.lifecycle import models as model_life
from plexrl_controller.lifecycle import sessions as session_life
from plexrl_controller.lifecycle import workers as worker_life
from plexrl_controller.lifecycle.machine import Machine

metadata = MetaData(
    naming_convention={
        "pk": "%(table_name)s_pkey",
        "fk": "%(table_name)s_%(column_0_name)s_fkey",
        "ck": "%(table_name)s_%(constraint_name)s_check",
        "uq": "%(table_name)s_%(column_0_N_name)s_key",
        "ix": "%(table_name)s_%(column_0_N_name)s_index",
    }
)

_FILLFACTOR_HOT = 80
"""Room on a page for new versions of its rows."""
_FILLFACTOR_CALLS = 50
"""A call is written three times, mostly while its page is the last one: inserted, ended, acknowledged."""


def _text(name: str, **kwargs: Any) -> Column[str]:
    return Column(name, Text, nullable=False, **kwargs)


def _float(name: str) -> Column[float]:
    return Column(name, Double, nullable=False)


def _bigint(name: str) -> Column[int]:
    return Column(name, BigInteger, nullable=False)


def _bytes(name: str) -> Column[bytes]:
    return Column(name, LargeBinary, nullable=False)


def _names(members: Iterable[IntEnum]) -> str:
    return ", ".join(f"'{member.name}'" for member in sorted(members))


def _enum(name: str, members: Iterable[IntEnum], *, nullable: bool = False) -> tuple[Column[str], CheckConstraint]:
    """An enum's member by name, and the constraint that it is one."""
    return Column(name, Text, nullable=nullable), CheckConstraint(f"{name} IN ({_names(members)})", name=name)


def _state(machine: Machine[Any, Any, Any]) -> tuple[Column[Any] | CheckConstraint, ...]:
    """A machine's state, constrained to its table's states, and whether it is not terminal."""
    live = Column(
        "live", Boolean, Computed(f"state NOT IN ({_names(machine.terminal)})", persisted=True), nullable=False
    )
    states = _enum("state", machine.states.__members__.values())
    return (*states, live) if machine.terminal else states


def _payload(name: str) -> tuple[Column[Any], ...]:
    """A payload's hash and size, and its bytes when it is small."""
    return (
        Column(f"{name}_sha256", Text),
        Column(f"{name}_size_bytes", BigInteger),
        Column(f"{name}_inline", LargeBinary),
    )


def _revision() -> tuple[Column[int], CheckConstraint]:
    return _bigint("revision"), CheckConstraint("revision >= 1", name="revision")


leader = Table(
    "leader",
    metadata,
    Column("singleton", Boolean, primary_key=True, server_default=text("true")),
    CheckConstraint("singleton", name="singleton"),
    _bigint("term"),
    _text("holder"),
    _text("commit_id"),
    comment="The newest term. Every commit writes this row, so an older leader cannot.",
)

tokens = Table(
    "tokens",
    metadata,
    Column("token_id", Text, primary_key=True),
    _text("token_sha256", unique=True),
    _text("label"),
    *_enum("role", Role),
    Column("tenant", Text),
    Column("revoked", Boolean, nullable=False),
    *_revision(),
    comment="Bearer tokens, by hash.",
)

jobs = Table(
    "jobs",
    metadata,
    Column("job_id", Text, primary_key=True),
    _text("tenant"),
    _text("name"),
    *_state(job_life.MACHINE),
    _float("create_time"),
    _float("lease_s"),
    _float("weight"),
    _float("slowdown_target"),
    Column("labels", JSONB, nullable=False),
    Column("end_time", Double),
    _text("message"),
    _bytes("client_state"),
    *_revision(),
    Index("jobs_live_name", "tenant", "name", unique=True, postgresql_where=text("live")),
    Index("jobs_newest", "create_time", "job_id"),
    Index("jobs_tenant_newest", "tenant", "create_time", "job_id"),
    comment="RLVR runs.",
)

models = Table(
    "models",
    metadata,
    Column("model_id", Text, primary_key=True),
    Column("job_id", Text, ForeignKey("jobs.job_id"), nullable=False),
    _text("tenant"),
    _text("name"),
    *_state(model_life.MACHINE),
    _float("create_time"),
    Column("role", SmallInteger, nullable=False),
    _bytes("base"),
    _bytes("settings"),
    _bytes("affinity"),
    Column("worker_id", Text),
    _bigint("worker_incarnation"),
    _bigint("weights_version"),
    _bigint("applied_sequence"),
    _bigint("due_sequence"),
    _bigint("last_sequence"),
    _bigint("failed_sequence"),
    _bigint("step"),
    _bigint("log_start"),
    _bigint("recoveries"),
    _bigint("parameter_count"),
    _bigint("state_bytes"),
    Column("has_tokenizer", Boolean, nullable=False),
    _text("message"),
    *_revision(),
    Index("models_live_name", "job_id", "name", unique=True, postgresql_where=text("live")),
    Index("models_job", "job_id"),
    comment="LLMs of jobs, and where each stands in its sequence.",
    postgresql_with={"fillfactor": _FILLFACTOR_HOT},
)

calls = Table(
    "calls",
    metadata,
    Column("call_id", Text, primary_key=True),
    _text("request_id"),
    _text("request_hash"),
    _text("job_id"),
    _text("model_id"),
    _text("tenant"),
    *_enum("kind", CallKind),
    *_enum("state", CallState),
    Column("cancelling", Boolean, Computed(f"state = '{CallState.CANCELLING.name}'", persisted=True), nullable=False),
    _bigint("sequence"),
    _bigint("weights_version"),
    *_payload("spec"),
    _float("create_time"),
    _float("deadline"),
    _text("reason"),
    Column("error", LargeBinary),
    *_payload("result"),
    Column("attempt", Integer, nullable=False),
    Column("lost_attempts", Integer, nullable=False),
    _bigint("leader_term"),
    Column("worker_id", Text),
    _bigint("worker_incarnation"),
    Column("checkpoint_id", Text),
    Column("start_time", Double),
    Column("end_time", Double),
    Column("acknowledged", Boolean, nullable=False),
    _text("outcome_sha256"),
    Column("session_id", Text),
    Column("source_model_id", Text),
    *_revision(),
    UniqueConstraint("job_id", "request_id"),
    Index(
        "calls_sequence",
        "model_id",
        "sequence",
        unique=True,
        postgresql_where=text(f"kind IN ({_names(kind for kind in CallKind if kind.sequenced)})"),
    ),
    Index("calls_cancelling", "call_id", postgresql_where=text("cancelling")),
    Index("calls_newest", "create_time", "call_id"),
    Index("calls_tenant_newest", "tenant", "create_time", "call_id"),
    Index("calls_job_newest", "job_id", "create_time", "call_id"),
    comment="Requested function executions.",
    postgresql_with={"fillfactor": _FILLFACTOR_CALLS},
)

sessions = Table(
    "sessions",
    metadata,
    Column("session_id", Text, primary_key=True),
    _text("job_id"),
    Column("model_id", Text, ForeignKey("models.model_id"), nullable=False),
    _text("tenant"),
    *_state(session_life.MACHINE),
    Column("max_concurrent", Integer, nullable=False),
    _float("grace_s"),
    _float("idle_limit_s"),
    _float("create_time"),
    Column("end_time", Double),
    *_revision(),
    Index("sessions_live", "session_id", postgresql_where=text("live")),
    Index("sessions_oldest_end", "end_time", postgresql_where=text("NOT live")),
    Index("sessions_model", "model_id"),
    comment="Grants for generates of one model that run together.",
)

workers = Table(
    "workers",
    metadata,
    Column("worker_id", Text, primary_key=True),
    _text("name"),
    *_state(worker_life.MACHINE),
    _text("address"),
    _bigint("incarnation"),
    Column("life_nonce", Numeric(20, 0), nullable=False),
    _bytes("capabilities"),
    Column("labels", JSONB, nullable=False),
    _text("version"),
    *_revision(),
    Column("cordoned", Boolean, nullable=False, server_default=text("false")),
    comment="Worker daemons.",
)

checkpoints = Table(
    "checkpoints",
    metadata,
    Column("checkpoint_id", Text, primary_key=True),
    Column("model_id", Text, ForeignKey("models.model_id"), nullable=False),
    _text("job_id"),
    _text("tenant"),
    _text("label"),
    _bigint("sequence"),
    _bigint("step"),
    _bigint("weights_version"),
    _bigint("size_bytes"),
    _text("manifest_sha256"),
    _float("create_time"),
    *_revision(),
    Index("checkpoints_model_newest", "model_id", "create_time", "checkpoint_id"),
    comment="Committed copies of full training states.",
)

snapshots = Table(
    "snapshots",
    metadata,
    Column("snapshot_id", Text, primary_key=True),
    Column("model_id", Text, ForeignKey("models.model_id"), nullable=False),
    _text("job_id"),
    _text("tenant"),
    Column("slot", Integer, nullable=False),
    Column("committed", Boolean, nullable=False),
    _bigint("sequence"),
    _bigint("step"),
    _bigint("weights_version"),
    _bigint("size_bytes"),
    _text("manifest_sha256"),
    _float("create_time"),
    *_revision(),
    UniqueConstraint("model_id", "slot"),
    comment="Places for automatic copies of full training states, used in turn.",
)

intervals = Table(
    "intervals",
    metadata,
    Column("interval_id", BigInteger, Identity(always=True), primary_key=True),
    *_enum("kind", IntervalKind),
    _text("worker_id"),
    _text("job_id"),
    _text("model_id"),
    Column("call_id", Text),
    *_enum("call_kind", CallKind, nullable=True),
    _bigint("start_unix_ns"),
    _bigint("end_unix_ns"),
    _bigint("moved_bytes"),
    Index("intervals_oldest", "end_unix_ns", "interval_id"),
    Index("intervals_job_oldest", "job_id", "end_unix_ns", "interval_id"),
    comment="Device time, as the workers measured it.",
)

folded_accounts = Table(
    "folded_accounts",
    metadata,
    Column("job_id", Text, primary_key=True),
    _float("busy_s"),
    _float("swap_s"),
    _float("hold_s"),
    _bigint("swaps"),
    comment="Device seconds of live jobs whose intervals are pruned.",
)

events = Table(
    "events",
    metadata,
    Column("event_id", BigInteger, Identity(always=True), primary_key=True),
    _text("machine"),
    _text("record_id"),
    _text("event"),
    Column("source", Text),
    _text("target"),
    _float("at"),
    _text("reason"),
    Column("attempt", Integer, nullable=False),
    _bigint("leader_term"),
    Index("events_record", "record_id", "event_id"),
    comment="One row per transition.",
)

requests = Table(
    "requests",
    metadata,
    Column("scope", Text, primary_key=True),
    Column("request_id", Text, primary_key=True),
    _text("request_hash"),
    _text("resource_id"),
    _float("create_time"),
    Index("requests_oldest", "create_time"),
    comment="What became of mutating requests that made something other than a call.",
)
