"""Room for what outlives pruned history: seconds of intervals that are gone, and the way to the oldest requests."""

from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("""CREATE TABLE folded_accounts (
    job_id TEXT NOT NULL,
    busy_s DOUBLE PRECISION NOT NULL,
    swap_s DOUBLE PRECISION NOT NULL,
    hold_s DOUBLE PRECISION NOT NULL,
    swaps BIGINT NOT NULL,
    CONSTRAINT folded_accounts_pkey PRIMARY KEY (job_id)
)""")
    op.execute("COMMENT ON TABLE folded_accounts IS 'Device seconds of live jobs whose intervals are pruned.'")
    op.execute("CREATE INDEX requests_oldest ON requests (create_time)")


def downgrade() -> None:
    op.execute("DROP INDEX requests_oldest")
    op.execute("DROP TABLE folded_accounts")
