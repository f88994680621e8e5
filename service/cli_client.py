"""The commands that talk to a running service over HTTP: send, score, lookup, status."""

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from service import cli_access
from service.cli_access import with_credentials
from trainer.errors import LivebedError, StoreUnavailable

client = typer.Typer()

EVENTS_PER_REQUEST: Final = 500  # the service's default limit is 512
TIMEOUT_S: Final = 10.0

Url = Annotated[str, typer.Option(envvar="LIVEBED_URL", help="Where the service answers.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object, for machines.")]
DEFAULT_URL: Final = "http://127.0.0.1:8080"


class ServiceAnswerError(LivebedError):
    """The service cannot be reached, or answered with an error; the sentence is what it said.

    `problem`: the answer's body where it was problem+json.
    """

    problem: dict[str, Any] | None = None


@client.command()
@with_credentials
def send(
    path: Annotated[str, typer.Argument(metavar="FILE|-", help="NDJSON: one event a line, or - for standard input.")],
    url: Url = DEFAULT_URL,
    as_json: Json = False,
) -> None:
    """Send events to the log; says how many were accepted, and why others were not."""
    totals: dict[str, Any] = {"accepted": 0, "duplicates": 0, "rejected": []}
    sent = 0
    for lines in _batches(path):
        body = b"\n".join(lines)
        try:
            answer = call(url, "POST", "/v1/events", body, content_type="application/x-ndjson")
        except ServiceAnswerError as error:
            refused = _all_refused(error)
            if refused is None:
                said = f"{totals['accepted']:,} events were accepted before that, {sent:,} lines sent"
                raise ServiceAnswerError(f"{error} ({said})") from None
            answer = refused
        totals["accepted"] += answer["accepted"]
        totals["duplicates"] += answer["duplicates"]
        totals["rejected"] += [{**one, "index": sent + one["index"]} for one in answer["rejected"]]
        sent += len(lines)
    if as_json:
        sys.stdout.write(json.dumps(totals) + "\n")
    else:
        sys.stdout.write(f"{totals['accepted']:,} accepted, {totals['duplicates']:,} duplicates\n")
        for one in totals["rejected"]:
            sys.stderr.write(f"event {one['index']} rejected ({one['code']}): {one['detail']}\n")
    raise typer.Exit(1 if totals["rejected"] else 0)


@client.command()
@with_credentials
def score(
    request: Annotated[
        str, typer.Argument(metavar="JSON|-", help='{"context": {...}, "candidates": [{...}]} or {"rows": [{...}]}.')
    ],
    url: Url = DEFAULT_URL,
    as_json: Json = False,
) -> None:
    """Score candidates with the live model."""
    body = sys.stdin.buffer.read() if request == "-" else request.encode()
    answer = call(url, "POST", "/v1/score", body)
    if as_json:
        sys.stdout.write(json.dumps(answer) + "\n")
        return
    for index, value in enumerate(answer["scores"]):
        sys.stdout.write(f"{index}\t{value:.6f}\n")


@client.command()
@with_credentials
def lookup(
    table: Annotated[str, typer.Argument(help="The table's name.")],
    ids: Annotated[list[str], typer.Argument(help="Ids: 42 and '42' are the same one.")],
    url: Url = DEFAULT_URL,
    as_json: Json = False,
) -> None:
    """Look up embeddings by id."""
    answer = call(url, "POST", f"/v1/tables/{table}/embeddings:lookup", json.dumps({"ids": ids}).encode())
    if as_json:
        sys.stdout.write(json.dumps(answer) + "\n")
        return
    for name, status, vector in zip(ids, answer["status"], answer["vectors"], strict=True):
        sys.stdout.write(f"{name}\t{status}\t{' '.join(f'{value:.4f}' for value in vector)}\n")


@client.command()
@with_credentials
def status(
    url: Url = DEFAULT_URL,
    local: Annotated[
        Path | None, typer.Option("--local", help="Look at the live store in this run directory instead.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Say whether the system is ready, how old the model is, and what it holds; exit status 1 if it is not."""
    state = _local_state(local) if local is not None else _served_state(url)
    if as_json:
        sys.stdout.write(json.dumps(state) + "\n")
    else:
        for name, value in state.items():
            sys.stdout.write(f"{name}\t{value if isinstance(value, str) else json.dumps(value)}\n")
    raise typer.Exit(0 if state["ready"] else 1)


def call(
    url: str,
    method: str,
    path: str,
    body: bytes | None = None,
    *,
    content_type: str = "application/json",
    timeout_s: float = TIMEOUT_S,
) -> dict[str, Any]:
    """One request; returns the decoded answer or raises ServiceAnswerError with what the service said."""
    import httpx

    headers = {"content-type": content_type} if body is not None else {}
    headers |= cli_access.given.headers
    verify = cli_access.given.context() if url.startswith("https:") else False
    try:
        reply = httpx.request(method, url + path, content=body, headers=headers, timeout=timeout_s, verify=verify)
    except httpx.HTTPError as error:
        raise ServiceAnswerError(f"no answer from {url}: {error}; is `livebed up` running?") from None
    except httpx.InvalidURL as error:
        raise ServiceAnswerError(f"{url} is not a URL: {error}") from None
    if reply.is_success:
        answer: dict[str, Any] = reply.json()
        return answer
    failure = ServiceAnswerError(f"{method} {path}: {_problem(reply.status_code, reply.text)}")
    with contextlib.suppress(ValueError):
        failure.problem = reply.json()
    raise failure


def _all_refused(error: ServiceAnswerError) -> dict[str, Any] | None:
    """An answer to a batch of which every event was refused, in the form of those that accept some; else None."""
    problem = error.problem or {}
    places = [one["pointer"].removeprefix("/") for one in problem.get("errors", [])]
    if problem.get("status") != 422 or not places or not all(place.isdecimal() for place in places):
        return None
    rejected = []
    for place, one in zip(places, problem["errors"], strict=True):
        code, _, detail = one["detail"].partition(": ")
        rejected.append({"index": int(place), "code": code, "detail": detail})
    return {"accepted": 0, "duplicates": 0, "rejected": rejected}


def _problem(status_code: int, text: str) -> str:
    """A problem+json answer as one sentence."""
    try:
        problem = json.loads(text)
    except ValueError:
        return f"{status_code} {text[:200]}"
    errors = "; ".join(f"{one.get('pointer', '')} {one.get('detail', '')}".strip() for one in problem.get("errors", []))
    return (
        f"{status_code} {problem.get('code', '')}: {problem.get('detail', '')}{' (' + errors + ')' if errors else ''}"
    )


def _batches(path: str) -> Iterator[list[bytes]]:
    """Non-empty lines of a file or of standard input, as many as one request takes."""
    try:
        source = sys.stdin.buffer if path == "-" else Path(path).open("rb")  # noqa: SIM115 - closed below
    except OSError as error:
        raise LivebedError(f"{path}: {error.strerror}") from None
    with source:
        lines: list[bytes] = []
        for line in source:
            if line.strip():
                lines.append(line.strip())
            if len(lines) == EVENTS_PER_REQUEST:
                yield lines
                lines = []
        if lines:
            yield lines


def _served_state(url: str) -> dict[str, Any]:
    model, tables = call(url, "GET", "/v1/model"), call(url, "GET", "/v1/tables")
    try:
        ready = call(url, "GET", "/readyz") is not None
        reason = None
    except ServiceAnswerError as error:
        ready, reason = False, str(error)
    return {"ready": ready, **({"reason": reason} if reason else {}), "model": model, "tables": tables["tables"]}


def _local_state(run_directory: Path) -> dict[str, Any]:
    """From the live store itself: works for a trainer that runs alone."""
    from trainer.live import Reader

    try:
        reader = Reader(run_directory / "store")
        reader.attach(0)
    except StoreUnavailable as error:
        return {"ready": False, "reason": str(error)}
    state = reader.state()
    heartbeat_age_s = time.time() - state.heartbeat_us / 1e6
    return {
        "ready": not state.stopped and heartbeat_age_s < 5.0,
        "version": state.version,
        "step": state.step,
        "watermark_us": state.watermark_us,
        "heartbeat_age_s": round(heartbeat_age_s, 3),
        "trainer_pid": state.writer_pid,
    }
