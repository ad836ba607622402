#!/bin/sh
# What CI runs, against the empty database that DATABASE_URL names.
set -eu
cd "$(dirname "$0")"

alembic upgrade head
alembic check                                  # fails while a model, or our schema, is ahead of the history
alembic downgrade base
alembic upgrade head                           # what a downgrade leaves behind would be in the way
alembic upgrade head --sql >/dev/null          # what a DBA reads; needs no database
alembic downgrade head:base --sql >/dev/null
