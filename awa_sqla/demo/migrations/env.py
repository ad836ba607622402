"""Alembic's way in. The connection is brought by `awa_sqla.demo.database.migrate`; there is no alembic.ini."""

from alembic import context

from awa_sqla.alembic import filters
from awa_sqla.demo.models import APP_SCHEMA, JOBS_SCHEMA, Base


def _only_ours(name: str | None, type_: str, _parents: object) -> bool:
    return type_ != "schema" or name in (APP_SCHEMA, JOBS_SCHEMA)


context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    version_table_schema=APP_SCHEMA,
    include_schemas=True,
    include_name=_only_ours,
    include_object=filters(JOBS_SCHEMA).include_object,
    autogenerate_plugins=["alembic.autogenerate.*", "awa_sqla.alembic"],
    awa_schema=JOBS_SCHEMA,
)
with context.begin_transaction():
    context.run_migrations()
