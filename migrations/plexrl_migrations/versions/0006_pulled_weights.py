"""Weights between workers: a load_checkpoint names the model whose rollout weights it takes."""

from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("ALTER TABLE calls ADD COLUMN source_model_id TEXT")


def downgrade() -> None:
    op.execute("ALTER TABLE calls DROP COLUMN source_model_id")
