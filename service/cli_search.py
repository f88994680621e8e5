"""The command `livebed search`: the nearest rows of a running service's table."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from service.cli_access import with_credentials
from service.cli_client import DEFAULT_URL, Json, Url, call
from trainer.errors import LivebedError

search_commands = typer.Typer()


@search_commands.command()
@with_credentials
def search(
    table: Annotated[str, typer.Argument(help="The table's name.")],
    id_: Annotated[str | None, typer.Option("--id", help="Near to the row of this id.")] = None,
    vector: Annotated[str | None, typer.Option(metavar="FILE|-", help="Near to this JSON array of numbers.")] = None,
    known: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Ids to name in the answer, one a line: the store has hashes.")
    ] = None,
    k: Annotated[int, typer.Option("--k", min=1, help="How many rows.")] = 10,
    metric: Annotated[str, typer.Option(help="cosine or dot.")] = "cosine",
    url: Url = DEFAULT_URL,
    as_json: Json = False,
) -> None:
    """Find the rows nearest to a vector, or to the row of an id."""
    request: dict[str, Any] = {"k": k, "metric": metric}
    if id_ is not None:
        request["id"] = id_
    if vector is not None:
        request["vector"] = _vector(vector)
    if known is not None:
        request["known_ids"] = _text(str(known)).split()
    answer = call(url, "POST", f"/v1/tables/{table}/embeddings:search", json.dumps(request).encode())
    if as_json:
        sys.stdout.write(json.dumps(answer) + "\n")
        return
    for key, name, similarity in zip(answer["keys"], answer["ids"], answer["similarities"], strict=True):
        sys.stdout.write(f"{key if name is None else name}\t{similarity:.6f}\n")


def _vector(path: str) -> list[Any]:
    try:
        numbers = json.loads(_text(path))
    except ValueError as error:
        raise LivebedError(f"{path}: not JSON: {error}") from None
    if not isinstance(numbers, list):
        raise LivebedError(f"{path}: got {type(numbers).__name__}, wanted a JSON array of numbers")
    return numbers


def _text(path: str) -> str:
    try:
        return sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise LivebedError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise LivebedError(f"{path}: not UTF-8") from None
