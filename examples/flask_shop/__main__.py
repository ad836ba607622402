"""`python -m flask_shop`: a web server and a worker process, to try it.

Without DATABASE_URL it starts a PostgreSQL of its own, which is gone afterwards.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from contextlib import ExitStack, suppress

from werkzeug.serving import run_simple

from awa_sqla.localpg import LocalPostgres


def main() -> None:
    """Serve until Ctrl-C or SIGTERM."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with ExitStack() as stack:
        stack.enter_context(suppress(KeyboardInterrupt))
        if "DATABASE_URL" not in os.environ:
            os.environ["DATABASE_URL"] = stack.enter_context(LocalPostgres()).sqlalchemy_url()
        port = int(os.environ.get("PORT", "5000"))
        os.environ.setdefault("PAYMENT_SECRET", secrets.token_hex(32))
        os.environ.setdefault("SHOP_URL", f"http://127.0.0.1:{port}")

        from .app import app  # noqa: PLC0415 - the settings are read when it is imported
        from .database import create_tables  # noqa: PLC0415

        create_tables()
        worker = subprocess.Popen([sys.executable, "-m", "awa_sqla", "-A", "flask_shop.jobs:awa", "worker"])
        stack.callback(worker.wait)
        stack.callback(worker.terminate)
        run_simple("127.0.0.1", port, app, threaded=True)


if __name__ == "__main__":
    main()
