"""The store's queries. Each goes by an index; `tests/store/test_query_plans.py` holds them to it."""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Select, case, func, not_, or_, select, tuple_

from plexrl_controller.domain.ids import JobId, ModelId, Tenant
from plexrl_controller.domain.states import CallState, IntervalKind
from plexrl_controller.lifecycle import calls as call_life
from plexrl_controller.store import rows
from plexrl_controller.store.paging import decode_page
from plexrl_controller.store.port import Page
from plexrl_controller.store.rows import RowCodec
from plexrl_controller.store.tables import (
    calls,
    checkpoints,
    events,
    folded_accounts,
    intervals,
    jobs,
    models,
    requests,
    sessions,
    snapshots,
    tokens,
    workers,
)

INTERVAL_BATCH = 1000
BULK_FIELDS = ("spec", "result")
"""Fields of a call that a listing leaves out."""

LIVE_JOBS = select(*rows.JOB.columns).where(jobs.c.live).order_by(jobs.c.create_time, jobs.c.job_id)
LIVE_MODELS = select(*rows.MODEL.columns).where(models.c.live).order_by(models.c.create_time, models.c.model_id)
OPEN_SESSIONS = (
    select(*rows.SESSION.columns).where(sessions.c.live).order_by(sessions.c.create_time, sessions.c.session_id)
)
WORKERS = select(*rows.WORKER.columns).order_by(workers.c.worker_id)
TOKENS = select(*rows.TOKEN.columns).order_by(tokens.c.token_id)
REQUESTS = select(*rows.REQUEST.columns).order_by(requests.c.create_time, requests.c.scope, requests.c.request_id)

_LIVE = calls.c.state.not_in([state.name for state in sorted(call_life.TERMINAL)])
_CALLS_OF_LIVE_JOBS = (
    select(calls)
    .join(jobs, jobs.c.job_id == calls.c.job_id)
    .where(jobs.c.live)
    .order_by(calls.c.create_time, calls.c.call_id)
)
HELD_CALLS = _CALLS_OF_LIVE_JOBS.with_only_columns(*rows.CALL.columns).where(
    or_(_LIVE, not_(calls.c.acknowledged)), not_(calls.c.cancelling)
)
"""Of live jobs: what is not terminal or not acknowledged. A job that ended left nothing live but what is cancelling."""
CANCELLING_CALLS = select(*rows.CALL.columns).where(calls.c.cancelling)
TOMBSTONES = _CALLS_OF_LIVE_JOBS.with_only_columns(
    calls.c.job_id, calls.c.request_id, calls.c.request_hash, calls.c.call_id
).where(not_(_LIVE), calls.c.acknowledged)

LOGGED_CALLS = _CALLS_OF_LIVE_JOBS.with_only_columns(*rows.CALL.columns).where(
    not_(_LIVE), calls.c.acknowledged, calls.c.spec_sha256.is_not(None)
)

SNAPSHOTS_OF_LIVE_MODELS = (
    select(*rows.SNAPSHOT.columns)
    .join(models, models.c.model_id == snapshots.c.model_id)
    .where(models.c.live)
    .order_by(snapshots.c.model_id, snapshots.c.slot)
)
CHECKPOINTS_OF_LIVE_MODELS = (
    select(*rows.CHECKPOINT.columns)
    .join(models, models.c.model_id == checkpoints.c.model_id)
    .where(models.c.live)
    .order_by(checkpoints.c.create_time, checkpoints.c.checkpoint_id)
)


def _seconds(kind: IntervalKind) -> Any:
    nanoseconds = case(
        (intervals.c.kind == kind.name, intervals.c.end_unix_ns - intervals.c.start_unix_ns),
        else_=0,
    )
    return func.sum(nanoseconds) / 1e9


_ACCOUNTS = (
    select(
        intervals.c.job_id,
        _seconds(IntervalKind.BUSY).label("busy_s"),
        (_seconds(IntervalKind.SWAP_IN) + _seconds(IntervalKind.SWAP_OUT)).label("swap_s"),
        _seconds(IntervalKind.HOLD).label("hold_s"),
        func.count()
        .filter(intervals.c.kind.in_([IntervalKind.SWAP_IN.name, IntervalKind.SWAP_OUT.name]))
        .label("swaps"),
    )
    .group_by(intervals.c.job_id)
    .order_by(intervals.c.job_id)
)
_FOLDED_ACCOUNTS = select(folded_accounts)
_SUCCEEDED = (
    select(calls.c.job_id, func.count()).where(calls.c.state == CallState.SUCCEEDED.name).group_by(calls.c.job_id)
)
ACCOUNTS = _ACCOUNTS.join(jobs, jobs.c.job_id == intervals.c.job_id).where(jobs.c.live)
FOLDED_ACCOUNTS = _FOLDED_ACCOUNTS.join(jobs, jobs.c.job_id == folded_accounts.c.job_id).where(jobs.c.live)
SUCCEEDED = _SUCCEEDED.join(jobs, jobs.c.job_id == calls.c.job_id).where(jobs.c.live)


def accounts_of(job_ids: Sequence[JobId]) -> tuple[Select[Any], Select[Any], Select[Any]]:
    """What ACCOUNTS, FOLDED_ACCOUNTS and SUCCEEDED tell of live jobs, of the jobs given."""
    return (
        _ACCOUNTS.where(intervals.c.job_id.in_(job_ids)),
        _FOLDED_ACCOUNTS.where(folded_accounts.c.job_id.in_(job_ids)),
        _SUCCEEDED.where(calls.c.job_id.in_(job_ids)),
    )


def by_id(codec: RowCodec[Any], record_id: str) -> Select[Any]:
    """One record, in any state."""
    return select(*codec.columns).where(codec.table.primary_key.columns[0] == record_id)


def list_jobs(tenant: Tenant | None, live_only: bool, page: Page) -> Select[Any]:
    """One row more than the page holds. Raises InvalidArgument for a bad page."""
    query = _newest_first(rows.JOB, page)
    if tenant is not None:
        query = query.where(jobs.c.tenant == tenant)
    return query.where(jobs.c.live) if live_only else query


def list_calls(tenant: Tenant | None, job_id: JobId | None, page: Page) -> Select[Any]:
    """One row more than the page holds, without bulk. Raises InvalidArgument for a bad page."""
    bulk = {name for field in rows.CALL.fields if field.field in BULK_FIELDS for name in field.columns}
    query = _newest_first(rows.CALL, page).with_only_columns(
        *(column for column in rows.CALL.columns if column.name not in bulk)
    )
    if tenant is not None:
        query = query.where(calls.c.tenant == tenant)
    if job_id is not None:
        query = query.where(calls.c.job_id == job_id)
    return query


def list_checkpoints(model_id: ModelId) -> Select[Any]:
    """A model's checkpoints, newest first."""
    newest = (checkpoints.c.create_time.desc(), checkpoints.c.checkpoint_id.desc())
    return select(*rows.CHECKPOINT.columns).where(checkpoints.c.model_id == model_id).order_by(*newest)


def list_intervals(tenant: Tenant | None, job_id: JobId | None, after: tuple[int, int]) -> Select[Any]:
    """A batch of intervals in the order of their ends; `after` is the end and id of the last one read."""
    key = (intervals.c.end_unix_ns, intervals.c.interval_id)
    query = select(intervals).where(tuple_(*key) > tuple_(*after)).order_by(*key).limit(INTERVAL_BATCH)
    if job_id is not None:
        query = query.where(intervals.c.job_id == job_id)
    if tenant is not None:
        query = query.join(jobs, jobs.c.job_id == intervals.c.job_id).where(jobs.c.tenant == tenant)
    return query


def list_events(record_id: str) -> Select[Any]:
    """A record's transitions, oldest first."""
    return select(*rows.EVENT.columns).where(events.c.record_id == record_id).order_by(events.c.event_id)


def _newest_first(codec: RowCodec[Any], page: Page) -> Select[Any]:
    start = decode_page(page)
    key = (codec.table.c.create_time, codec.table.primary_key.columns[0])
    query = select(*codec.columns).order_by(*(column.desc() for column in key)).limit(page.size + 1)
    return query if start is None else query.where(tuple_(*key) < tuple_(*start))
