"""The first schema. What a column means stands at its field in `plexrl_controller.domain.records`."""

from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

TABLES = """
CREATE TABLE leader (
    singleton BOOLEAN DEFAULT true NOT NULL,
    term BIGINT NOT NULL,
    holder TEXT NOT NULL,
    commit_id TEXT NOT NULL,
    CONSTRAINT leader_pkey PRIMARY KEY (singleton),
    CONSTRAINT leader_singleton_check CHECK (singleton)
);
COMMENT ON TABLE leader IS 'The newest term. Every commit writes this row, so an older leader cannot.';

CREATE TABLE tokens (
    token_id TEXT NOT NULL,
    token_sha256 TEXT NOT NULL,
    label TEXT NOT NULL,
    role TEXT NOT NULL,
    tenant TEXT,
    revoked BOOLEAN NOT NULL,
    revision BIGINT NOT NULL,
    CONSTRAINT tokens_pkey PRIMARY KEY (token_id),
    CONSTRAINT tokens_role_check CHECK (role IN ('ADMIN', 'TENANT', 'VIEWER', 'WORKER')),
    CONSTRAINT tokens_revision_check CHECK (revision >= 1),
    CONSTRAINT tokens_token_sha256_key UNIQUE (token_sha256)
);
COMMENT ON TABLE tokens IS 'Bearer tokens, by hash.';

CREATE TABLE jobs (
    job_id TEXT NOT NULL,
    tenant TEXT NOT NULL,
    name TEXT NOT NULL,
    state TEXT NOT NULL,
    live BOOLEAN GENERATED ALWAYS AS (state NOT IN ('FINISHED', 'FAILED', 'EXPIRED')) STORED NOT NULL,
    create_time DOUBLE PRECISION NOT NULL,
    lease_s DOUBLE PRECISION NOT NULL,
    weight DOUBLE PRECISION NOT NULL,
    slowdown_target DOUBLE PRECISION NOT NULL,
    labels JSONB NOT NULL,
    end_time DOUBLE PRECISION,
    message TEXT NOT NULL,
    client_state BYTEA NOT NULL,
    revision BIGINT NOT NULL,
    CONSTRAINT jobs_pkey PRIMARY KEY (job_id),
    CONSTRAINT jobs_state_check CHECK (state IN ('ACTIVE', 'PAUSED', 'FINISHING', 'FINISHED', 'FAILED', 'EXPIRED')),
    CONSTRAINT jobs_revision_check CHECK (revision >= 1)
);
CREATE UNIQUE INDEX jobs_live_name ON jobs (tenant, name) WHERE live;
CREATE INDEX jobs_newest ON jobs (create_time, job_id);
CREATE INDEX jobs_tenant_newest ON jobs (tenant, create_time, job_id);
COMMENT ON TABLE jobs IS 'RLVR runs.';

CREATE TABLE models (
    model_id TEXT NOT NULL,
    job_id TEXT NOT NULL,
    tenant TEXT NOT NULL,
    name TEXT NOT NULL,
    state TEXT NOT NULL,
    live BOOLEAN GENERATED ALWAYS AS (state NOT IN ('DELETED', 'FAILED')) STORED NOT NULL,
    create_time DOUBLE PRECISION NOT NULL,
    role SMALLINT NOT NULL,
    base BYTEA NOT NULL,
    settings BYTEA NOT NULL,
    affinity BYTEA NOT NULL,
    worker_id TEXT,
    worker_incarnation BIGINT NOT NULL,
    weights_version BIGINT NOT NULL,
    applied_sequence BIGINT NOT NULL,
    due_sequence BIGINT NOT NULL,
    last_sequence BIGINT NOT NULL,
    failed_sequence BIGINT NOT NULL,
    step BIGINT NOT NULL,
    restore_checkpoint_id TEXT,
    parameter_count BIGINT NOT NULL,
    state_bytes BIGINT NOT NULL,
    has_tokenizer BOOLEAN NOT NULL,
    message TEXT NOT NULL,
    revision BIGINT NOT NULL,
    CONSTRAINT models_pkey PRIMARY KEY (model_id),
    CONSTRAINT models_state_check CHECK (state IN (
        'CREATING', 'PLACED', 'RECOVERING', 'STATE_LOST', 'DELETING', 'DELETED', 'FAILED'
    )),
    CONSTRAINT models_revision_check CHECK (revision >= 1),
    CONSTRAINT models_job_id_fkey FOREIGN KEY(job_id) REFERENCES jobs (job_id)
) WITH (fillfactor = 80);
CREATE INDEX models_job ON models (job_id);
CREATE UNIQUE INDEX models_live_name ON models (job_id, name) WHERE live;
COMMENT ON TABLE models IS 'LLMs of jobs, and where each stands in its sequence.';

CREATE TABLE calls (
    call_id TEXT NOT NULL,
    request_id TEXT NOT NULL,
    request_hash TEXT NOT NULL,
    job_id TEXT NOT NULL,
    model_id TEXT NOT NULL,
    tenant TEXT NOT NULL,
    kind TEXT NOT NULL,
    state TEXT NOT NULL,
    live BOOLEAN GENERATED ALWAYS AS (state NOT IN ('SUCCEEDED', 'FAILED', 'CANCELLED', 'EXPIRED')) STORED NOT NULL,
    sequence BIGINT NOT NULL,
    weights_version BIGINT NOT NULL,
    spec_sha256 TEXT,
    spec_size_bytes BIGINT,
    spec_inline BYTEA,
    create_time DOUBLE PRECISION NOT NULL,
    deadline DOUBLE PRECISION NOT NULL,
    reason TEXT NOT NULL,
    error BYTEA,
    result_sha256 TEXT,
    result_size_bytes BIGINT,
    result_inline BYTEA,
    attempt INTEGER NOT NULL,
    lost_attempts INTEGER NOT NULL,
    leader_term BIGINT NOT NULL,
    worker_id TEXT,
    worker_incarnation BIGINT NOT NULL,
    checkpoint_id TEXT,
    start_time DOUBLE PRECISION,
    end_time DOUBLE PRECISION,
    acknowledged BOOLEAN NOT NULL,
    revision BIGINT NOT NULL,
    CONSTRAINT calls_pkey PRIMARY KEY (call_id),
    CONSTRAINT calls_kind_check CHECK (kind IN (
        'GENERATE', 'SCORE', 'FORWARD_BACKWARD', 'OPTIM_STEP', 'SYNC_WEIGHTS', 'SAVE_CHECKPOINT', 'LOAD_CHECKPOINT'
    )),
    CONSTRAINT calls_state_check CHECK (state IN (
        'PENDING', 'DISPATCHED', 'RUNNING', 'YIELDED', 'CANCELLING', 'SUCCEEDED', 'FAILED', 'CANCELLED', 'EXPIRED'
    )),
    CONSTRAINT calls_revision_check CHECK (revision >= 1),
    CONSTRAINT calls_job_id_request_id_key UNIQUE (job_id, request_id),
    CONSTRAINT calls_job_id_fkey FOREIGN KEY(job_id) REFERENCES jobs (job_id),
    CONSTRAINT calls_model_id_fkey FOREIGN KEY(model_id) REFERENCES models (model_id)
) WITH (fillfactor = 80);
CREATE INDEX calls_job_newest ON calls (job_id, create_time, call_id);
CREATE INDEX calls_live ON calls (create_time, call_id) WHERE live;
CREATE INDEX calls_newest ON calls (create_time, call_id);
CREATE UNIQUE INDEX calls_sequence ON calls (model_id, sequence)
    WHERE kind IN ('SCORE', 'FORWARD_BACKWARD', 'OPTIM_STEP', 'SYNC_WEIGHTS', 'SAVE_CHECKPOINT', 'LOAD_CHECKPOINT');
CREATE INDEX calls_tenant_newest ON calls (tenant, create_time, call_id);
COMMENT ON TABLE calls IS 'Requested function executions.';

CREATE TABLE workers (
    worker_id TEXT NOT NULL,
    name TEXT NOT NULL,
    state TEXT NOT NULL,
    address TEXT NOT NULL,
    incarnation BIGINT NOT NULL,
    life_nonce NUMERIC(20, 0) NOT NULL,
    capabilities BYTEA NOT NULL,
    labels JSONB NOT NULL,
    version TEXT NOT NULL,
    revision BIGINT NOT NULL,
    CONSTRAINT workers_pkey PRIMARY KEY (worker_id),
    CONSTRAINT workers_state_check CHECK (state IN ('JOINING', 'READY', 'CORDONED', 'DRAINING', 'DRAINED', 'LOST')),
    CONSTRAINT workers_revision_check CHECK (revision >= 1)
);
COMMENT ON TABLE workers IS 'Worker daemons.';

CREATE TABLE checkpoints (
    checkpoint_id TEXT NOT NULL,
    model_id TEXT NOT NULL,
    job_id TEXT NOT NULL,
    tenant TEXT NOT NULL,
    label TEXT NOT NULL,
    sequence BIGINT NOT NULL,
    step BIGINT NOT NULL,
    weights_version BIGINT NOT NULL,
    size_bytes BIGINT NOT NULL,
    manifest_sha256 TEXT NOT NULL,
    create_time DOUBLE PRECISION NOT NULL,
    revision BIGINT NOT NULL,
    CONSTRAINT checkpoints_pkey PRIMARY KEY (checkpoint_id),
    CONSTRAINT checkpoints_revision_check CHECK (revision >= 1),
    CONSTRAINT checkpoints_model_id_fkey FOREIGN KEY(model_id) REFERENCES models (model_id)
);
CREATE INDEX checkpoints_model_newest ON checkpoints (model_id, create_time, checkpoint_id);
COMMENT ON TABLE checkpoints IS 'Committed copies of full training states.';

CREATE TABLE intervals (
    interval_id BIGINT GENERATED ALWAYS AS IDENTITY,
    kind TEXT NOT NULL,
    worker_id TEXT NOT NULL,
    job_id TEXT NOT NULL,
    model_id TEXT NOT NULL,
    call_id TEXT,
    call_kind TEXT,
    start_unix_ns BIGINT NOT NULL,
    end_unix_ns BIGINT NOT NULL,
    moved_bytes BIGINT NOT NULL,
    CONSTRAINT intervals_pkey PRIMARY KEY (interval_id),
    CONSTRAINT intervals_kind_check CHECK (kind IN ('BUSY', 'SWAP_IN', 'HOLD', 'SWAP_OUT')),
    CONSTRAINT intervals_call_kind_check CHECK (call_kind IN (
        'GENERATE', 'SCORE', 'FORWARD_BACKWARD', 'OPTIM_STEP', 'SYNC_WEIGHTS', 'SAVE_CHECKPOINT', 'LOAD_CHECKPOINT'
    ))
);
CREATE INDEX intervals_job_oldest ON intervals (job_id, end_unix_ns, interval_id);
CREATE INDEX intervals_oldest ON intervals (end_unix_ns, interval_id);
COMMENT ON TABLE intervals IS 'Device time, as the workers measured it.';

CREATE TABLE events (
    event_id BIGINT GENERATED ALWAYS AS IDENTITY,
    machine TEXT NOT NULL,
    record_id TEXT NOT NULL,
    event TEXT NOT NULL,
    source TEXT,
    target TEXT NOT NULL,
    at DOUBLE PRECISION NOT NULL,
    reason TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    leader_term BIGINT NOT NULL,
    CONSTRAINT events_pkey PRIMARY KEY (event_id)
);
CREATE INDEX events_record ON events (record_id, event_id);
COMMENT ON TABLE events IS 'One row per transition.';

CREATE TABLE requests (
    scope TEXT NOT NULL,
    request_id TEXT NOT NULL,
    request_hash TEXT NOT NULL,
    resource_id TEXT NOT NULL,
    create_time DOUBLE PRECISION NOT NULL,
    CONSTRAINT requests_pkey PRIMARY KEY (scope, request_id)
);
COMMENT ON TABLE requests IS 'What became of mutating requests that made something other than a call.';

"""


def upgrade() -> None:
    for statement in TABLES.split(";\n"):
        if statement.strip():
            op.execute(statement)


def downgrade() -> None:
    op.execute("DROP TABLE requests, events, intervals, checkpoints, workers, calls, models, jobs, tokens, leader")
