"""`python -m fastapi_shop`: everything in one process, to try it.

Without DATABASE_URL it starts a PostgreSQL of its own, which is gone afterwards.
"""

from __future__ import annotations

import os
import secrets
from contextlib import ExitStack

import uvicorn

from awa_sqla.localpg import LocalPostgres


def main() -> None:
    """Serve until Ctrl-C."""
    with ExitStack() as stack:
        if "DATABASE_URL" not in os.environ:
            os.environ["DATABASE_URL"] = stack.enter_context(LocalPostgres()).sqlalchemy_url()
        port = int(os.environ.get("PORT", "8000"))
        os.environ.setdefault("PAYMENT_SECRET", secrets.token_hex(32))
        os.environ.setdefault("SHOP_URL", f"http://127.0.0.1:{port}")
        os.environ.setdefault("SHOP_WORKER", "1")

        from .app import app  # noqa: PLC0415 - the settings are read when it is imported
        from .database import create_tables  # noqa: PLC0415

        create_tables()
        uvicorn.run(app, host="127.0.0.1", port=port)


if __name__ == "__main__":
    main()
