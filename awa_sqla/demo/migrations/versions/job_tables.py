"""The queue's tables: one line in the application's own history."""

from alembic import op

revision = "job_tables"
down_revision = "app_tables"


def upgrade() -> None:
    """Install version 7."""
    op.awa_migrate(from_=0, to=7, schema="awa_demo")  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]


def downgrade() -> None:
    """Take it away again."""
    op.awa_migrate(from_=7, to=0, schema="awa_demo")  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
