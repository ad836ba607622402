"""The role that migrates: it owns the schema and what is in it, is no superuser, and is allowed nothing else."""

from __future__ import annotations

import pytest
from sqlalchemy.exc import DBAPIError

from awa_sqla.schema import LATEST, create_all, installed_version, migrate, migrate_online
from awa_sqla.schema.grants import ROLES, grants
from tests.schema.roles.duties import DUTIES
from tests.schema.roles.least import PREFIX, Place, in_one_schema

#: Each takes its own database, project or processes; run by `.ci/run` beside the quick suite.
pytestmark = pytest.mark.beside


def test_the_owner_goes_down_and_up_and_grants_again(place: Place) -> None:
    """All of it as a role that owns the schema and is allowed nothing else."""
    with place.watched() as refused, place.engine("owner").begin() as connection:
        assert migrate(connection, 0, place.schema) == (LATEST, 0)
        assert installed_version(connection, place.schema) == 0
        migrate(connection, LATEST, place.schema)
        for role in DUTIES:
            place.grant(connection, role, PREFIX + role)
            place.grant(connection, role, PREFIX + role)
        connection.rollback()
    assert refused == []


@in_one_schema
def test_the_owner_installs_and_upgrades_online(place: Place) -> None:
    """In a schema that was made for it, with what runs beside the traffic; the schema stays when our tables go."""
    place.sql(";".join(grants("owner", PREFIX + "owner", schema="online")))
    try:
        for version in (3, LATEST, 0):
            with place.watched() as refused:
                migrate_online(place.engine("owner"), version, "online")
            assert refused == []
            with place.admin.connect() as connection:
                assert installed_version(connection, "online") == version
        assert place.sql("SELECT FROM pg_namespace WHERE nspname = 'online'") != []
    finally:
        place.sql("DROP SCHEMA online CASCADE")


@in_one_schema
def test_what_somebody_else_has_installed_becomes_the_owners(place: Place) -> None:
    """A database that has lived with one role for everything: afterwards the owner can upgrade it."""
    with place.admin.connect() as connection:
        connection.exec_driver_sql("CREATE SCHEMA inherited")
        create_all(connection, "inherited")
        for _ in range(2):
            for statement in grants("owner", PREFIX + "owner", schema="inherited"):
                connection.exec_driver_sql(statement)
        others = connection.exec_driver_sql(
            "SELECT relname FROM pg_class WHERE relnamespace = 'inherited'::regnamespace "
            f"AND relowner <> '{PREFIX}owner'::regrole UNION ALL SELECT proname FROM pg_proc "
            f"WHERE pronamespace = 'inherited'::regnamespace AND proowner <> '{PREFIX}owner'::regrole"
        ).all()
        assert others == []
        connection.exec_driver_sql(f"SET LOCAL ROLE {PREFIX}owner")
        assert migrate(connection, 0, "inherited") == (LATEST, 0)
        connection.rollback()


@in_one_schema
def test_in_the_schema_public_the_owner_may_install_and_owns_nothing_else(place: Place) -> None:
    with place.admin.connect() as connection:
        connection.exec_driver_sql("CREATE TABLE public.yours ()")
        for statement in grants("owner", PREFIX + "owner", schema="public"):
            connection.exec_driver_sql(statement)
        connection.exec_driver_sql(f"SET LOCAL ROLE {PREFIX}owner")
        create_all(connection, "public")
        with pytest.raises(DBAPIError, match="must be owner of table yours"):
            connection.exec_driver_sql("DROP TABLE public.yours")
        connection.rollback()


def test_a_name_of_any_kind_is_the_name_of_a_role_and_nothing_more(place: Place) -> None:
    name = """it's "$body$; DROP TABLE jobs; --"""
    quoted = '"' + name.replace('"', '""') + '"'
    with place.admin.connect() as connection:
        connection.exec_driver_sql(f"CREATE ROLE {quoted}")
        for role in ROLES:
            for statement in grants(role, name, schema=place.schema):
                connection.exec_driver_sql(statement)
        owner = connection.exec_driver_sql(
            "SELECT nspowner::regrole::text FROM pg_namespace WHERE nspname = %s", (place.schema,)
        )
        assert owner.scalar() == quoted
        connection.rollback()
