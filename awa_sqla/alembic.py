"""What an app's `env.py` needs: the plugin and the filters.

An app keeps our tables in its own history. One line in one of its revisions installs them, and another
one after an upgrade of the package changes them:

    from alembic import op

    def upgrade() -> None:
        op.awa_migrate(from_=0, to=6)

    def downgrade() -> None:
        op.awa_migrate(from_=3, to=0)

Alembic finds the operation through this package's entry point; nothing needs to be imported. With
`autogenerate_plugins=["alembic.autogenerate.*", "awa_sqla.alembic"]` in `context.configure()`,
`alembic revision --autogenerate` writes that line, and `alembic check` fails while the database is behind.
With a schema of another name, add `awa_schema="jobs"` there, and take the filters from `filters("jobs")`.

Alembic loads this module while it is half imported itself, so nothing here imports Alembic: the operation is
in `awa_sqla.schema.operation`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from awa_sqla.models.base import SCHEMA, AwaBase, ViewBase
from awa_sqla.schema import checked_schema

if TYPE_CHECKING:
    from alembic.autogenerate.api import AutogenContext
    from alembic.operations.ops import UpgradeOps
    from alembic.runtime.plugins import Plugin
    from alembic.util import PriorityDispatchResult

__all__ = ["Filters", "filters", "include_name", "include_object", "setup"]

_OURS = frozenset(table.name for base in (AwaBase, ViewBase) for table in base.metadata.tables.values())


def setup(plugin: Plugin) -> None:
    """Called by Alembic through the entry point: registers `op.awa_migrate` and its comparator."""
    from awa_sqla.schema import operation  # noqa: PLC0415 - imports Alembic

    def compare(context: AutogenContext, upgrade_ops: UpgradeOps) -> PriorityDispatchResult:
        return operation.compare(context, upgrade_ops)  # late: `operation` may be what is importing Alembic

    plugin.add_autogenerate_comparator(compare, "autogenerate")


class Filters(NamedTuple):
    """The two filters of one schema, for `context.configure(**filters("jobs")._asdict())`."""

    include_name: _IncludeName
    include_object: _IncludeObject


def filters(schema: str = SCHEMA) -> Filters:
    """The filters for our tables in a schema of another name. Does no I/O.

    Raises `ConfigurationError` for a schema name that is no plain identifier.
    """
    checked_schema(schema)
    return Filters(_IncludeName(schema), _IncludeObject(schema))


class _IncludeName:
    """Leaves the whole schema out, before anything of it is read."""

    def __init__(self, schema: str) -> None:
        self.schema = schema

    def __call__(self, name: str | None, type_: str, _parent_names: Any) -> bool:
        return not (type_ == "schema" and name == self.schema)


class _IncludeObject:
    """Leaves our tables out, by schema and name, with all that hangs on them."""

    def __init__(self, schema: str) -> None:
        # Alembic has no name for the default schema.
        self.schemas = {schema, None} if schema == "public" else {schema}

    def __call__(self, obj: Any, _name: str | None, type_: str, *_: Any) -> bool:
        table = obj if type_ == "table" else getattr(obj, "table", None)
        return not (table is not None and table.schema in self.schemas and table.name in _OURS)


#: For `context.configure(include_name=...)`: leave the schema `awa` out of the app's autogenerate.
include_name = _IncludeName(SCHEMA)

#: For `context.configure(include_object=...)`: leave our tables out, where the app has its own in that schema.
include_object = _IncludeObject(SCHEMA)


class _PluginModule(ModuleType):
    """This module as the list of plugins that Alembic before 1.20.1 took every entry point to be."""

    def __iter__(self) -> Iterator[ModuleType]:
        yield self


sys.modules[__name__].__class__ = _PluginModule
