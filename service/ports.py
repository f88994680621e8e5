"""Listening sockets, made before any process that serves them: a worker that dies refuses no connection."""

import errno
import socket

from trainer.errors import LivebedError

# Connections that wait for an accept while a worker restarts; the kernel caps it at net.core.somaxconn.
BACKLOG = 2048


def listen(host: str, port: int, *, field: str) -> socket.socket:
    """A listening TCP socket; port 0 takes any free one. `field` is the setting to name when it cannot be had."""
    listener = _bind(host, port, field=field, shared=False)
    listener.listen(BACKLOG)
    return listener


def reserve(host: str, port: int, *, field: str) -> socket.socket:
    """Hold a port that several processes will listen on with SO_REUSEPORT; this socket itself never accepts.

    Bound alone first: with SO_REUSEPORT at once, a port that another server of ours uses would be shared with it.
    """
    alone = _bind(host, port, field=field, shared=False)
    port = alone.getsockname()[1]
    alone.close()
    return _bind(host, port, field=field, shared=True)


def _bind(host: str, port: int, *, field: str, shared: bool) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise LivebedError(f"serving.host: {host!r} is not an address of this machine ({error.strerror})") from None
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise LivebedError(_why(error, host, port, field)) from None
    return listener


def _why(error: OSError, host: str, port: int, field: str) -> str:
    variable = f"LIVEBED_{field.upper().replace('.', '__')}"
    if error.errno == errno.EADDRINUSE:
        return f"{field}: port {port} on {host} is in use by another process; set {field} or {variable} to a free one"
    if error.errno == errno.EACCES:
        return f"{field}: this user may not listen on port {port}; set {field} or {variable} to one above 1023"
    return f"{field}: cannot listen on {host} port {port}: {error.strerror}"
