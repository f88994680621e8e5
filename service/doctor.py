"""`livebed doctor`: what this machine must have, looked at one by one, with what to do where it has not."""

import importlib.util
import os
import platform
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Final

from service.ports import listen
from trainer.broker import server_binary
from trainer.errors import LivebedError
from trainer.schema import Schema
from trainer.settings import Settings

MIN_FILES: Final = 1024
MIN_SHARED_BYTES: Final = 256 * 2**20
GIB: Final = 2**30
RUNTIME_PACKAGES: Final = ("numpy", "numba", "redis", "fastapi", "uvicorn", "grpcio", "pyarrow", "msgspec", "orjson")


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    check: str
    ok: bool
    detail: str


def examine(settings: Settings | None) -> list[Finding]:
    """Look at everything; with settings also at what they ask of this machine."""
    checks: list[tuple[str, Callable[[], str]]] = [
        ("python", _python),
        ("packages", _packages),
        ("torchrec engine", _torch),
        ("kernels", _kernels),
        ("broker", _broker),
        ("open files", _files),
        ("shared memory", lambda: _shared_memory(settings)),
    ]
    if settings is not None:
        checks += [("configuration", lambda: _configuration(settings)), ("ports", lambda: _ports(settings))]
    return [_run(name, check) for name, check in checks]


def _run(name: str, check: Callable[[], str]) -> Finding:
    try:
        return Finding(name, True, check())
    except (LivebedError, OSError) as error:
        return Finding(name, False, str(error))


def _python() -> str:
    return f"{platform.python_version()} at {sys.executable}, {len(os.sched_getaffinity(0))} cores"


def _packages() -> str:
    missing = [name for name in RUNTIME_PACKAGES if importlib.util.find_spec(_module_of(name)) is None]
    if missing:
        raise LivebedError(f"not installed: {', '.join(missing)}; run requirements/install.sh")
    return ", ".join(f"{name} {metadata.version(name)}" for name in RUNTIME_PACKAGES)


def _module_of(distribution: str) -> str:
    return {"grpcio": "grpc"}.get(distribution, distribution)


def _torch() -> str:
    """Not needed by the event engine, so its absence is no failure."""
    missing = [name for name in ("torch", "torchrec", "fbgemm_gpu") if importlib.util.find_spec(name) is None]
    if missing:
        return f"not available ({', '.join(missing)} not installed); the event engine does without"
    return f"torch {metadata.version('torch')}, torchrec {metadata.version('torchrec')}"


def _kernels() -> str:
    from trainer.kernel import CACHE  # noqa: PLC0415 -- numba takes half a second

    cached = len(list(CACHE.rglob("*.nbi")))
    return f"{cached} compiled and cached" if cached else "none cached: the first start compiles them, about a minute"


def _broker() -> str:
    version = subprocess.run(  # noqa: S603 - the server of an installed package
        [str(server_binary()), "--version"], capture_output=True, text=True, check=False, timeout=10
    )
    if version.returncode != 0:
        raise LivebedError(f"the embedded server does not run: {version.stderr.strip()}; set LIVEBED_REDIS_URL")
    return " ".join(version.stdout.split()[:3])


def _files() -> str:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < MIN_FILES:
        raise LivebedError(f"at most {soft} open files, wanted {MIN_FILES}: raise it with ulimit -n")
    return f"at most {soft}"


def _shared_memory(settings: Settings | None) -> str:
    directory = settings.run_path.parent if settings is not None else Path("/dev/shm")  # noqa: S108 - only looked at
    if not directory.is_dir():
        raise LivebedError(f"{directory} does not exist: set run_dir to a memory-backed directory")
    free = shutil.disk_usage(directory).free
    wanted = _store_bytes(settings) if settings is not None else MIN_SHARED_BYTES
    if free < wanted:
        raise LivebedError(
            f"{free / GIB:.2f} GiB free in {directory}, wanted {wanted / GIB:.2f} GiB for the live store"
        )
    return f"{free / GIB:.1f} GiB free in {directory}"


def _store_bytes(settings: Settings) -> int:
    return sum(table.num_bytes for table in Schema.from_settings(settings).tables)


def _configuration(settings: Settings) -> str:
    schema = Schema.from_settings(settings)
    return (
        f"{len(schema.tables)} tables, {len(schema.features)} features, {_store_bytes(settings) / GIB:.2f} GiB at most"
    )


def _ports(settings: Settings) -> str:
    ports = {name: getattr(settings.serving, name) for name in ("http_port", "admin_port", "grpc_port")}
    for name, port in ports.items():
        host = settings.serving.admin_host if name == "admin_port" else settings.serving.host
        listen(host, port, field=f"serving.{name}").close()
    return ", ".join(f"{name} {port}" for name, port in ports.items()) + " are free"
