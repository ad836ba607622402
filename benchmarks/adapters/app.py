"""The user's application: one mapped table. Every peer writes its rows in (c)."""

from __future__ import annotations

from sqlalchemy import Engine, Text, create_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column


class Base(DeclarativeBase):
    """Base of the application."""


class User(Base):
    """A row of the application."""

    __tablename__ = "app_users"

    id: Mapped[int] = mapped_column(primary_key=True)
    email: Mapped[str] = mapped_column(Text)


def url(dsn: str, driver: str = "psycopg") -> str:
    """A libpq URL as SQLAlchemy takes it."""
    return dsn.replace("postgresql://", f"postgresql+{driver}://", 1)


def engine(dsn: str) -> Engine:
    """An engine on psycopg, as it comes."""
    return create_engine(url(dsn))


def connected(dsn: str) -> Engine:
    """The same, with a connection in its pool: most peers connect before they are asked for anything."""
    own = engine(dsn)
    own.connect().close()
    return own
