"""Automatic snapshots, and what it takes to execute calls again after one of them.

What a model can be restored from follows from its checkpoints, its snapshots and the calls whose arguments are kept.
"""

from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

UP = (
    """CREATE TABLE snapshots (
    snapshot_id TEXT NOT NULL,
    model_id TEXT NOT NULL,
    job_id TEXT NOT NULL,
    tenant TEXT NOT NULL,
    slot INTEGER NOT NULL,
    committed BOOLEAN NOT NULL,
    sequence BIGINT NOT NULL,
    step BIGINT NOT NULL,
    weights_version BIGINT NOT NULL,
    size_bytes BIGINT NOT NULL,
    manifest_sha256 TEXT NOT NULL,
    create_time DOUBLE PRECISION NOT NULL,
    revision BIGINT NOT NULL,
    CONSTRAINT snapshots_pkey PRIMARY KEY (snapshot_id),
    CONSTRAINT snapshots_revision_check CHECK (revision >= 1),
    CONSTRAINT snapshots_model_id_slot_key UNIQUE (model_id, slot),
    CONSTRAINT snapshots_model_id_fkey FOREIGN KEY(model_id) REFERENCES models (model_id)
)""",
    "COMMENT ON TABLE snapshots IS 'Places for automatic copies of full training states, used in turn.'",
    "ALTER TABLE models ADD COLUMN log_start BIGINT DEFAULT 0 NOT NULL",
    "ALTER TABLE models ADD COLUMN recoveries BIGINT DEFAULT 0 NOT NULL",
    # Arguments of acknowledged calls were not kept before: only what stands exactly at a checkpoint can be restored.
    """UPDATE models SET log_start = CASE
        WHEN restore_checkpoint_id = 'base' THEN 0
        ELSE COALESCE((SELECT sequence FROM checkpoints WHERE checkpoint_id = restore_checkpoint_id), applied_sequence)
    END""",
    "ALTER TABLE models ALTER COLUMN log_start DROP DEFAULT, ALTER COLUMN recoveries DROP DEFAULT",
    "ALTER TABLE models DROP COLUMN restore_checkpoint_id",
    "ALTER TABLE calls ADD COLUMN outcome_sha256 TEXT DEFAULT '' NOT NULL",
    "ALTER TABLE calls ALTER COLUMN outcome_sha256 DROP DEFAULT",
)
DOWN = (
    "ALTER TABLE calls DROP COLUMN outcome_sha256",
    "ALTER TABLE models ADD COLUMN restore_checkpoint_id TEXT",
    "ALTER TABLE models DROP COLUMN log_start, DROP COLUMN recoveries",
    "DROP TABLE snapshots",
)


def upgrade() -> None:
    for statement in UP:
        op.execute(statement)


def downgrade() -> None:
    for statement in DOWN:
        op.execute(statement)
