"""The operator's commands: `livebed table ...`, `livebed model ...`, `livebed checkpoint ...`.

What changes something goes to the admin port of a running system; checkpoints are listed, verified and restored on
disk.
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final
from urllib.parse import quote

import typer

from service.cli_access import with_credentials
from service.cli_client import DEFAULT_URL, Json, Url, call
from trainer.errors import CheckpointError, LivebedError

if TYPE_CHECKING:
    from trainer.settings import Settings

DEFAULT_ADMIN_URL: Final = "http://127.0.0.1:8081"
LONG_S: Final = 120.0  # a checkpoint or a rollback of a large model

AdminUrl = Annotated[str, typer.Option("--admin-url", envvar="LIVEBED_ADMIN_URL", help="The admin port.")]
Table = Annotated[str, typer.Argument(help="The table's name.")]
Id = Annotated[str, typer.Argument(help="The id; 42 and '42' are the same one.")]
Number = Annotated[int, typer.Argument(min=1, help="The checkpoint's number, from `livebed model versions`.")]
Config = Annotated[
    Path | None,
    typer.Option("--config", "-c", envvar="LIVEBED_CONFIG", show_default="livebed.yaml here", help="Configuration."),
]
DataDir = Annotated[Path | None, typer.Option("--data-dir", show_default="of the configuration", help="Its directory.")]

table_app = typer.Typer(help="Look at tables, resize them, inspect or forget an id.", no_args_is_help=True)
model_app = typer.Typer(help="What is served: kept versions, rolling back, releasing.", no_args_is_help=True)
checkpoint_app = typer.Typer(help="Create, list, verify and restore checkpoints.", no_args_is_help=True)


@table_app.command("list")
@with_credentials
def table_list(url: Url = DEFAULT_URL, as_json: Json = False) -> None:
    """All tables: rows, slots, bytes, policies."""
    answer = call(url, "GET", "/v1/tables")
    columns = ("name", "width", "rows", "capacity", "bytes", "admission", "eviction", "ttl_s")
    _print(answer, as_json, lambda: _table(columns, answer["tables"]))


@table_app.command("inspect")
@with_credentials
def table_inspect(table: Table, id_: Id, url: Url = DEFAULT_URL, as_json: Json = False) -> None:
    """One id: its row, when and how often it was seen, its optimizer state."""
    answer = call(url, "GET", f"/v1/tables/{quote(table, safe='')}/embeddings/{quote(id_, safe='')}")
    _print(answer, as_json, lambda: _lines(answer))


@table_app.command("forget")
@with_credentials
def table_forget(table: Table, id_: Id, admin_url: AdminUrl = DEFAULT_ADMIN_URL, as_json: Json = False) -> None:
    """Forget an id: its row, its state, what is known of it as an entity; names older checkpoints that may hold it.

    Events about it that are still in the log are not taken out of it, and an event that names it again teaches it anew.
    """
    answer = call(admin_url, "DELETE", f"/v1/tables/{quote(table, safe='')}/embeddings/{quote(id_, safe='')}")
    older = ", ".join(map(str, answer["checkpoints"])) or "none"
    text = f"will be forgotten at log entry {answer['stream_id']}; checkpoints that may still hold it: {older}"
    _print(answer, as_json, lambda: text)


@table_app.command("resize")
@with_credentials
def table_resize(
    table: Table,
    capacity: Annotated[int, typer.Argument(min=64, help="Slots it is to have.")],
    admin_url: AdminUrl = DEFAULT_ADMIN_URL,
    as_json: Json = False,
) -> None:
    """Grow or shrink a table while all runs; it keeps this size over restarts until the configured one is changed."""
    body = json.dumps({"capacity": capacity}).encode()
    answer = call(admin_url, "POST", f"/v1/tables/{quote(table, safe='')}:resize", body)
    _print(answer, as_json, lambda: f"will be resized at log entry {answer['stream_id']}")


@model_app.command("status")
@with_credentials
def model_status(url: Url = DEFAULT_URL, as_json: Json = False) -> None:
    """Whether what is learned is shown, and if not, why."""
    answer = call(url, "GET", "/v1/model/versions")
    state = {"publishing": answer["publishing"], "reasons": answer["reasons"], "model": call(url, "GET", "/v1/model")}
    _print(state, as_json, lambda: _lines(state))


@model_app.command("versions")
@with_credentials
def model_versions(url: Url = DEFAULT_URL, as_json: Json = False) -> None:
    """Versions that serving can be rolled back to: the kept checkpoints."""
    answer = call(url, "GET", "/v1/model/versions")
    columns = ("version", "created", "step", "position", "model_version", "bytes", "active", "problem")
    _print(answer, as_json, lambda: _table(columns, answer["versions"]))


@model_app.command("activate")
@with_credentials
def model_activate(version: Number, admin_url: AdminUrl = DEFAULT_ADMIN_URL, as_json: Json = False) -> None:
    """Roll serving back to a kept version; what is learned meanwhile is not shown until `livebed model release`."""
    answer = call(admin_url, "POST", f"/v1/model/versions/{version}:activate", timeout_s=LONG_S)
    text = f"version {answer['version']} is served ({answer['seconds']:.2f} s); publishing is held until released"
    _print(answer, as_json, lambda: text)


@model_app.command("release")
@with_credentials
def model_release(admin_url: AdminUrl = DEFAULT_ADMIN_URL, as_json: Json = False) -> None:
    """Show again what is learned: after a rollback, or a step that the guard has held."""
    answer = call(admin_url, "POST", "/v1/model:release", timeout_s=LONG_S)
    _print(answer, as_json, lambda: f"what is learned is shown, from model version {answer['model_version']} on")


@checkpoint_app.command("create")
@with_credentials
def checkpoint_create(admin_url: AdminUrl = DEFAULT_ADMIN_URL, as_json: Json = False) -> None:
    """Have the running trainer write one now; returns when it is on disk."""
    answer = call(admin_url, "POST", "/v1/checkpoints", timeout_s=LONG_S)
    text = (
        f"checkpoint {answer['version']}: step {answer['step']:,}, log entry {answer['position']}, "
        f"{answer['seconds']:.2f} s, learning stood still for {1000 * answer['pause_s']:.1f} ms"
    )
    _print(answer, as_json, lambda: text)


@checkpoint_app.command("list")
def checkpoint_list(config: Config = None, data_dir: DataDir = None, as_json: Json = False) -> None:
    """Checkpoints on disk, the newest first."""
    from trainer.checkpoint import listing

    found = [_row(info) for info in listing(_settings(config, data_dir).checkpoint_path)]
    columns = ("number", "created", "step", "position", "num_bytes", "is_latest", "problem")
    _print({"checkpoints": found}, as_json, lambda: _table(columns, found))


@checkpoint_app.command("verify")
def checkpoint_verify(
    number: Annotated[int | None, typer.Argument(min=1, show_default="all", help="Which one.")] = None,
    config: Config = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Read every byte and check it against the manifest; exit status 1 if something is wrong."""
    from trainer.checkpoint import listing, path_of, verify

    directory = _settings(config, data_dir).checkpoint_path
    numbers = [info.number for info in listing(directory)] if number is None else [number]
    if not numbers:
        raise CheckpointError(f"there are no checkpoints in {directory}")
    found = {one: verify(path_of(directory, one)) for one in numbers}
    text = "\n".join(f"{one}\t{'; '.join(problems) or 'good'}" for one, problems in found.items())
    _print({"problems": {str(one): problems for one, problems in found.items()}}, as_json, lambda: text)
    raise typer.Exit(1 if any(found.values()) else 0)


@checkpoint_app.command("restore")
def checkpoint_restore(number: Number, config: Config = None, data_dir: DataDir = None, as_json: Json = False) -> None:
    """Let the next start begin from this checkpoint (while the trainer runs: `livebed model activate`)."""
    from trainer.checkpoint import exclusive, point_to
    from trainer.control import ask
    from trainer.errors import ControlUnavailable

    settings = _settings(config, data_dir)
    try:
        ask(settings.run_path, "status")
    except ControlUnavailable:
        pass
    else:
        raise LivebedError("the trainer runs: stop it first, or roll back what is served with `livebed model activate`")
    with exclusive(settings.checkpoint_path):
        point_to(settings.checkpoint_path, number)
    _print({"restored": number}, as_json, lambda: f"the next start begins from checkpoint {number}")


def _settings(config: Path | None, data_dir: Path | None) -> "Settings":
    from service.cli import load

    return load(config, {"data_dir": data_dir})


def _row(info: Any) -> dict[str, Any]:
    from dataclasses import asdict

    from service.operations import rfc3339

    created = None if info.created_us is None else rfc3339(info.created_us / 1e6)
    return {**asdict(info), "created": created, "path": str(info.path)}


def _print(answer: Mapping[str, Any], as_json: bool, text: Callable[[], str]) -> None:
    sys.stdout.write((json.dumps(answer) if as_json else text()) + "\n")


def _lines(answer: Mapping[str, Any]) -> str:
    return "\n".join(
        f"{name}\t{value if isinstance(value, str) else json.dumps(value)}" for name, value in answer.items()
    )


def _table(columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows in columns that line up."""
    cells = [list(columns)] + [[_cell(row.get(column)) for column in columns] for row in rows]
    widths = [max(len(line[c]) for line in cells) for c in range(len(columns))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells
    )


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else ""
    if isinstance(value, int):
        return f"{value:,}"
    return "" if value is None else str(value)
