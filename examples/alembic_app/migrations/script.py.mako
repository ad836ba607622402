# Type checkers do not know the operations of plugins.
# mypy: disable-error-code="attr-defined"
# pyright: reportAttributeAccessIssue=false, reportUnknownMemberType=false
"""${message}

Revision ID: ${up_revision}
Revises: ${down_revision or "nothing" | comma,n}
"""

from __future__ import annotations

% if "sa." in (upgrades or "") + (downgrades or ""):
import sqlalchemy as sa

% endif
from alembic import op
${imports if imports else ""}
revision = ${repr(up_revision).replace("'", '"')}
down_revision = ${repr(down_revision).replace("'", '"')}


def upgrade() -> None:
    ${upgrades if upgrades else "pass"}


def downgrade() -> None:
    ${downgrades if downgrades else "pass"}
