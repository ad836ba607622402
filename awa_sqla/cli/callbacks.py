"""`awa-sqla callbacks`: the ingress as a process of its own, and signatures for senders without Python."""

from __future__ import annotations

import base64
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from awa_sqla.cli.finding import NotFoundError, Settings
from awa_sqla.cli.root import after_verb, leave, statuses
from awa_sqla.signing import ACTIONS, KEY_BYTES

SECRET_VARIABLE = "AWA_CALLBACK_SECRET"  # noqa: S105 - a name

_secret_option = click.option(
    "--secret-env", metavar="NAME", default=SECRET_VARIABLE, show_default=True, help="The variable with the secret."
)


@click.group()
def callbacks() -> None:
    """Answers of the outside world for jobs that wait for them."""


@callbacks.command()
@after_verb
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", default=4000, show_default=True, type=click.IntRange(0, 65535), help="0: any free one.")
@click.option("--prefix", default="/callbacks", show_default=True, help="The path below which it answers.")
@_secret_option
@click.option("--allow-unsigned", is_flag=True, help="Take requests without a signature: whoever has a token.")
@click.pass_obj
def serve(settings: Settings, /, host: str, port: int, prefix: str, secret_env: str, *, allow_unsigned: bool) -> None:
    """Serve POST PREFIX/ID/{complete|fail|heartbeat|resume} until SIGINT or SIGTERM.

    With an app, its follow-ups are made here; without, they are left as obligations for a worker. The secret is 64
    hexadecimal digits, or base64 of 32 bytes; two of them, with a comma between, while one takes over from the other.
    """
    serving = _serving()
    if not prefix.startswith("/"):
        raise click.BadParameter("must begin with /", param_hint="--prefix")
    if allow_unsigned and os.environ.get(secret_env):
        raise click.UsageError(f"--allow-unsigned would not look at {secret_env}, which is set: give one of the two")
    secret = None if allow_unsigned else _secrets(secret_env)
    app = settings.find_app()
    database = settings.database(app)
    try:
        listening = serving.listen(host, port)
    except OSError as exc:
        leave(f"cannot listen on {host} port {port}: {exc.strerror or exc}", 1)
    ready = _Ready(prefix.rstrip("/"), signed=secret is not None, follow_ups=app is not None)
    with statuses("callback", lambda: database):
        serving.serve(serving.Ingress(database, app, secret, prefix), listening, ready)


@callbacks.command()
@click.argument("callback_id", metavar="ID")
@click.argument("action", type=click.Choice(ACTIONS))
@click.option("--body", default="", metavar="@FILE|-|TEXT", help="What will be sent, byte for byte; - reads stdin.")
@click.option("--timestamp", type=int, metavar="SECONDS", help="When, in Unix seconds; default: now.")
@_secret_option
def sign(callback_id: str, action: str, body: str, timestamp: int | None, secret_env: str) -> None:
    """Print the headers that a request for a callback needs, one a line, as `curl -H @-` reads them.

    awa-sqla callbacks sign ID complete --body @body.json | curl -H @- --data-binary @body.json URL/ID/complete
    """
    from awa_sqla.errors import InvalidJob
    from awa_sqla.signing import sign_callback

    (key, *_) = _secrets(secret_env)
    try:
        headers = sign_callback(key, callback_id, action, _bytes(body), timestamp=timestamp)
    except InvalidJob as exc:
        raise click.UsageError(str(exc)) from exc
    for name, value in headers.items():
        click.echo(f"{name}: {value}")


@dataclass(frozen=True)
class _Ready:
    """Says on stderr, in one line, that requests are taken now."""

    prefix: str
    signed: bool
    follow_ups: bool

    def __call__(self, host: str, port: int) -> None:
        where = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        how = "signed requests" if self.signed else "UNSIGNED requests: whoever has a token can answer"
        then = "follow-ups of the app" if self.follow_ups else "follow-ups as obligations"
        click.echo(f"awa-sqla: callbacks at {where}{self.prefix} ({how}; {then})", err=True)


def _serving() -> Any:
    """What needs the extra `web`."""
    try:
        from awa_sqla.web import serving
    except ModuleNotFoundError as exc:
        missing = (exc.name or "").partition(".")[0]
        if missing not in ("starlette", "uvicorn"):
            raise
        raise NotFoundError(f"callbacks serve needs {missing}: pip install 'awa-sqla[web]'") from exc
    return serving


def _secrets(variable: str) -> tuple[bytes, ...]:
    """The keys of an environment variable, never shown. Raises `NotFoundError`."""
    given = os.environ.get(variable, "").strip()
    if not given:
        raise NotFoundError(
            f"no secret: set {variable} to 64 hexadecimal digits, as `openssl rand -hex {KEY_BYTES}` prints them"
        )
    keys = tuple(_key(part.strip()) for part in given.split(","))
    if None in keys or len(keys) > 2:
        raise NotFoundError(
            f"{variable} is no secret: it must be 64 hexadecimal digits or base64 of {KEY_BYTES} bytes, or two of "
            "these with a comma between"
        )
    return tuple(key for key in keys if key is not None)


def _key(text: str) -> bytes | None:
    if re.fullmatch(r"[0-9a-fA-F]{64}", text):
        return bytes.fromhex(text)
    try:
        key = base64.b64decode(text.replace("-", "+").replace("_", "/") + "=" * (-len(text) % 4), validate=True)
    except ValueError:
        return None
    return key if len(key) == KEY_BYTES else None


def _bytes(body: str) -> bytes:
    """What will be sent: a file's bytes, those of stdin, or the text as it was typed."""
    if body == "-":
        return sys.stdin.buffer.read()
    if body.startswith("@"):
        try:
            return Path(body[1:]).read_bytes()
        except OSError as exc:
            raise click.BadParameter(f"{body[1:]}: {exc.strerror}", param_hint="--body") from exc
    return os.fsencode(body)
