# mypy: disable-error-code="attr-defined"
"""upgrade awa: maintenance

Revision ID: 0008
Revises: 0007
"""

from __future__ import annotations

from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    op.awa_migrate(from_=5, to=6)


def downgrade() -> None:
    op.awa_migrate(from_=6, to=5)
