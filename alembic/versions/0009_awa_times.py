# mypy: disable-error-code="attr-defined"
"""upgrade awa: times

Revision ID: 0009
Revises: 0008
"""

from __future__ import annotations

from alembic import op

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    op.awa_migrate(from_=6, to=7)


def downgrade() -> None:
    op.awa_migrate(from_=7, to=6)
