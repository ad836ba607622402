"""Tables as a SQLModel application declares them: the tests' own, and one whose rows know their job."""

from sqlalchemy.orm import foreign, relationship
from sqlmodel import BigInteger, Field, Relationship, SQLModel

from awa_sqla import JobRecord


class SQLModelOrder(SQLModel, table=True):
    __tablename__ = "app_order"

    id: int | None = Field(default=None, primary_key=True)
    note: str


class SQLModelLetter(SQLModel, table=True):
    __tablename__ = "sqlmodel_letter"

    id: int | None = Field(default=None, primary_key=True)
    job_id: int | None = Field(default=None, sa_type=BigInteger, index=True)

    job: JobRecord | None = Relationship(
        sa_relationship=relationship(
            JobRecord, primaryjoin=lambda: foreign(SQLModelLetter.__table__.c.job_id) == JobRecord.id, viewonly=True
        )
    )
