"""The command line: `livebed --help`. Commands import what they need when they run, so that help is instant.

Exit status: 0 done, 1 it failed (one sentence on standard error), 2 used or configured wrongly.
"""

import json
import logging
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import trainer
from service.cli_client import client
from service.cli_operator import checkpoint_app, model_app, table_app
from service.cli_search import search_commands
from service.cli_token import token_app
from service.examples import KUAIRAND
from trainer.errors import LivebedError, SettingsError

if TYPE_CHECKING:
    from trainer.settings import Settings

FAILED, WRONG_USE = 1, 2
SHARED_MEMORY = "/dev/shm/livebed-UID-NAME"  # noqa: S108 - how the default is shown

app = typer.Typer(
    name="livebed",
    help="An online-learning embedding service: events in, live CTR scores and embeddings out.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
config_app = typer.Typer(help="Check or print the configuration.", no_args_is_help=True)
app.add_typer(config_app, name="config")
app.add_typer(table_app, name="table")
app.add_typer(model_app, name="model")
app.add_typer(checkpoint_app, name="checkpoint")
app.add_typer(token_app, name="token")

Config = Annotated[
    Path | None,
    typer.Option(
        "--config", "-c", envvar="LIVEBED_CONFIG", show_default="livebed.yaml here", help="Configuration file."
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Any setting by its path, e.g. model.cross_rank=16 (repeatable)."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object, for machines.")]


def _setting(flag: str, variable: str, default: str, text: str) -> Any:
    """A flag of one setting. Its variable is shown here and read by `Settings.load`, with all the others."""
    return typer.Option(flag, show_default=default, help=f"{text} [dim]\\[env var: LIVEBED_{variable}][/dim]")


HttpPort = Annotated[
    int | None, _setting("--http-port", "SERVING__HTTP_PORT", "8080", "HTTP port; 0 takes any free one.")
]
AdminPort = Annotated[
    int | None, _setting("--admin-port", "SERVING__ADMIN_PORT", "8081", "Admin and metrics, on loopback.")
]
GrpcPort = Annotated[int | None, _setting("--grpc-port", "SERVING__GRPC_PORT", "50051", "gRPC port.")]
Workers = Annotated[int | None, _setting("--workers", "SERVING__WORKERS", "1", "Service processes.")]
DataDir = Annotated[Path | None, _setting("--data-dir", "DATA_DIR", ".livebed", "Checkpoints, the broker's log.")]
RunDir = Annotated[Path | None, _setting("--run-dir", "RUN_DIR", SHARED_MEMORY, "Live store, metrics, sockets.")]
RedisUrl = Annotated[
    str | None, _setting("--redis-url", "REDIS_URL", "an embedded Valkey", "A Redis or Valkey (>= 7) of yours.")
]
Engine = Annotated[str | None, _setting("--engine", "ENGINE", "auto", "auto, event or torchrec.")]
Deterministic = Annotated[
    bool | None,
    typer.Option("--deterministic", help="Let the model be a function of the log alone, bit for bit: slower."),
]


@app.command()
def demo(
    seconds: Annotated[float | None, typer.Option(help="End after so long.", show_default="the whole log")] = None,
    rate: Annotated[float, typer.Option(help="Impressions a second; 0 means as fast as answers come.")] = 700.0,
    whole_log: Annotated[
        bool, typer.Option("--all", help="Replay the whole log, whatever it takes, then end.")
    ] = False,
    http_port: HttpPort = None,
    admin_port: AdminPort = None,
    grpc_port: GrpcPort = None,
    workers: Workers = None,
    as_json: Json = False,
) -> None:
    """Replay a real click log against a whole system of your own, and watch it learn."""
    from service.demo import DemoOptions, run_demo
    from service.demo_view import as_line

    if whole_log and seconds is not None:
        raise typer.BadParameter("--all and --seconds contradict each other")
    terminal = sys.stderr.isatty() and not as_json
    options = DemoOptions(
        rate=rate or None,
        seconds=seconds,
        keep_serving=terminal and sys.stdin.isatty() and seconds is None and not whole_log,
        live=terminal,
    )
    from trainer.log_lines import log_to_stderr

    log_to_stderr("supervisor", level=logging.WARNING)
    ports = {"serving.http_port": http_port, "serving.admin_port": admin_port, "serving.grpc_port": grpc_port}
    settings = load(KUAIRAND / "livebed.yaml", {**ports, "serving.workers": workers})
    figures = run_demo(settings, options)
    sys.stdout.write((json.dumps(figures) if as_json else as_line(figures)) + "\n")


@app.command()
def up(
    config: Config = None,
    data_dir: DataDir = None,
    run_dir: RunDir = None,
    redis_url: RedisUrl = None,
    engine: Engine = None,
    http_port: HttpPort = None,
    admin_port: AdminPort = None,
    grpc_port: GrpcPort = None,
    workers: Workers = None,
    deterministic: Deterministic = None,
    settings: Set = None,
) -> None:
    """Run broker, trainer and service from one configuration, until Ctrl-C."""
    flags: dict[str, Any] = {"data_dir": data_dir, "run_dir": run_dir, "stream.url": redis_url, "engine": engine}
    flags |= {"deterministic": deterministic}
    flags |= {"serving.http_port": http_port, "serving.admin_port": admin_port, "serving.grpc_port": grpc_port}
    _supervise(("trainer", "service"), load(config, {**flags, "serving.workers": workers}, settings))


@app.command()
def train(
    config: Config = None,
    data_dir: DataDir = None,
    run_dir: RunDir = None,
    redis_url: RedisUrl = None,
    engine: Engine = None,
    deterministic: Deterministic = None,
    replay: Annotated[
        str | None,
        typer.Option(metavar="LOG", help="Rebuild from a log instead: redis://HOST:PORT/DB?key=NAME, or `configured`."),
    ] = None,
    until: Annotated[
        str | None, typer.Option(metavar="ID", help="Last log entry of a replay.", show_default="its end")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Where a replay leaves its checkpoint.", show_default="replay")
    ] = None,
    settings: Set = None,
    as_json: Json = False,
) -> None:
    """Run the trainer alone: it learns from a Redis stream and publishes into the run directory.

    With --replay it publishes nothing: it learns a log from its first entry on, deterministically, and leaves one
    checkpoint and a digest of it.
    """
    flags: dict[str, Any] = {"data_dir": data_dir, "run_dir": run_dir, "stream.url": redis_url, "engine": engine}
    loaded = load(config, {**flags, "deterministic": deterministic}, settings)
    if replay is None:
        for flag, value in (("--until", until), ("--out", out)):
            if value is not None:
                raise typer.BadParameter(f"{flag} belongs to --replay")
        _supervise(("trainer",), loaded)
        return
    from service.cli_replay import run_replay

    run_replay(loaded, replay, until=until, out=out or Path("replay"), as_json=as_json)


@app.command()
def serve(
    config: Config = None,
    run_dir: RunDir = None,
    redis_url: RedisUrl = None,
    http_port: HttpPort = None,
    admin_port: AdminPort = None,
    grpc_port: GrpcPort = None,
    workers: Workers = None,
    settings: Set = None,
) -> None:
    """Run the service alone: it answers from the run directory of a trainer on the same machine."""
    flags = {"run_dir": run_dir, "stream.url": redis_url, "serving.workers": workers}
    flags |= {"serving.http_port": http_port, "serving.admin_port": admin_port, "serving.grpc_port": grpc_port}
    _supervise(("service",), load(config, flags, settings))


@app.command()
def evaluate(
    data: Annotated[Path, typer.Option("--data", help="Parquet or CSV file.")],
    config: Config = None,
    label: Annotated[str | None, typer.Option(help="Label column.", show_default="label.name of the file")] = None,
    time: Annotated[str | None, typer.Option(help="Time column, ms; rows are taken in its order.")] = None,
    batch: Annotated[int | None, typer.Option(help="Learn so many events in one update.", show_default="1")] = None,
    delay: Annotated[int, typer.Option(min=0, help="So many events between predicting one and learning it.")] = 0,
    max_rows: Annotated[int | None, typer.Option(help="Stop after so many rows.", show_default="all")] = None,
    others: Annotated[
        list[Path] | None,
        typer.Option("--compare", metavar="FILE", help="The same log under another configuration too (repeatable)."),
    ] = None,
    report: Annotated[
        Path | None, typer.Option(metavar="FILE.html", help="Write a page of its own, and JSON beside it.")
    ] = None,
    engine: Engine = None,
    settings: Set = None,
    as_json: Json = False,
) -> None:
    """Progressive validation of a click log: predict each event, then learn it, without a broker.

    --set changes the first configuration alone: `-c a.yaml --set KEY=VALUE --compare a.yaml` shows what a value does.
    """
    from service.cli_evaluate import run_evaluate

    configurations = [(str(config or "livebed.yaml"), load(config, {"engine": engine}, settings))]
    configurations += [(str(other), load(other, {"engine": engine})) for other in others or []]
    run_evaluate(
        configurations,
        data,
        report=report,
        as_json=as_json,
        label=label,
        time=time,
        batch=batch,
        delay=delay,
        max_rows=max_rows,
    )


@config_app.command("check")
def config_check(config: Config = None, settings: Set = None, as_json: Json = False) -> None:
    """Say whether the configuration can be used, and if not, which field is wrong and what it wants."""
    from trainer.schema import Schema, check_memory

    schema = Schema.from_settings(load(config, {}, settings))
    warnings = []
    try:
        check_memory(schema, "tables")
    except SettingsError as error:  # it may be for another machine
        warnings.append(str(error))
    inputs = [one.name for one in schema.inputs]
    tables = {table.name: {"width": table.width, "capacity": table.capacity} for table in schema.tables}
    if as_json:
        sys.stdout.write(json.dumps({"ok": True, "tables": tables, "inputs": inputs, "warnings": warnings}) + "\n")
        return
    for name, table in tables.items():
        sys.stdout.write(f"table {name}: {table['capacity']:,} rows of {table['width']} floats\n")
    sys.stdout.write(f"inputs: {', '.join(inputs)}\nthe configuration is good\n")
    for warning in warnings:
        sys.stderr.write(f"livebed: this machine is too small for it: {warning}\n")


@config_app.command("print")
def config_print(config: Config = None, settings: Set = None, as_json: Json = False) -> None:
    """Print the whole configuration as it is in force: file, environment, flags and defaults."""
    import yaml

    content = load(config, {}, settings).model_dump(mode="json")
    sys.stdout.write(json.dumps(content) + "\n" if as_json else yaml.safe_dump(content, sort_keys=False))


@app.command()
def doctor(config: Config = None, as_json: Json = False) -> None:
    """Check this machine: memory, packages, kernels, ports, broker."""
    from service.doctor import examine

    findings = examine(load(config, {}) if config is not None or Path("livebed.yaml").exists() else None)
    if as_json:
        sys.stdout.write(json.dumps([{"check": f.check, "ok": f.ok, "detail": f.detail} for f in findings]) + "\n")
    else:
        for found in findings:
            sys.stdout.write(f"{'ok   ' if found.ok else 'FAIL '} {found.check}: {found.detail}\n")
    raise typer.Exit(0 if all(found.ok for found in findings) else FAILED)


@app.command()
def version(as_json: Json = False) -> None:
    """Print the version."""
    number = metadata.version("livebed")
    sys.stdout.write(json.dumps({"version": number}) + "\n" if as_json else f"livebed {number}\n")


app.registered_commands += client.registered_commands + search_commands.registered_commands


def main() -> None:
    """Entry point of the console script."""
    try:
        _check_packages()
        app()
    except SettingsError as error:
        sys.stderr.write(f"livebed: {error}\n")
        sys.exit(WRONG_USE)
    except LivebedError as error:
        sys.stderr.write(f"livebed: {error}\n")
        sys.exit(FAILED)


def load(path: Path | None, flags: Mapping[str, Any], assignments: list[str] | None = None) -> "Settings":
    """Flag > environment > file > default."""
    from trainer.settings import Settings

    if path is None:
        path = Path("livebed.yaml")
        if not path.exists():
            wanted = "a file given with --config or LIVEBED_CONFIG, or livebed.yaml in this directory"
            raise SettingsError("configuration", "nothing", wanted)
    overrides = {key: value for key, value in flags.items() if value is not None}
    return Settings.load(path, overrides | _assignments(assignments or []))


def _assignments(texts: list[str]) -> dict[str, Any]:
    import yaml

    assigned: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise SettingsError("--set", text, "KEY=VALUE, for instance model.cross_rank=16")
        try:
            assigned[key] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise SettingsError(f"--set {key}", value, "a YAML value") from None
    return assigned


def _supervise(parts: tuple[str, ...], settings: "Settings") -> None:
    from service.supervisor import Supervisor
    from trainer.log_lines import log_to_stderr

    log_to_stderr("supervisor", form=settings.logging.format)
    Supervisor(settings, parts=parts).run()


def _check_packages() -> None:
    """Our packages have common names; another `trainer` earlier on the path would be a puzzle without this."""
    here, found = Path(__file__).parents[1], Path(trainer.__file__ or "").parents[1]
    if here != found:
        raise LivebedError(f"the package `trainer` comes from {found}, not from {here}: use an environment of its own")


if __name__ == "__main__":
    main()
