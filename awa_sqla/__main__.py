"""`python -m awa_sqla` and the console script `awa-sqla`."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line; says how to get it when its libraries are not installed."""
    try:
        from awa_sqla.cli import cli
    except KeyboardInterrupt:
        sys.exit(130)
    except ModuleNotFoundError as exc:
        if exc.name not in ("click", "rich"):
            raise
        sys.stderr.write(
            f"The command line needs {exc.name}: pip install 'awa-sqla[cli]', or 'awa-sqla[embedded]' for a "
            "PostgreSQL of its own as well\n"
        )
        sys.exit(3)
    cli(prog_name="awa-sqla")


if __name__ == "__main__":
    main()
