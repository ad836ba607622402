# Type checkers do not know the operations of plugins.
# mypy: disable-error-code="attr-defined"
# pyright: reportAttributeAccessIssue=false, reportUnknownMemberType=false
"""awa

Revision ID: 0002
Revises: 0001
"""

from __future__ import annotations

from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.awa_migrate(from_=0, to=1)


def downgrade() -> None:
    op.awa_migrate(from_=1, to=0)
