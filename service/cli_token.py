"""The commands that make, list and revoke tokens: they edit the file of tokens, which a running service reads again."""

import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from service.cli_operator import Config
from trainer.errors import SettingsError

token_app = typer.Typer(help="Make, list and revoke bearer tokens.", no_args_is_help=True)

File = Annotated[
    Path | None, typer.Option("--file", show_default="serving.tokens_file", help="The file of tokens to edit.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object, for machines.")]


@token_app.command("create")
def token_create(
    name: Annotated[str, typer.Option("--name", help="What it is for; one of its own.")],
    scope: Annotated[list[str], typer.Option("--scope", help="score, lookup, ingest, admin or metrics (repeatable).")],
    expires_days: Annotated[
        float | None, typer.Option("--expires-days", min=0, show_default="never", help="Refuse it after so many days.")
    ] = None,
    file: File = None,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Make a token and print it, once: only its hash is kept. A running service takes it within two seconds."""
    from service.token_file import create

    path = _path(file, config)
    token = create(path, name, scope, expires_days=expires_days)
    sys.stdout.write((json.dumps({"name": name, "token": token}) if as_json else token) + "\n")
    if not as_json:
        sys.stderr.write(f"keep it: it is not stored, and cannot be shown again ({path} has its hash)\n")


@token_app.command("list")
def token_list(file: File = None, config: Config = None, as_json: Json = False) -> None:
    """Names, scopes and times; not the tokens, which nobody knows."""
    from service.tokens import read_lines

    rows = []
    for line in read_lines(_path(file, config)):
        expired = line.expires is not None and line.expires <= datetime.now(UTC)
        times: dict[str, Any] = {
            "created": None if line.created is None else line.created.isoformat(),
            "expires": None if line.expires is None else line.expires.isoformat(),
        }
        rows.append({"name": line.name, "scopes": line.scopes, **times, "expired": expired})
    if as_json:
        sys.stdout.write(json.dumps({"tokens": rows}) + "\n")
        return
    for row in rows:
        until = f"{'expired' if row['expired'] else 'until'} {row['expires']}" if row["expires"] else "for good"
        sys.stdout.write(f"{row['name']}\t{','.join(row['scopes'])}\t{until}\n")


@token_app.command("revoke")
def token_revoke(
    name: Annotated[str, typer.Argument(help="The token's name.")],
    file: File = None,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Take a token out of the file: a running service refuses it within two seconds, in open streams too."""
    from service.token_file import revoke

    revoke(_path(file, config), name)
    sys.stdout.write(json.dumps({"revoked": name}) + "\n" if as_json else f"{name} is revoked\n")


def _path(file: Path | None, config: Path | None) -> Path:
    from service.cli import load

    if file is not None:
        return file
    configured = load(config, {}).serving.tokens_file
    if configured is None:
        raise SettingsError("serving.tokens_file", got=None, wanted="a path there, or --file")
    return configured
