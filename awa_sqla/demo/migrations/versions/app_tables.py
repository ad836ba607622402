"""The application's tables."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "app_tables"
down_revision = None

SCHEMA = "awa_demo_app"


def upgrade() -> None:
    """Create them."""
    op.create_table(
        "directory",
        sa.Column("id", sa.BigInteger(), primary_key=True),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("error", sa.Text()),
        sa.Column("files_total", sa.BigInteger(), nullable=False),
        sa.Column("files_done", sa.BigInteger(), nullable=False),
        sa.Column("files_failed", sa.BigInteger(), nullable=False),
        sa.Column("requests", sa.BigInteger(), nullable=False),
        sa.Column("approval_id", sa.Uuid()),
        sa.Column("summary", JSONB()),
        schema=SCHEMA,
    )
    op.create_table(
        "file",
        sa.Column("id", sa.BigInteger(), primary_key=True),
        sa.Column("directory_id", sa.BigInteger(), sa.ForeignKey(f"{SCHEMA}.directory.id"), nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("changed_ns", sa.BigInteger()),
        sa.Column("sha256", sa.Text()),
        sa.Column("size", sa.BigInteger()),
        sa.Column("lines", sa.BigInteger()),
        sa.Column("type", sa.Text()),
        sa.Column("error", sa.Text()),
        schema=SCHEMA,
    )
    op.create_table(
        "word",
        sa.Column("id", sa.BigInteger(), primary_key=True),
        sa.Column("file_id", sa.BigInteger(), sa.ForeignKey(f"{SCHEMA}.file.id"), nullable=False),
        sa.Column("word", sa.Text(), nullable=False),
        sa.Column("count", sa.BigInteger(), nullable=False),
        schema=SCHEMA,
    )
    op.create_table(
        "incident",
        sa.Column("id", sa.BigInteger(), primary_key=True),
        sa.Column("file_id", sa.BigInteger(), sa.ForeignKey(f"{SCHEMA}.file.id"), nullable=False),
        sa.Column("what", sa.Text(), nullable=False),
        sa.Column("attempt", sa.BigInteger(), nullable=False),
        sa.Column("detail", sa.Text(), nullable=False),
        schema=SCHEMA,
    )
    for table, column in (("file", "directory_id"), ("word", "file_id"), ("incident", "file_id")):
        op.create_index(f"ix_{SCHEMA}_{table}_{column}", table, [column], schema=SCHEMA)


def downgrade() -> None:
    """Drop them."""
    for table in ("incident", "word", "file", "directory"):
        op.drop_table(table, schema=SCHEMA)
