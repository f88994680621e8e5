"""Certificates of the listeners, for HTTP and gRPC alike, read again when the files change.

A new certificate is taken for new connections; those that are open keep the one that they began with. Files that do not
belong together, as in the middle of a rotation, change nothing: all is read and tried before any of it is used.
"""

import contextlib
import os
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from service.watched import Watched
from trainer.errors import SettingsError
from trainer.settings import TlsSettings


@dataclass(frozen=True)
class Certificate:
    """PEM as it was read, and a context made of it."""

    chain: bytes
    key: bytes
    client_ca: bytes | None
    context: ssl.SSLContext


class Certificates:
    """The newest good certificate of one set of files."""

    def __init__(self, tls: TlsSettings) -> None:
        """Read them. Raises SettingsError."""
        paths = [tls.cert_file, tls.key_file, *([tls.client_ca_file] if tls.client_ca_file is not None else [])]
        self.watched = Watched(paths, lambda: read_certificate(tls))

    @property
    def newest(self) -> Certificate:
        """What new connections get."""
        return self.watched.content

    def server_context(self) -> ssl.SSLContext:
        """For a listener that keeps one context for good: each handshake is handed on to the newest one."""
        certificate = self.newest
        context = _context(certificate.chain, certificate.key, certificate.client_ca)

        def hand_on(connection: Any, name: str | None, listening: ssl.SSLContext) -> None:
            connection.context = self.newest.context

        context.sni_callback = hand_on  # called for clients that name no server too
        return context


def read_certificate(tls: TlsSettings) -> Certificate:
    """Read the files, each once, and see that they belong together. Raises SettingsError."""
    chain, key = _read(tls.cert_file, "cert_file"), _read(tls.key_file, "key_file")
    client_ca = None if tls.client_ca_file is None else _read(tls.client_ca_file, "client_ca_file")
    return Certificate(chain, key, client_ca, _context(chain, key, client_ca))


def _context(chain: bytes, key: bytes, client_ca: bytes | None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        with _file_of(chain) as chain_path, _file_of(key) as key_path:
            context.load_cert_chain(chain_path, key_path, password="")  # an empty one: else it would ask the terminal
    except (OSError, ValueError) as error:
        wanted = "a certificate and its own key, without a password, in PEM"
        raise SettingsError("serving.tls.cert_file and key_file", got=_reason(error), wanted=wanted) from None
    if client_ca is not None:
        try:
            context.load_verify_locations(cadata=client_ca.decode("ascii"))
        except (OSError, ValueError) as error:
            wanted = "certificates of authorities in PEM"
            raise SettingsError("serving.tls.client_ca_file", got=_reason(error), wanted=wanted) from None
        context.verify_mode = ssl.CERT_REQUIRED
        # A session that is taken up again is not verified again, and the authority may have been taken out since.
        context.options |= ssl.OP_NO_TICKET
        context.num_tickets = 0
    return context


@contextlib.contextmanager
def _file_of(content: bytes) -> Iterator[str]:
    """A name for bytes in memory: `ssl` takes files alone, and reading ours again might find others."""
    descriptor = os.memfd_create("certificate")
    with open(descriptor, "wb", buffering=0) as file:  # noqa: PTH123 - a descriptor
        file.write(content)
        yield f"/proc/self/fd/{descriptor}"


def _read(path: Path, field: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        got = f"{path}: {error.strerror}"
        raise SettingsError(f"serving.tls.{field}", got=got, wanted="a readable PEM file") from None


def _reason(error: Exception) -> str:
    return str(getattr(error, "reason", None) or error)
