"""What commands that talk to a service say of themselves: a token, and certificates; the same four flags for each."""

import functools
import inspect
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from trainer.errors import LivebedError

TOKEN = typer.Option(
    "--token", envvar="LIVEBED_TOKEN", help="Bearer token; better as the variable: a process list shows flags."
)
CA_FILE = typer.Option("--ca-file", envvar="LIVEBED_CA_FILE", help="PEM of who signed the service's certificate.")
CLIENT_CERT = typer.Option("--client-cert", envvar="LIVEBED_CLIENT_CERT", help="PEM of our own certificate (mTLS).")
CLIENT_KEY = typer.Option("--client-key", envvar="LIVEBED_CLIENT_KEY", help="PEM of its key.")
FLAGS: dict[str, Any] = {
    "token": Annotated[str | None, TOKEN],
    "ca_file": Annotated[Path | None, CA_FILE],
    "client_cert": Annotated[Path | None, CLIENT_CERT],
    "client_key": Annotated[Path | None, CLIENT_KEY],
}


@dataclass(frozen=True)
class Credentials:
    """What a command was given."""

    token: str | None = None
    ca_file: Path | None = None
    client_cert: Path | None = None
    client_key: Path | None = None

    @property
    def headers(self) -> dict[str, str]:
        """What says who calls."""
        return {} if self.token is None else {"authorization": f"Bearer {self.token}"}

    def context(self) -> ssl.SSLContext:
        """Verifies the service, and shows our certificate if there is one. Raises LivebedError."""
        try:
            context = ssl.create_default_context(cafile=self.ca_file)
            if self.client_cert is not None:
                context.load_cert_chain(self.client_cert, self.client_key)
        except OSError as error:
            raise LivebedError(f"--ca-file, --client-cert or --client-key cannot be used: {error}") from None
        return context


given = Credentials()  # of the one command that this process runs


def with_credentials(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the flags; it finds what they say in `given`."""

    @functools.wraps(command)
    def run(**arguments: Any) -> None:
        global given  # noqa: PLW0603 - a process is one command
        given = Credentials(**{name: arguments.pop(name) for name in FLAGS})
        command(**arguments)

    own = inspect.signature(command)
    more = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        for name, annotation in FLAGS.items()
    ]
    parameters = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in own.parameters.values()]
    run.__signature__ = own.replace(parameters=[*parameters, *more])  # type: ignore[attr-defined] # what typer reads
    run.__annotations__ = {**command.__annotations__, **FLAGS}
    return run
