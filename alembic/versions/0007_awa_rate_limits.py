# mypy: disable-error-code="attr-defined"
"""upgrade awa: rate limits

Revision ID: 0007
Revises: 0006
"""

from __future__ import annotations

from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    op.awa_migrate(from_=4, to=5)


def downgrade() -> None:
    op.awa_migrate(from_=5, to=4)
