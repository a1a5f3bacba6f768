"""A call that only succeeds changes no index entry from its insert on, and none is checked against its job and model.

`calls.live` stood in an index, so that every outcome was written into each of the seven; what a new leader must know
beyond the calls of live jobs is what is cancelling.
"""

from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

UP = (
    "ALTER TABLE calls DROP CONSTRAINT calls_job_id_fkey, DROP CONSTRAINT calls_model_id_fkey",
    "DROP INDEX calls_live",
    "ALTER TABLE calls DROP COLUMN live",
    "ALTER TABLE calls ADD COLUMN cancelling BOOLEAN GENERATED ALWAYS AS (state = 'CANCELLING') STORED NOT NULL",
    "CREATE INDEX calls_cancelling ON calls (call_id) WHERE cancelling",
    "ALTER TABLE calls SET (fillfactor = 50)",
)
DOWN = (
    "ALTER TABLE calls SET (fillfactor = 80)",
    "DROP INDEX calls_cancelling",
    "ALTER TABLE calls DROP COLUMN cancelling",
    """ALTER TABLE calls ADD COLUMN live BOOLEAN
    GENERATED ALWAYS AS (state NOT IN ('SUCCEEDED', 'FAILED', 'CANCELLED', 'EXPIRED')) STORED NOT NULL""",
    "CREATE INDEX calls_live ON calls (create_time, call_id) WHERE live",
    "ALTER TABLE calls ADD CONSTRAINT calls_job_id_fkey FOREIGN KEY (job_id) REFERENCES jobs (job_id)",
    "ALTER TABLE calls ADD CONSTRAINT calls_model_id_fkey FOREIGN KEY (model_id) REFERENCES models (model_id)",
)


def upgrade() -> None:
    for statement in UP:
        op.execute(statement)


def downgrade() -> None:
    for statement in DOWN:
        op.execute(statement)
