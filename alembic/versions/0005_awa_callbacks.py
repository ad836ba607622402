# mypy: disable-error-code="attr-defined"
"""upgrade awa: callbacks

Revision ID: 0005
Revises: 0004
"""

from __future__ import annotations

from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    op.awa_migrate(from_=2, to=3)


def downgrade() -> None:
    op.awa_migrate(from_=3, to=2)
