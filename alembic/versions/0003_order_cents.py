"""order cents

Revision ID: 0003
Revises: 0002
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.add_column("customer_order", sa.Column("cents", sa.Integer(), server_default="0", nullable=False))
    op.alter_column("customer_order", "cents", server_default=None)


def downgrade() -> None:
    op.drop_column("customer_order", "cents")
