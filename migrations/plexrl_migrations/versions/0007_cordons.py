"""A cordon outlives the daemon: a worker that starts again is cordoned again."""

from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("ALTER TABLE workers ADD COLUMN cordoned BOOLEAN DEFAULT false NOT NULL")
    op.execute("UPDATE workers SET cordoned = true WHERE state = 'CORDONED'")


def downgrade() -> None:
    op.execute("ALTER TABLE workers DROP COLUMN cordoned")
