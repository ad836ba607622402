"""A database in which everybody has a role of its own, and what each of them was refused.

Nothing is left to chance: the owner is no superuser and owns the schema only, PUBLIC has no rights on the database and
on functions, and every role has an empty search_path.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import URL, Connection, Engine, NullPool, create_engine, event, text
from sqlalchemy.engine import ExceptionContext
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from awa_sqla import FollowUps
from awa_sqla.schema import create_all
from awa_sqla.schema.grants import ROLES, grants
from awa_sqla.session import catalogue
from awa_sqla.sqlstates import INSUFFICIENT_PRIVILEGE, driver_sqlstate

PASSWORD = "only here"
#: Roles are the server's, which other processes of a run may share.
PREFIX = f"least{os.environ.get('PYTEST_XDIST_WORKER', '')}_"
SCHEMAS = ("awa", "Other-one")
DRIVERS = ("psycopg", "psycopg2", "async psycopg", "async asyncpg")


class Place:
    """Our tables in a schema of some name, and the roles, each under its name with `PREFIX` before it."""

    def __init__(self, url: URL, schema: str) -> None:
        self.url, self.schema = url, schema
        self.admin = create_engine(url, poolclass=NullPool)
        self.refused: list[str] = []
        self.options: dict[str, Any] = {"poolclass": NullPool}
        if schema != "awa":
            self.options["execution_options"] = {"schema_translate_map": {"awa": schema}}
        self._engines: dict[tuple[str, str], Any] = {}
        self._build()
        self._wipe = ";".join(
            f"DELETE FROM {self.qualified(name)}"
            for name in ROLES["viewer"].relations
            if name not in ("jobs", "schema_version")
        )

    def qualified(self, name: str) -> str:
        """An object of ours in SQL."""
        return f'"{self.schema}".{name}'

    def as_role(self, role: str, driver: str = "psycopg") -> URL:
        """The URL with which a role connects."""
        url = self.url.set(username=PREFIX + role, password=PASSWORD)
        return url.set(drivername=f"postgresql+{driver}")

    def engine(self, role: str, driver: str = "psycopg") -> Engine:
        """An engine of a role."""
        found: Engine | None = self._engines.get((role, driver))
        if found is None:
            found = self._engines[role, driver] = create_engine(self.as_role(role, driver), **self.options)
        return found

    def async_engine(self, role: str, driver: str = "psycopg") -> AsyncEngine:
        """An async engine of a role, for one loop."""
        return create_async_engine(self.as_role(role, driver), **self.options)

    def run(
        self, role: str, work: Callable[[Session], Any], driver: str = "psycopg", follow_ups: FollowUps | None = None
    ) -> Any:
        """What `work(session)` returns, in a transaction of a role over one of `DRIVERS`."""
        registry = FollowUps() if follow_ups is None else follow_ups
        mode, _, name = driver.rpartition(" ")
        if mode:
            return asyncio.run(self._run_async(role, work, name, registry))
        maker = sessionmaker(self.engine(role, name))
        registry.attach(maker)
        with maker.begin() as session:
            return work(session)

    async def _run_async(self, role: str, work: Callable[[Session], Any], driver: str, registry: FollowUps) -> Any:
        engine = self.async_engine(role, driver)
        maker = async_sessionmaker(engine, class_=AsyncSession)
        registry.attach(maker)
        async with maker.begin() as session:
            return await session.run_sync(work)

    def sql(self, statement: str, **parameters: Any) -> list[Any]:
        """As the superuser; `{awa}` is the schema."""
        with self.admin.begin() as connection:
            found = connection.execute(text(statement.replace("{awa}", f'"{self.schema}"')), parameters)
            return list(found) if found.returns_rows else []

    def wipe(self) -> None:
        """No rows but the schema's own."""
        self.sql(self._wipe)
        catalogue.forget_cache()

    @contextmanager
    def watched(self) -> Iterator[list[str]]:
        """What the server refuses meanwhile for want of a privilege, whoever swallows the error; see `refused`."""
        found = self.refused = list[str]()

        def note(context: ExceptionContext) -> None:
            if driver_sqlstate(context.original_exception) == INSUFFICIENT_PRIVILEGE:
                found.append(str(context.original_exception).partition("\n")[0])

        event.listen(Engine, "handle_error", note)
        try:
            yield found
        finally:
            event.remove(Engine, "handle_error", note)

    def close(self) -> None:
        for engine in self._engines.values():
            engine.dispose()
        with self.admin.begin() as connection:
            for role in self._present(connection):
                connection.exec_driver_sql(f"DROP OWNED BY {role} CASCADE")
                connection.exec_driver_sql(f"DROP ROLE {role}")
        self.admin.dispose()

    def _build(self) -> None:
        roles = [PREFIX + role for role in (*ROLES, "both", "nobody")]
        with self.admin.begin() as connection:
            execute = connection.exec_driver_sql
            for role in self._present(connection):
                execute(f"DROP ROLE {role}")
            execute(f'REVOKE ALL ON DATABASE "{self.url.database}" FROM PUBLIC')
            execute("REVOKE ALL ON SCHEMA public FROM PUBLIC")
            for role in roles:
                execute(f"CREATE ROLE {role} LOGIN NOSUPERUSER NOCREATEDB NOCREATEROLE PASSWORD '{PASSWORD}'")
                execute(f"ALTER ROLE {role} SET search_path = ''")
                execute(f'GRANT CONNECT ON DATABASE "{self.url.database}" TO {role}')
            execute(f"ALTER DEFAULT PRIVILEGES FOR ROLE {PREFIX}owner REVOKE EXECUTE ON FUNCTIONS FROM PUBLIC")
            for statement in grants("owner", PREFIX + "owner", schema=self.schema):
                execute(statement)
        with self.engine("owner").begin() as connection:
            create_all(connection, self.schema)
            for role in ROLES:
                if role != "owner":
                    self.grant(connection, role, PREFIX + role)
            for role in ("worker", "maintenance"):
                self.grant(connection, role, PREFIX + "both")

    def grant(self, connection: Connection, role: str, to: str) -> None:
        """All grants of a role."""
        for statement in grants(role, to, schema=self.schema):
            connection.exec_driver_sql(statement)

    def _present(self, connection: Connection) -> list[str]:
        found = connection.exec_driver_sql(f"SELECT rolname FROM pg_roles WHERE starts_with(rolname, '{PREFIX}')")
        return [str(name) for (name,) in found]


class Grant:
    """One privilege that a role has on one object, and can be without for a while."""

    def __init__(self, place: Place, to: str, privilege: str, on: str) -> None:
        self._place, self._to = place, to
        self.privilege, self.on = privilege, on

    def __str__(self) -> str:
        return f"{self.privilege} ON {self.on}"

    @contextmanager
    def taken_away(self) -> Iterator[None]:
        self._place.sql(f"REVOKE {self} FROM {self._to}")
        try:
            yield
        finally:
            self._place.sql(f"GRANT {self} TO {self._to}")


def every_grant(place: Place, role: str) -> Iterator[Grant]:
    """Each single privilege of a role, those on columns one by one."""
    to, found = PREFIX + role, ROLES[role]
    yield Grant(place, to, "USAGE", f'SCHEMA "{place.schema}"')
    for relation, privileges in found.relations.items():
        for privilege in privileges:
            kind, _, columns = privilege.rstrip(")").partition(" (")
            for part in columns.split(", ") if columns else [""]:
                yield Grant(place, to, f"{kind} ({part})" if part else kind, f"TABLE {place.qualified(relation)}")
    for sequence in found.sequences:
        yield Grant(place, to, "USAGE", f"SEQUENCE {place.qualified(sequence)}")
    for function in found.functions:
        yield Grant(place, to, "EXECUTE", f"FUNCTION {place.qualified(function)}")


#: For what the schema's name has no part in.
in_one_schema = pytest.mark.parametrize("_built", SCHEMAS[:1], indirect=True)
