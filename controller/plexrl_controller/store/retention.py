"""What the store may forget, as statements: each deletes one batch, oldest first.

History is the events and intervals of anything, sessions that ended, and the calls, models, jobs and request keys of
jobs that did. A job's seconds outlive its intervals: they are folded into its account in the same statement. Whatever a
checkpoint or snapshot belongs to stays, and of a live job nothing goes that a resend could ask for.
"""

from sqlalchemy import text

BATCH_ROWS = 2000

EVENTS = """
WITH gone AS (
    DELETE FROM events WHERE event_id IN (
        SELECT event_id FROM (SELECT event_id, at FROM events ORDER BY event_id LIMIT :rows) AS oldest
        WHERE at < :before
    )
    RETURNING 1
)
SELECT count(*) FROM gone"""

INTERVALS = """
WITH gone AS (
    DELETE FROM intervals WHERE interval_id IN (
        SELECT interval_id FROM intervals WHERE end_unix_ns < CAST(:before * 1e9 AS bigint)
        ORDER BY end_unix_ns, interval_id LIMIT :rows
    )
    RETURNING job_id, kind, (end_unix_ns - start_unix_ns) / 1e9 AS seconds
), folded AS (
    INSERT INTO folded_accounts AS account (job_id, busy_s, swap_s, hold_s, swaps)
    SELECT job_id,
           coalesce(sum(seconds) FILTER (WHERE kind = 'BUSY'), 0),
           coalesce(sum(seconds) FILTER (WHERE kind IN ('SWAP_IN', 'SWAP_OUT')), 0),
           coalesce(sum(seconds) FILTER (WHERE kind = 'HOLD'), 0),
           count(*) FILTER (WHERE kind IN ('SWAP_IN', 'SWAP_OUT'))
    FROM gone WHERE job_id IN (SELECT job_id FROM jobs WHERE live) GROUP BY job_id
    ON CONFLICT (job_id) DO UPDATE SET
        busy_s = account.busy_s + excluded.busy_s, swap_s = account.swap_s + excluded.swap_s,
        hold_s = account.hold_s + excluded.hold_s, swaps = account.swaps + excluded.swaps
)
SELECT count(*) FROM gone"""

CALLS = """
WITH gone AS (
    DELETE FROM calls WHERE call_id IN (
        SELECT calls.call_id FROM jobs JOIN calls ON calls.job_id = jobs.job_id
        WHERE NOT jobs.live AND jobs.end_time < :before AND NOT calls.cancelling LIMIT :rows
    )
    RETURNING 1
)
SELECT count(*) FROM gone"""

SESSIONS = """
WITH gone AS (
    DELETE FROM sessions WHERE session_id IN (
        SELECT session_id FROM sessions WHERE NOT live AND end_time < :before ORDER BY end_time LIMIT :rows
    )
    RETURNING 1
)
SELECT count(*) FROM gone"""

SNAPSHOTS = """
WITH gone AS (
    DELETE FROM snapshots WHERE snapshot_id IN (
        SELECT snapshots.snapshot_id FROM jobs
        JOIN models ON models.job_id = jobs.job_id JOIN snapshots ON snapshots.model_id = models.model_id
        WHERE NOT jobs.live AND jobs.end_time < :before AND NOT models.live AND NOT snapshots.committed LIMIT :rows
    )
    RETURNING 1
)
SELECT count(*) FROM gone"""

MODELS = """
WITH gone AS (
    DELETE FROM models WHERE model_id IN (
        SELECT models.model_id FROM jobs JOIN models ON models.job_id = jobs.job_id
        WHERE NOT jobs.live AND jobs.end_time < :before AND NOT models.live
          AND NOT EXISTS (SELECT FROM checkpoints WHERE checkpoints.model_id = models.model_id)
          AND NOT EXISTS (SELECT FROM snapshots WHERE snapshots.model_id = models.model_id)
          AND NOT EXISTS (SELECT FROM sessions WHERE sessions.model_id = models.model_id)
          AND NOT EXISTS (SELECT FROM calls WHERE calls.model_id = models.model_id)
        LIMIT :rows
    )
    RETURNING 1
)
SELECT count(*) FROM gone"""

ACCOUNTS = """
WITH gone AS (
    DELETE FROM folded_accounts WHERE job_id IN (
        SELECT job_id FROM jobs WHERE NOT live AND end_time < :before LIMIT :rows
    )
    RETURNING 1
)
SELECT count(*) FROM gone"""

JOBS = """
WITH gone AS (
    DELETE FROM jobs WHERE job_id IN (
        SELECT job_id FROM jobs
        WHERE NOT live AND end_time < :before
          AND NOT EXISTS (SELECT FROM models WHERE models.job_id = jobs.job_id)
          AND NOT EXISTS (SELECT FROM calls WHERE calls.job_id = jobs.job_id)
        LIMIT :rows
    )
    RETURNING 1
)
SELECT count(*) FROM gone"""

REQUESTS = """
WITH gone AS (
    DELETE FROM requests WHERE (scope, request_id) IN (
        SELECT scope, request_id FROM requests
        WHERE create_time < :before
          AND NOT EXISTS (SELECT FROM jobs WHERE jobs.job_id = requests.resource_id AND jobs.live)
          AND NOT EXISTS (
              SELECT FROM models WHERE models.model_id = split_part(requests.resource_id, '@', 1) AND models.live
          )
        ORDER BY create_time LIMIT :rows
    )
    RETURNING 1
)
SELECT count(*) FROM gone"""

STEPS = tuple(text(step) for step in (EVENTS, INTERVALS, CALLS, SESSIONS, SNAPSHOTS, MODELS, ACCOUNTS, JOBS, REQUESTS))
"""In an order in which nothing that is left refers to something that went."""
