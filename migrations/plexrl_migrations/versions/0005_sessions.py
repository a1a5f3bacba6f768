"""Sessions: grants for generates that run together, and which calls belong to one."""

from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

UP = (
    """CREATE TABLE sessions (
    session_id TEXT NOT NULL,
    job_id TEXT NOT NULL,
    model_id TEXT NOT NULL,
    tenant TEXT NOT NULL,
    state TEXT NOT NULL,
    live BOOLEAN GENERATED ALWAYS AS (state NOT IN ('CLOSED', 'EXPIRED')) STORED NOT NULL,
    max_concurrent INTEGER NOT NULL,
    grace_s DOUBLE PRECISION NOT NULL,
    idle_limit_s DOUBLE PRECISION NOT NULL,
    create_time DOUBLE PRECISION NOT NULL,
    end_time DOUBLE PRECISION,
    revision BIGINT NOT NULL,
    CONSTRAINT sessions_pkey PRIMARY KEY (session_id),
    CONSTRAINT sessions_state_check CHECK (state IN ('OPEN', 'CLOSED', 'EXPIRED')),
    CONSTRAINT sessions_revision_check CHECK (revision >= 1),
    CONSTRAINT sessions_model_id_fkey FOREIGN KEY(model_id) REFERENCES models (model_id)
)""",
    "COMMENT ON TABLE sessions IS 'Grants for generates of one model that run together.'",
    "CREATE INDEX sessions_live ON sessions (session_id) WHERE live",
    "CREATE INDEX sessions_oldest_end ON sessions (end_time) WHERE NOT live",
    "CREATE INDEX sessions_model ON sessions (model_id)",
    "ALTER TABLE calls ADD COLUMN session_id TEXT",
)
DOWN = ("ALTER TABLE calls DROP COLUMN session_id", "DROP TABLE sessions")


def upgrade() -> None:
    for statement in UP:
        op.execute(statement)


def downgrade() -> None:
    for statement in DOWN:
        op.execute(statement)
