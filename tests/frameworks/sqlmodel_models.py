"""The tests' own table as a SQLModel application declares it."""

from __future__ import annotations

from sqlmodel import Field, SQLModel


class SQLModelOrder(SQLModel, table=True):
    __tablename__ = "app_order"

    id: int | None = Field(default=None, primary_key=True)
    note: str
