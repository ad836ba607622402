# mypy: disable-error-code="attr-defined"
"""upgrade awa: attended waits and receipts

Revision ID: 0006
Revises: 0005
"""

from __future__ import annotations

from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    op.awa_migrate(from_=3, to=4)


def downgrade() -> None:
    op.awa_migrate(from_=4, to=3)
