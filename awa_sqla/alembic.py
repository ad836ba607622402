"""What an app's `env.py` needs: the plugin, the filters, and a lock for replicas that migrate at once.

An app keeps our tables in its own history. One line in one of its revisions installs them, and another
one after an upgrade of the package changes them:

    from alembic import op

    def upgrade() -> None:
        op.awa_migrate(from_=0, to=7)

    def downgrade() -> None:
        op.awa_migrate(from_=7, to=0)

Alembic finds the operation through this package's entry point; nothing needs to be imported. With
`autogenerate_plugins=["alembic.autogenerate.*", "awa_sqla.alembic"]` in `context.configure()`,
`alembic revision --autogenerate` writes that line, and `alembic check` fails while the database is behind.
With a schema of another name, add `awa_schema="jobs"` there, or `awa_schema=["awa", "billing"]` for two side
by side; `awa_schema=()` is for a database without any.

Autogenerate leaves our tables alone in every `env.py`: `setup` registers a guard under a name that Alembic's
own wildcard matches. The filters keep our tables from being read at all, and protect them where an `env.py`
names Alembic's plugins one by one.

Alembic loads this module while it is half imported itself, so nothing here imports Alembic: the operation is
in `awa_sqla.schema.operation`.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from sqlalchemy import Connection

from awa_sqla.errors import ConfigurationError
from awa_sqla.models.base import SCHEMA
from awa_sqla.schema.alone import alone
from awa_sqla.schema.ownership import NAMES, marked, schema_names

if TYPE_CHECKING:
    from alembic.autogenerate.api import AutogenContext
    from alembic.operations.ops import UpgradeOps
    from alembic.runtime.plugins import Plugin
    from alembic.util import PriorityDispatchResult

__all__ = ["Filters", "filters", "include_name", "include_object", "one_at_a_time", "setup"]

#: The name under which the guard is found by the `alembic.autogenerate.*` that Alembic uses when nothing is said.
_GUARD = "alembic.autogenerate.awa_sqla"


def setup(plugin: Plugin) -> None:
    """Called by Alembic through the entry point: registers our operations, their comparator and the guard."""
    for module in ("operation", "mending"):
        import_module(f"awa_sqla.schema.{module}")  # imports Alembic, and registers an operation
    plugin.add_autogenerate_comparator(_compare, "autogenerate", qualifier="postgresql")
    _add_guard(plugin)
    with suppress(ValueError):  # it is there, when an app sets this module up under a second name
        _add_guard(type(plugin)(_GUARD))


def _add_guard(plugin: Plugin) -> None:
    from alembic.util import DispatchPriority  # noqa: PLC0415

    # In a subgroup of its own: no other plugin's STOP can keep it from running.
    plugin.add_autogenerate_comparator(
        _guard, "autogenerate", "awa_sqla", qualifier="postgresql", priority=DispatchPriority.LAST
    )


def _compare(context: AutogenContext, upgrade_ops: UpgradeOps) -> PriorityDispatchResult:
    from awa_sqla.schema import autogenerate  # noqa: PLC0415 - late: it may be what is importing Alembic

    return autogenerate.compare(context, upgrade_ops)


def _guard(context: AutogenContext, upgrade_ops: UpgradeOps) -> PriorityDispatchResult:
    from awa_sqla.schema import autogenerate  # noqa: PLC0415

    return autogenerate.guard(context, upgrade_ops)


@contextmanager
def one_at_a_time(connection: Connection, key: str = "alembic") -> Generator[None, None, None]:
    """Wait until no other process of this database is in here, whatever it migrates; for `env.py`:

        with one_at_a_time(connection), context.begin_transaction():
            context.run_migrations()

    The lock is held by a second connection of the same engine and ends with the process; it also holds while a revision
    commits in between, as `autocommit_block()` and `op.awa_migrate(..., concurrently=True)` do. Only processes with the
    same `key` wait for each other.

    Raises `ConfigurationError` when a transaction has begun: it would end after the lock; and inside itself.
    """
    if connection.in_transaction():
        raise ConfigurationError(
            "the lock must be taken before the transaction begins, and be kept until it has ended: "
            "`with one_at_a_time(connection), context.begin_transaction():`"
        )
    with alone(connection.engine, f"awa_sqla.alembic:{key}", logging.getLogger("awa_sqla.schema").info):
        yield


class Filters(NamedTuple):
    """The two filters of one schema, for `context.configure(**filters("jobs")._asdict())`."""

    include_name: _IncludeName
    include_object: _IncludeObject


def filters(schema: str | Sequence[str] = SCHEMA) -> Filters:
    """The filters for our tables in a schema of another name, or in several. Does no I/O.

    Raises `ConfigurationError` for a schema name that is no plain identifier.
    """
    schemas = schema_names(schema)
    return Filters(_IncludeName(schemas), _IncludeObject(schemas))


class _IncludeName:
    """Leaves the whole schema out, before anything of it is read."""

    def __init__(self, schemas: Sequence[str]) -> None:
        self.schemas = frozenset(schemas)

    def __call__(self, name: str | None, type_: str, _parent_names: Any) -> bool:
        return not (type_ == "schema" and name in self.schemas)


class _IncludeObject:
    """Leaves our tables out, by mark or by schema and name, with all that hangs on them."""

    def __init__(self, schemas: Sequence[str]) -> None:
        # Alembic has no name for the default schema.
        self.schemas: frozenset[str | None] = frozenset(schemas) | ({None} if "public" in schemas else set())

    def __call__(self, obj: Any, _name: str | None, type_: str, *rest: Any) -> bool:
        reflected, compare_to = rest
        table = obj if type_ == "table" else getattr(obj, "table", None)
        if table is None:
            return True
        if marked(table):
            return False
        new = not reflected and compare_to is None
        return new or table.schema not in self.schemas or table.name not in NAMES


#: For `context.configure(include_name=...)`: leave the schema `awa` out of the app's autogenerate.
include_name = _IncludeName((SCHEMA,))

#: For `context.configure(include_object=...)`: leave our tables out, where the app has its own in that schema.
include_object = _IncludeObject((SCHEMA,))


class _PluginModule(ModuleType):
    """This module as the list of plugins that Alembic before 1.20.1 took every entry point to be."""

    def __iter__(self) -> Iterator[ModuleType]:
        yield self


sys.modules[__name__].__class__ = _PluginModule
