# mypy: disable-error-code="attr-defined"
"""upgrade awa: unique jobs, versions of arguments

Revision ID: 0004
Revises: 0003
"""

from __future__ import annotations

from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.awa_migrate(from_=1, to=2)


def downgrade() -> None:
    op.awa_migrate(from_=2, to=1)
